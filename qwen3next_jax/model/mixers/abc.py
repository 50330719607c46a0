"""Attention with bounded-memory control (2110.02488, equations 4 and 9, causal): GSA whose slots
hold weighted means.

Letters: B batch, T time, H value heads, M slots.
"""

import jax.numpy as jnp

from qwen3next_jax.model.mixers.gsa import GSA
from qwen3next_jax.model.mixers.recurrent import Inputs, through
from qwen3next_jax.ops import linear_scan, max_plus_scan


class ABC(GSA):
    """A slot holds Σ e^{s_j} k_j / Σ e^{s_j} of its document, s = W x: with z = ln Σ e^s, what
    is written is e^{s − z} and the decay e^{z₋₁ − z}. The sums are kept over e^m, m the largest
    s so far.
    """

    def inputs(self, x_BTD, context) -> Inputs:
        return Inputs(self.project(x_BTD, context)[0], g=through(x_BTD, self.forget_proj))  # g: s

    def gates(self, heads, state):
        common = dict(segment_ids=heads.segment_ids, axis_name=heads.axis_name)
        m, m_before, largest = max_plus_scan(
            jnp.zeros_like(heads.g), heads.g, initial_state=state and state["largest"], **common
        )
        m = jnp.where(m == -jnp.inf, 0, m)  # of a row without a token
        change = jnp.where(m_before == -jnp.inf, 0, m_before - m)
        own = jnp.exp(heads.g - m)
        total, before, last = linear_scan(
            change, own, initial_state=state and state["total"], **common
        )
        starts = before == 0  # nothing to forget; below, no logarithm of it
        g = jnp.where(
            starts,
            0,
            change
            + jnp.log(jnp.where(starts, 1, before))
            - jnp.log(jnp.where(total == 0, 1, total)),
        )
        return (
            jnp.minimum(g, 0),
            own / jnp.where(total == 0, 1, total),
            {"largest": largest, "total": last},
        )

    @classmethod
    def init_cache(cls, config, batch, length):
        slots = (batch, config.linear_num_value_heads, cls.settings(config).slots)
        # The largest of no scores. From 0, e^{s − 0} of lower scores would underflow.
        return super().init_cache(config, batch, length) | {
            "largest": jnp.full(slots, -jnp.inf),
            "total": jnp.zeros(slots),
        }
