"""Retention (2307.08621, equations 5–8): rotated queries and keys, a constant decay per head."""

import jax.numpy as jnp

from qwen3next_jax.errors import require
from qwen3next_jax.model.layers import rotate
from qwen3next_jax.model.mixers.recurrent import Additive, Inputs

THETA = 10_000.0


class RetNet(Additive):
    """S ← γ S + k vᵀ, o = Sᵀq / √K, γ = 1 − 2^(−5−h), q and k rotated by their positions; norm per head, SiLU gate."""

    def __init__(self, config, make, layers):
        self.config = config
        self.make_projection(make)
        self.make_output(make)

    def inputs(self, x_BTD, context) -> Inputs:
        mixed, gate = self.project(x_BTD, context)
        k = self.config.linear_key_head_dim
        query_key = mixed[..., :2 * k].reshape(*mixed.shape[:3], 2, k)
        rotated = rotate(query_key.reshape(*mixed.shape[:2], -1, k), context.positions, k, THETA).reshape(*mixed.shape[:3], 2 * k)
        return Inputs(jnp.concatenate([rotated, mixed[..., 2 * k:]], axis=-1), gate, g=self.log_decay(x_BTD))

    def log_decay(self, x_BTD):
        heads = self.config.linear_num_value_heads
        return jnp.broadcast_to(jnp.log1p(-(2.0 ** (-5 - jnp.arange(heads)))), (*x_BTD.shape[:2], heads))

    def recurrence(self, heads, state):
        return super().recurrence(heads._replace(k=heads.k * heads.k.shape[-1] ** -0.5), state)

    @classmethod
    def check(cls, config):
        require(config.linear_key_head_dim % 2 == 0, f"model.linear_key_head_dim = {config.linear_key_head_dim}: expected an even "
                "number, as queries and keys are rotated")
