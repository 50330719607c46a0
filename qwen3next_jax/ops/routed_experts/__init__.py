"""The routed experts of one device. There is one row for each pair of a token and an expert that
the token chose. The rows lie in tiles, and all rows of a tile belong to one expert.
"""

from qwen3next_jax.ops.routed_experts.layout import (
    SavedForBackward,
    routed_experts,
    routed_experts_gradients,
    sum_by_token,
)

__all__ = ["SavedForBackward", "routed_experts", "routed_experts_gradients", "sum_by_token"]
