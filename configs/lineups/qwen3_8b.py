"""Qwen3-8B (2505.09388; Qwen/Qwen3-8B). Complete."""

from configs.lineups.lineup import lineup

PUBLISHED, LACKS = 8_190_735_360, {}


def get_config():
    return lineup(
        "qwen3_8b",
        vocab_size=151_936,
        hidden_size=4096,
        num_hidden_layers=36,
        full_attention_interval=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1e6,
        intermediate_size=12_288,
        max_position_embeddings=40_960,
    )
