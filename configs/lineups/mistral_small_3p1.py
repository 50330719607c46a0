"""Mistral Small 3.1 24B (mistralai/Mistral-Small-3.1-24B-Base-2503), the text model. The text model
is complete; the vision tower is left out.
"""

from configs.lineups.lineup import lineup

PUBLISHED, LACKS = 23_572_403_200, {}


def get_config():
    return lineup(
        "mistral_small_3p1",
        vocab_size=131_072,
        hidden_size=5120,
        num_hidden_layers=40,
        full_attention_interval=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1e9,
        qk_norm=False,
        intermediate_size=32_768,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
    )
