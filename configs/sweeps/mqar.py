"""Recall of two layers by their kinds and order: 4 patterns × {8, 16} pairs × 3 seeds of
configs/mqar.py.

    uv run qwen3next sweep configs/sweeps/mqar.py

docs/notes/2026-11-23-sweeps.md has the results.
"""

LINEAR, FULL = "linear_attention", "full_attention"
PATTERNS = {
    "linear→full": (LINEAR, FULL),
    "full→linear": (FULL, LINEAR),
    "full→full": (FULL, FULL),
    "linear→linear": (LINEAR, LINEAR),
}


def get_sweep():
    return {
        "base": "configs/mqar.py",
        "set": {"eval.every": 1200, "checkpoint.every": 400, "telemetry.diagnostics_every": 0},
        "x": "pattern",
        "axes": {
            "pattern": {name: {"model.layer_types": kinds} for name, kinds in PATTERNS.items()},
            "data.synthetic.pairs": [8, 16],
            "train.seed": [0, 1, 2],
        },
    }
