"""Kimi K2 1T-A32B (2507.20534; moonshotai/Kimi-K2-Base). One difference: Kimi K2 multiplies whole
attention scores by YaRN's factor; this project multiplies only the channels that are rotated.
"""

from configs.lineups.lineup import LIKE_DEEPSEEK, lineup

PUBLISHED = 1_026_408_235_864  # numbers in its files
LACKS = {"in the files, of no known weight": 3416}


def get_config():
    return lineup(
        "kimi_k2",
        vocab_size=163_840,
        hidden_size=7168,
        num_hidden_layers=61,
        full_attention_interval=1,
        full_mixer="mla",
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=192,
        partial_rotary_factor=1 / 3,
        rope_theta=50_000.0,
        yarn_factor=32.0,
        max_position_embeddings=4096,
        num_experts=384,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        shared_expert_intermediate_size=2048,
        mlp_only_layers=(0,),
        intermediate_size=18_432,
        mixer={"latent_rank": 512, "query_rank": 1536},
        moe=LIKE_DEEPSEEK | {"routed_scaling_factor": 2.827},
    )
