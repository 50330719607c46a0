"""Operators that several mixers of the zoo share: functions that take and return arrays. They
import only JAX, NumPy and `qwen3next_jax.ops`.
"""

from qwen3next_jax.zoo.ops.channel_delta_rule import channel_delta_rule
from qwen3next_jax.zoo.ops.normalizer import normalizer
from qwen3next_jax.zoo.ops.scans import expanded_scan, linear_scan, max_plus_scan, token_scan

__all__ = [
    "channel_delta_rule",
    "expanded_scan",
    "normalizer",
    "linear_scan",
    "max_plus_scan",
    "token_scan",
]
