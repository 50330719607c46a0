"""Trains the tiny model for 20 steps, reads its losses, and continues a text with the trained
model.

uv run python examples/train_tiny.py
"""

import tempfile

import qwen3next_jax as qwen3next

config = qwen3next.load_config("tiny", {"train.steps": 20, "train.log_every": 5, "eval.rows": 8})
with tempfile.TemporaryDirectory() as folder:
    run = qwen3next.train(config, f"{folder}/tiny")
    steps, losses = run.series("loss")
    for step, loss in zip(steps, losses):
        print(f"step {step}: loss {loss:.3f}")
    print(qwen3next.evaluate(run.path, rows=8)["heldout"])
    print("def " + qwen3next.generate(run.path, "def ", max_new_tokens=20))
