"""Operators that several families of the zoo share: functions of arrays that return arrays. They
import only jax, numpy and `qwen3next_jax.ops`.
"""

from qwen3next_jax.zoo.ops.channel_delta_rule import channel_delta_rule
from qwen3next_jax.zoo.ops.key_sum import key_sum
from qwen3next_jax.zoo.ops.scans import expanded_scan, linear_scan, max_plus_scan, token_scan

__all__ = [
    "channel_delta_rule",
    "expanded_scan",
    "key_sum",
    "linear_scan",
    "max_plus_scan",
    "token_scan",
]
