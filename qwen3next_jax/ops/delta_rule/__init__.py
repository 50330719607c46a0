"""The gated delta rule: one public function, several implementations of the same mathematics."""

from qwen3next_jax.ops.delta_rule.api import gated_delta_rule

__all__ = ["gated_delta_rule"]
