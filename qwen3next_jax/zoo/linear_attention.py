"""Linear attention with a decay for each head, or without decay: linear transformers, RetNet,
lightning attention, gated retention and gated random feature attention.

In the formulas, x is a token's input; q, k and v are its query, key and value; S [K, V] is the
recurrent state of a head; g is the log decay; β is the write strength; o is the head's output. The
output Sᵀq of a head is a weighted sum of the values of the tokens so far. Some mixers divide the
output by the sum of the weights, zᵀq, where z [K] is a second state.

Letters: B batch, T time, D model, G key heads, H value heads, K/V widths of a key and of a value.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.model.recurrent import ProjectedInputs, RecurrenceInputs, Recurrent
from qwen3next_jax.zoo.ops import attention_weight_sums
from qwen3next_jax.zoo.projections import l2_normalize, project_to_float32
from qwen3next_jax.zoo.references import (
    outer_product_recurrence,
    project_out,
    queries_keys_values_gate,
    rms_norm,
    unit_length,
)

EXAMPLES = {
    "linear": {"linear_mixer": "linear"},
    "retnet": {"linear_mixer": "retnet"},
    "lightning": {"linear_mixer": "lightning"},
    "gated_retention": {"linear_mixer": "gated_retention"},
    "gated_rfa": {"linear_mixer": "gated_rfa"},
}
LINEAR_EPSILON = (
    1e-6  # `LinearAttention` adds it to the sum of the weights before it divides by the sum
)
ROTATION_BASE = 10_000.0  # the base of the rotary positions of `Retention`
GATED_RETENTION_TEMPERATURE = 16.0  # τ of the paper
# `GatedRFA` divides by the sum of the weights. Some features are sines, so the sum may be 0 or
# negative; its absolute value is raised to at least this number.
RFA_EPSILON = 1e-6


class ScalarDecayMixer(Recurrent):
    """The base class of linear attention with at most one decay for each head: S ← e^g S + β k vᵀ,
    o = Sᵀq. There is no convolution, and q and k are not normalised.

    If `divides_by_weight_sum` returns True, there is a second state z [K], z ← e^g z + β k, and a
    subclass divides o by the sum of the weights, zᵀq.
    """

    switches_read = ("delta_rule",)
    has_convolution_and_silu = False
    normalize_qk = False

    @classmethod
    def divides_by_weight_sum(cls, config) -> bool:
        """Returns whether the mixer divides its output by the sum of the weights."""
        return False

    @classmethod
    def uses_delta_term(cls, config):
        return False

    def recurrence(self, heads: RecurrenceInputs, state):
        # `gated_delta_rule` divides by √K
        return super().recurrence(heads._replace(q=heads.q * heads.q.shape[-1] ** 0.5), state)

    def recurrence_and_weight_sum(self, heads: RecurrenceInputs, state):
        """Computes the recurrence of S and of z.

        Returns:
          o [B, T, H, V] in float32; the sum of the weights zᵀq [B, T, H]; {name: state after the
          row} for both states.
        """
        o_BTHV, states = ScalarDecayMixer.recurrence(self, heads, state)
        weight_BTH, z_BHK = attention_weight_sums(
            heads.q,
            heads.k,
            g=heads.log_decay,
            beta=heads.beta,
            initial_state=state and state["normaliser"],
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return o_BTHV.astype(jnp.float32), weight_BTH, states | {"normaliser": z_BHK}

    @classmethod
    def init_cache(cls, config, batch, length):
        cache = super().init_cache(config, batch, length)
        if cls.divides_by_weight_sum(config):
            cache["normaliser"] = jnp.zeros(cache["state"].shape[:-1])
        return cache

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of writing and reading the states S and z."""
        flops = super().activation_flops(config, length)
        if cls.divides_by_weight_sum(config):
            flops += 4 * config.linear_num_value_heads * config.linear_key_head_dim
        return flops


class LinearAttention(ScalarDecayMixer):
    """Linear attention (2006.16236, equations 16–20): it replaces the weight e^{q·k} of softmax
    attention by the product φ(q)·φ(k) of feature vectors.

    S ← S + φ(k) vᵀ, z ← z + φ(k), o = Sᵀφ(q) / (zᵀφ(q) + ε), φ = elu + 1. With `mixer.feature_map`
    = "identity" and without `mixer.normaliser`, the output o is the plain sum Σ v (k·q).
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # feature map of queries and keys: elu(x) + 1 ("elu", as in the paper) or x ("identity")
        feature_map: Literal["elu", "identity"] = "elu"
        # whether the output is divided by the sum of the weights; requires positive features
        normaliser: bool = True

        def __post_init__(self):
            require(
                self.feature_map == "elu" or not self.normaliser,
                "model.mixer.normaliser = True with model.mixer.feature_map = "
                "'identity': the sum of the weights may vanish: expected "
                "model.mixer.normaliser = False, or the feature map 'elu'",
            )

    def __init__(self, config, make, layer_indices):
        self.config = config
        self.make_projection(make, gate=False)
        self.make_output(make)

    def project_inputs(self, x_BTD, context) -> ProjectedInputs:
        qkv, _ = self.project_qkv_and_gate(x_BTD, context)
        return ProjectedInputs(qkv)

    def recurrence(self, heads, state):
        if self.settings(self.config).feature_map == "elu":
            heads = heads._replace(q=jax.nn.elu(heads.q) + 1, k=jax.nn.elu(heads.k) + 1)
        if not self.settings(self.config).normaliser:
            return super().recurrence(heads, state)
        o_BTHV, weight_BTH, states = self.recurrence_and_weight_sum(heads, state)
        return (o_BTHV / (weight_BTH[..., None] + LINEAR_EPSILON)).astype(heads.v.dtype), states

    @classmethod
    def divides_by_weight_sum(cls, config):
        return cls.settings(config).normaliser


class Retention(ScalarDecayMixer):
    """The base class of RetNet and gated retention: S ← γ S + k vᵀ, o = Sᵀq / √K, where q and k
    are rotated by their positions (2307.08621, equations 5–8). The output of each head is normed
    and multiplied by a SiLU gate. A subclass computes the log decay ln γ in `log_decay`.
    """

    def __init__(self, config, make, layer_indices):
        self.config = config
        self.make_projection(make)
        self.make_output(make)

    def log_decay(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the log decay ln γ of every token and head, [B, T, H]."""
        raise NotImplementedError

    def project_inputs(self, x_BTD, context) -> ProjectedInputs:
        k = self.config.linear_key_head_dim
        qkv, gate = self.project_qkv_and_gate(x_BTD, context)
        q_BTGK, k_BTGK, v_BTGV = jnp.split(qkv, (k, 2 * k), axis=-1)
        q_BTGK = _rotate(q_BTGK, context.positions)
        k_BTGK = _rotate(k_BTGK, context.positions)
        qkv = jnp.concatenate([q_BTGK, k_BTGK, v_BTGV], axis=-1)
        return ProjectedInputs(qkv, gate, log_decay=self.log_decay(x_BTD))

    def recurrence(self, heads, state):
        # The operator divides by √K, as the paper does.
        return Recurrent.recurrence(self, heads, state)

    @classmethod
    def check(cls, config):
        require(
            config.linear_key_head_dim % 2 == 0,
            f"model.linear_key_head_dim = {config.linear_key_head_dim}: expected an even "
            "number, as queries and keys are rotated",
        )


def _rotate(x_BTGK, positions_BT):
    """Applies rotary positions with the base ROTATION_BASE to all K dimensions of x; dimension i
    and dimension i + K/2 form a pair. The settings `rope_theta` and `partial_rotary_factor` have no
    effect on this rotation.
    """
    first, second = jnp.split(x_BTGK.astype(jnp.float32), 2, axis=-1)
    half = first.shape[-1]
    frequency = ROTATION_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT[:, :, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTGK.dtype)


class RetNet(Retention):
    """Retention (2307.08621): γ = 1 − 2^(−5−h) for head h, the same for every token. The paper also
    divides each output by a positive number; this code does not, because the norm of each head
    cancels such a factor.
    """

    def log_decay(self, x_BTD):
        heads = self.config.linear_num_value_heads
        log_decay_H = jnp.log1p(-(2.0 ** (-5 - jnp.arange(heads))))
        return jnp.broadcast_to(log_decay_H, (*x_BTD.shape[:2], heads))


class GatedRetention(Retention):
    """Gated retention (2405.05254, equation 6): the decay γ = σ(w x)^(1/τ), τ = 16, depends on the
    token.
    """

    def __init__(self, config, make, layer_indices):
        super().__init__(config, make, layer_indices)
        self.decay_proj = make.matrix(
            (config.hidden_size, config.linear_num_value_heads), "embed -> value_heads"
        )

    def log_decay(self, x_BTD):
        logit_BTH = project_to_float32(x_BTD, self.decay_proj)
        return jax.nn.log_sigmoid(logit_BTH) / GATED_RETENTION_TEMPERATURE


class LightningAttention(ScalarDecayMixer):
    """Lightning attention (MiniMax-01, 2501.08313): each head of each layer has a constant decay,
    which is not trained.

    q, k, v = SiLU(W x), S ← e^{−s} S + k vᵀ, o = Sᵀq, with s = 2^(−8(h+1)/H) (1 − l/(L − 1 + 1e-5)
    + 1e-5) for head h of H and layer l of L, both from 0. The outputs of all heads together pass
    through one RMSNorm and are multiplied by a sigmoid gate. The layer of the multi-token
    prediction module counts as the last layer, l = L − 1.
    """

    gate_activation = staticmethod(jax.nn.sigmoid)

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        h = c.linear_num_value_heads
        self.make_projection(make)
        depth = 1 - jnp.asarray(layer_indices) / (c.num_hidden_layers - 1 + 1e-5) + 1e-5
        slopes = depth.reshape(*make.stack_shape, 1) * 2.0 ** (-8 * (jnp.arange(h) + 1) / h)
        self.log_decay = make.parameter(
            lambda shape: jnp.broadcast_to(-slopes, shape), (h,), "value_heads", kind="rate"
        )
        self.make_output(make, per_head=True)

    def project_inputs(self, x_BTD, context) -> ProjectedInputs:
        qkv, gate = self.project_qkv_and_gate(x_BTD, context)
        log_decay_H = jax.lax.stop_gradient(self.log_decay[...])
        return ProjectedInputs(
            jax.nn.silu(qkv),
            gate,
            log_decay=jnp.broadcast_to(log_decay_H, (*x_BTD.shape[:2], *log_decay_H.shape)),
        )

    def norm_and_gate(self, o_BTHV, norm_HV, gate_BTGRV):
        o = o_BTHV.astype(jnp.float32)
        mean_square = jnp.mean(o * o, axis=(-2, -1), keepdims=True)
        o = o * jax.lax.rsqrt(mean_square + self.config.rms_norm_eps) * norm_HV
        gate = self.gate_activation(gate_BTGRV.reshape(o.shape).astype(jnp.float32))
        return (o * gate).astype(o_BTHV.dtype)


class GatedRFA(ScalarDecayMixer):
    """Gated random feature attention (2103.02143, equations 4 and 7).

    The features of a query or key y are φ(y) = [sin ωy, cos ωy] / √(K/2), where ω [K/2, K] has
    entries from N(0, 1) and is not trained. q and k are normalised to length 1, the decay is γ =
    σ(w x), and the recurrence is S ← γ S + (1 − γ) φ(k) vᵀ, z ← γ z + (1 − γ) φ(k), o = Sᵀφ(q) /
    (zᵀφ(q)).
    """

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        g, k = c.linear_num_key_heads, c.linear_key_head_dim
        self.make_projection(make, gate=False)
        self.decay_proj = make.matrix(
            (c.hidden_size, c.linear_num_value_heads), "embed -> value_heads"
        )
        self.frequencies = make.parameter(
            lambda shape: jax.random.normal(make.rngs.params(), shape),
            (g, k // 2, k),
            "key_heads . .",
            kind="rate",
        )
        self.make_output(make)

    def project_inputs(self, x_BTD, context) -> ProjectedInputs:
        logit_BTH = project_to_float32(x_BTD, self.decay_proj)
        qkv, _ = self.project_qkv_and_gate(x_BTD, context)
        return ProjectedInputs(
            qkv, log_decay=jax.nn.log_sigmoid(logit_BTH), beta=jax.nn.sigmoid(-logit_BTH)
        )

    def recurrence_parameters(self):
        return (jax.lax.stop_gradient(self.frequencies[...]),)

    def recurrence(self, heads, state):
        (frequencies_GFK,) = heads.recurrence_parameters

        def features(x_BTGK):
            angle = jnp.einsum(
                "btgk,gfk->btgf", l2_normalize(x_BTGK), frequencies_GFK, precision="highest"
            )
            waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
            return (waves * (x_BTGK.shape[-1] / 2) ** -0.5).astype(x_BTGK.dtype)

        o_BTHV, weight_BTH, states = self.recurrence_and_weight_sum(
            heads._replace(q=features(heads.q), k=features(heads.k)), state
        )
        sign = jnp.where(weight_BTH < 0, -1, 1)
        weight_BTH = sign * jnp.maximum(jnp.abs(weight_BTH), RFA_EPSILON)
        return (o_BTHV / weight_BTH[..., None]).astype(heads.v.dtype), states

    @classmethod
    def divides_by_weight_sum(cls, config):
        return True

    @classmethod
    def check(cls, config):
        require(
            config.linear_key_head_dim % 2 == 0,
            f"model.linear_key_head_dim = {config.linear_key_head_dim}: expected an even "
            "number, as half of the features are sines",
        )


def linear_reference(config, params, x):
    q, k, v, _ = queries_keys_values_gate(config, params, x)
    settings = LinearAttention.settings(config)
    if settings.feature_map == "elu":
        q, k = (jnp.where(y > 0, y + 1, jnp.exp(jnp.minimum(y, 0))) for y in (q, k))
    no_decay = jnp.zeros(v.shape[:2])
    if settings.normaliser:
        o, z = outer_product_recurrence(q, k, v, no_decay, normaliser=True)
        o = o / (z + 1e-6)
    else:
        o = outer_product_recurrence(q, k, v, no_decay)
    return project_out(params, rms_norm(config, o) * params["norm"])


def _rotate_reference(x):
    """Applies rotary positions with the base 10,000 to all K dimensions of x [T, H, K]."""
    half = x.shape[-1] // 2
    angle = (jnp.arange(len(x))[:, None] * 10_000.0 ** (-jnp.arange(half) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], axis=-1
    )


def _retention_reference(config, params, x, log_decay):
    """Computes retention of one row, [T, D] → [T, D], with the log decay ln γ [T, H]."""
    q, k, v, gate = queries_keys_values_gate(config, params, x)
    o = outer_product_recurrence(
        _rotate_reference(q), _rotate_reference(k) * k.shape[-1] ** -0.5, v, log_decay
    )
    return project_out(params, rms_norm(config, o) * params["norm"] * jax.nn.silu(gate))


def retnet_reference(config, params, x):
    h = config.linear_num_value_heads
    log_decay = jnp.broadcast_to(jnp.log(1 - 2.0 ** (-5 - jnp.arange(h))), (len(x), h))
    return _retention_reference(config, params, x, log_decay)


def gated_retention_reference(config, params, x):
    return _retention_reference(config, params, x, -jax.nn.softplus(-x @ params["decay_proj"]) / 16)


def lightning_reference(config, params, x):
    """Computes lightning attention with the decay of the first layer."""
    q, k, v, gate = queries_keys_values_gate(config, params, x)
    h = v.shape[1]
    slope = 2.0 ** (-8 * (jnp.arange(h) + 1) / h) * (1 + 1e-5)
    o = outer_product_recurrence(
        jax.nn.silu(q), jax.nn.silu(k), jax.nn.silu(v), jnp.broadcast_to(-slope, v.shape[:2])
    )
    return project_out(
        params, rms_norm(config, o, (-2, -1)) * params["norm"] * jax.nn.sigmoid(gate)
    )


def gated_rfa_reference(config, params, x):
    q, k, v, _ = queries_keys_values_gate(config, params, x)
    repeats = v.shape[1] // config.linear_num_key_heads
    omega = jax.lax.stop_gradient(jnp.repeat(params["frequencies"], repeats, axis=0))

    def features(y):
        angle = jnp.einsum("thk,hfk->thf", unit_length(y), omega)
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1) / jnp.sqrt(omega.shape[1])

    logit = x @ params["decay_proj"]
    o, z = outer_product_recurrence(
        features(q),
        features(k),
        v,
        -jax.nn.softplus(-logit),
        jax.nn.sigmoid(-logit),
        normaliser=True,
    )
    o = o / (jnp.where(z < 0, -1, 1) * jnp.maximum(jnp.abs(z), 1e-6))
    return project_out(params, rms_norm(config, o) * params["norm"])


REFERENCES = {
    "linear": linear_reference,
    "retnet": retnet_reference,
    "lightning": lightning_reference,
    "gated_retention": gated_retention_reference,
    "gated_rfa": gated_rfa_reference,
}
