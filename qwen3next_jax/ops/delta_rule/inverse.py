"""The inverse of I + L, L strictly lower triangular, out of plain matrix products.

A power series of L is unsafe at these sizes: with keys correlated 0.9 its terms grow until float32 holds nothing of the
result. Block elimination never forms those powers: (I + L)^{-1} of a 2m block follows from the inverses of its two
diagonal m blocks as X21 = -X22 (L21 X11).
"""
import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import Products, lower_mask

BASE = 16


def ladder(l_CC, exact, size: int):
  """(I + L)^{-1} of blocks of `size` rows by doubling, on masked whole matrices [..., C, C]."""
  row, column = _indices(l_CC)
  x = jnp.where(row == column, 1., jnp.where((row // 2 == column // 2) & (row > column), -l_CC, 0))
  m = 2
  while m < size:
    x = double(x, l_CC, m, exact)
    m *= 2
  return x


def double(x_CC, l_CC, m: int, exact):
  """From the inverses of the m-row diagonal blocks to those of the 2m-row blocks: X <- X - X L_m X, where L_m keeps of L only
  the lower-left m x m quarter of each 2m block. Only every second block of m rows changes, and only it is multiplied."""
  row, column = _indices(l_CC)
  quarter = jnp.where((row // (2 * m) == column // (2 * m)) & (row // m > column // m), l_CC, 0)
  if m < 8:  # less than a tile of sublanes: cutting rows apart costs more than multiplying all of them
    return x_CC - exact.nn(exact.nn(x_CC, quarter), x_CC)
  blocks = jnp.split(x_CC, l_CC.shape[-1] // m, axis=-2)
  lower = jnp.concatenate(blocks[1::2], axis=-2)
  lower = lower - exact.nn(exact.nn(lower, quarter), x_CC)
  blocks[1::2] = jnp.split(lower, len(blocks) // 2, axis=-2)
  return jnp.concatenate(blocks, axis=-2)


def _indices(l_CC):
  shape = l_CC.shape[-2:]
  return jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def unit_lower_inverse(l_CC, exact: Products):
  """(I + L)^{-1}, [..., C, C], for C a power of two: the ladder inside 16-row diagonal blocks, then block merges."""
  size = l_CC.shape[-1]
  base = min(BASE, size)
  blocks = [l_CC[..., i:i + base, i:i + base] for i in range(0, size, base)]
  x = ladder(jnp.stack(blocks), exact, base)
  inverses = [x[i] for i in range(len(blocks))]
  m = base
  while m < size:
    merged = []
    for i in range(0, len(inverses), 2):
      top, bottom = inverses[i], inverses[i + 1]
      start = i * m
      corner = l_CC[..., start + m:start + 2 * m, start:start + m]
      corner = -exact.nn(bottom, exact.nn(corner, top))
      merged.append(jnp.concatenate([jnp.concatenate([top, jnp.zeros_like(top)], axis=-1),
                                     jnp.concatenate([corner, bottom], axis=-1)], axis=-2))
    inverses, m = merged, 2 * m
  return inverses[0]
