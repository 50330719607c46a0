"""Compares four forms of the residual stream by the loss on bytes of Python, with all other
settings equal: 4 forms × 3 seeds; models have 8 dense layers of width 64.

    uv run qwen3next sweep configs/sweeps/residuals.py

Time: the four runs of one seed take 5.5 minutes of one core.
Result: with each seed, the form "attention over blocks" has the lowest loss, and "gated streams" a
lower one than "mHC" (docs/notes/models.md).
"""

FORMS = {
    "one stream": {},
    "gated streams": {
        "model.block.placement": "gated_residual",
        "model.streams.hc_count": 4,
        "model.streams.hc_lowrank": 16,
    },
    "mHC": {"model.block.placement": "mhc", "model.streams.hc_count": 4},
    "attention over blocks": {
        "model.block.placement": "attention_residual",
        "model.streams.block_layers": 2,
    },
}


def get_sweep():
    return {
        "base": "configs/tiny.py",
        "set": {
            "model.num_hidden_layers": 8,
            "model.hidden_size": 64,
            "model.head_dim": 32,
            "model.num_attention_heads": 2,
            "model.num_key_value_heads": 1,
            "model.linear_num_key_heads": 2,
            "model.linear_num_value_heads": 2,
            "model.linear_key_head_dim": 16,
            "model.linear_value_head_dim": 32,
            "model.num_experts": 0,
            "model.intermediate_size": 128,
            "model.mtp_depth": 0,
            "train.steps": 300,
            "train.batch_size": 4,
            "train.sequence_length": 128,
            "train.log_every": 50,
            "eval.rows": 256,
            "eval.every": 100_000,
            "eval.sample_tokens": 0,
            "checkpoint.every": 100_000,
            "telemetry.diagnostics_every": 0,
        },
        "x": "form",
        "axes": {"train.seed": [0, 1, 2], "form": FORMS},
    }
