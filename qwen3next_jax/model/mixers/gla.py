"""Gated linear attention (2312.06635, equations 3–4): a decay per key channel, from a gate of
low rank.
"""

import jax

from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.mixers.recurrent import ByChannel, Inputs, low_rank, through

RANK, TEMPERATURE = 16, 16  # the paper's


class GLA(ByChannel):
    """g = log σ(W₂ W₁ x + b) / 16 per key channel, S ← Diag(e^g) S + k vᵀ, o = Sᵀq / √K; no
    convolution; SiLU gate.
    """

    def __init__(self, config, make, layers):
        self.config = c = config
        self.make_projection(make)
        self.decay_down, self.decay_up = low_rank(make, RANK, c.linear_key_head_dim)
        self.decay_bias = make.parameter(
            jax.numpy.zeros,
            (c.linear_num_value_heads, c.linear_key_head_dim),
            "value_heads .",
            kind="rate",
        )
        self.make_output(make)

    def inputs(self, x_BTD: jax.Array, context: Context) -> Inputs:
        logit_BTHK = through(x_BTD, self.decay_down, self.decay_up) + self.decay_bias[...]
        return Inputs(*self.project(x_BTD, context), g=jax.nn.log_sigmoid(logit_BTHK) / TEMPERATURE)

    def recurrence(self, heads, state):
        return super().recurrence(heads._replace(q=heads.q * heads.q.shape[-1] ** -0.5), state)
