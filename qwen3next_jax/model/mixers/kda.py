"""Kimi Delta Attention (2510.26692, equation 1): Gated DeltaNet with a decay per key channel,
both gates of low rank.

Letters: B batch, T time, D model, G key heads, H value heads, K/V their widths.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.hf_entries import Entry, Slice, one, vector
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.mixers.gated_deltanet import START_OF_DECAY, uniform_rate
from qwen3next_jax.model.mixers.recurrent import Inputs, Recurrent, low_rank, through, unit
from qwen3next_jax.ops import channel_delta_rule


class KDA(Recurrent):
    """g = −e^A softplus(W₂ W₁ x + b) per key channel, β = σ(w x); q and k of length 1; the
    output gate is a sigmoid.
    """

    switches = ("short_convolution", "linear_conv_kernel_dim", "decay_init")
    activation = staticmethod(jax.nn.sigmoid)

    def __init__(self, config, make, layers):
        self.config = c = config
        h, k, v = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        self.make_projection(make, gate=False)
        self.make_convolution(make)
        self.beta_proj = make.matrix((c.hidden_size, h), "embed -> value_heads")
        self.decay_down, self.decay_up = low_rank(make, v, k)
        self.gate_down, self.gate_up = low_rank(make, v, v)
        a_log, dt_bias = START_OF_DECAY[c.decay_init]
        # fla's and transformers' start of this layer
        a_log = uniform_rate(1.0) if c.decay_init == "log_uniform" else a_log
        self.a_log = make.parameter(
            lambda shape: a_log(make.rngs.params(), shape), (h,), "value_heads", kind="rate"
        )
        self.dt_bias = make.parameter(
            lambda shape: dt_bias(make.rngs.params, shape), (h, k), "value_heads .", kind="rate"
        )
        self.make_output(make)

    def inputs(self, x_BTD: jax.Array, context: Context) -> Inputs:
        step_BTHK = jax.nn.softplus(
            through(x_BTD, self.decay_down, self.decay_up) + self.dt_bias[...]
        )
        return Inputs(
            self.project(x_BTD, context)[0],
            through(x_BTD, self.gate_down, self.gate_up),
            g=-jnp.exp(self.a_log[...])[:, None] * step_BTHK,
            beta=jax.nn.sigmoid(through(x_BTD, self.beta_proj)),
        )

    def recurrence(self, heads, state):
        dtype, scale = heads.v.dtype, heads.q.shape[-1] ** -0.5
        o, final = channel_delta_rule(
            (unit(heads.q) * scale).astype(dtype),
            unit(heads.k).astype(dtype),
            heads.v,
            g=heads.g,
            beta=heads.beta,
            initial_state=state and state["state"],
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return o, {"state": final}

    @staticmethod
    def hf_entries(config):
        d, h, k, every = (
            config.hidden_size,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            slice(None),
        )
        parts = [(name, (every, slice(i * k, (i + 1) * k))) for i, name in enumerate("qkv")]
        yield Entry(
            "in_proj",
            (1, 2, 0),
            tuple(
                Slice(place, f"self_attn.{name}_proj.weight", (h * k, d)) for name, place in parts
            ),
        )
        yield Entry(
            "conv_kernel",
            (1, 2, 0),
            tuple(
                Slice(
                    place,
                    f"self_attn.{name}_conv1d.weight",
                    (h * k, 1, config.linear_conv_kernel_dim),
                )
                for name, place in parts
            ),
        )
        yield one("beta_proj", "self_attn.b_proj.weight", (1, 0), (h, d))
        for path, name in (("decay", "f"), ("gate", "g")):
            yield one(f"{path}_down", f"self_attn.{name}_a_proj.weight", (1, 0), (k, d))
            yield one(f"{path}_up", f"self_attn.{name}_b_proj.weight", (1, 2, 0), (h * k, k))
        yield one("a_log", "self_attn.A_log", (0,), (1, 1, h, 1))
        yield one("dt_bias", "self_attn.dt_bias", (0, 1), (h * k,))
        yield vector("norm", "self_attn.o_norm.weight", k)
        yield one("out_proj", "self_attn.o_proj.weight", (2, 0, 1), (d, h * k))
