"""Qwen3-30B-A3B (2505.09388; Qwen/Qwen3-30B-A3B). Complete."""

from configs.lineups.lineup import lineup

PUBLISHED, LACKS = 30_532_122_624, {}


def get_config():
    return lineup(
        "qwen3_30b_a3b",
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        full_attention_interval=1,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        rope_theta=1e6,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        shared_expert_intermediate_size=0,
        max_position_embeddings=40_960,
    )
