"""The base class of the mixers in `biased_attention.py` and `sliding_window.py`: gated attention
whose projections can have biases.

Letters: B batch, T time, D model, N query heads, M key/value heads, K head width.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from qwen3next_jax.model.gated_attention import GatedAttention


class BiasedProjections(GatedAttention):
    """`GatedAttention` with biases: q = W x + b, and likewise for keys, values and the output
    projection. The setting `attention_bias` says which projections have a bias. If there is an
    output gate, the query projection also computes the gate, and the bias of the query projection
    has entries for the gate, too. Biases start at 0 and have no weight decay.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(GatedAttention.Settings):
        # which projections have a bias: none ("none"), the projections of queries, keys and values
        # ("qkv"), or these and the output projection ("qkvo")
        attention_bias: Literal["none", "qkv", "qkvo"] = "none"

    def __init__(self, config, make, layer_indices):
        super().__init__(config, make, layer_indices)
        c, biased = config, self.settings(config).attention_bias
        gate_width = c.head_dim if c.attention_output_gate else 0
        if biased != "none":
            self.q_bias = make.parameter(
                jnp.zeros,
                (c.num_attention_heads, c.head_dim + gate_width),
                "query_heads head_width",
                kind="rate",
            )
            shape, axes = (c.num_key_value_heads, c.head_dim), "key_value_heads head_width"
            self.k_bias = make.parameter(jnp.zeros, shape, axes, kind="rate")
            self.v_bias = make.parameter(jnp.zeros, shape, axes, kind="rate")
        if biased == "qkvo":
            self.o_bias = make.parameter(jnp.zeros, (c.hidden_size,), ".", kind="rate")

    def input_projections(self, x_BTD, context):
        q_BTNK, gate_BTNK, k_BTMK, v_BTMK = super().input_projections(x_BTD, context)
        if self.settings(self.config).attention_bias == "none":
            return q_BTNK, gate_BTNK, k_BTMK, v_BTMK
        q_bias_NK, gate_bias_NK = jnp.split(self.q_bias[...], (self.config.head_dim,), axis=-1)
        if gate_BTNK is not None:
            gate_BTNK = _add_bias(gate_BTNK, gate_bias_NK)
        q_BTNK = _add_bias(q_BTNK, q_bias_NK)
        return (
            q_BTNK,
            gate_BTNK,
            _add_bias(k_BTMK, self.k_bias[...]),
            _add_bias(v_BTMK, self.v_bias[...]),
        )

    def __call__(self, x_BTD, context, cache=None):
        y_BTD, diagnostics, cache = super().__call__(x_BTD, context, cache)
        if self.settings(self.config).attention_bias == "qkvo":
            y_BTD = _add_bias(y_BTD, self.o_bias[...])
        return y_BTD, diagnostics, cache


def _add_bias(x, bias):
    """Returns x + bias in x's dtype."""
    return x + bias.astype(x.dtype)
