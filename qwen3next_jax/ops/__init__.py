"""Operators: arrays in, arrays out. They import only jax and numpy, and a kernel library where one is used."""
from qwen3next_jax.ops.causal_conv1d import causal_conv1d
from qwen3next_jax.ops.delta_rule import gated_delta_rule

__all__ = ["causal_conv1d", "gated_delta_rule"]
