"""Attention whose scores are any function of query, key and their places: one function, in XLA."""

from qwen3next_jax.ops.pair_attention.pairs import dot, pair_attention

__all__ = ["dot", "pair_attention"]
