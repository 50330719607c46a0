"""Mixers and other parts of a block beside the released model's: one file for each family.

The core runs without this folder. `config/registry.py` names what is in it.
"""

# Operators that `qwen3next_jax.ops` also offers by these names: name → module.
OPERATORS = {
    "channel_delta_rule": "qwen3next_jax.zoo.ops",
    "fft_convolution": "qwen3next_jax.zoo.hyena",
    "linear_scan": "qwen3next_jax.zoo.ops",
    "max_plus_scan": "qwen3next_jax.zoo.ops",
}
