"""TTT-Linear (2407.04620): the state is a linear model that every token trains by a step of
gradient descent.

Letters: B batch, T time, H value heads, K the width of keys and of values.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.model.mixers.recurrent import Inputs, Recurrent, through
from qwen3next_jax.ops.scans import token_scan


class TTT(Recurrent):
    """W ← W − η ∇½‖f(k; W) − v‖², o = f(q; W), f(x; W) = x + LN(Wᵀx), η = σ(w x) / K, W₀
    learned. The gradient is taken at the W of the start of each `mixer.block` tokens of a
    document. The cache holds W − W₀. Its diagnostic beta is the mean of η.
    """

    switches = ()

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # tokens of a document whose gradients are taken at one state
        block: int = 16

        def __post_init__(self):
            check_bounds(self, "model.mixer", {"at least 1": "block"})

    convolved = False

    def __init__(self, config, make, layers):
        self.config = c = config
        h, k = c.linear_num_value_heads, c.linear_key_head_dim
        self.make_projection(make, gate=False)
        self.rate_proj = make.matrix((c.hidden_size, h), "embed -> value_heads")
        start = lambda shape: 0.02 * jax.random.normal(make.rngs.params(), shape)
        self.start = make.parameter(
            start, (h, k, k), "value_heads . .", kind="vector", operand=False
        )
        self.scale = make.parameter(jnp.ones, (h, k), "value_heads .", kind="norm")
        self.shift = make.parameter(jnp.zeros, (h, k), "value_heads .", kind="rate")
        self.make_output(make)

    def inputs(self, x_BTD, context) -> Inputs:
        rate_BTH = jax.nn.sigmoid(through(x_BTD, self.rate_proj)) / self.config.linear_key_head_dim
        return Inputs(self.project(x_BTD, context)[0], beta=rate_BTH)

    def head_weights(self):
        return self.start[...], self.scale[...], self.shift[...]

    def recurrence(self, heads, state):
        start_HKV, scale, shift = (x.astype(jnp.float32) for x in heads.weights)

        def f(x_BHK, w_BHKV):
            y = jnp.einsum("bhkv,bhk->bhv", start_HKV + w_BHKV, x_BHK)
            y = y - jnp.mean(y, axis=-1, keepdims=True)
            return (
                x_BHK
                + scale
                * y
                * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.rms_norm_eps)
                + shift
            )

        slope = jax.grad(lambda w, k, v: 0.5 * jnp.sum((f(k, w) - v) ** 2))

        def step(state, token):
            q, k, v, rate_BH = token
            w = state["state"] - rate_BH[..., None, None] * slope(state["start"], k, v)
            return stepped(state, w, self.settings(self.config).block), f(q, w)

        return by_block(step, heads, heads.beta, state)

    @classmethod
    def init_cache(cls, config, batch, length):
        cache = super().init_cache(config, batch, length)
        return cache | {"start": cache["state"], "count": jnp.zeros(cache["state"].shape[:2])}

    @classmethod
    def check(cls, config):
        k, v = config.linear_key_head_dim, config.linear_value_head_dim
        require(
            k == v,
            f"model.linear_value_head_dim = {v} with the mixer 'ttt': expected "
            f"model.linear_key_head_dim = {k}, as what "
            "is added to a key is compared with a value",
        )


def by_block(step, heads, gates, state):
    """(o [B, T, H, V], states) of `step` from token to token, of q, k, v of each head in float32
    and the `gates` [B, T, H, …].
    """
    (batch, _, count, value), key = heads.v.shape, heads.k.shape[-1]
    q, k = (
        jnp.repeat(x.astype(jnp.float32), count // x.shape[2], axis=2) for x in (heads.q, heads.k)
    )
    if state is None:
        empty = jnp.zeros((batch, count, key, value))
        state = {"state": empty, "start": empty, "count": empty[..., 0, 0]} | (
            {"momentum": empty} if gates.ndim == 4 else {}
        )
    o, state = token_scan(
        step,
        (q, k, heads.v.astype(jnp.float32), gates),
        state,
        segment_ids=heads.segment_ids,
        axis_name=heads.axis_name,
    )
    return o.astype(heads.v.dtype), state


def stepped(state, w_BHKV, block: int):
    """The states after a token that left w: after the last of a block that is where the next
    one's gradients are taken.
    """
    count = state["count"] + 1
    ended = count == block
    start_BHKV = jnp.where(ended[..., None, None], w_BHKV, state["start"])
    return state | {"state": w_BHKV, "start": start_BHKV, "count": jnp.where(ended, 0, count)}
