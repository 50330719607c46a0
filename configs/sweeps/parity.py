"""What two layers do on parity, on rows of up to eight times the trained length: recurrent layers,
attention, and one of each; the write strength β in (0, 1) and in (0, 2).

    uv run qwen3next sweep configs/sweeps/parity.py --workers=2

Size: 5 models × 3 seeds, 1000 steps each; about half an hour of 2 cores. Result: docs/results.md.
"""

LINEAR, FULL = "linear_attention", "full_attention"


def get_sweep():
    return {
        "base": "configs/state.py",
        "set": {
            "data.source": "parity",
            "eval.every": 1000,
            "checkpoint.every": 1000,
            "telemetry.diagnostics_every": 0,
        },
        "x": "model",
        "axes": {
            "model": {
                "attention": {"model.layer_types": (FULL, FULL)},
                "one of each, beta 1": {"model.layer_types": (LINEAR, FULL)},
                "one of each, beta 2": {
                    "model.layer_types": (LINEAR, FULL),
                    "model.beta_range": 2,
                },
                "recurrent, beta 1": {"model.layer_types": (LINEAR, LINEAR)},
                "recurrent, beta 2": {
                    "model.layer_types": (LINEAR, LINEAR),
                    "model.beta_range": 2,
                },
            },
            "train.seed": [0, 1, 2],
        },
    }
