"""Operators that several mixers of the zoo share: functions that take and return arrays. The
operators import only JAX, NumPy and `qwen3next_jax.ops`.
"""

from qwen3next_jax.zoo.ops.attention_weight_sums import attention_weight_sums
from qwen3next_jax.zoo.ops.channel_delta_rule import channel_delta_rule
from qwen3next_jax.zoo.ops.scans import (
    linear_scan,
    low_memory_linear_scan,
    max_plus_scan,
    token_scan,
)

__all__ = [
    "channel_delta_rule",
    "low_memory_linear_scan",
    "attention_weight_sums",
    "linear_scan",
    "max_plus_scan",
    "token_scan",
]
