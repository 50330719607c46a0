"""The decay between every two rows (tokens) of a chunk, for each channel, computed from exponents
that are sums of g and never differences of sums.

Between the rows i > j the state decays by e^{Σ_{j<t≤i} g_t} in each channel. With G_i = Σ_{t≤i} g_t
the factors e^{G_i} and e^{−G_j} would give this decay by a matrix product, but e^{−G_j} can
overflow, and the difference G_i − G_j would lose precision. Instead the pairs of rows are divided
into levels m = 1, 2, 4, …, C/2. A pair belongs to level m if i is in an odd block of m rows (the
first block has the number 0) and j is in the even block just before it. Its exponent is then

    (Σ of g from the start of i's block to row i)
    + (Σ of g from the row after j to the end of j's block).

Every pair belongs to exactly one level. Both sums are ≤ 0, so nothing overflows, and g = −∞ is
exact. At each level the product of a function of i and a function of j gives the decay.

A level with m < BASE is computed as a masked product of blocks of BASE rows, as a matrix unit
multiplies no smaller blocks. A level with m ≥ BASE is the product of each odd block with the even
block before it.

Letters: C chunk length, K key width, `…` leading dimensions.
"""

import typing

import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import indices

BASE = 16


class Exponents(typing.NamedTuple):
    """Sums of g. All are ≤ 0 and linear in g, so that `jax.vjp` of `exponents` computes dg by sums,
    too.

    Attributes:
      levels: for each level [..., C, K]: for a row in an odd block the sum from the block's start
        to the row; for a row in an even block the sum from the next row to the block's end.
      reads: the sums of `levels` for the rows of queries. If a token reads the state before its own
        decay and write, the sums in odd blocks end one row earlier.
      enter: [..., C, K], the sum from the chunk's start to each row.
      reads_enter: [..., C, K], the same for the rows of queries; it may end one row earlier, too.
      leave: [..., C, K], the sum from the next row to the chunk's end.
      total: [..., 1, K], the sum over the chunk.
    """

    levels: tuple
    reads: tuple
    enter: typing.Any
    reads_enter: typing.Any
    leave: typing.Any
    total: typing.Any


def exponents(g_CK, before: bool) -> Exponents:
    """The sums of g. `before`: whether a token reads the state before its own decay and write."""

    def halves(x, m):  # the even and the odd blocks of m rows, [..., C / 2m, m, K] each
        x = x.reshape(*x.shape[:-2], -1, 2, m, x.shape[-1])
        return x[..., 0, :, :], x[..., 1, :, :]

    def joined(even, odd):
        return jnp.stack([even, odd], axis=-3).reshape(g_CK.shape)

    head, tail, total, read = (
        g_CK,
        jnp.zeros_like(g_CK),
        g_CK,
        jnp.zeros_like(g_CK) if before else g_CK,
    )
    levels, reads, m = [], [], 1
    while m < g_CK.shape[-2]:
        (head_even, head_odd), (tail_even, tail_odd), (read_even, read_odd) = (
            halves(x, m) for x in (head, tail, read)
        )
        total_even, total_odd = halves(total, 1)
        levels.append(joined(tail_even, head_odd))
        reads.append(joined(tail_even, read_odd) if before else levels[-1])
        head, tail, total = (
            joined(head_even, head_odd + total_even),
            joined(tail_even + total_odd, tail_odd),
            total_even + total_odd,
        )
        read = joined(read_even, read_odd + total_even) if before else head
        total, m = total[..., 0, :], 2 * m
    return Exponents(tuple(levels), tuple(reads), head, read, tail, total)


# ---- matrices over pairs of rows, level by level
# ----------------------------------------------------------------------------


def _diagonal(x_CC, size: int):
    """The blocks on the diagonal, [..., C / size, size, size]."""
    return jnp.stack(
        [x_CC[..., i : i + size, i : i + size] for i in range(0, x_CC.shape[-1], size)], axis=-3
    )


def _rows(x_CK, m: int):
    """The rows in odd blocks and the rows in even blocks of level m. For m < BASE both are whole
    blocks of BASE rows; `_mask` then leaves out the other rows.
    """
    size = min(max(2 * m, BASE), x_CK.shape[-2])
    x = x_CK.reshape(*x_CK.shape[:-2], -1, size, x_CK.shape[-1])
    return (x, x) if m < BASE else (x[..., m:, :], x[..., :m, :])


def _mask(size: int, m: int):
    """Whether a pair of rows belongs to level m, [size, size], for a block of `size` rows."""
    row, column = indices(size, size)
    return (row // (2 * m) == column // (2 * m)) & (row // m > column // m)


def pairs(x_levels, y_levels, product):
    """The strictly lower matrix [..., C, C] whose entry (i, j) is the product of row i of x and row
    j of y, both taken from the level of the pair (i, j).

    Args:
      x_levels, y_levels: for each level an array [..., C, K].
      product: (x, y) → x yᵀ.
    """
    whole = None
    for level, (x, y) in enumerate(zip(x_levels, y_levels)):
        m = 1 << level
        (odd, _), (_, even) = _rows(x, m), _rows(y, m)
        corner = product(odd, even)
        if m < BASE:
            corner = jnp.where(_mask(corner.shape[-1], m), corner, 0)
            whole = corner if whole is None else whole + corner
            continue
        blocks = whole.reshape(*whole.shape[:-3], -1, 2, m, m)
        upper = jnp.concatenate([blocks[..., 0, :, :], jnp.zeros_like(corner)], axis=-1)
        whole = jnp.concatenate(
            [upper, jnp.concatenate([corner, blocks[..., 1, :, :]], axis=-1)], axis=-2
        )
    return whole[..., 0, :, :]


def pairs_backward(d_CC, x_CK, y_CK, level: int, nn, tn):
    """The gradients (dx, dy), each [..., C, K], of one level of `pairs`.

    Args:
      d_CC: the gradient of the matrix that `pairs` returns.
      nn: (x, y) → x y.
      tn: (x, y) → xᵀ y.
    """
    m = 1 << level
    (odd, _), (_, even) = _rows(x_CK, m), _rows(y_CK, m)
    corner = _diagonal(d_CC, min(max(2 * m, BASE), d_CC.shape[-1]))
    if m < BASE:
        corner = jnp.where(_mask(corner.shape[-1], m), corner, 0)
        return nn(corner, even).reshape(x_CK.shape), tn(corner, odd).reshape(y_CK.shape)
    corner = corner[..., m:, :m]
    dx, dy = nn(corner, even), tn(corner, odd)
    zero = jnp.zeros_like(dx)
    return jnp.concatenate([zero, dx], axis=-2).reshape(x_CK.shape), jnp.concatenate(
        [dy, zero], axis=-2
    ).reshape(y_CK.shape)


def applied(x_CK, y_CK, v_CV, level: int, dots):
    """The product [..., C, V] of v and the matrix of one level of `pairs`. The rows of v, like
    those of x and y, are multiplied by the decays of the level.
    """
    m = 1 << level
    (odd, _), (_, even), (_, values) = _rows(x_CK, m), _rows(y_CK, m), _rows(v_CV, m)
    corner = dots.nt(odd, even)
    if m < BASE:
        return dots.nn(jnp.where(_mask(corner.shape[-1], m), corner, 0), values).reshape(v_CV.shape)
    o = dots.nn(corner, values)
    return jnp.concatenate([jnp.zeros_like(o), o], axis=-2).reshape(v_CV.shape)
