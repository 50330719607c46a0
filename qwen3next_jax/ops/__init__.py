"""Operators: functions that take and return arrays. The operators import only JAX and NumPy. Some
operators also have kernels, which a plugin package provides (`implementations.KERNELS`).
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
    "expert_mlp",
    "gated_delta_rule",
    "grouped_matmul",
    "linear_cross_entropy",
]

# A plugin package that may add operators to this module. Its dict `OPERATORS` maps the name of an
# operator to the import string of the module that defines it. The plugin is imported when code
# reads a name that this module lacks.
_PLUGIN = "qwen3next_jax.zoo"


def __getattr__(name: str) -> Any:
    try:
        further = importlib.import_module(_PLUGIN).OPERATORS
    except ModuleNotFoundError as error:
        if error.name != _PLUGIN:
            raise
        further = {}
    if name not in further:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(further[name]), name)
