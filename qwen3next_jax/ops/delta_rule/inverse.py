"""The inverse of I + L, L strictly lower triangular, out of plain matrix products.

A power series of L is unsafe at these sizes: with keys correlated 0.9 its terms grow until float32 holds nothing of the
result. Block elimination never forms those powers: (I + L)^{-1} of a 2m block follows from the inverses of its two
diagonal m blocks as X21 = -X22 (L21 X11).
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import Products, lower_mask

BASE = 16


def ladder(l_CC, exact: Products, size: int):
    """(I + L)^{-1} of blocks of `size` rows by doubling on masked whole matrices: X <- X - X L_m X, where L_m keeps of L only
    the lower-left m x m quarter of each 2m diagonal block."""
    row, column = _indices(*l_CC.shape[-2:])
    x = jnp.where(row == column, 1.0, jnp.where((row // 2 == column // 2) & (row > column), -l_CC, 0))
    m = 2
    while m < size:
        quarter = (row // (2 * m) == column // (2 * m)) & (row // m > column // m)
        x = x - exact.nn(exact.nn(x, jnp.where(quarter, l_CC, 0)), x)
        m *= 2
    return x


def _indices(rows: int, columns: int):
    shape = (rows, columns)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)


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
                jnp.concatenate(
                    [jnp.concatenate([top, jnp.zeros_like(top)], axis=-1), jnp.concatenate([corner, bottom], axis=-1)],
                    axis=-2,
                )
            )
        inverses, m = merged, 2 * m
    return inverses[0]


# ---- inside a TPU kernel: [I, C, C], I heads ----------------------------------------------------------------------------

DIAGONAL, LANES = 16, 128


def tiled_inverse(l_ICC, exact):
    """The same inverse shaped for a TPU: 16-row diagonal blocks by substitution on the vector unit, where all of them fit in a
    few registers, then merges of which only the rows that change go through the matrix unit."""
    heads, size = l_ICC.shape[:2]
    x = _diagonal_inverse(l_ICC)
    l = exact.split(l_ICC)
    m = DIAGONAL
    while m < size:
        blocks = jnp.split(x, size // m, axis=1)
        lower = jnp.concatenate(blocks[1::2], axis=1)
        # Every second block's rows of X L X; outside the quarter left of the block's diagonal they are no part of the result.
        change = exact.nn(exact.split(exact.nn(exact.split(lower), l)), exact.split(x))
        row, column = _indices(size // 2, size)
        lower = lower - jnp.where(column // m == 2 * (row // m), change, 0)
        blocks[1::2] = jnp.split(lower, size // (2 * m), axis=1)
        x = jnp.concatenate(blocks, axis=1)
        m *= 2
    return x


def _diagonal_inverse(l_ICC):
    """The inverses of the 16-row diagonal blocks, in place on the diagonal. The blocks of several heads are packed side by side
    along the lanes; row j is then eliminated from all of them at once."""
    heads, size = l_ICC.shape[:2]
    tiles = size // DIAGONAL
    shape = (1, tiles, DIAGONAL, size)
    own = jax.lax.broadcasted_iota(jnp.int32, shape, 3) // DIAGONAL == jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    packed = jnp.sum(jnp.where(own, l_ICC.reshape(heads, tiles, DIAGONAL, size), 0), axis=1)  # [I, 16, C]
    per_group = max(LANES // size, 1)
    inverses = []
    for start in range(0, heads, per_group):
        group = [packed[i] for i in range(start, min(start + per_group, heads))]
        group += [jnp.zeros_like(group[0])] * (per_group - len(group))
        x = _substitute(jnp.concatenate(group, axis=1))
        inverses += [x[:, i * size : (i + 1) * size] for i in range(per_group)]
    x = jnp.stack(inverses[:heads])[:, None]
    return jnp.where(own, x, 0).reshape(heads, size, size)


def _substitute(l):
    """(I + L)^{-1} of 16x16 blocks side by side, [16, 128]."""
    row, column = _indices(*l.shape)
    x = jnp.where(row == column % DIAGONAL, 1.0, 0.0)
    for j in range(DIAGONAL - 1):
        factors = jnp.take_along_axis(
            l, column // DIAGONAL * DIAGONAL + j, axis=1
        )  # column j of every block, along its lanes
        x = x - factors * x[j : j + 1]
    return x
