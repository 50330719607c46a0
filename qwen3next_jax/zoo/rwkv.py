"""RWKV-4 and RWKV-6: recurrences whose inputs mix each token with the token before it.

Letters: B batch, T time, D model (in RWKV-4 also the number of channels), P number of mixed inputs,
E = 2·D (the inputs of a token and of the token before it, side by side), G key heads, H value
heads, K/V widths of a key and of a value, R rank of the network that computes the mixing weights.
"""

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.model.layers import Context, token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.recurrent import ProjectedInputs, Recurrent
from qwen3next_jax.ops import causal_conv1d
from qwen3next_jax.sharding.rules import activation_spec, per_shard
from qwen3next_jax.zoo.ops import channel_delta_rule, linear_scan, max_plus_scan
from qwen3next_jax.zoo.projections import make_low_rank_projection, project_to_float32
from qwen3next_jax.zoo.references import (
    outer_product_recurrence,
    project_out,
    rms_norm,
    shift_by_one_token,
)

EXAMPLES = {"rwkv4": {"linear_mixer": "rwkv4"}, "rwkv6": {"linear_mixer": "rwkv6"}}
RWKV4_STATE_NAMES = ("largest", "weighted", "total")
RWKV6_INPUT_NAMES = ("decay", "key", "value", "receptance", "gate")
RWKV6_MIX_RANK, RWKV6_DECAY_RANK = 32, 64  # the values of the paper


def token_shift(
    x_BTD: jax.Array, context: Context, before_B1D: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Shifts x by one token.

    Args:
      x_BTD: the inputs of the tokens, [B, T, D].
      context: gives the mesh, the document ids and the axis over which T is split.
      before_B1D: the x of the token before the row's first token, from a cache; None for zeros.

    Returns:
      The x of the token before each token, [B, T, D], with zeros for the first token of a document;
      the x of the row's last token, [B, 1, D].
    """

    def run(x, segment_ids, before):
        kernel = jnp.stack([jnp.ones(x.shape[-1], x.dtype), jnp.zeros(x.shape[-1], x.dtype)])
        return causal_conv1d(
            x,
            kernel,
            activation=None,
            initial_state=before,
            segment_ids=segment_ids,
            axis_name=context.mesh_time_axis,
        )

    rows = activation_spec("batch", context.logical_time_axis)
    first = activation_spec("batch")
    return per_shard(run, context.mesh, (rows, rows, first), (rows, first))(
        x_BTD, context.segment_ids, before_B1D
    )


class RWKV4(Mixer):
    """RWKV-4 (2305.13048, equations 11–16). For each channel, the output is a weighted mean of the
    values so far, times a gate σ(r). A value's weight is e^k, and decays at a constant rate for
    each channel.

    o = σ(r) (Σ_{j<t} e^{k_j − (t−1−j) e^w} v_j + e^{u + k_t} v_t) / (the same sum with v = 1).
    The receptance r, the key k and the value v are projections of μ x + (1 − μ) x₋₁, where x₋₁ is
    the x of the token before; each has its own learned μ [D]. w sets the decay, and u is a bonus
    for the current token. To avoid overflow, the states hold the numerator and the denominator
    divided by e^m, with m_t = max(m_{t−1} − e^w, k_t). Channels are not split over the mesh axis
    `tensor`.

    Diagnostics, for each channel [D]: half_life, ln 2 / e^w; receptance, the mean of σ(r).
    """

    def __init__(self, config, make, layer_indices):
        d = config.hidden_size
        self.mix = make.parameter(
            lambda shape: jnp.full(shape, 0.5), (3, d), ". embed_out", kind="rate"
        )
        self.receptance_proj = make.matrix((d, d), "embed -> .")
        self.key_proj = make.matrix((d, d), "embed -> .")
        self.value_proj = make.matrix((d, d), "embed -> .")
        self.decay = make.parameter(
            lambda shape: jnp.broadcast_to(jnp.linspace(-5.0, 3.0, d), shape),
            (d,),
            "embed_out",
            kind="rate",
        )
        self.bonus = make.parameter(
            lambda shape: jnp.full(shape, jnp.log(0.3)), (d,), "embed_out", kind="rate"
        )
        self.out_proj = make.matrix((d, d), ". -> embed")

    def __call__(self, x_BTD, context, cache=None):
        dtype = x_BTD.dtype
        before, last = token_shift(x_BTD, context, cache and cache["shift"])
        mixed = x_BTD + (before - x_BTD) * (1 - self.mix[...]).astype(dtype)[:, None, None]
        r = mixed[0] @ self.receptance_proj[...].astype(dtype)
        k = mixed[1] @ self.key_proj[...].astype(dtype)
        v = mixed[2] @ self.value_proj[...].astype(dtype)
        rows = activation_spec("batch", context.logical_time_axis)
        first = activation_spec("batch")
        whole = activation_spec()
        state = cache and tuple(cache[name] for name in RWKV4_STATE_NAMES)

        def run(k, v, w, bonus, segment_ids, state):
            return self._weighted_mean(k, v, w, bonus, segment_ids, context.mesh_time_axis, state)

        o, state = per_shard(
            run, context.mesh, (rows, rows, whole, whole, rows, first), (rows, first)
        )(k, v, self.decay[...], self.bonus[...], context.segment_ids, state)
        gated = (jax.nn.sigmoid(r.astype(jnp.float32)) * o).astype(dtype)
        y = gated @ self.out_proj[...].astype(dtype)
        diagnostics = {}
        if context.options.collect_stats:
            diagnostics = {
                "half_life": jnp.log(2) * jnp.exp(-self.decay[...]),
                "receptance": token_mean(jax.nn.sigmoid(r), context.stats_mask),
            }
        return y, diagnostics, cache and dict(zip(RWKV4_STATE_NAMES, state)) | {"shift": last}

    def _weighted_mean(self, k, v, w, bonus, segment_ids, axis_name, state):
        """Computes, for each token, a weighted mean of the values v so far. The weight of a value
        is e^k with the value's key k, and decays with every later token; the weight of the token's
        own value is e^{u + k}.

        Args:
          k, v: the keys and the values, [B, T, D].
          w: [D], the logarithm of each channel's decay rate.
          bonus: [D], u.
          segment_ids, axis_name: as in `linear_scan`.
          state: the states before the row, in the order of RWKV4_STATE_NAMES; None for empty
            states.

        Returns:
          The mean [B, T, D], float32; the states after the row, in the order of RWKV4_STATE_NAMES.
        """
        split = dict(segment_ids=segment_ids, axis_name=axis_name)
        largest, weighted, total = (None, None, None) if state is None else state
        k = k.astype(jnp.float32)
        v = v.astype(jnp.float32)
        log_decay = jnp.broadcast_to(-jnp.exp(w), k.shape)
        m, m_before, largest = max_plus_scan(log_decay, k, initial_state=largest, **split)
        m = jnp.where(m == -jnp.inf, 0, m)  # m is -∞ in a row without a token
        change = jnp.where(m_before == -jnp.inf, 0, jnp.minimum(log_decay + m_before - m, 0))
        # a has the value of `change` and the gradient of `log_decay`.
        a = log_decay + jax.lax.stop_gradient(change - log_decay)
        weight = jnp.exp(k - m)
        _, weighted_before, weighted = linear_scan(a, weight * v, initial_state=weighted, **split)
        ones = jnp.ones_like(v)
        _, total_before, total = linear_scan(a, weight * ones, initial_state=total, **split)
        m_before = jnp.where(total_before == 0, -jnp.inf, m_before)
        top = jax.lax.stop_gradient(jnp.maximum(m_before, bonus + k))
        past = jnp.exp(m_before - top)
        now = jnp.exp(bonus + k - top)
        mean = (past * weighted_before + now * v) / (past * total_before + now)
        return mean, (largest, weighted, total)

    @staticmethod
    def init_cache(config, batch, length):
        states = {name: jnp.zeros((batch, config.hidden_size)) for name in RWKV4_STATE_NAMES}
        # "largest" starts at -∞, the maximum of no keys. If it started at 0, e^{k − 0} would
        # underflow where all keys are far below 0.
        states["largest"] = jnp.full_like(states["largest"], -jnp.inf)
        return states | {"shift": jnp.zeros((batch, 1, config.hidden_size), config.dtype)}

    @staticmethod
    def activation_flops(config, length):
        return 0.0  # every matrix product has a parameter, so it is counted from its declaration

    @staticmethod
    def halo(config):
        return 1


class RWKV6(Recurrent):
    """RWKV-6 (2404.05892, equations 13–20): a recurrence with a decay for each key channel and a
    bonus u for the current token.

    The decay w, the key k, the value v, the receptance r (the query) and the gate are each computed
    from an input of their own, x + (x₋₁ − x) ⊙ (μ + Δ). Each of the five inputs mixes x with x₋₁,
    the x of the token before; μ is learned, and a network of low rank computes Δ from x and x₋₁.
    The log decay is g = −e^w with w = w₀ + W₂ tanh(W₁ x_w), where x_w is the input of the decay.
    The output of token t is o = S_{t−1}ᵀr + (Σ_c r_c u_c k_c) v, and the state becomes S ←
    Diag(e^g) S + k vᵀ. The output of each head passes through a LayerNorm and is multiplied by a
    SiLU gate. There is no convolution.
    """

    switches_read = ()
    has_convolution_and_silu = False

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        d, g, h = c.hidden_size, c.linear_num_key_heads, c.linear_num_value_heads
        r, k = h // g, c.linear_key_head_dim
        v = r * c.linear_value_head_dim
        count, rank = len(RWKV6_INPUT_NAMES), RWKV6_MIX_RANK

        def half(shape):
            return jnp.full(shape, 0.5)

        self.mix_all = make.parameter(half, (d,), "embed_out", kind="rate")
        self.mix = make.parameter(half, (count, d), ". embed_out", kind="rate")
        self.mix_down = make.matrix((d, count, rank), "embed -> * .")
        self.mix_up = make.matrix((count, rank, d), "* . -> embed_out")
        for part in (("receptance", k), ("key", k), ("value", v, r), ("gate", v, r)):
            projection = make.matrix((d, g, part[1]), "embed -> key_heads .", parts=(part,))
            setattr(self, f"{part[0]}_proj", projection)
        self.decay_down, self.decay_up = make_low_rank_projection(make, RWKV6_DECAY_RANK, k)
        self.decay = make.parameter(
            lambda shape: jnp.broadcast_to(jnp.linspace(-6.0, -1.0, k), shape),
            (h, k),
            "value_heads .",
            kind="rate",
        )
        self.bonus = make.parameter(half, (h, k), "value_heads .", kind="rate")
        self.make_output(make, per_head=True)

    def __call__(self, x_BTD, context: Context, cache=None):
        before_BTD, last = token_shift(x_BTD, context, cache and cache["shift"])
        other_states = cache and {name: x for name, x in cache.items() if name != "shift"}
        x_and_before_BTE = jnp.concatenate([x_BTD, before_BTD], axis=-1)
        y_BTD, diagnostics, other_states = super().__call__(x_and_before_BTE, context, other_states)
        return y_BTD, diagnostics, other_states and other_states | {"shift": last}

    def mix_inputs(self, x_and_before_BTE: jax.Array) -> jax.Array:
        """Returns the mixed inputs [P, B, T, D], in the order of RWKV6_INPUT_NAMES.
        `x_and_before_BTE` holds x and x₋₁ side by side.
        """
        x, before = jnp.split(x_and_before_BTE, 2, axis=-1)
        change = before - x
        dtype = x.dtype
        low_BTPR = jnp.tanh(
            project_to_float32(x + change * self.mix_all[...].astype(dtype), self.mix_down)
        ).astype(dtype)
        delta = (
            jnp.einsum("btpr,prd->pbtd", low_BTPR, self.mix_up[...].astype(dtype))
            + self.mix[...].astype(dtype)[:, None, None]
        )
        return x + change * delta

    def project_inputs(self, x_and_before_BTE: jax.Array, context: Context) -> ProjectedInputs:
        dtype = x_and_before_BTE.dtype
        mixed = dict(zip(RWKV6_INPUT_NAMES, self.mix_inputs(x_and_before_BTE)))

        def project(name):
            weight_DGC = getattr(self, f"{name}_proj")[...].astype(dtype)
            return jnp.einsum("btd,dgc->btgc", mixed[name], weight_DGC)

        low = jnp.tanh(project_to_float32(mixed["decay"], self.decay_down)).astype(dtype)
        w_BTHK = self.decay[...] + project_to_float32(low, self.decay_up)
        qkv = jnp.concatenate([project("receptance"), project("key"), project("value")], axis=-1)
        return ProjectedInputs(qkv, project("gate"), log_decay=-jnp.exp(w_BTHK))

    def recurrence_parameters(self):
        return (self.bonus[...],)

    def recurrence(self, heads, state):
        (bonus_HK,) = heads.recurrence_parameters
        o_BTHV, final_state = channel_delta_rule(
            heads.q,
            heads.k,
            heads.v,
            g=heads.log_decay,
            beta=heads.beta,
            delta_term=False,
            read="before",
            bonus=bonus_HK,
            initial_state=state and state["state"],
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return o_BTHV, {"state": final_state}

    def norm_and_gate(self, o_BTHV, norm_HV, gate_BTGRV):
        o = o_BTHV.astype(jnp.float32)
        o = o - jnp.mean(o, axis=-1, keepdims=True)
        return super().norm_and_gate(o.astype(o_BTHV.dtype), norm_HV, gate_BTGRV)

    @classmethod
    def uses_delta_term(cls, config):
        return False

    @classmethod
    def init_cache(cls, config, batch, length):
        shift = jnp.zeros((batch, 1, config.hidden_size), config.dtype)
        return super().init_cache(config, batch, length) | {"shift": shift}

    @classmethod
    def halo(cls, config):
        return 1


def rwkv4_reference(config, params, x):
    """Computes RWKV-4 with explicit sums over all earlier tokens."""
    before = shift_by_one_token(x)
    mix = params["mix"]
    r = (mix[0] * x + (1 - mix[0]) * before) @ params["receptance_proj"]
    k = (mix[1] * x + (1 - mix[1]) * before) @ params["key_proj"]
    v = (mix[2] * x + (1 - mix[2]) * before) @ params["value_proj"]
    i, j = np.ogrid[: len(x), : len(x)]
    age = jnp.asarray(np.maximum(i - 1 - j, 0))[..., None]
    past = jnp.exp(k[None] - age * jnp.exp(params["decay"]))
    now = jnp.exp(params["bonus"] + k[None])
    weight = jnp.where((j < i)[..., None], past, 0) + jnp.where((j == i)[..., None], now, 0)
    mean = jnp.einsum("ijd,jd->id", weight, v) / weight.sum(axis=1)
    return (jax.nn.sigmoid(r) * mean) @ params["out_proj"]


def rwkv6_reference(config, params, x):
    before = shift_by_one_token(x)
    heads = config.linear_num_value_heads
    low = jnp.tanh(
        jnp.einsum("td,dpr->tpr", x + (before - x) * params["mix_all"], params["mix_down"])
    )
    mixed = {
        name: x + (before - x) * (params["mix"][i] + low[:, i] @ params["mix_up"][i])
        for i, name in enumerate(RWKV6_INPUT_NAMES)
    }

    def project(name):
        return jnp.einsum("td,dgc->tgc", mixed[name], params[f"{name}_proj"])

    def for_value_heads(y):
        return jnp.repeat(y, heads // config.linear_num_key_heads, axis=1)

    w = params["decay"] + jnp.einsum(
        "tr,rhk->thk", jnp.tanh(mixed["decay"] @ params["decay_down"]), params["decay_up"]
    )
    v = project("value").reshape(len(x), heads, -1)
    gate = project("gate").reshape(len(x), heads, -1)
    o = outer_product_recurrence(
        for_value_heads(project("receptance")),
        for_value_heads(project("key")),
        v,
        -jnp.exp(w),
        bonus=params["bonus"],
    )
    o = rms_norm(config, o - o.mean(axis=-1, keepdims=True))
    return project_out(params, o * params["norm"] * jax.nn.silu(gate))


REFERENCES = {"rwkv4": rwkv4_reference, "rwkv6": rwkv6_reference}
