"""Matrices of two heads side by side, and their products with what belongs to one head.

A [C, C] matrix of 64 tokens fills half of a TPU register's 128 lanes and a sixteenth of the 256
x 256 matrix unit. So those of heads 2e and 2e + 1 lie side by side in the lanes, a pair [C, 2C],
and right operands lie on the diagonal of one matrix: a product then takes both heads at the
price of one.

E pairs, I = 2E heads, C chunk length, R rows, X any width.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import HIGHEST, Products, indices, parts, stacked

LANES = 128


def is_first_head(shape):
    """Whether a lane belongs to the first head of its pair."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) < shape[-1] // 2


def split_heads(x_I):
    """[I, ...] to the first heads and the second ones, [E, ...] each."""
    x = x_I.reshape(-1, 2, *x_I.shape[1:])
    return x[:, 0], x[:, 1]


def interleave_heads(first_E, second_E):
    """The reverse of `split_heads`."""
    x = jnp.stack([first_E, second_E], axis=1)
    return x.reshape(-1, *x.shape[2:])


def concat_pair(x_IRX):
    """[E, R, 2X]."""
    return jnp.concatenate(split_heads(x_IRX), axis=-1)


def split_pair(x_ERX):
    """The reverse of `concat_pair`."""
    width = x_ERX.shape[-1] // 2
    return interleave_heads(x_ERX[..., :width], x_ERX[..., width:])


def block_diagonal(x_IRX):
    """[E, 2R, 2X]: the first head's in the upper left, the second one's in the lower right,
    zeros elsewhere.
    """
    first, second = split_heads(x_IRX)
    zero = jnp.zeros_like(first)
    return jnp.concatenate(
        [jnp.concatenate([first, zero], axis=-1), jnp.concatenate([zero, second], axis=-1)], axis=-2
    )


def diagonal_blocks(x_ERX):
    """The reverse of `block_diagonal`; what lies elsewhere is dropped."""
    rows, width = x_ERX.shape[-2] // 2, x_ERX.shape[-1] // 2
    return interleave_heads(x_ERX[:, :rows, :width], x_ERX[:, rows:, width:])


def over_lanes(rows_RC):
    """[R, C] to [R, C, LANES], every lane of a row of the result holding that row's number."""
    x, shape = rows_RC.T, (rows_RC.shape[1], LANES)
    return jnp.stack([jnp.broadcast_to(x[:, i : i + 1], shape) for i in range(rows_RC.shape[0])])


def pairs_over_lanes(rows_EC):
    """`over_lanes` of the two heads of every row [E, 2C]: [I, C, LANES]."""
    x = over_lanes(rows_EC)
    return x.reshape(-1, x.shape[1] // 2, LANES)


def pairs_over_lanes_by_product(rows_EC):
    """`pairs_over_lanes` by a product with ones and zeros, in which three bfloat16 parts carry a
    float32 exactly: work for the matrix unit where the cross-lane unit has more than enough.
    """
    count, size = rows_EC.shape[0], rows_EC.shape[1] // 2
    parts, rest = [], rows_EC
    for _ in range(3):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)
    row, column = indices(3 * count, count * LANES)
    pick = (row % count == column // LANES).astype(jnp.bfloat16)
    # [2C, LANES] each
    x = jnp.split(Products(jnp.bfloat16).tn(jnp.concatenate(parts), pick), count, axis=1)
    return jnp.stack(x).reshape(-1, size, LANES)


def pair_columns(rows_EC):
    """[E, C, 2C]: the numbers of rows [E, 2C] in columns, each head's over its half of the
    lanes.
    """
    count, lanes = rows_EC.shape
    size, width = lanes // 2, max(lanes, 2 * count)
    both = jnp.concatenate(
        [rows_EC[:, :size], rows_EC[:, size:], jnp.zeros((width - 2 * count, size), rows_EC.dtype)]
    )
    first = is_first_head((size, lanes))
    lane = lambda e: jnp.pad(jnp.where(first, e, count + e), ((0, 0), (0, width - lanes)))
    return jnp.stack(
        [jnp.take_along_axis(both.T, lane(e), axis=1)[:, :lanes] for e in range(count)]
    )


def tile_lanes(spread_ICX, width: int):
    """What is spread over LANES, for a multiple of them."""
    return jnp.concatenate([spread_ICX] * (width // LANES), axis=-1)


def row_sums(*xs_ICX):
    """[E, 2C] each: the sums of every row, the two heads of a pair in one row."""
    size = xs_ICX[0].shape[1]
    # [2C, 1]
    sums = [
        x
        for x_ICX in xs_ICX
        for x in jnp.concatenate(split_heads(jnp.sum(x_ICX, axis=-1, keepdims=True)), axis=1)
    ]
    width = -(-len(sums) // LANES) * LANES
    lane = indices(2 * size, width)[1]
    columns = jnp.zeros((2 * size, width), jnp.float32)
    for i, x in enumerate(sums):
        columns = jnp.where(lane == i, x, columns)
    return jnp.split(columns.T[: len(sums)], len(xs_ICX))


@dataclasses.dataclass(frozen=True)
class PairProducts:
    """Products with operands in `operand` and float32 accumulation.

    bfloat16 operands that must keep their value go in two parts, high and low, of which `parts`
    makes a tuple; all products of parts but low with low are summed, most of them inside the
    matrix unit. float32 operands are one part.
    """

    operand: typing.Any

    def parts(self, x):
        return parts(x, self.operand)

    @property
    def plain(self):
        return Products(self.operand)

    def nn(self, x_parts, y_parts):
        """[I, R, X]: pairs [E, R, 2C] times what each head holds [I, C, X]."""
        x, y = stacked(x_parts, [block_diagonal(y) for y in y_parts], -1, -2)
        return split_pair(self.plain.nn(x, y))

    def tn(self, x_parts, y_parts):
        """[I, C, X]: pairs [E, R, 2C] transposed times what each head holds [I, R, X]."""
        x, y = stacked(x_parts, [concat_pair(y) for y in y_parts], -2, -2)
        return diagonal_blocks(self.plain.tn(x, y))

    def pairs(self, x_parts, y_parts):
        """[E, R, 2C]: pairs [E, R, 2C] times pairs [E, C, 2C].

        Parts of y go beside each other, parts of x below each other: a quarter of the loads of
        stationary operands that a stack along the contraction takes, and there is little else in
        these small products.
        """
        y = []
        for part in y_parts:
            first, zero = is_first_head(part.shape), jnp.zeros_like(part)
            y.append(
                jnp.concatenate(
                    [jnp.where(first, part, zero), jnp.where(first, zero, part)], axis=-2
                )
            )
        return _quarters(
            self.plain.nn(jnp.concatenate(x_parts, axis=-2), jnp.concatenate(y, axis=-1)),
            x_parts,
            y_parts,
        )

    def nt(self, xs, y_parts):
        """[E, R, 2C] each: x y^T of every head for parts of x [I, R, X] and y [I, C, X]."""
        x = jnp.concatenate([concat_pair(part) for x_parts in xs for part in x_parts], axis=-2)
        product = self.plain.nt(
            x, jnp.concatenate([block_diagonal(part) for part in y_parts], axis=-2)
        )
        found = []
        for x_parts in xs:
            rows = sum(part.shape[-2] for part in x_parts)
            found.append(_quarters(product[:, :rows], x_parts, y_parts))
            product = product[:, rows:]
        return found

    def sums_before(self, x_ECC):
        """Column t: the sum over the columns of the same head before t."""
        lanes = x_ECC.shape[-1]
        row, column = indices(lanes, lanes)
        before = ((row < column) & ((row < lanes // 2) == (column < lanes // 2))).astype(
            self.operand
        )
        x, y = stacked(self.parts(x_ECC), [before], -1, -2)
        return jax.lax.dot_general(
            x,
            y,
            (((2,), (0,)), ((), ())),
            precision=self.plain.precision,
            preferred_element_type=jnp.float32,
        )


def sums(rows_EC, counts):
    """[..., 2C] column t: the sum over the columns i of the same head for which counts(i, t)
    holds.
    """
    lanes = rows_EC.shape[-1]
    row, column = indices(lanes, lanes)
    counted = counts(row, column) & ((row < lanes // 2) == (column < lanes // 2))
    return jnp.matmul(rows_EC, counted.astype(jnp.float32), precision=HIGHEST)


def _quarters(product, x_parts, y_parts):
    """The sum over the pairs of parts that count, x's below each other and y's beside each
    other.
    """
    rows, columns = product.shape[-2] // len(x_parts), product.shape[-1] // len(y_parts)
    at = lambda i, j: product[:, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
    small = [at(i, j) for i in range(len(x_parts)) for j in range(len(y_parts)) if i + j == 1]
    return at(0, 0) if not small else at(0, 0) + sum(small[1:], small[0])


# ---- the inverse of I + L (`inverse.py` says why this way)
# ---------------------------------------------------------------

# rows of a block; pairs whose chains of eliminations hide each other's latency
DIAGONAL, TOGETHER = 16, 8


def pair_inverse(m_ECC, products):
    """(I + L)^{-1}, L the strictly lower part of m, for two heads side by side.

    16-row diagonal blocks by substitution on the vector unit, then merges of which only the rows
    that change go through the matrix unit.
    """
    size = m_ECC.shape[-2]
    x = _diagonal_inverse(m_ECC)
    parts = products.parts(m_ECC)
    m = DIAGONAL
    while m < size:
        blocks = jnp.split(x, size // m, axis=1)
        lower = jnp.concatenate(blocks[1::2], axis=1)
        # Every second block's rows of X L X. Only the quarter left of the block's diagonal is part
        # of the result; it takes nothing of m above the diagonal.
        change = products.pairs(
            products.parts(products.pairs(products.parts(lower), parts)), products.parts(x)
        )
        row, column = indices(size // 2, 2 * size)
        lower = lower - jnp.where(column % size // m == 2 * (row // m), change, 0)
        blocks[1::2] = jnp.split(lower, size // (2 * m), axis=1)
        x = jnp.concatenate(blocks, axis=1)
        m *= 2
    return x


def _diagonal_inverse(m_ECC):
    """The inverses of the 16-row diagonal blocks, in place. The blocks of a pair, packed, fill
    two registers.
    """
    size = m_ECC.shape[1]
    blocks = jnp.split(m_ECC, size // DIAGONAL, axis=1)
    row, column = indices(DIAGONAL, 2 * size)
    own = column % size // DIAGONAL
    packed = blocks[0]
    for i in range(1, len(blocks)):
        packed = jnp.where(own == i, blocks[i], packed)
    packed = jnp.where(row > column % DIAGONAL, packed, 0)
    x = jnp.concatenate(
        [_substitute(packed[e : e + TOGETHER]) for e in range(0, packed.shape[0], TOGETHER)]
    )
    return jnp.concatenate([jnp.where(own == i, x, 0) for i in range(len(blocks))], axis=1)


def _substitute(l):
    """(I + L)^{-1} of 16x16 blocks side by side, [n, 16, lanes]: row j is eliminated from all
    rows of all blocks at once. Half of a block is a register's 8 rows; what lies above row j
    stays.
    """
    half = DIAGONAL // 2
    row, column = indices(DIAGONAL, l.shape[-1])
    identity = jnp.where(row == column % DIAGONAL, 1.0, 0.0)
    x, start = [jnp.split(identity, 2) for _ in l], column[:half] // DIAGONAL * DIAGONAL
    for j in range(DIAGONAL - 1):
        for n, rows in enumerate(x):
            pivot = rows[j // half][j % half : j % half + 1]
            for i in range(j // half, 2):  # by column j of every block, along its lanes
                rows[i] = (
                    rows[i]
                    - jnp.take_along_axis(l[n, i * half : (i + 1) * half], start + j, axis=1)
                    * pivot
                )
    return jnp.stack([jnp.concatenate(rows) for rows in x])
