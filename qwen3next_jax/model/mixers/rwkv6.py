"""RWKV-6 (2404.05892, equations 13–20): a decay per channel, a bonus for the current token, and
inputs that mix it with the last one.

Letters: B batch, T time, D model, G key heads, H value heads, K/V widths.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.mixers.recurrent import Inputs, low_rank, through
from qwen3next_jax.model.mixers.shift import Shifted

PARTS, RANK, DECAY_RANK = ("decay", "key", "value", "receptance", "gate"), 32, 64  # the paper's


class RWKV6(Shifted):
    """g = −e^w, w = w₀ + W₂ tanh(W₁ x_w); o_t = S_{t−1}ᵀr + (Σ r u k) v, S ← Diag(e^g) S + k vᵀ;
    LayerNorm per head, SiLU gate; five inputs mixed with the token before.
    """

    read = "before"

    def __init__(self, config, make, layers):
        self.config = c = config
        d, g, h, k = (
            c.hidden_size,
            c.linear_num_key_heads,
            c.linear_num_value_heads,
            c.linear_key_head_dim,
        )
        r = h // g
        v = r * c.linear_value_head_dim
        half = lambda shape: jnp.full(shape, 0.5)
        self.make_mixing(make, len(PARTS), RANK)
        for part in (("receptance", k), ("key", k), ("value", v, r), ("gate", v, r)):
            projection = make.matrix((d, g, part[1]), "embed -> key_heads .", parts=(part,))
            setattr(self, f"{part[0]}_proj", projection)
        self.decay_down, self.decay_up = low_rank(make, DECAY_RANK, k)
        slow_to_fast = lambda shape: jnp.broadcast_to(jnp.linspace(-6.0, -1.0, k), shape)
        self.decay = make.parameter(slow_to_fast, (h, k), "value_heads .", kind="rate")
        self.bonus = make.parameter(half, (h, k), "value_heads .", kind="rate")
        self.make_output(make, per_head=True)

    def inputs(self, x_BTE: jax.Array, context: Context) -> Inputs:
        of, dtype = dict(zip(PARTS, self.mixed(x_BTE))), x_BTE.dtype
        part = lambda name: jnp.einsum(
            "btd,dgc->btgc", of[name], getattr(self, f"{name}_proj")[...].astype(dtype)
        )
        low = jnp.tanh(through(of["decay"], self.decay_down)).astype(dtype)
        w_BTHK = self.decay[...] + through(low, self.decay_up)
        return Inputs(
            jnp.concatenate([part("receptance"), part("key"), part("value")], axis=-1),
            part("gate"),
            g=-jnp.exp(w_BTHK),
        )

    def head_weights(self):
        return (self.bonus[...],)

    def finish(self, o_BTHV, norm_HV, gate_BTGRV):
        o = o_BTHV.astype(jnp.float32)
        o = o - jnp.mean(o, axis=-1, keepdims=True)
        return super().finish(o.astype(o_BTHV.dtype), norm_HV, gate_BTGRV)
