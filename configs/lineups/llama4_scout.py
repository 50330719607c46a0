"""Llama 4 Scout 109B-A17B (meta-llama/Llama-4-Scout-17B-16E), the text model. Every fourth layer
has no position embedding. All other layers have a sliding window of 8192 tokens, where Llama 4 has
chunks of 8192 tokens. This project lacks the norm (without weights) of queries and keys, the
attention temperature of the layers without positions, and the router's sigmoid, with which Llama 4
multiplies an expert's input.
"""

from configs.lineups.lineup import lineup

PUBLISHED, LACKS = 107_769_861_120, {}


def get_config():
    return lineup(
        "llama4_scout",
        vocab_size=202_048,
        hidden_size=5120,
        num_hidden_layers=48,
        linear_mixer="sliding_window",
        full_mixer="nope_attention",
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=500_000.0,
        qk_norm=False,
        num_experts=16,
        num_experts_per_tok=1,
        norm_topk_prob=False,
        moe_intermediate_size=8192,
        shared_expert_intermediate_size=8192,
        max_position_embeddings=262_144,
        rms_norm_eps=1e-5,
        mixer={"window": 8192},
        moe={"shared_expert_gate": False},
    )
