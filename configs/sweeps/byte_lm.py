"""Compares ratios of linear to full attention layers on text: the loss on bytes of Python, at equal
tokens and parameters. 4 ratios × 3 seeds; 4 layers of width 128, dense, 0.82 million parameters,
500 steps of 8 × 256 bytes.

    uv run qwen3next sweep configs/sweeps/byte_lm.py

Time: 31 minutes on a 2-core AMD EPYC without accelerator.
Result: 3:1 and 1:0 have the lowest loss and cannot be told apart; attention alone has the highest
(docs/notes/studies.md).
"""


def get_sweep():
    return {
        "base": "configs/tiny.py",
        "set": {
            "model.num_experts": 0,
            "model.intermediate_size": 320,
            "model.mtp_depth": 0,
            "model.rope_theta": 10_000.0,
            "train.steps": 500,
            "train.log_every": 50,
            "eval.every": 500,
            "eval.sample_tokens": 0,
            "eval.suites": ("position",),
            "checkpoint.every": 250,
            "telemetry.diagnostics_every": 0,
        },
        "match": "parameters",
        "x": "ratio",
        "axes": {"ratio": ["0:1", "1:1", "3:1", "1:0"], "train.seed": [0, 1, 2]},
    }
