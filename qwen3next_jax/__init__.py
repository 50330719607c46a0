"""Pretrain and study Qwen3-Next in JAX. A public name of this package is imported when it is first
used, so that commands start quickly.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "Run": "qwen3next_jax.commands.python",
    "UserError": "qwen3next_jax.common.errors",
    "evaluate": "qwen3next_jax.commands.python",
    "generate": "qwen3next_jax.commands.python",
    "load_config": "qwen3next_jax.commands.python",
    "plan": "qwen3next_jax.commands.python",
    "train": "qwen3next_jax.commands.python",
    "ModelConfig": "qwen3next_jax.config",
    "Qwen3Next": "qwen3next_jax.model",
    "hf_tensors": "qwen3next_jax.interop.huggingface",
    "load_hf": "qwen3next_jax.interop.huggingface",
    "save_hf": "qwen3next_jax.interop.huggingface",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'qwen3next_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
