"""Trains five sizes of a hybrid model, each with three budgets of FLOPs; `qwen3next scaling` fits a
scaling law to the 15 runs. A model has three linear layers and one attention layer, all dense,
widths of 16 to 64 and 21 thousand to 0.24 million parameters. A run reads 0.07 to 8 million bytes
of Python.

    uv run qwen3next sweep configs/sweeps/ladder.py
    uv run qwen3next scaling runs/sweeps/ladder

Time: 23 minutes on 2 cores of a CPU machine that other programs used too.
Result: a law fitted to the other 14 runs predicts the loss of the largest run with an error of
-1.5 %. A law fitted to the two lower budgets predicts the losses of the highest budget with errors
of -1.7 to -3.9 % (docs/notes/studies.md).
"""

WIDTHS = (16, 24, 32, 48, 64)
FLOPS = (1e11, 3e11, 9e11)
HEAD = 8


def size(width: int) -> dict:
    """Returns the settings of a model of this width. The number of heads grows with the model's
    width; the width of a head is constant.
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
