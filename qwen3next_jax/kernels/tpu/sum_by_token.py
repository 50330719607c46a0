"""Sums the rows of each token on TPUs: it sorts the rows by token, then calls
`routed_experts.sum_rows`.

N tokens, A choices per token, P rows, D model width.
"""

import jax
import jax.numpy as jnp

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
