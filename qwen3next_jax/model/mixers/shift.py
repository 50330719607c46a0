"""The token before each one, of its document."""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import Context
from qwen3next_jax.ops import causal_conv1d
from qwen3next_jax.parallel.rules import activation_spec, local


def shifted(x_BTD: jax.Array, context: Context, before_B1D: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(x of the token before [B, T, D], zeros for a document's first; the row's last x [B, 1, D]). `before`: x before the first token."""
    def run(x, segment_ids, before):
        kernel = jnp.stack([jnp.ones(x.shape[-1], x.dtype), jnp.zeros(x.shape[-1], x.dtype)])
        return causal_conv1d(x, kernel, activation=None, initial_state=before, segment_ids=segment_ids, axis_name=context.time_axis)

    rows, first = activation_spec("batch", context.time), activation_spec("batch")
    return local(run, context.mesh, (rows, rows, first), (rows, first))(x_BTD, context.segment_ids, before_B1D)
