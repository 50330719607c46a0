"""Recall of 16 pairs against the base of the rotary positions: 2 × 3 seeds of configs/mqar.py, a recurrent layer below attention.

    uv run python -m qwen3next_jax.sweep configs/sweeps/rope_base.py

Ten million is the released model's, made for rows of 262,144 tokens; docs/sweeps.md has what it gave on rows of 64.
"""


def get_sweep():
    return {
        "base": "configs/mqar.py",
        "set": {"data.synthetic.pairs": 16, "eval.every": 1200, "checkpoint.every": 400, "telemetry.diagnostics_every": 0},
        "axes": {"model.rope_theta": [10_000.0, 10_000_000.0], "train.seed": [0, 1, 2]},
    }
