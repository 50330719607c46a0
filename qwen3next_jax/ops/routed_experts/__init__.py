"""The routed experts of one device, with rows in tiles of one expert each."""

from qwen3next_jax.ops.routed_experts.layout import (
    routed_experts,
    routed_experts_gradients,
    sum_by_token,
)

__all__ = ["routed_experts", "routed_experts_gradients", "sum_by_token"]
