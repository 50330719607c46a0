"""The old name of `qwen3next_jax.model.gated_attention`, for mixers outside this package."""

from qwen3next_jax.model.gated_attention import GatedAttention

__all__ = ["GatedAttention"]
