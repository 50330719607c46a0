"""The inverse of I + L, L strictly lower triangular, out of plain matrix products.

A power series of L is unsafe at these sizes: with keys correlated 0.9 its terms grow until float32 holds nothing of the
result. Block elimination never forms those powers: (I + L)^{-1} of a 2m block follows from the inverses of its two
diagonal m blocks as X21 = -X22 (L21 X11).
"""

import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import Products, indices

BASE = 16


def ladder(l_CC, exact: Products, size: int):
    """(I + L)^{-1} of blocks of `size` rows by doubling on masked whole matrices: X <- X - X L_m X, where L_m keeps of L only
    the lower-left m x m quarter of each 2m diagonal block."""
    row, column = indices(*l_CC.shape[-2:])
    x = jnp.where(row == column, 1.0, jnp.where((row // 2 == column // 2) & (row > column), -l_CC, 0))
    m = 2
    while m < size:
        quarter = (row // (2 * m) == column // (2 * m)) & (row // m > column // m)
        x = x - exact.nn(exact.nn(x, jnp.where(quarter, l_CC, 0)), x)
        m *= 2
    return x


def unit_lower_inverse(l_CC, exact: Products):
    """(I + L)^{-1}, [..., C, C], for C a power of two: the ladder inside 16-row diagonal blocks, then block merges."""
    size = l_CC.shape[-1]
    base = min(BASE, size)
    blocks = [l_CC[..., i : i + base, i : i + base] for i in range(0, size, base)]
    x = ladder(jnp.stack(blocks), exact, base)
    inverses = [x[i] for i in range(len(blocks))]
    m = base
    while m < size:
        merged = []
        for i in range(0, len(inverses), 2):
            top, bottom = inverses[i], inverses[i + 1]
            start = i * m
            corner = l_CC[..., start + m : start + 2 * m, start : start + m]
            corner = -exact.nn(bottom, exact.nn(corner, top))
            merged.append(
                jnp.concatenate([jnp.concatenate([top, jnp.zeros_like(top)], axis=-1), jnp.concatenate([corner, bottom], axis=-1)],
                                axis=-2)
            )
        inverses, m = merged, 2 * m
    return inverses[0]


# ---- inside a TPU kernel: twins [E, C, 2C] ------------------------------------------------------------------------------

DIAGONAL, TOGETHER = 16, 8  # rows of a block; twins whose chains of eliminations hide each other's latency


def twin_inverse(m_ECC, products):
    """(I + L)^{-1}, L the strictly lower part of m, for two heads side by side (`twins.py`).

    16-row diagonal blocks by substitution on the vector unit, then merges of which only the rows that change go through the
    matrix unit.
    """
    size = m_ECC.shape[-2]
    x = _diagonal_inverse(m_ECC)
    parts = products.parts(m_ECC)
    m = DIAGONAL
    while m < size:
        blocks = jnp.split(x, size // m, axis=1)
        lower = jnp.concatenate(blocks[1::2], axis=1)
        # Every second block's rows of X L X. Only the quarter left of the block's diagonal is part of the result; it takes
        # nothing of m above the diagonal.
        change = products.twins(products.parts(products.twins(products.parts(lower), parts)), products.parts(x))
        row, column = indices(size // 2, 2 * size)
        lower = lower - jnp.where(column % size // m == 2 * (row // m), change, 0)
        blocks[1::2] = jnp.split(lower, size // (2 * m), axis=1)
        x = jnp.concatenate(blocks, axis=1)
        m *= 2
    return x


def _diagonal_inverse(m_ECC):
    """The inverses of the 16-row diagonal blocks, in place. The blocks of a twin, packed, fill two registers."""
    size = m_ECC.shape[1]
    blocks = jnp.split(m_ECC, size // DIAGONAL, axis=1)
    row, column = indices(DIAGONAL, 2 * size)
    own = column % size // DIAGONAL
    packed = blocks[0]
    for i in range(1, len(blocks)):
        packed = jnp.where(own == i, blocks[i], packed)
    packed = jnp.where(row > column % DIAGONAL, packed, 0)
    x = jnp.concatenate([_substitute(packed[e : e + TOGETHER]) for e in range(0, packed.shape[0], TOGETHER)])
    return jnp.concatenate([jnp.where(own == i, x, 0) for i in range(len(blocks))], axis=1)


def _substitute(l):
    """(I + L)^{-1} of 16x16 blocks side by side, [n, 16, lanes]: row j is eliminated from all rows of all blocks at once. Half of
    a block is a register's 8 rows; what lies above row j stays."""
    half = DIAGONAL // 2
    row, column = indices(DIAGONAL, l.shape[-1])
    identity = jnp.where(row == column % DIAGONAL, 1.0, 0.0)
    x, start = [jnp.split(identity, 2) for _ in l], column[:half] // DIAGONAL * DIAGONAL
    for j in range(DIAGONAL - 1):
        for n, rows in enumerate(x):
            pivot = rows[j // half][j % half : j % half + 1]
            for i in range(j // half, 2):  # by column j of every block, along its lanes
                rows[i] = rows[i] - jnp.take_along_axis(l[n, i * half : (i + 1) * half], start + j, axis=1) * pivot
    return jnp.stack([jnp.concatenate(rows) for rows in x])
