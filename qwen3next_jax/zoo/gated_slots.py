"""Attention over a fixed number of memory slots to which every token writes: gated slot attention
and attention with bounded-memory control.

In the formulas, x is a token's input; q, k and v are its query, key and value; K and V are the
widths of a key and of a value.

Letters: B batch, T time, H value heads, M slots.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.model.recurrent import ProjectedInputs, Recurrent
from qwen3next_jax.zoo.ops import channel_delta_rule, linear_scan, max_plus_scan
from qwen3next_jax.zoo.projections import project_to_float32
from qwen3next_jax.zoo.references import project_out, queries_keys_values_gate, rms_norm

EXAMPLES = {
    "gsa": {"linear_mixer": "gsa", "mixer": {"slots": 6}},
    "abc": {"linear_mixer": "abc", "mixer": {"slots": 6}},
}
GSA_TEMPERATURE = 8  # divisor of the log of the forget gates, as in the paper


class MemorySlotsMixer(Recurrent):
    """The base class of mixers whose heads have two states: Sₖ [K, M] holds a key for each slot,
    and Sᵥ [M, V] holds a value for each slot. A token has a log decay g [M] and a write strength w
    [M], one number for each slot, which both states use:

    Sₖ ← Sₖ Diag(e^g) + k wᵀ, p = softmax(Sₖᵀq), Sᵥ ← Diag(e^g) Sᵥ + w vᵀ, o = SiLU(Sᵥᵀp).

    A norm of each head follows. There is no convolution and no output gate. A subclass computes g
    and w in `log_decay_and_write_strength`.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # number of memory slots, each of which holds a key and a value
        slots: Annotated[int, "at least 1"] = 64

    switches_read = ()
    has_convolution_and_silu = False

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        self.make_projection(make, gate=False)
        self.forget_proj = make.matrix(
            (c.hidden_size, c.linear_num_value_heads, self.settings(c).slots),
            "embed -> value_heads .",
        )
        self.make_output(make)

    def log_decay_and_write_strength(self, heads, state):
        """Computes the gates g and w of every slot.

        Args:
          heads: queries, keys, values; the field `log_decay` holds the inputs of the gates, which
            the method `project_inputs` computed.
          state: {name: state before the row}; None if the row begins with empty states.

        Returns:
          g, the log decay [B, T, H, M]; w, the write strength [B, T, H, M]; {name: state after the
          row} for the states that only the gates need.
        """
        raise NotImplementedError

    def recurrence(self, heads, state):
        g_BTHM, strength_BTHM, gate_states = self.log_decay_and_write_strength(heads, state)
        strength_BTHM = strength_BTHM.astype(heads.v.dtype)
        common = dict(delta_term=False, segment_ids=heads.segment_ids, axis_name=heads.axis_name)
        no_decay_BTHK = jnp.zeros((*heads.v.shape[:3], heads.q.shape[-1]), jnp.float32)
        scores_BTHM, keys = channel_delta_rule(
            heads.q,
            heads.k,
            strength_BTHM,
            g=no_decay_BTHK,
            value_log_decay=g_BTHM,
            initial_state=state and state["state"],
            **common,
        )
        weights_BTHM = jax.nn.softmax(scores_BTHM.astype(jnp.float32), axis=-1)
        o_BTHV, values = channel_delta_rule(
            weights_BTHM.astype(heads.v.dtype),
            strength_BTHM,
            heads.v,
            g=g_BTHM,
            initial_state=state and state["values"],
            **common,
        )
        return jax.nn.silu(o_BTHV), {"state": keys, "values": values} | gate_states

    @classmethod
    def init_cache(cls, config, batch, length):
        heads = (batch, config.linear_num_value_heads)
        return super().init_cache(config, batch, length) | {
            "state": jnp.zeros((*heads, config.linear_key_head_dim, cls.settings(config).slots)),
            "values": jnp.zeros((*heads, cls.settings(config).slots, config.linear_value_head_dim)),
        }

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of writing and reading both states."""
        return (
            4
            * config.linear_num_value_heads
            * cls.settings(config).slots
            * (config.linear_key_head_dim + config.linear_value_head_dim)
        )

    @classmethod
    def uses_delta_term(cls, config):
        return False


class GSA(MemorySlotsMixer):
    """Gated slot attention (2409.07146, equations 7–9): g = log σ(W x) / 8 is the log decay of a
    slot, and w = 1 − e^g is its write strength.
    """

    def project_inputs(self, x_BTD, context) -> ProjectedInputs:
        qkv, _ = self.project_qkv_and_gate(x_BTD, context)
        logit_BTHM = project_to_float32(x_BTD, self.forget_proj)
        return ProjectedInputs(qkv, log_decay=jax.nn.log_sigmoid(logit_BTHM) / GSA_TEMPERATURE)

    def log_decay_and_write_strength(self, heads, state):
        return heads.log_decay, -jnp.expm1(heads.log_decay), {}


class ABC(MemorySlotsMixer):
    """Attention with bounded-memory control (2110.02488, equations 4 and 9, causal). A slot holds
    weighted means over the tokens j of the document so far: Σ e^{s_j} k_j / Σ e^{s_j} for its key,
    and the same mean of v_j for its value. The scores of a token are s = W x, one for each slot.

    The recurrence of a slot has the write strength w = e^{s_t − z_t} and the log decay g = z_{t−1}
    − z_t, where z_t = ln Σ_{j ≤ t} e^{s_j}. To avoid overflow, the state "total" holds Σ e^{s_j −
    m}, where m, the state "largest", is the largest s so far.
    """

    def project_inputs(self, x_BTD, context) -> ProjectedInputs:
        qkv, _ = self.project_qkv_and_gate(x_BTD, context)
        # the field `log_decay` holds s
        return ProjectedInputs(qkv, log_decay=project_to_float32(x_BTD, self.forget_proj))

    def log_decay_and_write_strength(self, heads, state):
        s_BTHM = heads.log_decay
        common = dict(segment_ids=heads.segment_ids, axis_name=heads.axis_name)
        m, m_before, largest = max_plus_scan(
            jnp.zeros_like(s_BTHM), s_BTHM, initial_state=state and state["largest"], **common
        )
        m = jnp.where(m == -jnp.inf, 0, m)  # a row without a token
        change = jnp.where(m_before == -jnp.inf, 0, m_before - m)
        weight = jnp.exp(s_BTHM - m)
        total, total_before, last_total = linear_scan(
            change, weight, initial_state=state and state["total"], **common
        )
        # At the first token there is nothing to forget, and ln 0 is not finite.
        is_first = total_before == 0
        g_BTHM = jnp.where(
            is_first,
            0,
            change
            + jnp.log(jnp.where(is_first, 1, total_before))
            - jnp.log(jnp.where(total == 0, 1, total)),
        )
        return (
            jnp.minimum(g_BTHM, 0),
            weight / jnp.where(total == 0, 1, total),
            {"largest": largest, "total": last_total},
        )

    @classmethod
    def init_cache(cls, config, batch, length):
        slots = (batch, config.linear_num_value_heads, cls.settings(config).slots)
        # "largest" starts at -∞, the maximum of no scores. If it started at 0, e^{s − 0} would
        # underflow where all scores are far below 0.
        return super().init_cache(config, batch, length) | {
            "largest": jnp.full(slots, -jnp.inf),
            "total": jnp.zeros(slots),
        }


def gsa_reference(config, params, x):
    q, k, v, _ = queries_keys_values_gate(config, params, x)
    forget = jax.nn.sigmoid(jnp.einsum("td,dhm->thm", x, params["forget_proj"])) ** (1 / 8)

    def step(carry, token):
        keys, values = carry
        q, k, v, f = token
        keys = keys * f[:, None] + k[..., None] * (1 - f)[:, None]
        values = f[..., None] * values + (1 - f)[..., None] * v[:, None]
        weights = jax.nn.softmax(jnp.einsum("hkm,hk->hm", keys, q), axis=-1)
        return (keys, values), jnp.einsum("hmv,hm->hv", values, weights)

    heads, slots = forget.shape[1:]
    empty = jnp.zeros((heads, k.shape[-1], slots)), jnp.zeros((heads, slots, v.shape[-1]))
    _, o = jax.lax.scan(step, empty, (q, k, v, forget))
    return project_out(params, rms_norm(config, jax.nn.silu(o)) * params["norm"])


def abc_reference(config, params, x):
    """Computes attention with bounded-memory control (ABC) without a recurrence, from the weight of
    every token j in each slot at every time i.
    """
    q, k, v, _ = queries_keys_values_gate(config, params, x)
    s = jnp.einsum("td,dhm->thm", x, params["forget_proj"])
    is_past = np.tril(np.ones((len(x), len(x)), bool))[..., None, None]
    weights = jax.nn.softmax(jnp.where(is_past, s[None], -jnp.inf), axis=1)
    keys = jnp.einsum("ijhm,jhc->ihmc", weights, k)
    values = jnp.einsum("ijhm,jhc->ihmc", weights, v)
    chosen = jax.nn.softmax(jnp.einsum("ihmk,ihk->ihm", keys, q), axis=-1)
    o = jnp.einsum("ihm,ihmv->ihv", chosen, values)
    return project_out(params, rms_norm(config, jax.nn.silu(o)) * params["norm"])


REFERENCES = {"gsa": gsa_reference, "abc": abc_reference}
