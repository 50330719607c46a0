"""Sums the rows of each token on TPUs: it sorts the rows by token, then calls
`routed_experts.sum_rows`.

N tokens, A choices per token, P rows, D model width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.kernels.tpu import chip
from qwen3next_jax.kernels.tpu.grids import LANES
from qwen3next_jax.kernels.tpu.routed_experts import sum_rows


def supports(rows, shape: tuple[int, int]) -> str:
    """Returns "": the kernel can run every call."""
    return ""


def sum_by_token(rows, choice, shape: tuple[int, int], *, interpret: bool = False):
    """Returns [N, D], the result of `ops.routed_experts.sum_by_token` for `shape` = (N, A).
    `interpret` says whether a CPU interprets the kernel.
    """
    choice = choice.astype(jnp.int32)
    choice, order = jax.lax.sort(
        (choice, jnp.arange(choice.shape[0], dtype=jnp.int32)), num_keys=1, is_stable=False
    )
    rows = rows.at[order].get(mode="promise_in_bounds")
    return sum_rows(rows, choice // shape[1], shape[0], interpret=interpret)


def by_choice(values, choice, shape: tuple[int, int], *, interpret: bool = False):
    """Returns [Q] with `values` [P] at the indices `choice` [P], and 0 elsewhere; indices of Q or
    more are left out.

    A scatter would write one number after another. Here a value becomes a row that is 0 but for
    the column of its choice, and the rows of a token are summed.
    """
    choice, values = jax.lax.sort((choice.astype(jnp.int32), values), num_keys=1, is_stable=False)
    tokens, choices = shape
    width = -(-choices // (LANES * chip.cores())) * LANES * chip.cores()
    values = jnp.where(choice < tokens * choices, values, 0)
    rows = jnp.where((choice % choices)[:, None] == jnp.arange(width), values[:, None], 0)
    sums = sum_rows(rows, choice // choices, tokens, interpret=interpret)
    return sums[:, :choices].reshape(-1)
