"""MiniMax-M2 230B-A10B (MiniMaxAI/MiniMax-M2)."""

from configs.lineups.lineup import lineup

PUBLISHED, LACKS = 228_689_764_864, {}


def get_config():
    return lineup(
        "minimax_m2",
        vocab_size=200_064,
        hidden_size=3072,
        num_hidden_layers=62,
        full_attention_interval=1,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        partial_rotary_factor=0.5,
        rope_theta=5e6,
        max_position_embeddings=196_608,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        shared_expert_intermediate_size=0,
        mixer={"qk_norm_over": "layer"},
        moe={"scoring_func": "sigmoid", "router_bias": True},
    )
