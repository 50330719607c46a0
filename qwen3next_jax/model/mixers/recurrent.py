"""The old name of `qwen3next_jax.model.recurrent`, for mixers outside this package."""

from qwen3next_jax.model.recurrent import Heads, Inputs, Recurrent

__all__ = ["Heads", "Inputs", "Recurrent"]
