"""Nemotron 3 Nano 30B-A3B (2512.20848; nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16), whose 52
layers become blocks of a mixer (M, *) and, if a layer of experts (E) follows, its experts. The
biases of the convolutions are left out. Two numbers of parameters differ: a block without experts
also has a second norm, and the router's bias counts as a parameter.
"""

from configs.lineups.lineup import LIKE_DEEPSEEK, lineup

LAYERS = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
PUBLISHED = 31_577_937_344
LACKS = {
    "biases of convolutions": 23 * 6144,
    "norms where there is no MLP": -6 * 2688,
    "router's bias is a parameter here": -23 * 128,
}


def get_config():
    pairs = [(kind, after == "E") for kind, after in zip(LAYERS, LAYERS[1:]) if kind != "E"]
    return lineup(
        "nemotron3_nano",
        vocab_size=131_072,
        hidden_size=2688,
        num_hidden_layers=len(pairs),
        num_attention_heads=32,
        num_key_value_heads=2,
        layer_types=tuple("mamba2" if kind == "M" else "nope_attention" for kind, _ in pairs),
        head_dim=128,
        qk_norm=False,
        linear_num_key_heads=8,
        linear_num_value_heads=64,
        linear_key_head_dim=128,
        linear_value_head_dim=64,
        num_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        shared_expert_intermediate_size=3712,
        max_position_embeddings=262_144,
        mlp_only_layers=tuple(i for i, (_, experts) in enumerate(pairs) if not experts),
        block={"mlp": "none"},
        rms_norm_eps=1e-5,
        moe=LIKE_DEEPSEEK | {"experts": "relu2", "routed_scaling_factor": 2.5},
    )
