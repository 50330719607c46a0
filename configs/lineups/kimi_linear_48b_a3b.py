"""Kimi Linear 48B-A3B (2510.26692; moonshotai/Kimi-Linear-48B-A3B-Base), whose released weights can
be imported and exported (docs/families.md).
"""

from configs.lineups.lineup import LIKE_DEEPSEEK, lineup

PUBLISHED, LACKS = 49_122_681_728, {}


def get_config():
    layers = tuple("mla" if i in (3, 7, 11, 15, 19, 23, 26) else "kda" for i in range(27))
    return lineup(
        "kimi_linear_48b_a3b",
        vocab_size=163_840,
        hidden_size=2304,
        num_hidden_layers=27,
        layer_types=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=192,
        partial_rotary_factor=0.0,
        linear_num_key_heads=32,
        linear_num_value_heads=32,
        max_position_embeddings=1_048_576,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
        mlp_only_layers=(0,),
        intermediate_size=9216,
        rms_norm_eps=1e-5,
        mixer={"latent_rank": 512, "shared_key_width": 64, "latent_norm_eps": 1e-6},
        moe=LIKE_DEEPSEEK | {"routed_scaling_factor": 2.446},
        decay_init="log_uniform",
        hf_form="kimi_linear",
    )
