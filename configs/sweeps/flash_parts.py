"""Removes the parts of Qwen3.8-Flash-Next one at a time, and compares the losses on bytes of Python
at equal FLOPs. The sweep has 8 models × 3 seeds; a model has 3 dense layers of width 64, and its
indexer is trained. Rows have 128 bytes.

    uv run qwen3next sweep configs/sweeps/flash_parts.py

Time: about 85 minutes with --workers=2 on 2 CPU cores that many other programs used.
Result: the loss is highest without the n-gram embedding and lowest with one residual stream; the
number of keys that the indexer selects makes no measurable difference (docs/qwen3_8_flash_next.md).

The seeds are the first axis, so that all models run with the first seed before any model runs with
the second seed.
"""

# Attention to all keys. It has no indexer, so the indexer's settings are those of the package.
ALL_KEYS = {
    "model.full_mixer": "gated_attention",
    "model.mixer.indexer_n_heads": 4,
    "model.mixer.indexer_head_dim": 128,
    "model.mixer.indexer_budget": 2048,
    "train.indexer_training": "frozen",
}
PARTS = {
    "released": {},
    "2 streams": {"model.streams.hc_count": 2},
    "1 stream": {"model.streams.hc_count": 1},
    "no n-grams": {"model.ple.layer_ids": ()},
    "budget 8": {"model.mixer.indexer_budget": 8},
    "all keys": ALL_KEYS,
    "SiLU gate": {"model.output_gate_type": "silu"},
    "none of them": ALL_KEYS
    | {
        "model.block.placement": "pre",
        "model.ple.layer_ids": (),
        "model.output_gate_type": "silu",
    },
}


def get_sweep():
    return {
        "base": "configs/qwen3_8_flash_tiny.py",
        "set": {
            "model.hidden_size": 64,
            "model.num_hidden_layers": 3,
            "model.full_attention_interval": 3,
            "model.num_experts": 0,
            "model.intermediate_size": 160,
            "model.mixer.indexer_budget": 32,
            "train.batch_size": 4,
            "train.sequence_length": 128,
            "model.mtp_depth": 0,
            "train.indexer_training": "sparse",
            "train.log_every": 50,
            "eval.rows": 256,
            "eval.every": 100_000,
            "eval.sample_tokens": 0,
            "checkpoint.every": 100_000,
            "telemetry.diagnostics_every": 0,
        },
        "x": "part",
        "axes": {"flops": [4e11], "train.seed": [0, 1, 2], "part": PARTS},
    }
