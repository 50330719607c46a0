"""The inverse of I + L for a strictly lower triangular matrix L, computed with matrix products
alone.

The power series of the inverse, I - L + L^2 - …, is not accurate enough for chunks of 64 rows: if
the keys have a correlation of 0.9, the terms of the series grow until their sum in float32 has no
correct digit. This module uses block elimination, which computes no powers of L. To invert a block
of 2m rows, block elimination takes the inverses X11 and X22 of the block's two diagonal blocks of m
rows, and computes the lower left quarter of the inverse, X21 = -X22 (L21 X11).

C rows of the matrix.
"""

import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import MatrixProducts, row_and_column_indices

BASE = 16


def diagonal_block_inverses(l_CC, exact: MatrixProducts, size: int):
    """Returns [..., C, C]: the inverses of the diagonal blocks of `size` rows of I + L, with zeros
    outside the diagonal blocks.

    The function doubles the size m of the inverted diagonal blocks step by step: X <- X - X L_m X
    for m = 2, 4, …, where L_m is L with zeros outside the lower left m x m quarter of each diagonal
    block of 2m rows.
    """
    row, column = row_and_column_indices(*l_CC.shape[-2:])
    x = jnp.where(
        row == column, 1.0, jnp.where((row // 2 == column // 2) & (row > column), -l_CC, 0)
    )
    m = 2
    while m < size:
        quarter = (row // (2 * m) == column // (2 * m)) & (row // m > column // m)
        x = x - exact.nn(exact.nn(x, jnp.where(quarter, l_CC, 0)), x)
        m *= 2
    return x


def unit_lower_inverse(l_CC, exact: MatrixProducts):
    """Returns (I + L)^{-1}, [..., C, C], for a C that is a power of two. `diagonal_block_inverses`
    inverts the diagonal blocks of 16 rows (one block if C is smaller). After that, pairs of
    neighbouring inverses are merged until one inverse remains.
    """
    size = l_CC.shape[-1]
    base = min(BASE, size)
    blocks = [l_CC[..., i : i + base, i : i + base] for i in range(0, size, base)]
    x = diagonal_block_inverses(jnp.stack(blocks), exact, base)
    inverses = [x[i] for i in range(len(blocks))]
    m = base
    while m < size:
        merged = []
        for i in range(0, len(inverses), 2):
            top, bottom = inverses[i], inverses[i + 1]
            start = i * m
            corner = l_CC[..., start + m : start + 2 * m, start : start + m]
            corner = -exact.nn(bottom, exact.nn(corner, top))
            merged.append(jnp.block([[top, jnp.zeros_like(top)], [corner, bottom]]))
        inverses, m = merged, 2 * m
    return inverses[0]
