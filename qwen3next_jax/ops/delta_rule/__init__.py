"""The gated delta rule: one public function and several implementations, which compute the same
results.
"""

from qwen3next_jax.ops.delta_rule.api import gated_delta_rule

__all__ = ["gated_delta_rule"]
