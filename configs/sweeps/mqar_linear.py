"""Compares start values of the decay and sizes of the state for two recurrent layers that recall 8
key-value pairs: 3 combinations × 3 seeds. The fourth combination, decay_init "ones" with states of
16 × 16, is in configs/sweeps/mqar.py, as the pattern linear→linear.

    uv run qwen3next sweep configs/sweeps/mqar_linear.py

Time: 24 minutes on a 2-core AMD EPYC without accelerator.
Result: with decay_init "log_uniform" a model learns part of the task, with "ones" none of it;
results differ widely between seeds (docs/notes/studies.md).
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
