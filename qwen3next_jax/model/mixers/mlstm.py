"""mLSTM (xLSTM, 2405.04517, equations 19–27): linear attention with an exponential input gate.

m_t = max(f_t + m_{t−1}, i_t) is taken out of all exponents, so that none is above 0; the output
does not depend on it.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.mixers.recurrent import Additive, Inputs, through
from qwen3next_jax.ops import max_plus_scan


class MLSTM(Additive):
    """S ← σ(f) S + e^i k vᵀ, n ← σ(f) n + e^i k, o = Sᵀq / max(|nᵀq|, 1), k scaled by K^-1/2;
    norm per head, then the gate σ. Its diagnostic beta is the mean of i.
    """

    activation = staticmethod(jax.nn.sigmoid)

    def __init__(self, config, make, layers):
        self.config = c = config
        h = c.linear_num_value_heads
        self.make_projection(make)
        self.input_proj = make.matrix((c.hidden_size, h), "embed -> value_heads")
        self.forget_proj = make.matrix((c.hidden_size, h), "embed -> value_heads")
        self.input_bias = make.parameter(
            lambda shape: jnp.full(shape, -10.0), (h,), "value_heads", kind="rate"
        )
        spread = lambda shape: jnp.broadcast_to(jnp.linspace(3.0, 6.0, h), shape)
        self.forget_bias = make.parameter(spread, (h,), "value_heads", kind="rate")
        self.make_output(make)

    def inputs(self, x_BTD, context) -> Inputs:
        forget = jax.nn.log_sigmoid(through(x_BTD, self.forget_proj) + self.forget_bias[...])
        # In the fields of decay and write strength: the logarithms of both gates.
        return Inputs(
            *self.project(x_BTD, context),
            g=forget,
            beta=through(x_BTD, self.input_proj) + self.input_bias[...],
        )

    def recurrence(self, heads, state):
        ids = dict(segment_ids=heads.segment_ids, axis_name=heads.axis_name)
        m, before, last = max_plus_scan(
            heads.g, heads.beta, initial_state=state and state["largest"], **ids
        )
        m = jnp.where(m == -jnp.inf, 0, m)  # of a row without a token
        # Its value is held at or below 0; the gradient is that of the forget gate, also where the
        # value is 0.
        g = heads.g + jax.lax.stop_gradient(
            jnp.where(before == -jnp.inf, 0, jnp.minimum(heads.g + before - m, 0)) - heads.g
        )
        heads = heads._replace(
            k=heads.k * heads.k.shape[-1] ** -0.5, g=g, beta=jnp.exp(heads.beta - m)
        )
        o, weight, states = self.weighted(heads, state)
        return (o / jnp.maximum(jnp.abs(weight), jnp.exp(-m))[..., None]).astype(
            heads.v.dtype
        ), states | {"largest": last}

    @classmethod
    def normalises(cls, config):
        return True

    @classmethod
    def init_cache(cls, config, batch, length):
        # Any m serves: a weight that underflows here is nothing beside the denominator's 1.
        return super().init_cache(config, batch, length) | {
            "largest": jnp.zeros((batch, config.linear_num_value_heads))
        }
