"""Decay between the rows of a chunk, a number per channel: a ladder of references, of sums that
are never differences.

The pair of rows i > j decays by e^{Σ_{j<t≤i} g_t} in each channel, which no product of a
function of i and one of j gives safely: e^{G_i} e^{−G_j} overflows, and G_i − G_j loses what
float32 has. But at level m = 1, 2, 4, …, C/2 the pairs with i in an odd block of m rows and j in
the even block before it meet at the border between the two: the exponent is

    (Σ of g from the start of i's block to row i) + (Σ of g from the row after j to the end of
    j's block),

both ≤ 0 and both sums. Every pair is at exactly one level. So no exponent is positive, nothing
overflows, and g = −∞ is exact.

Up to BASE rows a level is a masked product of whole blocks of BASE rows (a matrix unit takes
nothing smaller); from there on it is a product of the odd block with the even one.

C chunk length, K key width, `…` leading dimensions.
"""

import typing

import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import indices

BASE = 16


class Exponents(typing.NamedTuple):
    """Sums of g, all ≤ 0 and linear in g: `jax.vjp` of `exponents` gives dg as sums, too.

    levels: per level [..., C, K]; of a row in an odd block from the block's start to the row, in
    an even one from the row after to the end. reads: the same of the rows that read; those in
    odd blocks stop a row earlier where the read comes before decay and write. enter,
    reads_enter: [..., C, K] from the chunk's start. leave: from the row after to the chunk's
    end. total: [..., 1, K].
    """

    levels: tuple
    reads: tuple
    enter: typing.Any
    reads_enter: typing.Any
    leave: typing.Any
    total: typing.Any


def exponents(g_CK, before: bool) -> Exponents:
    """`before`: reads come before the row's own decay and write."""

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
    """[..., C / size, size, size] the blocks on the diagonal."""
    return jnp.stack(
        [x_CC[..., i : i + size, i : i + size] for i in range(0, x_CC.shape[-1], size)], axis=-3
    )


def _rows(x_CK, m: int):
    """The odd and the even rows of level m; below BASE whole blocks, whose other rows the mask
    leaves out.
    """
    size = min(max(2 * m, BASE), x_CK.shape[-2])
    x = x_CK.reshape(*x_CK.shape[:-2], -1, size, x_CK.shape[-1])
    return (x, x) if m < BASE else (x[..., m:, :], x[..., :m, :])


def _mask(size: int, m: int):
    """Pairs of level m in a block of `size` rows."""
    row, column = indices(size, size)
    return (row // (2 * m) == column // (2 * m)) & (row // m > column // m)


def pairs(x_levels, y_levels, product):
    """[..., C, C] the strictly lower matrix whose entry (i, j) is the product of row i of x and
    row j of y, each at its level.

    x_levels, y_levels: per level [..., C, K]. product: x, y → x yᵀ.
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
    """(dx, dy) [..., C, K] of one level of `pairs` from the gradient d of its matrix. nn: x y;
    tn: xᵀ y.
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
    """[..., C, V] one level's matrix of `pairs` times v, whose rows stand at the levels' borders
    as those of x and y do.
    """
    m = 1 << level
    (odd, _), (_, even), (_, values) = _rows(x_CK, m), _rows(y_CK, m), _rows(v_CV, m)
    corner = dots.nt(odd, even)
    if m < BASE:
        return dots.nn(jnp.where(_mask(corner.shape[-1], m), corner, 0), values).reshape(v_CV.shape)
    o = dots.nn(corner, values)
    return jnp.concatenate([jnp.zeros_like(o), o], axis=-2).reshape(v_CV.shape)
