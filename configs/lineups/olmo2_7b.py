"""OLMo 2 7B (2501.00656; allenai/OLMo-2-1124-7B). Complete."""

from configs.lineups.lineup import lineup

PUBLISHED, LACKS = 7_298_617_344, {}


def get_config():
    return lineup(
        "olmo2_7b",
        vocab_size=100_352,
        hidden_size=4096,
        num_hidden_layers=32,
        full_attention_interval=1,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        rope_theta=500_000.0,
        intermediate_size=11_008,
        max_position_embeddings=4096,
        block={"placement": "olmo2"},
        mixer={"qk_norm_over": "layer"},
    )
