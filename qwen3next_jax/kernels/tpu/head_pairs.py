"""Pairs of heads: arrays that hold the matrices of two heads side by side, and products with these
arrays.

A matrix [C, C] with C = 64 fills half of a TPU register's 128 lanes and a sixteenth of the 256 x
256 matrix unit. So the matrices of heads 2e and 2e + 1 lie side by side in the lanes, as a pair
[C, 2C]. In a product of pairs, the right operand is a block-diagonal matrix of the two heads' right
operands. So one product of pairs computes two heads in the time of one head.

E pairs, I = 2E heads, C chunk length, R any number of rows, X any width.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from qwen3next_jax.kernels.tpu.grids import LANES
from qwen3next_jax.ops.delta_rule.chunk_math import (
    HIGHEST,
    MatrixProducts,
    concatenate_split_operands,
    row_and_column_indices,
    split_high_and_low,
)


def is_first_head(shape):
    """Returns booleans of `shape`: whether the lane belongs to the first head of a pair."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) < shape[-1] // 2


def split_heads(x_I):
    """Returns two arrays [E, ...]: the heads 0, 2, 4, … of x_I [I, ...], which come first in their
    pairs, and the heads 1, 3, 5, ….
    """
    x = x_I.reshape(-1, 2, *x_I.shape[1:])
    return x[:, 0], x[:, 1]


def interleave_heads(first_E, second_E):
    """The reverse of `split_heads`."""
    x = jnp.stack([first_E, second_E], axis=1)
    return x.reshape(-1, *x.shape[2:])


def concat_pair(x_IRX):
    """Returns [E, R, 2X], with the two heads of a pair side by side."""
    return jnp.concatenate(split_heads(x_IRX), axis=-1)


def split_pair(x_ERX):
    """The reverse of `concat_pair`."""
    width = x_ERX.shape[-1] // 2
    return interleave_heads(x_ERX[..., :width], x_ERX[..., width:])


def block_diagonal(x_IRX):
    """Returns [E, 2R, 2X], with the first head's matrix in the upper left, the second head's matrix
    in the lower right, and zeros elsewhere.
    """
    first, second = split_heads(x_IRX)
    zero = jnp.zeros_like(first)
    return jnp.concatenate(
        [jnp.concatenate([first, zero], axis=-1), jnp.concatenate([zero, second], axis=-1)], axis=-2
    )


def diagonal_blocks(x_ERX):
    """The reverse of `block_diagonal`; the two blocks off the diagonal are ignored."""
    rows, width = x_ERX.shape[-2] // 2, x_ERX.shape[-1] // 2
    return interleave_heads(x_ERX[:, :rows, :width], x_ERX[:, rows:, width:])


def broadcast_over_lanes(rows_RC):
    """Returns [R, C, LANES], with each number of rows_RC repeated in all lanes."""
    x, shape = rows_RC.T, (rows_RC.shape[1], LANES)
    return jnp.stack([jnp.broadcast_to(x[:, i : i + 1], shape) for i in range(rows_RC.shape[0])])


def broadcast_pairs_over_lanes(rows_EC):
    """Returns [I, C, LANES], with each number of rows_EC [E, 2C] repeated in all lanes."""
    x = broadcast_over_lanes(rows_EC)
    return x.reshape(-1, x.shape[1] // 2, LANES)


def broadcast_pairs_over_lanes_by_product(rows_EC):
    """Returns the same as `broadcast_pairs_over_lanes`, computed by a product with a matrix of ones
    and zeros. The result is exact, because each float32 number is split into three bfloat16 parts
    that add up to the number. Use this function where the cross-lane unit of the TPU is the
    bottleneck, because the function moves the work to the matrix unit.
    """
    count, size = rows_EC.shape[0], rows_EC.shape[1] // 2
    parts, rest = [], rows_EC
    for _ in range(3):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)
    row, column = row_and_column_indices(3 * count, count * LANES)
    pick = (row % count == column // LANES).astype(jnp.bfloat16)
    # [2C, LANES] each
    x = jnp.split(MatrixProducts(jnp.bfloat16).tn(jnp.concatenate(parts), pick), count, axis=1)
    return jnp.stack(x).reshape(-1, size, LANES)


def broadcast_pairs_as_columns(rows_EC):
    """Returns [E, C, 2C]: the C numbers of each head in rows_EC [E, 2C] become a column, which is
    repeated in all lanes of the head's half.
    """
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
    """Returns [I, C, width], x [I, C, LANES] repeated along the last axis. `width` is a multiple of
    LANES.
    """
    return jnp.concatenate([x_ICX] * (width // LANES), axis=-1)


def row_sums(*xs_ICX):
    """Returns a list: for every x [I, C, X] the sums over the last axis, as rows [E, 2C]."""
    size = xs_ICX[0].shape[1]
    # [2C, 1]
    sums = [
        x
        for x_ICX in xs_ICX
        for x in jnp.concatenate(split_heads(jnp.sum(x_ICX, axis=-1, keepdims=True)), axis=1)
    ]
    width = -(-len(sums) // LANES) * LANES
    lane = row_and_column_indices(2 * size, width)[1]
    columns = jnp.zeros((2 * size, width), jnp.float32)
    for i, x in enumerate(sums):
        columns = jnp.where(lane == i, x, columns)
    return jnp.split(columns.T[: len(sums)], len(xs_ICX))


@dataclasses.dataclass(frozen=True)
class PairProducts:
    """Products with operands of the dtype `operand_dtype` and float32 accumulation.

    Each operand is a tuple of parts, whose sum is the operand's value (`split_into_parts`). If
    `operand_dtype` is bfloat16, an operand that needs more precision has two parts: the rounded
    value and the rounded remainder. Every other operand has one part. The product of two operands
    is the sum of the products of their parts, except the product of the two remainders, which is
    too small to matter. `nn` and `tn` concatenate the parts along the contracted axis, so that the
    matrix unit adds up the products of the parts.

    Attributes:
      operand_dtype: the dtype of the parts.
    """

    operand_dtype: typing.Any

    def split_into_parts(self, x):
        """Returns x as a tuple of parts."""
        return split_high_and_low(x, self.operand_dtype)

    @property
    def plain_products(self):
        """Products whose operands are single arrays, not tuples of parts."""
        return MatrixProducts(self.operand_dtype)

    def nn(self, x_parts, y_parts):
        """Returns [I, R, X]: for each head, the head's half [R, C] of the pairs x [E, R, 2C] times
        the head's y [I, C, X].
        """
        x, y = concatenate_split_operands(x_parts, [block_diagonal(y) for y in y_parts], -1, -2)
        return split_pair(self.plain_products.nn(x, y))

    def tn(self, x_parts, y_parts):
        """Returns [I, C, X]: for each head, the transpose of the head's half [R, C] of the pairs x
        [E, R, 2C] times the head's y [I, R, X].
        """
        x, y = concatenate_split_operands(x_parts, [concat_pair(y) for y in y_parts], -2, -2)
        return diagonal_blocks(self.plain_products.tn(x, y))

    def nn_pairs(self, x_parts, y_parts):
        """Returns pairs [E, R, 2C]: for each head, the head's half [R, C] of x [E, R, 2C] times the
        head's half [C, C] of y [E, C, 2C].

        The parts of x are stacked along the rows, and the parts of y along the columns, so that a
        single product computes the products of all parts. The single product loads a quarter as
        many weights into the matrix unit as a product of operands that are concatenated along the
        contracted axis. The loads of weights are most of the cost of small products.
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
            self.plain_products.nn(jnp.concatenate(x_parts, axis=-2), jnp.concatenate(y, axis=-1)),
            x_parts,
            y_parts,
        )

    def nt(self, xs, y_parts):
        """Returns a list: for every x [I, R, X] in `xs`, the products x y^T of all heads with y
        [I, C, X], as pairs [E, R, 2C]. Every x, and y, is given as a tuple of parts.
        """
        x = jnp.concatenate([concat_pair(part) for x_parts in xs for part in x_parts], axis=-2)
        product = self.plain_products.nt(
            x, jnp.concatenate([block_diagonal(part) for part in y_parts], axis=-2)
        )
        products = []
        for x_parts in xs:
            rows = sum(part.shape[-2] for part in x_parts)
            products.append(_sum_part_products(product[:, :rows], x_parts, y_parts))
            product = product[:, rows:]
        return products

    def sums_of_columns_before(self, x_ECC):
        """Returns an array [E, C, 2C]: its column t is the sum of all columns of x [E, C, 2C] that
        come before column t and belong to the same head.
        """
        lanes = x_ECC.shape[-1]
        row, column = row_and_column_indices(lanes, lanes)
        before = ((row < column) & ((row < lanes // 2) == (column < lanes // 2))).astype(
            self.operand_dtype
        )
        x, y = concatenate_split_operands(self.split_into_parts(x_ECC), [before], -1, -2)
        return jax.lax.dot_general(
            x,
            y,
            (((2,), (0,)), ((), ())),
            precision=self.plain_products.precision,
            preferred_element_type=jnp.float32,
        )


def sum_columns_where(rows_EC, condition):
    """Returns an array [..., 2C]: its column t is the sum of all columns i of rows_EC [..., 2C]
    that belong to the same head as column t, and for which condition(i, t) is true.
    """
    lanes = rows_EC.shape[-1]
    row, column = row_and_column_indices(lanes, lanes)
    counted = condition(row, column) & ((row < lanes // 2) == (column < lanes // 2))
    return jnp.matmul(rows_EC, counted.astype(jnp.float32), precision=HIGHEST)


def _sum_part_products(product, x_parts, y_parts):
    """Returns the sum of the blocks of `product`, except the block that is the product of the two
    remainders. Block (i, j) is the product of part i of x and part j of y.
    """
    rows, columns = product.shape[-2] // len(x_parts), product.shape[-1] // len(y_parts)
    at = lambda i, j: product[:, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
    small = [at(0, 1)] if len(y_parts) > 1 else []
    if len(x_parts) > 1:
        small.append(at(1, 0))
    return at(0, 0) if not small else at(0, 0) + sum(small[1:], small[0])


# ---- the inverse of I + L, by blocks; `ops/delta_rule/inverse.py` gives the reason for blocks

DIAGONAL = 16  # rows of a diagonal block
PAIRS_AT_ONCE = 8  # the number of pairs that are inverted together, to hide latency


def unit_lower_pair_inverse(m_ECC, products):
    """Returns (I + L)^{-1} of each head as pairs [E, C, 2C], where L is the strictly lower
    triangular part of the head's matrix in `m_ECC`. `products` is a `PairProducts`.

    The vector unit inverts diagonal blocks of 16 rows by substitution. Then neighbouring blocks are
    merged two by two until there is one block. To merge blocks, the matrix unit computes only the
    rows that change: the rows of every second block.
    """
    size = m_ECC.shape[-2]
    x = _diagonal_block_inverses(m_ECC)
    m_parts = products.split_into_parts(m_ECC)
    m = DIAGONAL
    while m < size:
        blocks = jnp.split(x, size // m, axis=1)
        lower = jnp.concatenate(blocks[1::2], axis=1)
        # Every second block of rows of X L X. It is computed with m_ECC in place of L. That is
        # enough, because the entries that are used, left of the diagonal blocks, do not depend on
        # the entries of m_ECC above the diagonal.
        change = products.nn_pairs(
            products.split_into_parts(products.nn_pairs(products.split_into_parts(lower), m_parts)),
            products.split_into_parts(x),
        )
        row, column = row_and_column_indices(size // 2, 2 * size)
        lower = lower - jnp.where(column % size // m == 2 * (row // m), change, 0)
        blocks[1::2] = jnp.split(lower, size // (2 * m), axis=1)
        x = jnp.concatenate(blocks, axis=1)
        m *= 2
    return x


def _diagonal_block_inverses(m_ECC):
    """Returns [E, C, 2C]: the inverses of the diagonal blocks of 16 rows of I + L, and zeros
    outside the diagonal blocks. For the computation, the diagonal blocks of a pair lie side by side
    in an array [16, 2C].
    """
    size = m_ECC.shape[1]
    blocks = jnp.split(m_ECC, size // DIAGONAL, axis=1)
    row, column = row_and_column_indices(DIAGONAL, 2 * size)
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
    """Returns the inverses (I + L)^{-1} of blocks of 16 x 16 that lie side by side, [n, 16, lanes].

    Step j eliminates row j from the rows below it, in all blocks at once. Each half of a block has
    8 rows, as many as a register.
    """
    half = DIAGONAL // 2
    row, column = row_and_column_indices(DIAGONAL, l.shape[-1])
    identity = jnp.where(row == column % DIAGONAL, 1.0, 0.0)
    x, start = [jnp.split(identity, 2) for _ in l], column[:half] // DIAGONAL * DIAGONAL
    for j in range(DIAGONAL - 1):
        for n, rows in enumerate(x):
            pivot = rows[j // half][j % half : j % half + 1]
            for i in range(j // half, 2):  # column j of every block, repeated along its lanes
                rows[i] = (
                    rows[i]
                    - jnp.take_along_axis(l[n, i * half : (i + 1) * half], start + j, axis=1)
                    * pivot
                )
    return jnp.stack([jnp.concatenate(rows) for rows in x])
