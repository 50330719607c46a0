"""Compares the best learning rates of two widths with muP and without: 2 × 2 × 5 runs of a model of
two layers.

    uv run qwen3next sweep configs/sweeps/widths.py --workers=2

Time: 6 minutes on 2 cores of a CPU machine that other programs used too.
Result: from width 32 to 128, the best rate moves by -6.7 factors of √2 without muP and by -2.2 with
muP. One seed is not enough: at width 32 the best rate is the highest of the sweep, and a quarter of
the best rate is nearly as good.

The section "Learning rate" of the sweep's report says how far the best rate moves. At width 32, the
base width of muP, runs with and without muP are identical. benchmarks/training/widths.py compares
three widths with three seeds.
"""

HEAD = 16


def width(size: int) -> dict:
    """Returns the settings of a model of this width. The width of a head is the same for all
    widths.
    """
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
