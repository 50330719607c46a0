"""The delta rule with a decay for each key channel: Kimi Delta Attention and Gated DeltaNet-2.

In the formulas, x is a token's input; q, k and v are its query, key and value; S [K, V] is the
recurrent state of a head; g [K] is the log decay; β is the write strength; o is the head's output.

Letters: B batch, T time, D model, G key heads, H value heads, R = H/G, K/V widths of a key and of
a value.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.gated_deltanet import DECAY_INITS, log_of_uniform
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.recurrent import ProjectedInputs, Recurrent, write_strength
from qwen3next_jax.zoo.ops import channel_delta_rule
from qwen3next_jax.zoo.projections import l2_normalize, make_low_rank_projection, project_to_float32
from qwen3next_jax.zoo.references import (
    outer_product_recurrence,
    project_out,
    queries_keys_values_gate,
    rms_norm,
    unit_length,
)

EXAMPLES = {"kda": {"linear_mixer": "kda"}, "gdn2": {"linear_mixer": "gdn2"}}


class KDA(Recurrent):
    """Kimi Delta Attention (2510.26692, equation 1): Gated DeltaNet with a decay for each key
    channel. The projections of the decay and of the output gate have low rank.

    S ← Diag(e^g) S, S ← S + β k (v − Sᵀk)ᵀ, o = Sᵀq / √K, with q and k normalised to length 1,
    g = −e^{A_log} softplus(W₂ W₁ x + b), where W₂ W₁ is a projection of low rank, and β = σ(w x)
    (times `model.beta_range`). The activation of the output gate is a sigmoid.
    """

    switches_read = ("short_convolution", "linear_conv_kernel_dim", "decay_init", "beta_range")
    gate_activation = staticmethod(jax.nn.sigmoid)

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        h, k, v = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        self.make_projection(make, gate=False)
        self.make_convolution(make)
        self.beta_proj = make.matrix((c.hidden_size, h), "embed -> value_heads")
        self.decay_down, self.decay_up = make_low_rank_projection(make, v, k)
        self.gate_down, self.gate_up = make_low_rank_projection(make, v, v)
        init_a_log, init_dt_bias = DECAY_INITS[c.decay_init]
        if c.decay_init == "log_uniform":
            init_a_log = log_of_uniform(1.0)  # the initial values of fla and transformers
        self.a_log = make.parameter(
            lambda shape: init_a_log(make.rngs.params(), shape), (h,), "value_heads", kind="rate"
        )
        self.dt_bias = make.parameter(
            lambda shape: init_dt_bias(make.rngs.params, shape),
            (h, k),
            "value_heads .",
            kind="rate",
        )
        self.make_output(make)

    def project_inputs(self, x_BTD: jax.Array, context: Context) -> ProjectedInputs:
        step_BTHK = jax.nn.softplus(
            project_to_float32(x_BTD, self.decay_down, self.decay_up) + self.dt_bias[...]
        )
        return ProjectedInputs(
            self.project_qkv_and_gate(x_BTD, context)[0],
            project_to_float32(x_BTD, self.gate_down, self.gate_up),
            log_decay=-jnp.exp(self.a_log[...])[:, None] * step_BTHK,
            beta=self.beta_of_logits(project_to_float32(x_BTD, self.beta_proj)),
        )

    def beta_of_logits(self, logit_BTH: jax.Array) -> jax.Array:
        """Computes the field `beta` of `ProjectedInputs` from the projection by `beta_proj`."""
        return write_strength(logit_BTH, self.config)

    def recurrence(self, heads, state):
        dtype = heads.v.dtype
        scale = heads.q.shape[-1] ** -0.5
        k_BTGK = l2_normalize(heads.k).astype(dtype)
        beta_BTH = heads.beta
        if self.config.beta_range > 1:
            # A key that was rounded to bfloat16 may be longer than 1. With β = 2 the factor
            # 1 − β ‖k‖² would then be below −1, and a key that repeats would let the state grow
            # without bound.
            length_BTG = jnp.sum(jnp.square(k_BTGK.astype(jnp.float32)), axis=-1)
            repeats = beta_BTH.shape[2] // k_BTGK.shape[2]
            beta_BTH = jnp.minimum(beta_BTH, 2 / jnp.repeat(length_BTG, repeats, axis=2))
        o_BTHV, final_state = channel_delta_rule(
            (l2_normalize(heads.q) * scale).astype(dtype),
            k_BTGK,
            heads.v,
            g=heads.log_decay,
            beta=beta_BTH,
            initial_state=state and state["state"],
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return o_BTHV, {"state": final_state}


class GDN2(KDA):
    """Gated DeltaNet-2 (2605.22791, equations 10–12): Kimi Delta Attention with two gates in place
    of β. The gate b weighs what is erased from the state, and the gate w weighs what is written.

    S ← Diag(e^g) S, S ← S + k (w ⊙ v − Sᵀ(b ⊙ k))ᵀ with b = σ(W x) for each key channel
    and w = σ(W' x) for each value channel of each value head. If all entries of the gates b and w
    equal β, Gated DeltaNet-2 has the recurrence of `KDA`. The activation of the output gate is a
    SiLU. The diagnostic beta is the mean of the gates b and w. The setting `model.beta_range` does
    not scale the gates b and w, because products of the matrices I − k (b ⊙ k)ᵀ, which are not
    symmetric, may grow.
    """

    switches_read = ("short_convolution", "linear_conv_kernel_dim", "decay_init")
    gate_activation = staticmethod(jax.nn.silu)

    def __init__(self, config, make, layer_indices):
        super().__init__(config, make, layer_indices)
        k, v = config.linear_key_head_dim, config.linear_value_head_dim
        # This matrix replaces the `beta_proj` that KDA makes.
        self.beta_proj = make.matrix(
            (config.hidden_size, config.linear_num_value_heads, k + v),
            "embed -> value_heads .",
            parts=(("erase", k), ("write", v)),
        )

    def beta_of_logits(self, logit_BTHC):
        return jax.nn.sigmoid(logit_BTHC)

    def recurrence(self, heads, state):
        dtype = heads.v.dtype
        scale = heads.q.shape[-1] ** -0.5
        repeats = heads.v.shape[2] // heads.k.shape[2]
        erase_BTHK, write_BTHV = jnp.split(heads.beta, (heads.k.shape[-1],), axis=-1)
        k_BTGK = l2_normalize(heads.k)
        o_BTHV, final_state = channel_delta_rule(
            (l2_normalize(heads.q) * scale).astype(dtype),
            k_BTGK.astype(dtype),
            (write_BTHV * heads.v).astype(dtype),
            g=heads.log_decay,
            erase_key=erase_BTHK * jnp.repeat(k_BTGK, repeats, axis=2),
            initial_state=state and state["state"],
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return o_BTHV, {"state": final_state}


def _project_low_rank(params, name, x):
    """Returns x [T, D] times the low-rank matrix of the parameters `name`_down and `name`_up, [T,
    H, …].
    """
    return jnp.einsum("tr,rhk->thk", x @ params[f"{name}_down"], params[f"{name}_up"])


def _log_decay(params, x):
    """Returns the log decay g [T, H, K] for the inputs x [T, D]."""
    step = jax.nn.softplus(_project_low_rank(params, "decay", x) + params["dt_bias"])
    return -jnp.exp(params["a_log"])[:, None] * step


def kda_reference(config, params, x):
    q, k, v, _ = queries_keys_values_gate(config, params, x, convolved=True)
    o = outer_product_recurrence(
        unit_length(q) * q.shape[-1] ** -0.5,
        unit_length(k),
        v,
        _log_decay(params, x),
        config.beta_range * jax.nn.sigmoid(x @ params["beta_proj"]),
        delta_term=True,
    )
    gate = jax.nn.sigmoid(_project_low_rank(params, "gate", x))
    return project_out(params, rms_norm(config, o) * params["norm"] * gate)


def gdn2_reference(config, params, x):
    q, k, v, _ = queries_keys_values_gate(config, params, x, convolved=True)
    gates = jax.nn.sigmoid(jnp.einsum("td,dhc->thc", x, params["beta_proj"]))
    b, w = gates[..., : k.shape[-1]], gates[..., k.shape[-1] :]
    o = outer_product_recurrence(
        unit_length(q) * q.shape[-1] ** -0.5,
        unit_length(k),
        w * v,
        _log_decay(params, x),
        delta_term=True,
        erase_key=b * unit_length(k),
    )
    gate = jax.nn.silu(_project_low_rank(params, "gate", x))
    return project_out(params, rms_norm(config, o) * params["norm"] * gate)


REFERENCES = {"kda": kda_reference, "gdn2": gdn2_reference}
