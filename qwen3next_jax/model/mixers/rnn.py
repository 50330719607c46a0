"""The plain recurrent network (Elman, 1990): what a state that is not linear costs, and gives.

Letters: B batch, T time, D model, H groups of V channels, C = V for each of a cell's gates.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.ops.scans import token_scan
from qwen3next_jax.sharding.rules import activation_spec, local


class RNN(Mixer):
    """h ← tanh(W x + U h + b), projected back to the model's width. linear_num_value_heads
    groups of linear_value_head_dim channels, each with a U of its own, so that `tensor` splits
    them: one group is the textbook's. A token waits for the one before it, and so do the shards
    of a row.

    Diagnostics, per group [H]: state_norm, ‖h‖ after the last token, mean over rows.
    """

    gates = ("input",)
    states = ("h",)

    def __init__(self, config, make, layers):
        d, h, v = config.hidden_size, config.linear_num_value_heads, config.linear_value_head_dim
        width = len(self.gates) * v
        self.in_proj = make.matrix(
            (d, h, width), "embed -> value_heads .", parts=[(name, v) for name in self.gates]
        )
        start = lambda shape: jax.random.normal(make.rngs.params(), shape) * v**-0.5
        self.recurrent = make.parameter(
            start, (h, v, width), "value_heads . .", kind="vector", operand=False
        )
        self.bias = make.parameter(jnp.zeros, (h, width), "value_heads .", kind="rate")
        self.out_proj = make.matrix((h, v, d), "value_heads . -> embed")

    def cell(self, state, x_BHC):
        """The states after a token, "h" the one that is read, from the sum of what it and "h"
        give.
        """
        return {"h": jnp.tanh(x_BHC)}

    def __call__(self, x_BTD, context, cache=None):
        rows, first, heads = (
            activation_spec(*axes)
            for axes in (("batch", context.time, "heads"), ("batch", "heads"), ("heads",))
        )

        def run(x_BTHC, u_HVC, bias_HC, ids, state):
            def step(state, x_BHC):
                after = self.cell(state, x_BHC + jnp.einsum("bhv,hvc->bhc", state["h"], u_HVC))
                return after, after["h"]

            if state is None:
                state = {
                    name: jnp.zeros((x_BTHC.shape[0], *u_HVC.shape[:2]), jnp.float32)
                    for name in self.states
                }
            return token_scan(
                step,
                x_BTHC.astype(jnp.float32) + bias_HC,
                state,
                segment_ids=ids,
                axis_name=context.time_axis,
            )

        x_BTHC = jnp.einsum("btd,dhc->bthc", x_BTD, self.in_proj[...].astype(x_BTD.dtype))
        tokens = activation_spec("batch", context.time)
        h_BTHV, state = local(
            run, context.mesh, (rows, heads, heads, tokens, first), (rows, first)
        )(
            x_BTHC,
            self.recurrent[...].astype(jnp.float32),
            self.bias[...],
            context.segment_ids,
            cache,
        )
        y_BTD = jnp.einsum(
            "bthv,hvd->btd", h_BTHV.astype(x_BTD.dtype), self.out_proj[...].astype(x_BTD.dtype)
        )
        diagnostics = (
            {"state_norm": jnp.mean(jnp.linalg.norm(state["h"], axis=-1), axis=0)}
            if context.diagnose
            else {}
        )
        return y_BTD, diagnostics, cache and state

    @classmethod
    def init_cache(cls, config, batch, length):
        return {
            name: jnp.zeros((batch, config.linear_num_value_heads, config.linear_value_head_dim))
            for name in cls.states
        }

    @classmethod
    def forward_flops(cls, config, length):
        """U h."""
        return 2 * config.linear_num_value_heads * len(cls.gates) * config.linear_value_head_dim**2

    @staticmethod
    def splits(config):
        return {"linear_num_value_heads": config.linear_num_value_heads}
