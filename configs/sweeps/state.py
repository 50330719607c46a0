"""Compares what layers do on tasks that need a state (`data/state_tasks.py`) and on recall: how
many layers have attention, the range of the write strength β, the number of writes a token (Gated
DeltaProduct), and attention with or without positions.

    uv run qwen3next sweep configs/sweeps/state.py --workers=2

Size: 22 models × 6 tasks × 3 seeds, 396 points. It has not been run as a whole.
"""

LINEAR, FULL = "linear_attention", "full_attention"
# Four layers. Attention is in every layer, in every second one, in the last one, or in none.
PATTERNS = {
    "attention": (FULL,) * 4,
    "1:1": (LINEAR, FULL) * 2,
    "3:1": (LINEAR, LINEAR, LINEAR, FULL),
    "recurrent": (LINEAR,) * 4,
}
WRITES = {
    "beta 1": {},
    "beta 2": {"model.beta_range": 2},
    "2 writes": {
        "model.linear_mixer": "gated_deltaproduct",
        "model.mixer.num_householder": 2,
    },
    "2 writes beta 2": {
        "model.linear_mixer": "gated_deltaproduct",
        "model.mixer.num_householder": 2,
        "model.beta_range": 2,
    },
}
POSITIONS = {"rope": {}, "no positions": {"model.full_mixer": "nope_attention"}}


def models():
    """Name of a model → its settings."""
    found = {}
    for pattern, layers in PATTERNS.items():
        for writes, of_recurrence in WRITES.items() if LINEAR in layers else [("", {})]:
            for positions, of_attention in POSITIONS.items() if FULL in layers else [("", {})]:
                name = " ".join(filter(None, (pattern, writes, positions)))
                settings = {"model.num_hidden_layers": 4, "model.layer_types": layers}
                found[name] = settings | of_recurrence | of_attention
    return found


def get_sweep():
    return {
        "base": "configs/state.py",
        "set": {
            "eval.every": 1000,
            "checkpoint.every": 1000,
            "telemetry.diagnostics_every": 0,
        },
        "x": "model",
        "axes": {
            "model": models(),
            "task": {
                name: {"data.source": name}
                for name in ("parity", "modular_addition", "s3", "a5", "s5", "state_recall")
            },
            "train.seed": [0, 1, 2],
        },
    }
