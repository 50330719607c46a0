"""Causal grouped-query attention: one public function with implementations in XLA, by splash and by
tokamax's kernels; the sequence may be split over a mesh axis.
"""

from qwen3next_jax.ops.attention.api import attention

__all__ = ["attention"]
