"""The gated delta rule: the function `gated_delta_rule`, and several implementations, which compute
the same results.
"""

from qwen3next_jax.ops.delta_rule.api import gated_delta_rule

__all__ = ["gated_delta_rule"]
