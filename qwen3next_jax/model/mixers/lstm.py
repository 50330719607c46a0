"""Long short-term memory (Hochreiter and Schmidhuber, 1997; with the forget gate of Gers et al.,
2000).
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.mixers.rnn import RNN


class LSTM(RNN):
    """i, f, g, o = W x + U h + b;  c ← σ(f) c + σ(i) tanh(g);  h ← σ(o) tanh(c), in groups as
    `RNN`. b starts at 1 for f, else at 0.
    """

    gates = ("input", "forget", "new", "output")
    states = ("h", "c")

    def __init__(self, config, make, layers):
        super().__init__(config, make, layers)
        h, v = config.linear_num_value_heads, config.linear_value_head_dim
        start = lambda shape: jnp.broadcast_to(
            jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0]), v), shape
        )
        self.bias = make.parameter(start, (h, 4 * v), "value_heads .", kind="rate")

    def cell(self, state, x_BHC):
        i, f, g, o = jnp.split(x_BHC, 4, axis=-1)
        c = jax.nn.sigmoid(f) * state["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return {"h": jax.nn.sigmoid(o) * jnp.tanh(c), "c": c}
