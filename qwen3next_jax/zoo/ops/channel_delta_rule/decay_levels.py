"""The decay between every two rows (tokens) of a chunk, for each channel. The exponents of the
decays are computed as sums of the log decay g, never as differences of sums.

From row j to row i > j, each channel of the state decays by the factor e^{Σ_{j<t≤i} g_t}. With G_i
= Σ_{t≤i} g_t, the decay of a pair (i, j) is e^{G_i} e^{−G_j}, so one matrix product could apply the
decays of all pairs. But e^{−G_j} can overflow, and the difference G_i − G_j would lose precision.
Therefore the pairs of rows are divided into levels m = 1, 2, 4, …, C/2. For level m, the rows of a
chunk are divided into blocks of m rows, numbered from 0. A pair of rows (i, j) belongs to level m
if i is in a block with an odd number and j is in the block just before. The exponent of the decay
of a pair (i, j) of level m is

    (Σ of g from the start of i's block to row i)
    + (Σ of g from the row after j to the end of j's block).

Every pair of rows belongs to exactly one level. Both sums in the exponent are ≤ 0, so nothing
overflows, and g = −∞ is exact. At each level, the decay of a pair of rows (i, j) is the product of
a factor that depends on i and a factor that depends on j.

At a level m < MIN_BLOCK_ROWS, the code multiplies blocks of MIN_BLOCK_ROWS rows and then masks the
pairs of other levels, because a matrix unit is not faster for smaller blocks. At a level m ≥
MIN_BLOCK_ROWS, the code multiplies each odd block with the even block before it.

Letters: C chunk length, K key width, `…` leading dimensions.
"""

import typing

import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import row_and_column_indices

MIN_BLOCK_ROWS = 16  # the fewest rows of a block that is multiplied as a whole


class DecayExponents(typing.NamedTuple):
    """Sums of the log decay g over spans of rows. All sums are ≤ 0. The sums are linear in g, so
    `jax.vjp` of `decay_exponents` computes the gradient of g by sums alone.

    Attributes:
      by_level: for each level an array [..., C, K]. For a row in an odd block, the array holds the
        sum from the block's start to the row; for a row in an even block, the sum from the next row
        to the block's end.
      query_by_level: like `by_level`, for the rows of queries. If a token reads the state before
        its own decay and write, the sums of query_by_level in odd blocks end one row earlier.
        Otherwise query_by_level is `by_level`.
      from_start: [..., C, K], the sum from the chunk's start to each row.
      query_from_start: [..., C, K], like `from_start`, for the rows of queries. If a token reads
        the state before its own decay and write, each sum of query_from_start ends one row earlier.
        Otherwise query_from_start is `from_start`.
      to_end: [..., C, K], the sum from the next row to the chunk's end.
      total: [..., 1, K], the sum over the chunk.
    """

    by_level: tuple
    query_by_level: tuple
    from_start: typing.Any
    query_from_start: typing.Any
    to_end: typing.Any
    total: typing.Any


def decay_exponents(g_CK, reads_before_write: bool) -> DecayExponents:
    """Returns the sums of g over the spans of rows that `DecayExponents` lists.

    Args:
      g_CK: [..., C, K], the log decay of each row.
      reads_before_write: whether a token reads the state before its own decay and write.
    """

    def halves(x, m):  # the even and the odd blocks of m rows, [..., C / 2m, m, K] each
        x = x.reshape(*x.shape[:-2], -1, 2, m, x.shape[-1])
        return x[..., 0, :, :], x[..., 1, :, :]

    def joined(even, odd):
        return jnp.stack([even, odd], axis=-3).reshape(g_CK.shape)

    head, tail, total, read = (
        g_CK,
        jnp.zeros_like(g_CK),
        g_CK,
        jnp.zeros_like(g_CK) if reads_before_write else g_CK,
    )
    levels, reads, m = [], [], 1
    while m < g_CK.shape[-2]:
        (head_even, head_odd), (tail_even, tail_odd), (read_even, read_odd) = (
            halves(x, m) for x in (head, tail, read)
        )
        total_even, total_odd = halves(total, 1)
        levels.append(joined(tail_even, head_odd))
        reads.append(joined(tail_even, read_odd) if reads_before_write else levels[-1])
        head, tail, total = (
            joined(head_even, head_odd + total_even),
            joined(tail_even + total_odd, tail_odd),
            total_even + total_odd,
        )
        read = joined(read_even, read_odd + total_even) if reads_before_write else head
        total, m = total[..., 0, :], 2 * m
    return DecayExponents(tuple(levels), tuple(reads), head, read, tail, total)


# ---- matrices over pairs of rows, level by level
# ----------------------------------------------------------------------------


def _diagonal_blocks(x_CC, size: int):
    """Returns the diagonal blocks of a matrix [..., C, C], as [..., C / size, size, size]."""
    return jnp.stack(
        [x_CC[..., i : i + size, i : i + size] for i in range(0, x_CC.shape[-1], size)], axis=-3
    )


def _odd_and_even_rows(x_CK, m: int):
    """Returns two arrays [..., blocks, rows, K]: the rows in odd blocks and the rows in even blocks
    of level m. For m < MIN_BLOCK_ROWS, both arrays hold all rows, in blocks of MIN_BLOCK_ROWS rows,
    and the caller applies `_level_mask` to the product of the two.
    """
    size = min(max(2 * m, MIN_BLOCK_ROWS), x_CK.shape[-2])
    x = x_CK.reshape(*x_CK.shape[:-2], -1, size, x_CK.shape[-1])
    return (x, x) if m < MIN_BLOCK_ROWS else (x[..., m:, :], x[..., :m, :])


def _level_mask(size: int, m: int):
    """Returns booleans [size, size]: whether each pair of rows of a block of `size` rows belongs to
    level m.
    """
    row, column = row_and_column_indices(size, size)
    return (row // (2 * m) == column // (2 * m)) & (row // m > column // m)


def pair_products(x_levels, y_levels, product):
    """Returns a strictly lower triangular matrix [..., C, C] of inner products. Entry (i, j) of the
    matrix is the inner product of row i of x and row j of y, both taken from the arrays of the
    level to which the pair (i, j) belongs.

    Args:
      x_levels, y_levels: for each level an array [..., C, K].
      product: function (x, y) → x yᵀ.
    """
    whole = None
    for level, (x, y) in enumerate(zip(x_levels, y_levels)):
        m = 1 << level
        (odd, _), (_, even) = _odd_and_even_rows(x, m), _odd_and_even_rows(y, m)
        corner = product(odd, even)
        if m < MIN_BLOCK_ROWS:
            corner = jnp.where(_level_mask(corner.shape[-1], m), corner, 0)
            whole = corner if whole is None else whole + corner
            continue
        blocks = whole.reshape(*whole.shape[:-3], -1, 2, m, m)
        upper = jnp.concatenate([blocks[..., 0, :, :], jnp.zeros_like(corner)], axis=-1)
        whole = jnp.concatenate(
            [upper, jnp.concatenate([corner, blocks[..., 1, :, :]], axis=-1)], axis=-2
        )
    return whole[..., 0, :, :]


def pair_products_backward(d_CC, x_CK, y_CK, level: int, nn, tn):
    """Returns the gradients (dx, dy), each [..., C, K], of the arrays of one level of
    `pair_products`.

    Args:
      d_CC: the gradient of the matrix that `pair_products` returns.
      x_CK, y_CK: the arrays of the level that `pair_products` took.
      level: the index of the level; m = 2^level.
      nn: function (x, y) → x y.
      tn: function (x, y) → xᵀ y.
    """
    m = 1 << level
    (odd, _), (_, even) = _odd_and_even_rows(x_CK, m), _odd_and_even_rows(y_CK, m)
    corner = _diagonal_blocks(d_CC, min(max(2 * m, MIN_BLOCK_ROWS), d_CC.shape[-1]))
    if m < MIN_BLOCK_ROWS:
        corner = jnp.where(_level_mask(corner.shape[-1], m), corner, 0)
        return nn(corner, even).reshape(x_CK.shape), tn(corner, odd).reshape(y_CK.shape)
    corner = corner[..., m:, :m]
    dx, dy = nn(corner, even), tn(corner, odd)
    zero = jnp.zeros_like(dx)
    return jnp.concatenate([zero, dx], axis=-2).reshape(x_CK.shape), jnp.concatenate(
        [dy, zero], axis=-2
    ).reshape(y_CK.shape)


def level_products_times_values(x_CK, y_CK, v_CV, level: int, dots):
    """Returns [..., C, V]: the entries x_i · y_j of the pairs (i, j) of one level, as a matrix,
    times v. The rows of x, y and v are already multiplied by the decays of the level. `level` is
    the index of the level; m = 2^level.
    """
    m = 1 << level
    (odd, _), (_, even), (_, values) = (
        _odd_and_even_rows(x_CK, m),
        _odd_and_even_rows(y_CK, m),
        _odd_and_even_rows(v_CV, m),
    )
    corner = dots.nt(odd, even)
    if m < MIN_BLOCK_ROWS:
        return dots.nn(jnp.where(_level_mask(corner.shape[-1], m), corner, 0), values).reshape(
            v_CV.shape
        )
    o = dots.nn(corner, values)
    return jnp.concatenate([jnp.zeros_like(o), o], axis=-2).reshape(v_CV.shape)
