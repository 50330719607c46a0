"""Linear attention in which each key channel of the state has its own decay, computed from the
token: GLA, HGRN-2 and decaying fast weights.

In the formulas, x is a token's input; q, k and v are its query, key and value; S [K, V] is the
recurrent state of a head; g is the log decay; o is the output of a head.

Letters: B batch, T time, D model, G key heads, H value heads, K/V widths of a key and of a value.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.recurrent import ProjectedInputs, Recurrent
from qwen3next_jax.zoo.ops import channel_delta_rule
from qwen3next_jax.zoo.projections import make_low_rank_projection, project_to_float32
from qwen3next_jax.zoo.references import (
    outer_product_recurrence,
    project_out,
    queries_keys_values_gate,
    rms_norm,
)

EXAMPLES = {
    "gla": {"linear_mixer": "gla"},
    "hgrn2": {"linear_mixer": "hgrn2"},
    "dfw": {"linear_mixer": "dfw"},
}
# The rank of the decay's projection and the divisor of the log decay, as in the paper.
GLA_RANK, GLA_TEMPERATURE = 16, 16


class ChannelDecayMixer(Recurrent):
    """The base class of linear attention with a log decay g for each key channel: S ← Diag(e^g) S +
    k vᵀ, o = Sᵀq, without a convolution.
    """

    switches_read = ()
    has_convolution_and_silu = False

    def recurrence(self, heads, state):
        o_BTHV, final_state = channel_delta_rule(
            heads.q,
            heads.k,
            heads.v,
            g=heads.log_decay,
            beta=heads.beta,
            delta_term=False,
            initial_state=state and state["state"],
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return o_BTHV, {"state": final_state}

    @classmethod
    def uses_delta_term(cls, config):
        return False


class GLA(ChannelDecayMixer):
    """Gated linear attention (2312.06635, equations 3–4): g = log σ(W₂ W₁ x + b) / 16 for each
    key channel, where W₂ W₁ is a projection of rank 16, and o = Sᵀq / √K. The activation of the
    output gate is a SiLU.
    """

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        self.make_projection(make)
        self.decay_down, self.decay_up = make_low_rank_projection(
            make, GLA_RANK, c.linear_key_head_dim
        )
        self.decay_bias = make.parameter(
            jnp.zeros,
            (c.linear_num_value_heads, c.linear_key_head_dim),
            "value_heads .",
            kind="rate",
        )
        self.make_output(make)

    def project_inputs(self, x_BTD: jax.Array, context: Context) -> ProjectedInputs:
        logit_BTHK = (
            project_to_float32(x_BTD, self.decay_down, self.decay_up) + self.decay_bias[...]
        )
        qkv, gate = self.project_qkv_and_gate(x_BTD, context)
        return ProjectedInputs(
            qkv, gate, log_decay=jax.nn.log_sigmoid(logit_BTHK) / GLA_TEMPERATURE
        )

    def recurrence(self, heads, state):
        return super().recurrence(heads._replace(q=heads.q * heads.q.shape[-1] ** -0.5), state)


class HGRN2(ChannelDecayMixer):
    """HGRN-2 (2404.07904): each key channel has a decay f and the key 1 − f. The decay has a lower
    bound b, which starts higher in deeper layers.

    For the token's input x, the decay is f = b + (1 − b) σ(W x), the log decay g = ln f, the key k
    = 1 − f, and the query q = SiLU(W' x). There is no output gate. The lower bound b of the decay
    is a parameter of each layer and channel. The bound b starts at the layer's number (from 0)
    divided by the number of layers, but at least at 0.01. In the paper, the lower bounds of the
    decays are a cumulative softmax over the layers, with the same initial values. The layer of the
    multi-token prediction module counts as the last layer.
    """

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        shape = (c.linear_num_key_heads, c.linear_key_head_dim)
        bound = jnp.maximum(jnp.asarray(layer_indices) / c.num_hidden_layers, 0.01).reshape(
            *make.stack_shape, 1, 1
        )
        self.make_projection(make, gate=False)
        logit = jnp.log(bound) - jnp.log1p(-bound)
        self.bound = make.parameter(
            lambda shape: jnp.broadcast_to(logit, shape), shape, "key_heads .", kind="rate"
        )
        self.make_output(make)

    def project_inputs(self, x_BTD: jax.Array, context: Context) -> ProjectedInputs:
        qkv, _ = self.project_qkv_and_gate(x_BTD, context)
        k = self.config.linear_key_head_dim
        q, key, v = jnp.split(qkv, (k, 2 * k), axis=-1)
        # g is computed from k = 1 − f: if f were rounded to 1, ln f would be 0.
        key = jax.nn.sigmoid(-self.bound[...]) * jax.nn.sigmoid(-key.astype(jnp.float32))
        g_BTGK = jnp.log1p(-key)
        repeats = self.config.linear_num_value_heads // self.config.linear_num_key_heads
        return ProjectedInputs(
            jnp.concatenate([jax.nn.silu(q), key.astype(q.dtype), v], axis=-1),
            log_decay=jnp.repeat(g_BTGK, repeats, axis=2),
        )


class DecayingFastWeights(ChannelDecayMixer):
    """Decaying fast weights (2210.04243): each key channel and each value channel has a decay.

    S ← Diag(σ(W x)) S Diag(σ(W' x)) + k vᵀ, o = Sᵀq. The output of each head is normed; there is no
    output gate.
    """

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        width = c.linear_key_head_dim + c.linear_value_head_dim
        self.make_projection(make, gate=False)
        self.decay_proj = make.matrix(
            (c.hidden_size, c.linear_num_value_heads, width), "embed -> value_heads ."
        )
        self.make_output(make)

    def project_inputs(self, x_BTD: jax.Array, context: Context) -> ProjectedInputs:
        qkv, _ = self.project_qkv_and_gate(x_BTD, context)
        return ProjectedInputs(
            qkv, log_decay=jax.nn.log_sigmoid(project_to_float32(x_BTD, self.decay_proj))
        )

    def recurrence(self, heads, state):
        key_decay, value_log_decay = jnp.split(heads.log_decay, (heads.q.shape[-1],), axis=-1)
        o_BTHV, final_state = channel_delta_rule(
            heads.q,
            heads.k,
            heads.v,
            g=key_decay,
            value_log_decay=value_log_decay,
            delta_term=False,
            initial_state=state and state["state"],
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return o_BTHV, {"state": final_state}


def gla_reference(config, params, x):
    q, k, v, gate = queries_keys_values_gate(config, params, x)
    low = x @ params["decay_down"]
    logit = jnp.einsum("tr,rhk->thk", low, params["decay_up"]) + params["decay_bias"]
    o = outer_product_recurrence(q * q.shape[-1] ** -0.5, k, v, -jax.nn.softplus(-logit) / 16)
    return project_out(params, rms_norm(config, o) * params["norm"] * jax.nn.silu(gate))


def hgrn2_reference(config, params, x):
    q, logit, v, _ = queries_keys_values_gate(config, params, x)
    repeats = v.shape[1] // config.linear_num_key_heads
    bound = jnp.repeat(jax.nn.sigmoid(params["bound"]), repeats, axis=0)
    forget = bound + (1 - bound) * jax.nn.sigmoid(logit)
    o = outer_product_recurrence(jax.nn.silu(q), 1 - forget, v, jnp.log(forget))
    return project_out(params, rms_norm(config, o) * params["norm"])


def decaying_fast_weights_reference(config, params, x):
    q, k, v, _ = queries_keys_values_gate(config, params, x)
    decay = jax.nn.sigmoid(jnp.einsum("td,dhc->thc", x, params["decay_proj"]))

    def step(s, token):
        q, k, v, decay = token
        key_decay, value_log_decay = decay[:, : k.shape[-1]], decay[:, k.shape[-1] :]
        s = key_decay[..., None] * s * value_log_decay[:, None] + k[..., None] * v[:, None]
        return s, jnp.einsum("hkv,hk->hv", s, q)

    empty = jnp.zeros((*k.shape[1:], v.shape[-1]))
    _, o = jax.lax.scan(step, empty, (q, k, v, decay))
    return project_out(params, rms_norm(config, o) * params["norm"])


REFERENCES = {
    "gla": gla_reference,
    "hgrn2": hgrn2_reference,
    "dfw": decaying_fast_weights_reference,
}
