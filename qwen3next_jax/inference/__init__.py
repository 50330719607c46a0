"""Text generation with a cache, and with drafts from the multi-token prediction module."""

from qwen3next_jax.inference.decode import generate, generate_to_end

__all__ = ["generate", "generate_to_end"]
