"""SmolLM3-3B (HuggingFaceTB/SmolLM3-3B): every fourth layer has no position embedding (2501.18795).
Complete.
"""

from configs.lineups.lineup import lineup

PUBLISHED, LACKS = 3_075_098_624, {}


def get_config():
    return lineup(
        "smollm3_3b",
        vocab_size=128_256,
        hidden_size=2048,
        num_hidden_layers=36,
        linear_mixer="gated_attention",
        full_mixer="nope_attention",
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        rope_theta=5e6,
        qk_norm=False,
        intermediate_size=11_008,
        max_position_embeddings=65_536,
        tie_word_embeddings=True,
    )
