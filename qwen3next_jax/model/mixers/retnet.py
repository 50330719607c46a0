"""Retention (2307.08621, equations 5–8): rotated queries and keys, a constant decay per head."""

import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.model.mixers.recurrent import Additive, Inputs, Recurrent

THETA = 10_000.0


class RetNet(Additive):
    """S ← γ S + k vᵀ, o = Sᵀq / √K, γ = 1 − 2^(−5−h), q and k rotated by their positions; norm
    per head, SiLU gate.
    """

    def __init__(self, config, make, layers):
        self.config = config
        self.make_projection(make)
        self.make_output(make)

    def inputs(self, x_BTD, context) -> Inputs:
        mixed, gate = self.project(x_BTD, context)
        q, k, v = jnp.split(
            mixed, (self.config.linear_key_head_dim, 2 * self.config.linear_key_head_dim), axis=-1
        )
        q, k = (_rotated(x, context.positions) for x in (q, k))
        return Inputs(jnp.concatenate([q, k, v], axis=-1), gate, g=self.log_decay(x_BTD))

    def log_decay(self, x_BTD):
        heads = self.config.linear_num_value_heads
        return jnp.broadcast_to(
            jnp.log1p(-(2.0 ** (-5 - jnp.arange(heads)))), (*x_BTD.shape[:2], heads)
        )

    # the operator's own scale is the paper's: none is multiplied in, and rounded
    recurrence = Recurrent.recurrence

    @classmethod
    def check(cls, config):
        require(
            config.linear_key_head_dim % 2 == 0,
            f"model.linear_key_head_dim = {config.linear_key_head_dim}: expected an even "
            "number, as queries and keys are rotated",
        )


def _rotated(x_BTGK, positions_BT):
    """Rotate-half, over the whole head, whatever the rotation of the model's attention is."""
    first, second = jnp.split(x_BTGK.astype(jnp.float32), 2, axis=-1)
    half = first.shape[-1]
    angle = positions_BT[:, :, None, None] * THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x_BTGK.dtype)
