"""RWKV-6 (2404.05892, equations 13–20): a decay per channel, a bonus for the current token, and inputs that mix it with the last one.

Letters: B batch, T time, D model, G key heads, H value heads, K/V widths.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.mixers.recurrent import ByChannel, Inputs, low_rank, through
from qwen3next_jax.model.mixers.shift import shifted

PARTS, RANK, DECAY_RANK = ("decay", "key", "value", "receptance", "gate"), 32, 64  # the paper's


class RWKV6(ByChannel):
    """g = −e^w, w = w₀ + W₂ tanh(W₁ x_w); o_t = S_{t−1}ᵀr + (Σ r u k) v, S ← Diag(e^g) S + k vᵀ; LayerNorm per head, SiLU gate. Each
    of its five inputs is x + (x₋₁ − x) ⊙ (μ + Δ), Δ from the token itself, of low rank."""

    read = "before"

    def __init__(self, config, make, layers):
        self.config = c = config
        d, g, h, k = c.hidden_size, c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim
        v = h // g * c.linear_value_head_dim
        half = lambda shape: jnp.full(shape, 0.5)
        self.mix_all = make.parameter(half, (d,), "embed_out", kind="rate")
        self.mix = make.parameter(half, (len(PARTS), d), ". embed_out", kind="rate")
        self.mix_down = make.matrix((d, len(PARTS), RANK), "embed -> * .")
        self.mix_up = make.matrix((len(PARTS), RANK, d), "* . -> embed_out")
        for name, width in (("receptance", k), ("key", k), ("value", v), ("gate", v)):
            setattr(self, f"{name}_proj", make.matrix((d, g, width), "embed -> key_heads ."))
        self.decay_down, self.decay_up = low_rank(make, DECAY_RANK, k)
        slow_to_fast = lambda shape: jnp.broadcast_to(jnp.linspace(-6.0, -1.0, k), shape)
        self.decay = make.parameter(slow_to_fast, (h, k), "value_heads .", kind="rate")
        self.bonus = make.parameter(half, (h, k), "value_heads .", kind="rate")
        self.make_output(make, per_head=True)

    def __call__(self, x_BTD, context: Context, cache=None):
        before_BTD, last = shifted(x_BTD, context, cache and cache["shift"])
        rest = cache and {name: x for name, x in cache.items() if name != "shift"}
        y, diagnostics, rest = super().__call__(jnp.concatenate([x_BTD, before_BTD], axis=-1), context, rest)
        return y, diagnostics, rest and rest | {"shift": last}

    def inputs(self, x_BTE: jax.Array, context: Context) -> Inputs:
        x, before = jnp.split(x_BTE, 2, axis=-1)
        change, dtype = before - x, x.dtype
        mixed = jnp.tanh(through(x + change * self.mix_all[...].astype(dtype), self.mix_down)).astype(dtype)
        delta = jnp.einsum("btpr,prd->pbtd", mixed, self.mix_up[...].astype(dtype)) + self.mix[...].astype(dtype)[:, None, None]
        of = dict(zip(PARTS, x + change * delta))
        part = lambda name: jnp.einsum("btd,dgc->btgc", of[name], getattr(self, f"{name}_proj")[...].astype(dtype))
        low = jnp.tanh(through(of["decay"], self.decay_down)).astype(dtype)
        w_BTHK = self.decay[...] + through(low, self.decay_up)
        return Inputs(jnp.concatenate([part("receptance"), part("key"), part("value")], axis=-1), part("gate"), g=-jnp.exp(w_BTHK))

    def head_weights(self):
        return (self.bonus[...],)

    def finish(self, o_BTHV, norm_HV, gate_BTGRV):
        o = o_BTHV.astype(jnp.float32)
        o = o - jnp.mean(o, axis=-1, keepdims=True)
        return super().finish(o.astype(o_BTHV.dtype), norm_HV, gate_BTGRV)

    @classmethod
    def init_cache(cls, config, batch, length):
        return super().init_cache(config, batch, length) | {"shift": jnp.zeros((batch, 1, config.hidden_size), config.dtype)}

    @classmethod
    def halo(cls, config):
        return 1
