"""Causal grouped-query attention: one public function; blockwise XLA, splash and tokamax's
kernels behind it, whole or over a mesh axis.
"""

from qwen3next_jax.ops.attention.api import attention

__all__ = ["attention"]
