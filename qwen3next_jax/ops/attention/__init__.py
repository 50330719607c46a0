"""Causal grouped-query attention. The function `attention` has three implementations: XLA alone,
JAX's splash attention kernels and cuDNN. The sequence may be split over a mesh axis.
"""

from qwen3next_jax.ops.attention.api import attention

__all__ = ["attention"]
