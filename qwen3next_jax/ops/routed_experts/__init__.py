"""The routed experts of one device: rows laid out in tiles (`tiling`), TPU kernels on them
(`pallas_tpu`).
"""

from qwen3next_jax.ops.routed_experts.tiling import (
    routed_experts,
    routed_experts_gradients,
    sum_by_token,
)

__all__ = ["routed_experts", "routed_experts_gradients", "sum_by_token"]
