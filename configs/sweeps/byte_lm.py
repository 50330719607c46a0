"""Compares ratios of linear to full attention layers by the loss on bytes of Python, with equal
numbers of tokens and parameters. The sweep has 4 ratios × 3 seeds; a model has 4 dense layers of
width 128, 0.82 million parameters, and trains for 500 steps of 8 × 256 bytes.

    uv run qwen3next sweep configs/sweeps/byte_lm.py

Time: 31 minutes on a 2-core AMD EPYC without accelerator.
Result: the ratios 3:1 and 1:0 (linear to full) have the lowest loss, within the spread of the
seeds; attention alone has the highest loss (docs/notes/studies.md).
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
