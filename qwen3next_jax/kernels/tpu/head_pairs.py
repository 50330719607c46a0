"""Pairs of heads: the matrices of two heads side by side, and products with them.

A [C, C] matrix of 64 tokens fills half of a TPU register's 128 lanes and a sixteenth of the
256 x 256 matrix unit. So the matrices of heads 2e and 2e + 1 lie side by side in the lanes, as a
pair [C, 2C], and right operands lie as two blocks on the diagonal of one matrix. One product then
computes both heads at the cost of one.

E pairs, I = 2E heads, C chunk length, R any number of rows, X any width.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import (
    HIGHEST,
    Products,
    indices,
    split_precision,
    stack_for_product,
)

LANES = 128


def is_first_head(shape):
    """An array of `shape` that says which lanes belong to the first head of a pair."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) < shape[-1] // 2


def split_heads(x_I):
    """The first heads [E, ...] and the second heads [E, ...] of the pairs."""
    x = x_I.reshape(-1, 2, *x_I.shape[1:])
    return x[:, 0], x[:, 1]


def interleave_heads(first_E, second_E):
    """The reverse of `split_heads`."""
    x = jnp.stack([first_E, second_E], axis=1)
    return x.reshape(-1, *x.shape[2:])


def concat_pair(x_IRX):
    """[E, R, 2X]: the heads of a pair side by side."""
    return jnp.concatenate(split_heads(x_IRX), axis=-1)


def split_pair(x_ERX):
    """The reverse of `concat_pair`."""
    width = x_ERX.shape[-1] // 2
    return interleave_heads(x_ERX[..., :width], x_ERX[..., width:])


def block_diagonal(x_IRX):
    """[E, 2R, 2X]: the first head's matrix in the upper left, the second head's in the lower right,
    zeros elsewhere.
    """
    first, second = split_heads(x_IRX)
    zero = jnp.zeros_like(first)
    return jnp.concatenate(
        [jnp.concatenate([first, zero], axis=-1), jnp.concatenate([zero, second], axis=-1)], axis=-2
    )


def diagonal_blocks(x_ERX):
    """The reverse of `block_diagonal`; it drops the other two blocks."""
    rows, width = x_ERX.shape[-2] // 2, x_ERX.shape[-1] // 2
    return interleave_heads(x_ERX[:, :rows, :width], x_ERX[:, rows:, width:])


def over_lanes(rows_RC):
    """[R, C, LANES]: every number of [R, C] broadcast over the lanes."""
    x, shape = rows_RC.T, (rows_RC.shape[1], LANES)
    return jnp.stack([jnp.broadcast_to(x[:, i : i + 1], shape) for i in range(rows_RC.shape[0])])


def pairs_over_lanes(rows_EC):
    """`over_lanes` of the two heads of every row [E, 2C]: [I, C, LANES]."""
    x = over_lanes(rows_EC)
    return x.reshape(-1, x.shape[1] // 2, LANES)


def pairs_over_lanes_by_product(rows_EC):
    """`pairs_over_lanes` by a product with ones and zeros, in which three bfloat16 parts carry a
    float32 exactly. It moves work to the matrix unit where the cross-lane unit is the bottleneck.
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
    """[E, C, 2C]: rows [E, 2C] as columns, each broadcast over its head's half of the lanes."""
    count, lanes = rows_EC.shape
    size, width = lanes // 2, max(lanes, 2 * count)
    heads = jnp.concatenate(
        [rows_EC[:, :size], rows_EC[:, size:], jnp.zeros((width - 2 * count, size), rows_EC.dtype)]
    )
    first = is_first_head((size, lanes))
    lane = lambda e: jnp.pad(jnp.where(first, e, count + e), ((0, 0), (0, width - lanes)))
    return jnp.stack(
        [jnp.take_along_axis(heads.T, lane(e), axis=1)[:, :lanes] for e in range(count)]
    )


def tile_lanes(x_ICX, width: int):
    """x [I, C, LANES] repeated along the lanes, [I, C, width]; `width` is a multiple of LANES."""
    return jnp.concatenate([x_ICX] * (width // LANES), axis=-1)


def row_sums(*xs_ICX):
    """The sums of the rows of every x [I, C, X], as rows [E, 2C] each."""
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
    """Products with operands of the dtype `operand` and float32 accumulation.

    An operand that must keep its float32 value is a tuple of parts (`split`): in bfloat16 the
    rounded value and the rounded remainder, in float32 the value itself. A product is the sum of
    the products of all pairs of parts but that of two remainders; the matrix unit does most of
    these sums.
    """

    operand: typing.Any

    def split(self, x):
        """x as a tuple of parts."""
        return split_precision(x, self.operand)

    @property
    def plain(self):
        """Products of operands that are one array each."""
        return Products(self.operand)

    def nn(self, x_parts, y_parts):
        """[I, R, X]: pairs x [E, R, 2C] times y [I, C, X] of each head."""
        x, y = stack_for_product(x_parts, [block_diagonal(y) for y in y_parts], -1, -2)
        return split_pair(self.plain.nn(x, y))

    def tn(self, x_parts, y_parts):
        """[I, C, X]: transposed pairs x [E, R, 2C] times y [I, R, X] of each head."""
        x, y = stack_for_product(x_parts, [concat_pair(y) for y in y_parts], -2, -2)
        return diagonal_blocks(self.plain.tn(x, y))

    def nn_pairs(self, x_parts, y_parts):
        """[E, R, 2C]: pairs x [E, R, 2C] times pairs y [E, C, 2C].

        The parts of y lie side by side and those of x below each other. That takes a quarter of the
        loads of stationary operands that parts along the contraction would take, and these loads
        are most of the cost of such small products.
        """
        y = []
        for part in y_parts:
            first, zero = is_first_head(part.shape), jnp.zeros_like(part)
            y.append(
                jnp.concatenate(
                    [jnp.where(first, part, zero), jnp.where(first, zero, part)], axis=-2
                )
            )
        return _sum_part_products(
            self.plain.nn(jnp.concatenate(x_parts, axis=-2), jnp.concatenate(y, axis=-1)),
            x_parts,
            y_parts,
        )

    def nt(self, xs, y_parts):
        """x y^T for every x [I, R, X] of `xs`, with y [I, C, X]: pairs [E, R, 2C] each."""
        x = jnp.concatenate([concat_pair(part) for x_parts in xs for part in x_parts], axis=-2)
        product = self.plain.nt(
            x, jnp.concatenate([block_diagonal(part) for part in y_parts], axis=-2)
        )
        products = []
        for x_parts in xs:
            rows = sum(part.shape[-2] for part in x_parts)
            products.append(_sum_part_products(product[:, :rows], x_parts, y_parts))
            product = product[:, rows:]
        return products

    def sums_before(self, x_ECC):
        """[E, C, 2C]: in column t the sum over the columns of the same head before t."""
        lanes = x_ECC.shape[-1]
        row, column = indices(lanes, lanes)
        before = ((row < column) & ((row < lanes // 2) == (column < lanes // 2))).astype(
            self.operand
        )
        x, y = stack_for_product(self.split(x_ECC), [before], -1, -2)
        return jax.lax.dot_general(
            x,
            y,
            (((2,), (0,)), ((), ())),
            precision=self.plain.precision,
            preferred_element_type=jnp.float32,
        )


def sum_columns_where(rows_EC, condition):
    """[..., 2C]: in column t the sum over the columns i of the same head for which condition(i, t)
    holds.
    """
    lanes = rows_EC.shape[-1]
    row, column = indices(lanes, lanes)
    counted = condition(row, column) & ((row < lanes // 2) == (column < lanes // 2))
    return jnp.matmul(rows_EC, counted.astype(jnp.float32), precision=HIGHEST)


def _sum_part_products(product, x_parts, y_parts):
    """The sum of a product's blocks, one for each pair of parts (x's below each other, y's side by
    side), without that of two remainders.
    """
    rows, columns = product.shape[-2] // len(x_parts), product.shape[-1] // len(y_parts)
    at = lambda i, j: product[:, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
    small = [at(i, j) for i in range(len(x_parts)) for j in range(len(y_parts)) if i + j == 1]
    return at(0, 0) if not small else at(0, 0) + sum(small[1:], small[0])


# ---- the inverse of I + L; `ops/delta_rule/inverse.py` says why it is computed by blocks

DIAGONAL = 16  # rows of a diagonal block
PAIRS_AT_ONCE = 8  # whose eliminations run interleaved, to hide latency


def pair_inverse(m_ECC, products):
    """(I + L)^{-1} [E, C, 2C] of pairs, L being the strictly lower part of m.

    The vector unit inverts diagonal blocks of 16 rows by substitution. Then blocks are merged two
    by two; only the rows that change pass through the matrix unit.
    """
    size = m_ECC.shape[-2]
    x = _diagonal_inverse(m_ECC)
    m_parts = products.split(m_ECC)
    m = DIAGONAL
    while m < size:
        blocks = jnp.split(x, size // m, axis=1)
        lower = jnp.concatenate(blocks[1::2], axis=1)
        # The rows of every second block of X L X. Only the quarter left of the block's diagonal is
        # used; nothing of m above the diagonal enters it.
        change = products.nn_pairs(
            products.split(products.nn_pairs(products.split(lower), m_parts)), products.split(x)
        )
        row, column = indices(size // 2, 2 * size)
        lower = lower - jnp.where(column % size // m == 2 * (row // m), change, 0)
        blocks[1::2] = jnp.split(lower, size // (2 * m), axis=1)
        x = jnp.concatenate(blocks, axis=1)
        m *= 2
    return x


def _diagonal_inverse(m_ECC):
    """The inverses of the diagonal blocks of 16 rows, zeros elsewhere. The blocks of a pair are
    packed side by side for it, in two registers.
    """
    size = m_ECC.shape[1]
    blocks = jnp.split(m_ECC, size // DIAGONAL, axis=1)
    row, column = indices(DIAGONAL, 2 * size)
    block = column % size // DIAGONAL
    packed = blocks[0]
    for i in range(1, len(blocks)):
        packed = jnp.where(block == i, blocks[i], packed)
    packed = jnp.where(row > column % DIAGONAL, packed, 0)
    x = jnp.concatenate(
        [
            _forward_substitution(packed[e : e + PAIRS_AT_ONCE])
            for e in range(0, packed.shape[0], PAIRS_AT_ONCE)
        ]
    )
    return jnp.concatenate([jnp.where(block == i, x, 0) for i in range(len(blocks))], axis=1)


def _forward_substitution(l):
    """(I + L)^{-1} of blocks of 16 rows side by side, [n, 16, lanes].

    Step j eliminates row j from the rows below it, in all blocks at once. A half of a block is the
    8 rows of a register.
    """
    half = DIAGONAL // 2
    row, column = indices(DIAGONAL, l.shape[-1])
    identity = jnp.where(row == column % DIAGONAL, 1.0, 0.0)
    x, start = [jnp.split(identity, 2) for _ in l], column[:half] // DIAGONAL * DIAGONAL
    for j in range(DIAGONAL - 1):
        for n, rows in enumerate(x):
            pivot = rows[j // half][j % half : j % half + 1]
            for i in range(j // half, 2):  # column j of every block, broadcast along its lanes
                rows[i] = (
                    rows[i]
                    - jnp.take_along_axis(l[n, i * half : (i + 1) * half], start + j, axis=1)
                    * pivot
                )
    return jnp.stack([jnp.concatenate(rows) for rows in x])
