"""Operators: arrays in, arrays out. They import only jax and numpy, and a kernel library where
one is used.
"""

from qwen3next_jax.ops.attention import attention
from qwen3next_jax.ops.causal_conv1d import causal_conv1d
from qwen3next_jax.ops.channel_delta_rule import channel_delta_rule
from qwen3next_jax.ops.cross_entropy import linear_cross_entropy
from qwen3next_jax.ops.delta_rule import gated_delta_rule
from qwen3next_jax.ops.grouped_matmul import expert_mlp, grouped_matmul
from qwen3next_jax.ops.scans import linear_scan, max_plus_scan

__all__ = [
    "attention",
    "causal_conv1d",
    "channel_delta_rule",
    "expert_mlp",
    "gated_delta_rule",
    "grouped_matmul",
    "linear_cross_entropy",
    "linear_scan",
    "max_plus_scan",
]
