"""Gemma 3 1B (2503.19786; google/gemma-3-1b-pt). Two differences: Gemma multiplies embeddings by
√1152, and its local layers use a RoPE base of 10,000; here all layers use the global layers' base,
1,000,000.
"""

from configs.lineups.lineup import lineup

PUBLISHED, LACKS = 999_885_952, {}


def get_config():
    return lineup(
        "gemma3_1b",
        vocab_size=262_144,
        hidden_size=1152,
        num_hidden_layers=26,
        full_attention_interval=6,
        linear_mixer="sliding_window",
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        rope_theta=1e6,
        zero_centered_norm=True,
        intermediate_size=6912,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        block={"placement": "sandwich", "mlp": "geglu"},
        mixer={"window": 512},
    )
