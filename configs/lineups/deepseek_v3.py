"""DeepSeek-V3 671B-A37B (2412.19437; deepseek-ai/DeepSeek-V3). The published number of parameters
does not count multi-token prediction. One difference: DeepSeek-V3 multiplies whole attention scores
by YaRN's factor; this project multiplies only the channels that are rotated.
"""

from configs.lineups.lineup import LIKE_DEEPSEEK, lineup

PUBLISHED, LACKS = 671_026_419_200, {}


def get_config():
    return lineup(
        "deepseek_v3",
        vocab_size=129_280,
        hidden_size=7168,
        num_hidden_layers=61,
        full_attention_interval=1,
        full_mixer="mla",
        num_attention_heads=128,
        num_key_value_heads=128,
        head_dim=192,
        partial_rotary_factor=1 / 3,
        rope_theta=10_000.0,
        yarn_factor=40.0,
        max_position_embeddings=4096,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        shared_expert_intermediate_size=2048,
        mlp_only_layers=(0, 1, 2),
        intermediate_size=18_432,
        mtp_depth=1,
        mixer={"latent_rank": 512, "query_rank": 1536},
        moe=LIKE_DEEPSEEK | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    )
