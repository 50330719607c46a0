"""Recall of 8 pairs by recurrent layers alone, against the start of the decay and the size of
the state: 3 × 3 seeds.

    uv run qwen3next sweep configs/sweeps/mqar_linear.py

The fourth pair, decay_init "ones" with states of 16 × 16, is linear→linear of
configs/sweeps/mqar.py.
"""

WIDE = {"model.linear_key_head_dim": 32, "model.linear_value_head_dim": 32}


def get_sweep():
    return {
        "base": "configs/mqar.py",
        "set": {
            "model.layer_types": ("linear_attention",) * 2,
            "eval.every": 1200,
            "checkpoint.every": 400,
            "telemetry.diagnostics_every": 0,
        },
        "x": "start",
        "axes": {
            "start": {
                "log_uniform 16": {"model.decay_init": "log_uniform"},
                "log_uniform 32": WIDE | {"model.decay_init": "log_uniform"},
                "ones 32": WIDE,
            },
            "train.seed": [0, 1, 2],
        },
    }
