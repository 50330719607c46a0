"""Mixers and other parts of a block that the released Qwen3-Next does not have: one file for each
family of similar mixers.

No other folder of the package needs the folder `zoo`. `config/registry.py` lists the mixers and
parts by name.
"""

# Name of an operator → the module that defines it. `qwen3next_jax.ops` imports the operator from
# there when it is asked for this name.
OPERATORS = {
    "channel_delta_rule": "qwen3next_jax.zoo.ops",
    "fft_convolution": "qwen3next_jax.zoo.hyena",
    "linear_scan": "qwen3next_jax.zoo.ops",
    "max_plus_scan": "qwen3next_jax.zoo.ops",
}
