"""Matmuls of rows sorted by group, one weight matrix per group: the experts of a mixture.

"blocked" walks blocks of consecutive rows that belong to one group, so every row meets one weight matrix only. A group's
last block may reach into the rows of the next group; what it writes there is overwritten when the walk gets to them.
(XLA's own `ragged_dot` computes every group for every row on CPU.)

Letters: R rows, C rows of a block, D width in, F width out, E groups (experts), I expert width.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ("blocked", "ragged_dot")
_BLOCK = 128  # rows; measured with benchmarks/grouped_matmul.py


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """y_r = x_r · w[group of r].

    Args:
      x: [R, D] rows sorted by group.
      w: [E, D, F].
      group_sizes: [E] integers, rows of each group; their sum may be below R, the rows beyond give zeros.
      implementation: "blocked", "ragged_dot", or None for the platform's best ("blocked" on CPU, "ragged_dot" elsewhere).

    Returns:
      y [R, F] in x's dtype, accumulated in float32; differentiable in x and w.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
    """
    _check(x, w, group_sizes, implementation)
    if w.ndim != 3 or w.shape[1] != x.shape[1]:
        raise ValueError(f"w has shape {w.shape}: expected [E, D, F] with D = {x.shape[1]}, as in x")
    return _matmul(implementation, x, w, group_sizes.astype(jnp.int32))


def expert_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array, group_sizes: jax.Array, *,
               implementation: str | None = None) -> jax.Array:
    """SwiGLU experts on rows sorted by expert: y_r = (silu(x_r gate_e) · (x_r up_e)) down_e.

    Args:
      x: [R, D] rows sorted by expert.
      gate_up: [E, D, 2, I], gate at index 0.
      down: [E, I, D].
      group_sizes, implementation: as in `grouped_matmul`.

    Returns:
      y [R, D] in x's dtype; differentiable in x, gate_up and down.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
    """
    _check(x, gate_up, group_sizes, implementation)
    if gate_up.ndim != 4 or gate_up.shape[1:3] != (x.shape[1], 2):
        raise ValueError(f"gate_up has shape {gate_up.shape}: expected [E, D, 2, I] with D = {x.shape[1]}, as in x")
    if down.shape != (gate_up.shape[0], gate_up.shape[3], x.shape[1]):
        raise ValueError(f"down has shape {down.shape}: expected [E, I, D] = "
                         f"{(gate_up.shape[0], gate_up.shape[3], x.shape[1])}")
    e, d, _, i = gate_up.shape
    hidden_R2I = grouped_matmul(x, gate_up.reshape(e, d, 2 * i), group_sizes, implementation=implementation)
    gate_RI, up_RI = hidden_R2I[:, :i], hidden_R2I[:, i:]
    return grouped_matmul(jax.nn.silu(gate_RI) * up_RI, down, group_sizes, implementation=implementation)


def _check(x, w, group_sizes, implementation):
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: expected one of {', '.join(IMPLEMENTATIONS)}, or None")
    if x.ndim != 2 or x.shape[0] == 0:
        raise ValueError(f"x has shape {x.shape}: expected [R, D] with at least one row")
    if group_sizes.shape != w.shape[:1]:
        raise ValueError(f"group_sizes has shape {group_sizes.shape}: expected [E] = {w.shape[:1]}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes has dtype {group_sizes.dtype}: expected integers")


# ---- one custom gradient outside, the choice of platform inside forward and inside backward ----------------------


def _choose(implementation, blocked, ragged, *args):
    if implementation is None:
        return jax.lax.platform_dependent(*args, cpu=blocked, default=ragged)
    return (blocked if implementation == "blocked" else ragged)(*args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(implementation, x, w, group_sizes):
    return _choose(implementation, _blocked, _ragged, x, w, group_sizes)


def _matmul_forward(implementation, x, w, group_sizes):
    return _matmul(implementation, x, w, group_sizes), (x, w, group_sizes)


def _matmul_backward(implementation, residuals, dy):
    dx, dw = _choose(implementation, _blocked_gradients, _ragged_gradients, *residuals, dy)
    return dx, dw, None


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _ragged(x, w, group_sizes):
    return jax.lax.ragged_dot(x, w, group_sizes, preferred_element_type=_wide(x)).astype(x.dtype)


def _ragged_gradients(x, w, group_sizes, dy):
    _, pullback = jax.vjp(lambda x, w: _ragged(x, w, group_sizes), x, w)
    return pullback(dy)


def _wide(x):
    return jnp.promote_types(jnp.float32, x.dtype)


# ---- blocked ------------------------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """Of each block: its group, its first row, and how many of its rows are its own; then the count of blocks."""

    group: jax.Array
    row: jax.Array
    own: jax.Array
    count: jax.Array


def _blocks(group_sizes, rows: int) -> _Blocks:
    groups = group_sizes.shape[0]
    limit = rows // _BLOCK + groups  # each group wastes less than one block
    blocks_E = -(-group_sizes // _BLOCK)
    end_E = jnp.cumsum(blocks_E)
    index = jnp.arange(limit)
    group = jnp.minimum(jnp.sum(end_E[None] <= index[:, None], axis=1), groups - 1)
    within = (index - (end_E - blocks_E)[group]) * _BLOCK
    first_E = jnp.cumsum(group_sizes) - group_sizes
    own = jnp.clip(group_sizes[group] - within, 0, _BLOCK)
    return _Blocks(group, first_E[group] + within, own, end_E[-1])


def _pad(x):
    return jnp.pad(x, ((0, _BLOCK), (0, 0)))


def _take(x, row):
    return jax.lax.dynamic_slice_in_dim(x, row, _BLOCK)


def _trim(y, group_sizes):
    """Drops the padding and clears the rows of no group."""
    y = y[:-_BLOCK]
    return jnp.where(jnp.arange(y.shape[0])[:, None] < jnp.sum(group_sizes), y, 0)


def _blocked(x, w, group_sizes):
    blocks, x_RD = _blocks(group_sizes, x.shape[0]), _pad(x)

    def body(b, y_RF):
        y_CF = jnp.dot(_take(x_RD, blocks.row[b]), w[blocks.group[b]], preferred_element_type=_wide(x)).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y_RF, y_CF, blocks.row[b], 0)

    return _trim(jax.lax.fori_loop(0, blocks.count, body, jnp.zeros((x_RD.shape[0], w.shape[2]), x.dtype)), group_sizes)


def _blocked_gradients(x, w, group_sizes, dy):
    blocks, x_RD, dy_RF = _blocks(group_sizes, x.shape[0]), _pad(x), _pad(dy)

    def body(b, carry):
        dx_RD, dw_EDF = carry
        row, group = blocks.row[b], blocks.group[b]
        dy_CF = _take(dy_RF, row)
        dx_CD = jnp.dot(dy_CF, w[group].T, preferred_element_type=_wide(x)).astype(x.dtype)
        x_CD = jnp.where(jnp.arange(_BLOCK)[:, None] < blocks.own[b], _take(x_RD, row), 0)
        dw_DF = dw_EDF[group] + jnp.dot(x_CD.T, dy_CF, preferred_element_type=_wide(x))
        return (jax.lax.dynamic_update_slice_in_dim(dx_RD, dx_CD, row, 0),
                jax.lax.dynamic_update_index_in_dim(dw_EDF, dw_DF, group, 0))

    zeros = jnp.zeros_like(x_RD), jnp.zeros(w.shape, _wide(x))
    dx_RD, dw_EDF = jax.lax.fori_loop(0, blocks.count, body, zeros)
    return _trim(dx_RD, group_sizes), dw_EDF.astype(w.dtype)
