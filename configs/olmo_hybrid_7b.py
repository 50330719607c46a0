"""Olmo Hybrid 7B (allenai/Olmo-Hybrid-7B) with all its dimensions: 24 layers of Gated DeltaNet with
write strengths up to 2, 8 layers of attention without positions, dense MLPs; 7,430,870,688
parameters in 523 tensors.

To continue training from the released weights, downloaded to the folder OLMO_HYBRID_7B, and to
export the result in the released format:

    uv run train.py --config=configs/olmo_hybrid_7b.py --config.train.init_from=OLMO_HYBRID_7B \\
        --config.data.path='my/texts/**/*.jsonl'
    uv run qwen3next export --workdir=runs/olmo_hybrid_7b --out=hf/continued --dtype=bfloat16

docs/families.md describes the formats that can be read and written.
"""

from ml_collections import ConfigDict

from qwen3next_jax.config import default_config


def get_config() -> ConfigDict:
    config = ConfigDict(default_config())
    config.name = "olmo_hybrid_7b"

    model = config.model
    model.vocab_size = 100_352
    model.hidden_size = 3840
    model.num_hidden_layers = 32
    model.num_attention_heads = 30
    model.num_key_value_heads = 30
    model.head_dim = 128
    model.partial_rotary_factor = 0.0
    model.max_position_embeddings = 65_536
    model.linear_num_key_heads = 30
    model.linear_num_value_heads = 30
    model.linear_key_head_dim = 96
    model.linear_value_head_dim = 192
    model.beta_range = 2
    model.decay_init = "log_uniform"
    model.num_experts = 0
    model.intermediate_size = 11_008
    model.mtp_depth = 0
    model.attention_output_gate = False
    model.zero_centered_norm = False
    model.block.placement = "olmo_hybrid"
    model.mixer.qk_norm_over = "layer"
    model.mixer.output_norm_eps = 1e-5
    model.hf_form = "olmo_hybrid"
    model.eos_token_id = 100_257

    config.train.steps = 5_000
    config.train.batch_size = 64
    config.train.sequence_length = 4096
    config.train.remat = "block"
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_steps = 100
    return config
