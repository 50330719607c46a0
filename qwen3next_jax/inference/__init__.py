"""Decoding: cached generation, and drafting with the multi-token prediction module."""

from qwen3next_jax.inference.decode import complete, generate

__all__ = ["complete", "generate"]
