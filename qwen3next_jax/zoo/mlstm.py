"""mLSTM (xLSTM, 2405.04517, equations 19–27): linear attention with an exponential input gate.

The code subtracts m_t = max(ln σ(f_t) + m_{t−1}, i_t) from all exponents, so that no exponent is
above 0; f_t and i_t are the inputs of the forget gate and of the input gate. The mixer's output
does not depend on the subtracted m_t.

Letters: B batch, T time, D model, H value heads, K/V widths of a key and of a value.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.recurrent import ProjectedInputs, Recurrent
from qwen3next_jax.zoo.ops import attention_weight_sums, max_plus_scan
from qwen3next_jax.zoo.projections import project_to_float32
from qwen3next_jax.zoo.references import (
    outer_product_recurrence,
    project_out,
    queries_keys_values_gate,
    rms_norm,
)

EXAMPLES = {"mlstm": {"linear_mixer": "mlstm"}}


class MLSTM(Recurrent):
    """The mixer of mLSTM: S ← σ(f) S + e^i k vᵀ, n ← σ(f) n + e^i k, o = Sᵀq / max(|nᵀq|, 1). The
    inputs i of the input gate and f of the forget gate are linear in the token's input, with a
    bias; the key k is scaled by K^-1/2. The output of each head is normed and multiplied by a
    sigmoid gate. There is no convolution. The diagnostic beta is the mean of i, the input of the
    input gate.
    """

    switches_read = ("delta_rule",)
    has_convolution_and_silu = False
    normalize_qk = False
    gate_activation = staticmethod(jax.nn.sigmoid)

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        h = c.linear_num_value_heads
        self.make_projection(make)
        self.input_proj = make.matrix((c.hidden_size, h), "embed -> value_heads")
        self.forget_proj = make.matrix((c.hidden_size, h), "embed -> value_heads")
        self.input_bias = make.parameter(
            lambda shape: jnp.full(shape, -10.0), (h,), "value_heads", kind="rate"
        )
        self.forget_bias = make.parameter(
            lambda shape: jnp.broadcast_to(jnp.linspace(3.0, 6.0, h), shape),
            (h,),
            "value_heads",
            kind="rate",
        )
        self.make_output(make)

    def project_inputs(self, x_BTD, context) -> ProjectedInputs:
        log_forget_BTH = jax.nn.log_sigmoid(
            project_to_float32(x_BTD, self.forget_proj) + self.forget_bias[...]
        )
        qkv, gate = self.project_qkv_and_gate(x_BTD, context)
        log_input_BTH = project_to_float32(x_BTD, self.input_proj) + self.input_bias[...]
        # The fields g and beta hold the logarithms of the forget gate and of the input gate.
        return ProjectedInputs(qkv, gate, log_decay=log_forget_BTH, beta=log_input_BTH)

    def recurrence(self, heads, state):
        split = dict(segment_ids=heads.segment_ids, axis_name=heads.axis_name)
        log_forget, log_input = heads.log_decay, heads.beta
        m, m_before, last_m = max_plus_scan(
            log_forget, log_input, initial_state=state and state["largest"], **split
        )
        m = jnp.where(m == -jnp.inf, 0, m)  # m is -∞ in a row without a token
        # g has the value of the log decay after the subtraction of m, clipped to at most 0, and the
        # gradient of log_forget. Because the output does not depend on m, m needs no gradient.
        g = log_forget + jax.lax.stop_gradient(
            jnp.where(m_before == -jnp.inf, 0, jnp.minimum(log_forget + m_before - m, 0))
            - log_forget
        )
        heads = heads._replace(
            k=heads.k * heads.k.shape[-1] ** -0.5, log_decay=g, beta=jnp.exp(log_input - m)
        )
        # `gated_delta_rule` divides by √K
        o_BTHV, states = super().recurrence(
            heads._replace(q=heads.q * heads.q.shape[-1] ** 0.5), state
        )
        o_BTHV = o_BTHV.astype(jnp.float32)
        nq_BTH, n_BHK = attention_weight_sums(
            heads.q,
            heads.k,
            g=heads.log_decay,
            beta=heads.beta,
            initial_state=state and state["normaliser"],
            **split,
        )
        o_BTHV = o_BTHV / jnp.maximum(jnp.abs(nq_BTH), jnp.exp(-m))[..., None]
        states = states | {"normaliser": n_BHK, "largest": last_m}
        return o_BTHV.astype(heads.v.dtype), states

    @classmethod
    def init_cache(cls, config, batch, length):
        cache = super().init_cache(config, batch, length)
        # The output does not depend on the initial value of m. With the initial value 0, weights
        # that underflow are negligible beside the 1 in the denominator.
        return cache | {
            "normaliser": jnp.zeros(cache["state"].shape[:-1]),
            "largest": jnp.zeros((batch, config.linear_num_value_heads)),
        }

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of writing and reading the states S and n."""
        normaliser_flops = 4 * config.linear_num_value_heads * config.linear_key_head_dim
        return super().activation_flops(config, length) + normaliser_flops

    @classmethod
    def uses_delta_term(cls, config):
        return False


def mlstm_reference(config, params, x):
    """Computes mLSTM with e^i, not with e^(i - m) as the mixer does to avoid overflow."""
    q, k, v, gate = queries_keys_values_gate(config, params, x)
    i = x @ params["input_proj"] + params["input_bias"]
    f = x @ params["forget_proj"] + params["forget_bias"]
    o, nq = outer_product_recurrence(
        q, k * k.shape[-1] ** -0.5, v, -jax.nn.softplus(-f), jnp.exp(i), normaliser=True
    )
    o = rms_norm(config, o / jnp.maximum(jnp.abs(nq), 1))
    return project_out(params, o * params["norm"] * jax.nn.sigmoid(gate))


REFERENCES = {"mlstm": mlstm_reference}
