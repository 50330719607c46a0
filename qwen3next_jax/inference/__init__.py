"""Text generation with a cache, and with drafts from the multi-token prediction module."""

from qwen3next_jax.inference.decode import complete, generate

__all__ = ["complete", "generate"]
