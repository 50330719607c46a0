"""The delta rule with a decay for each key channel: the public function `channel_delta_rule` and
its two implementations, "chunked" and "recurrent" (token by token).
"""

from qwen3next_jax.zoo.ops.channel_delta_rule.api import channel_delta_rule

__all__ = ["channel_delta_rule"]
