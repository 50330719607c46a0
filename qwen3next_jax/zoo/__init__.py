"""Mixers and other parts of a block that the released model does not have: one file for each
family.

The core runs without this folder. `config/registry.py` lists the mixers and parts by name.
"""

# {name: module} of the operators that can also be imported from `qwen3next_jax.ops`.
OPERATORS = {
    "channel_delta_rule": "qwen3next_jax.zoo.ops",
    "fft_convolution": "qwen3next_jax.zoo.hyena",
    "linear_scan": "qwen3next_jax.zoo.ops",
    "max_plus_scan": "qwen3next_jax.zoo.ops",
}
