"""Attention sinks with and without the output gate: three attention layers on the
bigram-backcopy task, 2 × 3 seeds.

    uv run qwen3next sweep configs/sweeps/output_gate.py

The weights start at a standard deviation of 0.1, near 1 / sqrt(width): from the usual 0.02 no
sink grows in a model this narrow. docs/notes/2026-11-23-sweeps.md has the results.
"""


def get_sweep():
    return {
        "base": "configs/mqar.py",
        "set": {
            "data.source": "backcopy",
            "model.num_hidden_layers": 3,
            "model.layer_types": ("full_attention",) * 3,
            "model.initializer_range": 0.1,
            "train.log_every": 100,
            "eval.every": 1200,
            "eval.suites": ("sinks",),
            "checkpoint.every": 400,
            "telemetry.diagnostics_every": 0,
        },
        "x": "gate",
        "axes": {
            "gate": {
                "without": {"model.attention_output_gate": False},
                "with": {"model.attention_output_gate": True},
            },
            "train.seed": [0, 1, 2],
        },
    }
