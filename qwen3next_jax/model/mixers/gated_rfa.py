"""Gated random feature attention (2103.02143, equations 4 and 7)."""

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.model.mixers.recurrent import Additive, Inputs, through, unit

# the sum of the weights is kept this far from 0: with sines among the features it may vanish or
# turn negative
EPSILON = 1e-6


class GatedRFA(Additive):
    """φ(x) = [sin ωx, cos ωx] / √(K/2) of q and k of length 1, ω ~ N(0, 1) never learned; γ =
    σ(w x), S ← γ S + (1 − γ) φ(k) vᵀ, z alike; o = Sᵀφ(q) / (zᵀφ(q)).
    """

    def __init__(self, config, make, layers):
        self.config = c = config
        g, k = c.linear_num_key_heads, c.linear_key_head_dim
        self.make_projection(make, gate=False)
        self.decay_proj = make.matrix(
            (c.hidden_size, c.linear_num_value_heads), "embed -> value_heads"
        )
        normal = lambda shape: jax.random.normal(make.rngs.params(), shape)
        self.frequencies = make.parameter(normal, (g, k // 2, k), "key_heads . .", kind="rate")
        self.make_output(make)

    def inputs(self, x_BTD, context) -> Inputs:
        logit = through(x_BTD, self.decay_proj)
        return Inputs(
            self.project(x_BTD, context)[0],
            g=jax.nn.log_sigmoid(logit),
            beta=jax.nn.sigmoid(-logit),
        )

    def head_weights(self):
        return (jax.lax.stop_gradient(self.frequencies[...]),)

    def recurrence(self, heads, state):
        def features(x):
            angle = jnp.einsum("btgk,gfk->btgf", unit(x), heads.weights[0], precision="highest")
            return (
                jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
                * (x.shape[-1] / 2) ** -0.5
            ).astype(x.dtype)

        o, weight, states = self.weighted(
            heads._replace(q=features(heads.q), k=features(heads.k)), state
        )
        weight = jnp.where(weight < 0, -1, 1) * jnp.maximum(jnp.abs(weight), EPSILON)
        return (o / weight[..., None]).astype(heads.v.dtype), states

    @classmethod
    def normalises(cls, config):
        return True

    @classmethod
    def check(cls, config):
        require(
            config.linear_key_head_dim % 2 == 0,
            f"model.linear_key_head_dim = {config.linear_key_head_dim}: expected an even "
            "number, as half of the features are sines",
        )
