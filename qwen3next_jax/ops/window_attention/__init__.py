"""Attention to the last so many tokens: one function, in XLA."""

from qwen3next_jax.ops.window_attention.window import window_attention

__all__ = ["window_attention"]
