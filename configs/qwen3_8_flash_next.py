"""Qwen3.8-Flash-Next (August 2026), dimension by dimension: 125.7 B parameters (a token
uses 6 B), an n-gram embedding of 51.2 B, and 2.6 B of multi-token prediction.

    uv run train.py --config=configs/qwen3_8_flash_next.py
    --config.train.init_from=QWEN3_8_FLASH_NEXT --config.data.path='my/texts/**/*.jsonl'

continues training from the released weights, downloaded to the folder QWEN3_8_FLASH_NEXT.
docs/qwen3_8_flash_next.md says what is known about this model, and what is not.
configs/qwen3_8_flash_tiny.py is a small version of the model, for a laptop.
"""

from ml_collections import ConfigDict

from qwen3next_jax.config import default_config


def get_config() -> ConfigDict:
    config = ConfigDict(default_config())
    config.name = "qwen3_8_flash_next"

    model = config.model
    model.vocab_size = 248_320
    model.hidden_size = 2560
    model.num_hidden_layers = 48
    model.hf_form = "qwen4_exp_text"
    model.eos_token_id = 248_044
    model.max_position_embeddings = 262_144

    # four residual streams in place of norms
    model.block.placement = "gated_residual"
    model.streams.hc_count = 4
    model.streams.hc_lowrank = 320

    # three layers of four: Gated DeltaNet
    model.linear_num_key_heads = 16
    model.linear_num_value_heads = 48
    model.linear_key_head_dim = 128
    model.linear_value_head_dim = 128
    model.output_gate_type = "sigmoid"

    # the fourth: attention to the blocks that an indexer selects
    model.full_mixer = "qsa"
    model.num_attention_heads = 24
    model.num_key_value_heads = 2
    model.head_dim = 256
    model.partial_rotary_factor = 0.25
    model.mixer = dict(
        indexer_n_heads=4,
        indexer_head_dim=128,
        indexer_budget=2048,
        indexer_compress_ratio=4,
    )

    # layer 2 adds an embedding of n-grams of 2 and 3 tokens
    model.ple.layer_ids = (2,)
    model.ple.ngram_size = 3
    model.ple.heads_per_ngram = 8
    model.ple.embed_dim = 2560
    model.ple.ngram_vocab_size_base = 20_000_000

    model.num_experts = 512
    model.num_experts_per_tok = 10
    model.moe_intermediate_size = 640
    model.shared_expert_intermediate_size = 640

    config.train.steps = 5_000
    config.train.batch_size = 64
    config.train.sequence_length = 4096
    config.train.remat = "block"
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 100
    return config
