"""Compares the best learning rate of two widths with muP and without: 2 × 2 × 5 points; two layers.

    uv run qwen3next sweep configs/sweeps/widths.py --workers=2

Time: 6 minutes on 2 cores of a CPU machine that others used too.
Result: the best rate moves by -6.7 steps of √2 without and by -2.2 with muP. That of width 32 is
the highest that was tried, and nearly as good at a quarter of it: one seed does not tell steps.

The section "Learning rate" of its report says how far the best rate moves from width 32 to 128. At
width 32, the base, both are the same run. Three seeds and three widths:
benchmarks/training/widths.py.
"""

HEAD = 16


def width(size: int) -> dict:
    """Settings of a model of this width. The width of a head is the same in all."""
    heads = size // HEAD
    return {
        "model.hidden_size": size,
        "model.intermediate_size": 2 * size,
        "model.num_attention_heads": heads,
        "model.num_key_value_heads": heads,
        "model.linear_num_key_heads": heads,
        "model.linear_num_value_heads": heads,
    }


def get_sweep():
    return {
        "base": "configs/tiny.py",
        "set": {
            "model.num_hidden_layers": 2,
            "model.full_attention_interval": 2,
            "model.num_experts": 0,
            "model.mtp_depth": 0,
            "model.head_dim": HEAD,
            "model.linear_key_head_dim": HEAD,
            "model.linear_value_head_dim": HEAD,
            "model.rope_theta": 10_000.0,
            "train.steps": 80,
            "train.sequence_length": 64,
            "train.log_every": 40,
            "optimizer.warmup_steps": 10,
            "eval.every": 80,
            "eval.sample_tokens": 0,
            "checkpoint.every": 80,
            "telemetry.diagnostics_every": 0,
        },
        "x": "width",
        "axes": {
            "scaling": {
                "none": {},
                "mup": {"optimizer.scaling": "mup", "optimizer.base_width": 32},
            },
            "width": {str(size): width(size) for size in (32, 128)},
            "optimizer.learning_rate": [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2],
        },
    }
