"""Compares the kinds and the order of two layers on the recall task of configs/mqar.py: 4 patterns
of layers × 8 or 16 key-value pairs × 3 seeds.

    uv run qwen3next sweep configs/sweeps/mqar.py

Time: 42 minutes on a 2-core AMD EPYC without accelerator.
Result: only a model with a recurrent layer before an attention layer learns the task
(docs/notes/studies.md).
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
