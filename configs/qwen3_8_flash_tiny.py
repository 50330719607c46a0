"""A small Qwen3.8-Flash-Next, which trains on the bytes of the Python standard library in minutes
on a laptop. A row has 256 tokens; for each query, the indexer selects 64 of them.

    uv run train.py --config=configs/qwen3_8_flash_tiny.py

Each of the following flags switches one part off: --config.model.block.placement=pre,
--config.model.ple.layer_ids='()', --config.model.output_gate_type=silu. With
--config.model.mixer.indexer_budget=256, every query sees all keys.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    config.name = "qwen3_8_flash_tiny"

    model = config.model
    model.hf_form = "qwen4_exp_text"
    model.block.placement = "gated_residual"
    model.streams.hc_count = 4
    model.streams.hc_lowrank = 16
    model.output_gate_type = "sigmoid"
    model.full_mixer = "qsa"
    model.mixer = dict(
        indexer_n_heads=2,
        indexer_head_dim=16,
        indexer_budget=64,
        indexer_compress_ratio=4,
    )
    model.ple.layer_ids = (2,)
    model.ple.heads_per_ngram = 4
    model.ple.embed_dim = 64
    model.ple.ngram_vocab_size_base = 4001
    model.ple.split_ngram_parts = 4
    return config
