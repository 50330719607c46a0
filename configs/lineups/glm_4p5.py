"""GLM-4.5 355B-A32B (2508.06471; zai-org/GLM-4.5), complete. `PUBLISHED` is the number of
parameters in the released files, 358,337,791,296, less those of multi-token prediction, which
include copies of the embedding tables.
"""

from configs.lineups.lineup import LIKE_DEEPSEEK, lineup

PUBLISHED, LACKS = 352_797_829_024, {}


def get_config():
    return lineup(
        "glm_4p5",
        vocab_size=151_552,
        hidden_size=5120,
        num_hidden_layers=92,
        full_attention_interval=1,
        full_mixer="biased_attention",
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        partial_rotary_factor=0.5,
        rope_theta=1e6,
        max_position_embeddings=131_072,
        num_experts=160,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        shared_expert_intermediate_size=1536,
        mlp_only_layers=(0, 1, 2),
        intermediate_size=12_288,
        mtp_depth=1,
        rms_norm_eps=1e-5,
        mixer={"attention_bias": "qkv"},
        moe=LIKE_DEEPSEEK | {"routed_scaling_factor": 2.5},
    )
