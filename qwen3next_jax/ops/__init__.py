"""Operators: functions of arrays. They import jax, numpy and, where one is used, a kernel library.
"""

import importlib
from typing import Any

from qwen3next_jax.ops.attention import attention
from qwen3next_jax.ops.causal_conv1d import causal_conv1d
from qwen3next_jax.ops.cross_entropy import linear_cross_entropy
from qwen3next_jax.ops.delta_rule import gated_delta_rule
from qwen3next_jax.ops.grouped_matmul import expert_mlp, grouped_matmul

__all__ = [
    "attention",
    "causal_conv1d",
    "channel_delta_rule",
    "expert_mlp",
    "fft_convolution",
    "gated_delta_rule",
    "grouped_matmul",
    "linear_cross_entropy",
    "linear_scan",
    "max_plus_scan",
]

# Operators that only the zoo uses stand there. Their names here keep working.
_ZOO_OPS = "qwen3next_jax.zoo.ops"
_IN_ZOO = {
    "channel_delta_rule": _ZOO_OPS,
    "fft_convolution": "qwen3next_jax.zoo.hyena",
    "linear_scan": _ZOO_OPS,
    "max_plus_scan": _ZOO_OPS,
}


def __getattr__(name: str) -> Any:
    if name not in _IN_ZOO:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_IN_ZOO[name]), name)
