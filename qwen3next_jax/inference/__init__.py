"""Decoding: cached generation, and drafting with the multi-token prediction module."""

from qwen3next_jax.inference.decode import complete, generate
from qwen3next_jax.inference.speculative import speculative_generate

__all__ = ["complete", "generate", "speculative_generate"]
