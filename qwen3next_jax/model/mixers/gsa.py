"""Gated slot attention (2409.07146, equations 7–9): softmax over a bounded number of slots, M,
that keep keys and values.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.model.mixers.recurrent import ByChannel, Inputs, through
from qwen3next_jax.ops import channel_delta_rule


class GSA(ByChannel):
    """g = log σ(w x) / 8 per slot; Sₖ ← Sₖ e^g + k (1 − e^g)ᵀ, p = softmax(Sₖᵀq), Sᵥ ← e^g Sᵥ +
    (1 − e^g) vᵀ, o = SiLU(Sᵥᵀp), norm per head. Both states pass operator B, the first with its
    decay on the value side.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # memory slots, each of which keeps a key and a value
        slots: int = 64

        def __post_init__(self):
            check_bounds(self, "model.mixer", {"at least 1": "slots"})

    temperature = 8  # of the forget gates, the paper's

    def __init__(self, config, make, layers):
        self.config = c = config
        self.make_projection(make, gate=False)
        self.forget_proj = make.matrix(
            (c.hidden_size, c.linear_num_value_heads, self.settings(c).slots),
            "embed -> value_heads .",
        )
        self.make_output(make)

    def inputs(self, x_BTD, context) -> Inputs:
        return Inputs(
            self.project(x_BTD, context)[0],
            g=jax.nn.log_sigmoid(through(x_BTD, self.forget_proj)) / self.temperature,
        )

    def recurrence(self, heads, state):
        q, k, v, *_, segment_ids, axis_name, _ = heads
        g, written_BTHM, states = self.gates(heads, state)
        written_BTHM = written_BTHM.astype(v.dtype)
        common = dict(erase=False, segment_ids=segment_ids, axis_name=axis_name)
        none = jnp.zeros((*v.shape[:3], q.shape[-1]), jnp.float32)
        scores, keys = channel_delta_rule(
            q,
            k,
            written_BTHM,
            g=none,
            value_decay=g,
            initial_state=state and state["state"],
            **common,
        )
        weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v.dtype)
        o, values = channel_delta_rule(
            weights, written_BTHM, v, g=g, initial_state=state and state["values"], **common
        )
        return jax.nn.silu(o), {"state": keys, "values": values} | states

    def gates(self, heads, state):
        """(log decay of the slots, what is written to them [B, T, H, M], states)."""
        return heads.g, -jnp.expm1(heads.g), {}

    @classmethod
    def init_cache(cls, config, batch, length):
        c, heads = config, (batch, config.linear_num_value_heads)
        return super().init_cache(config, batch, length) | {
            "state": jnp.zeros((*heads, c.linear_key_head_dim, cls.settings(c).slots)),
            "values": jnp.zeros((*heads, cls.settings(c).slots, c.linear_value_head_dim)),
        }

    @classmethod
    def forward_flops(cls, config, length):
        """Two states: decay or write, and read, of each."""
        return (
            4
            * config.linear_num_value_heads
            * cls.settings(config).slots
            * (config.linear_key_head_dim + config.linear_value_head_dim)
        )
