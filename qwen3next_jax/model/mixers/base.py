"""The old name of `qwen3next_jax.model.mixer`, for mixers outside this package."""

from qwen3next_jax.model.mixer import Mixer

__all__ = ["Mixer"]
