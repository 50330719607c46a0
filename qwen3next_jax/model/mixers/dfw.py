"""Decaying fast weights (2210.04243): a decay per key channel and one per value channel.

Letters: B batch, T time, D model, H value heads, K/V widths.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.mixers.recurrent import ByChannel, Inputs, through
from qwen3next_jax.ops import channel_delta_rule


class DFW(ByChannel):
    """S ← Diag(σ(W x)) S Diag(σ(W' x)) + k vᵀ, o = Sᵀq; norm per head."""

    def __init__(self, config, make, layers):
        self.config = c = config
        both = c.linear_key_head_dim + c.linear_value_head_dim
        self.make_projection(make, gate=False)
        self.decay_proj = make.matrix(
            (c.hidden_size, c.linear_num_value_heads, both), "embed -> value_heads ."
        )
        self.make_output(make)

    def inputs(self, x_BTD, context) -> Inputs:
        return Inputs(
            self.project(x_BTD, context)[0], g=jax.nn.log_sigmoid(through(x_BTD, self.decay_proj))
        )

    def recurrence(self, heads, state):
        key_decay, value_decay = jnp.split(heads.g, (heads.q.shape[-1],), axis=-1)
        o, final = channel_delta_rule(
            heads.q,
            heads.k,
            heads.v,
            g=key_decay,
            value_decay=value_decay,
            erase=False,
            initial_state=state and state["state"],
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return o, {"state": final}
