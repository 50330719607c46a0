"""Five sizes of a hybrid model, each trained with three budgets of compute: what `qwen3next
scaling` fits. Four dense layers 3:1, widths 16 to 64, 21 thousand to 0.24 million parameters, 0.07
to 8 million bytes of Python; 15 points.

    uv run qwen3next sweep configs/sweeps/ladder.py
    uv run qwen3next scaling runs/sweeps/ladder

Time: 23 minutes on 2 cores of a CPU machine that others used too.
Result: the largest run is predicted from the other 14 with an error of -1.5 %, the five runs of the
highest budget from the lower ones with -1.7 to -3.9 % (docs/notes/studies.md).
"""

WIDTHS = (16, 24, 32, 48, 64)
FLOPS = (1e11, 3e11, 9e11)
HEAD = 8


def size(width: int) -> dict:
    """Settings of a model of this width. The number of heads grows with the width, the width of a
    head does not.
    """
    heads = width // HEAD
    return {
        "model.hidden_size": width,
        "model.intermediate_size": 5 * width // 2,
        "model.num_attention_heads": heads,
        "model.linear_num_key_heads": heads,
        "model.linear_num_value_heads": heads,
    }


def get_sweep():
    return {
        "base": "configs/tiny.py",
        "set": {
            "model.num_experts": 0,
            "model.mtp_depth": 0,
            "model.head_dim": HEAD,
            "model.num_key_value_heads": 1,
            "model.linear_key_head_dim": HEAD,
            "model.linear_value_head_dim": HEAD,
            "model.rope_theta": 10_000.0,
            "train.batch_size": 4,
            "train.sequence_length": 128,
            "train.log_every": 100,
            "optimizer.learning_rate": 4e-3,
            "optimizer.warmup_steps": 16,
            "eval.every": 100_000,
            "eval.rows": 128,
            "eval.sample_tokens": 0,
            "checkpoint.every": 100_000,
            "telemetry.diagnostics_every": 0,
        },
        "x": "size",
        "axes": {
            "flops": list(FLOPS),
            "size": {str(width): size(width) for width in WIDTHS},
        },
    }
