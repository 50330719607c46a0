"""Sums the rows of each token on TPUs: the function sorts the rows by token, then calls
`routed_experts.sum_rows_by_token`.

N tokens, A choices per token, P rows, D model width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.kernels.tpu import chip
from qwen3next_jax.kernels.tpu.grids import LANES
from qwen3next_jax.kernels.tpu.routed_experts import sum_rows_by_token


def unsupported_reason(rows, shape: tuple[int, int]) -> str:
    """Returns why the kernel cannot run a call; "" if it can."""
    if rows.dtype == jnp.float64:
        return "has rows of float64: expected float32 or bfloat16"
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
    return sum_rows_by_token(rows, choice // shape[1], shape[0], interpret=interpret)


def values_by_choice(values, choice, shape: tuple[int, int], *, interpret: bool = False):
    """Returns [Q] with `values` [P], float32, at the indices `choice` [P], and 0 elsewhere; indices
    of Q or more are left out.

    A scatter would write one number after another. Instead, this function turns each value into a
    row with three nonzero columns, whose positions depend on the choice, and sums the rows of each
    token. The three columns hold three bfloat16 numbers that add up to the value. So the result is
    exact, with a sixth of the products that float32 rows would need.
    """
    tokens, choices = shape
    choice, values = jax.lax.sort((choice.astype(jnp.int32), values), num_keys=1, is_stable=False)
    rest, parts = jnp.where(choice < tokens * choices, values, 0), []
    for _ in range(3):
        # A conversion to bfloat16 and back might be optimized away.
        parts.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - parts[-1]
    width = -(-3 * choices // (LANES * chip.core_count())) * LANES * chip.core_count()
    column = jnp.arange(width) - (choice % choices)[:, None]
    rows = sum(
        jnp.where(column == n * choices, part[:, None], 0) for n, part in enumerate(parts)
    ).astype(jnp.bfloat16)
    sums = sum_rows_by_token(rows, choice // choices, tokens, interpret=interpret)
    return jnp.sum(
        sums[:, : 3 * choices].reshape(tokens, 3, choices), axis=1, dtype=jnp.float32
    ).reshape(-1)
