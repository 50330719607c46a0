"""The delta rule with a decay for each key channel: the public function `channel_delta_rule`, its
chunked form and its recurrence over tokens.
"""

from qwen3next_jax.zoo.ops.channel_delta_rule.api import channel_delta_rule

__all__ = ["channel_delta_rule"]
