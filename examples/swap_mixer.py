"""Trains the recall task with two recurrent mixers, and compares the curves of both runs.

uv run python examples/swap_mixer.py
"""

import tempfile

import qwen3next_jax as qwen3next

STEPS = 60
with tempfile.TemporaryDirectory() as folder:
    runs = {}
    for mixer in ("gated_deltanet", "mamba2"):
        settings = {"model.linear_mixer": mixer, "train.steps": STEPS, "train.log_every": 20}
        config = qwen3next.load_config("mqar", settings)
        runs[mixer] = qwen3next.train(config, f"{folder}/{mixer}")
    for mixer, run in runs.items():
        steps, losses = run.series("loss")
        print(mixer, *(f"step {step}: {loss:.3f}" for step, loss in zip(steps, losses)))
