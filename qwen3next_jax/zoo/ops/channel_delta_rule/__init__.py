"""The delta rule with a decay per key channel: one public function, its chunked form and the
recurrence.
"""

from qwen3next_jax.zoo.ops.channel_delta_rule.api import channel_delta_rule

__all__ = ["channel_delta_rule"]
