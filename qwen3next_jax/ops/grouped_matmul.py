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
_BLOCK = 64  # rows; the best of 32 … 256 for 8 to 64 groups of 8192 rows, widths 128 (benchmarks/grouped_matmul.py)


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
    return _mlp(implementation, x, gate_up.reshape(*gate_up.shape[:2], -1), down, group_sizes.astype(jnp.int32))


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(implementation, x, gate_up, down, group_sizes):
    return _mlp_forward(implementation, x, gate_up, down, group_sizes)[0]


def _mlp_forward(implementation, x, gate_up, down, group_sizes):
    y, hidden = _choose(implementation, _blocked_mlp, _ragged_mlp, x, gate_up, down, group_sizes)
    return y, (x, gate_up, down, group_sizes, hidden)


def _mlp_backward(implementation, residuals, dy):
    return (*_choose(implementation, _blocked_mlp_gradients, _ragged_mlp_gradients, *residuals, dy), None)


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _swiglu(hidden):
    """[…, 2I], gate before up → silu(gate) · up [..., I], in float32 inside."""
    gate, up = jnp.split(hidden.astype(_wide(hidden)), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(hidden.dtype)


def _wide(x):
    return jnp.promote_types(jnp.float32, x.dtype)


def _dot(a, b):
    """a @ b accumulated in float32, in a's dtype."""
    return jnp.dot(a, b, preferred_element_type=_wide(a)).astype(a.dtype)


# ---- ragged_dot ---------------------------------------------------------------------------------------------------


def _ragged(x, w, group_sizes):
    return jax.lax.ragged_dot(x, w, group_sizes, preferred_element_type=_wide(x)).astype(x.dtype)


def _ragged_gradients(x, w, group_sizes, dy):
    _, pullback = jax.vjp(lambda x, w: _ragged(x, w, group_sizes), x, w)
    return pullback(dy)


def _ragged_mlp(x, gate_up, down, group_sizes):
    hidden = _ragged(x, gate_up, group_sizes)
    return _ragged(_swiglu(hidden), down, group_sizes), hidden


def _ragged_mlp_gradients(x, gate_up, down, group_sizes, hidden, dy):
    activation, pullback = jax.vjp(_swiglu, hidden)
    da, ddown = _ragged_gradients(activation, down, group_sizes, dy)
    dx, dgate_up = _ragged_gradients(x, gate_up, group_sizes, *pullback(da))
    return dx, dgate_up, ddown


# ---- blocked ------------------------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """Of each block: its group, its first row, where its own rows start and end inside it; then the count of blocks."""

    group: jax.Array
    row: jax.Array
    begin: jax.Array
    end: jax.Array
    count: jax.Array


def _blocks(group_sizes, rows: int, size: int) -> _Blocks:
    groups = group_sizes.shape[0]
    limit = rows // size + groups  # each group wastes less than one block
    blocks_E = -(-group_sizes // size)
    end_E = jnp.cumsum(blocks_E)
    index = jnp.arange(limit)
    group = jnp.minimum(jnp.sum(end_E[None] <= index[:, None], axis=1), groups - 1)
    within = (index - (end_E - blocks_E)[group]) * size
    first = (jnp.cumsum(group_sizes) - group_sizes)[group] + within
    row = jnp.minimum(first, rows - size)  # the last blocks move up instead of hanging over the end
    begin = first - row
    return _Blocks(group, row, begin, begin + jnp.minimum(group_sizes[group] - within, size), end_E[-1])


def _walk(group_sizes, rows: int, outputs, sums, step):
    """Runs `step` over the blocks, in a loop as long as the groups need.

    Args:
      outputs, sums: tuples of shapes to fill, [R, F] of rows and [E, …] of groups.
      step: (take, group) → (tuple of [C, F] for the block's rows, tuple of terms to add at its group). `take(x)` is the
        block's rows of x; rows of other groups among them are dropped from outputs, and are zeros with
        `take(x, own=True)`, which a sum over rows needs.

    Returns:
      (outputs, sums) as tuples of arrays. Rows of no group are zeros.
    """
    size = min(_BLOCK, rows)
    blocks = _blocks(group_sizes, rows, size)

    def body(b, carry):
        row, group = blocks.row[b], blocks.group[b]
        index = jnp.arange(size)[:, None]
        own_C1 = (blocks.begin[b] <= index) & (index < blocks.end[b])

        def take(x, own=False):
            x = jax.lax.dynamic_slice_in_dim(x, row, size)
            return jnp.where(own_C1, x, 0) if own else x

        def put(y, value):
            return jax.lax.dynamic_update_slice_in_dim(y, jnp.where(own_C1, value, take(y)), row, 0)

        def add(total, term):
            return jax.lax.dynamic_update_index_in_dim(total, total[group] + term, group, 0)

        values, terms = step(take, group)
        return tuple(map(put, carry[0], values)), tuple(map(add, carry[1], terms))

    start = tuple(tuple(jnp.zeros(a.shape, a.dtype) for a in shapes) for shapes in (outputs, sums))
    return jax.lax.fori_loop(0, blocks.count, body, start)


def _shape(rows, width, like):
    return jax.ShapeDtypeStruct((rows, width), like.dtype)


def _sum(w, x):
    return jax.ShapeDtypeStruct(w.shape, _wide(x))


def _product(a, b):
    """aᵀ b in the dtype of accumulation."""
    return jnp.dot(a.T, b, preferred_element_type=_wide(a))


def _blocked(x, w, group_sizes):
    def step(take, group):
        return (_dot(take(x), w[group]),), ()

    (y,), _ = _walk(group_sizes, x.shape[0], (_shape(x.shape[0], w.shape[2], x),), (), step)
    return y


def _blocked_gradients(x, w, group_sizes, dy):
    def step(take, group):
        return (_dot(take(dy), w[group].T),), (_product(take(x, own=True), take(dy)),)

    (dx,), (dw,) = _walk(group_sizes, x.shape[0], (x,), (_sum(w, x),), step)
    return dx, dw.astype(w.dtype)


def _blocked_mlp(x, gate_up, down, group_sizes):
    def step(take, group):
        hidden = _dot(take(x), gate_up[group])
        return (_dot(_swiglu(hidden), down[group]), hidden), ()

    (y, hidden), _ = _walk(group_sizes, x.shape[0], (x, _shape(x.shape[0], gate_up.shape[2], x)), (), step)
    return y, hidden


def _blocked_mlp_gradients(x, gate_up, down, group_sizes, hidden, dy):
    def step(take, group):
        dy_CD = take(dy, own=True)  # with it every gradient below is zero in rows of other groups
        activation, pullback = jax.vjp(_swiglu, take(hidden))
        (dhidden,) = pullback(_dot(dy_CD, down[group].T))
        return (_dot(dhidden, gate_up[group].T),), (_product(take(x), dhidden), _product(activation, dy_CD))

    (dx,), sums = _walk(group_sizes, x.shape[0], (x,), (_sum(gate_up, x), _sum(down, x)), step)
    return dx, sums[0].astype(gate_up.dtype), sums[1].astype(down.dtype)
