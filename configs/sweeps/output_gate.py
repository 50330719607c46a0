"""Compares the attention sinks of models with and without the output gate of attention: 2 models ×
3 seeds, with three attention layers, on the bigram-backcopy task.

    uv run qwen3next sweep configs/sweeps/output_gate.py

Time: 14 minutes on a 2-core AMD EPYC without accelerator.
Result: with the gate, less attention goes to the first token, and activations are smaller
(docs/notes/studies.md).

Weights start with a standard deviation of 0.1, near 1 / sqrt(width), because no sink grows in a
model this narrow with the usual 0.02.
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
