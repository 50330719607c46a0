"""Mamba-2 (2405.21060): state-space duality, in the letters of attention: q = C, k = B, v = x; G
key heads are its groups.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.mixers.gated_deltanet import START_OF_DECAY
from qwen3next_jax.model.mixers.recurrent import Inputs, Recurrent, through


class Mamba2(Recurrent):
    """Δ = softplus(w x + b), S ← e^{−Δ e^A} S + Δ k vᵀ, o = Sᵀq + D v; RMSNorm of o · SiLU(z)
    over the heads of a group. The released models' convolution has a bias; this one has none.
    """

    switches = (*Recurrent.switches, "decay_init")
    normalized = False

    def __init__(self, config, make, layers):
        self.config = c = config
        h = c.linear_num_value_heads
        self.make_projection(make)
        self.make_convolution(make)
        self.step_proj = make.matrix((c.hidden_size, h), "embed -> value_heads")
        a_log, dt_bias = START_OF_DECAY[c.decay_init]
        self.a_log = make.parameter(
            lambda shape: a_log(make.rngs.params(), shape), (h,), "value_heads", kind="rate"
        )
        self.dt_bias = make.parameter(
            lambda shape: dt_bias(make.rngs.params, shape), (h,), "value_heads", kind="rate"
        )
        self.skip = make.parameter(jnp.ones, (h,), "value_heads", kind="rate")
        self.make_output(make, per_head=True)

    def inputs(self, x_BTD: jax.Array, context: Context) -> Inputs:
        step_BTH = jax.nn.softplus(through(x_BTD, self.step_proj) + self.dt_bias[...])
        return Inputs(
            *self.project(x_BTD, context), g=-jnp.exp(self.a_log[...]) * step_BTH, beta=step_BTH
        )

    def head_weights(self):
        return (self.skip[...],)

    def recurrence(self, heads, state):
        # the operator divides by √K
        o, states = super().recurrence(heads._replace(q=heads.q * heads.q.shape[-1] ** 0.5), state)
        return o + (heads.weights[0][:, None] * heads.v).astype(o.dtype), states

    def finish(self, o_BTHV, norm_HV, gate_BTGRV):
        groups = (*o_BTHV.shape[:2], self.config.linear_num_key_heads, -1)
        y = o_BTHV.astype(jnp.float32).reshape(groups) * jax.nn.silu(gate_BTGRV.astype(jnp.float32))
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return (y.reshape(o_BTHV.shape) * norm_HV).astype(o_BTHV.dtype)

    @classmethod
    def erases(cls, config):
        return False
