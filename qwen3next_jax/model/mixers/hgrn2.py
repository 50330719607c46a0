"""HGRN-2 (2404.07904): what a channel forgets is what it takes in, above a bound that grows with
depth.

Letters: B batch, T time, G key heads, H value heads, K key width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.mixers.recurrent import ByChannel, Inputs


class HGRN2(ByChannel):
    """f = b + (1 − b) σ(W x), g = ln f, k = 1 − f, q = SiLU(W x), o = Sᵀq; no output gate.

    The bound b is a parameter of each layer and channel that starts at layer / layers; the paper
    takes a cumulative softmax over the layers, which starts there. In multi-token prediction
    layer is layers − 1.
    """

    def __init__(self, config, make, layers):
        self.config = c = config
        shape = (c.linear_num_key_heads, c.linear_key_head_dim)
        bound = jnp.maximum(jnp.asarray(layers) / c.num_hidden_layers, 0.01).reshape(
            *make.stack, 1, 1
        )
        self.make_projection(make, gate=False)
        logit = jnp.log(bound) - jnp.log1p(-bound)
        self.bound = make.parameter(
            lambda shape: jnp.broadcast_to(logit, shape), shape, "key_heads .", kind="rate"
        )
        self.make_output(make)

    def inputs(self, x_BTD: jax.Array, context: Context) -> Inputs:
        mixed, _ = self.project(x_BTD, context)
        k = self.config.linear_key_head_dim
        q, key, v = jnp.split(mixed, (k, 2 * k), axis=-1)
        # k = 1 − f, and g from it: ln f of an f that was rounded to 1 would be 0.
        key = jax.nn.sigmoid(-self.bound[...]) * jax.nn.sigmoid(-key.astype(jnp.float32))
        g_BTGK = jnp.log1p(-key)
        repeats = self.config.linear_num_value_heads // self.config.linear_num_key_heads
        return Inputs(
            jnp.concatenate([jax.nn.silu(q), key.astype(q.dtype), v], axis=-1),
            g=jnp.repeat(g_BTGK, repeats, axis=2),
        )
