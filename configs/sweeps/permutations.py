"""Compares one layer of each kind on the permutations of five things (s5 of `data/state_tasks.py`):
inputs that exchange two things, or that exchange two or turn three. An exchange is one reflection,
so one write a token with β in (0, 2) suffices for it; a turn of three takes two.

    uv run qwen3next sweep configs/sweeps/permutations.py --workers=2

Size: 4 models × 2 sets of inputs × 3 seeds, 24 points of about a minute each.
Result: docs/state.md.
"""

NO_RECURRENCE = {"beta_range": 1, "decay_gate": True, "short_convolution": True}
MODELS = {
    "attention": {"layer_types": ("full_attention",)} | NO_RECURRENCE,
    "recurrent, beta 1": {"beta_range": 1},
    "recurrent, beta 2": {},
    "2 writes, beta 2": {"linear_mixer": "gated_deltaproduct"},
}


def get_sweep():
    models = {
        model: {f"model.{name}": value for name, value in settings.items()}
        for model, settings in MODELS.items()
    }
    stages = (
        {"steps": 1000, "sequence_length": 4, "batch_size": 256},
        {"steps": 1000, "sequence_length": 8, "batch_size": 128},
        {"steps": 1000},
    )
    return {
        "base": "configs/state.py",
        "set": {
            "data.source": "s5",
            "train.steps": 3000,
            "train.stages": stages,
            "telemetry.diagnostics_every": 0,
            "eval.every": 3000,
            "checkpoint.every": 3000,
        },
        "x": "model",
        "axes": {
            "model": models,
            "inputs": {
                "exchanges of two": {"data.synthetic.max_moved": 2},
                "and turns of three": {"data.synthetic.max_moved": 3},
            },
            "train.seed": [0, 1, 2],
        },
    }
