"""The earlier place of `qwen3next_jax.common.figures`, for evaluations that were written for it."""

from qwen3next_jax.common.figures import Figure

__all__ = ["Figure"]
