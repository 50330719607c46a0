"""gpt-oss-20b (2508.10925; openai/gpt-oss-20b): every second layer has a window of 128 tokens, each
head has a sink logit, and the matrices of attention, router and experts have biases. All parameters
are here. One difference: this project rounds YaRN's borders between frequencies, gpt-oss does not.
"""

from configs.lineups.lineup import lineup

PUBLISHED, LACKS = 20_914_757_184, {}


def get_config():
    return lineup(
        "gpt_oss_20b",
        vocab_size=201_088,
        hidden_size=2880,
        num_hidden_layers=24,
        full_attention_interval=2,
        linear_mixer="sliding_window",
        full_mixer="sink_attention",
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        rope_theta=150_000.0,
        qk_norm=False,
        yarn_factor=32.0,
        max_position_embeddings=4096,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=2880,
        shared_expert_intermediate_size=0,
        rms_norm_eps=1e-5,
        mixer={"window": 128, "sink_logit": True, "attention_bias": "qkvo"},
        moe={"experts": "clipped_swiglu"},
    )
