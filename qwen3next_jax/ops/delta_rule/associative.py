"""Computes the state before every chunk with an associative scan. A chunk changes the state by an
affine map, S' = M S + U, and the composition of affine maps is associative. In the notation of
`chunk_math`:

  M = carry I - K^T rho A beta gamma K     U = K^T rho A beta V
  (M2, U2) after (M1, U1) = (M2 M1, M2 U1 + U2)

`context.py` composes the maps of the shards of a sequence in the same way. The matrices M are
float32 (float64 for float64 inputs), because rounding errors compound in products of many matrices.
If a document starts inside a chunk, the chunk's M is zero, because carry is 0, and rho or gamma is
0 in every row.

N chunks, B batch, H value heads, C chunk length, K key width, V value width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import Chunk, MatrixProducts, RowScaled


def compose_affine_maps(first, second, exact: MatrixProducts):
    """Returns the affine map that applies `first` and then `second`. Each map is a pair
    (M [..., K, K], U [..., K, V]).
    """
    (m1, u1), (m2, u2) = first, second
    return exact.nn(m2, m1), exact.nn(m2, u1) + u2


def _apply_row_scales(k):
    """Returns k as one array. If k is `RowScaled`, each row is multiplied by its scale."""
    return k.scale_column * k.unscaled if isinstance(k, RowScaled) else k


def affine_maps_of_chunks(c: Chunk, exact: MatrixProducts):
    """Returns M [N, B, H, K, K] and U [N, B, H, K, V] of all chunks."""
    k = _apply_row_scales(c.k)
    identity = c.decay.carry * jnp.eye(k.shape[-1], dtype=exact.operand_dtype)
    k_rho = c.decay.rho * k
    if c.inverse is None:
        return identity, exact.tn(k_rho, c.beta * c.v)
    written_keys = exact.nn(c.inverse, c.beta * c.decay.gamma * k)
    return identity - exact.tn(k_rho, written_keys), exact.tn(
        k_rho, exact.nn(c.inverse, c.beta * c.v)
    )


def states_before_each_map(maps, first, exact: MatrixProducts, reverse: bool):
    """Applies N maps to a state, one after another. Returns the state before each map,
    [N, ..., K, V], and the state after all maps, [..., K, V].

    Args:
      maps: the pair (M [N, ..., K, K], U [N, ..., K, V]).
      first: [..., K, V], the state before the map that is applied first.
      exact: the matrix products, in float32 or float64, that compose the maps.
      reverse: whether the maps are applied from the last map to the first map.
    """
    m, u = jax.lax.associative_scan(
        lambda a, b: compose_affine_maps(a, b, exact), maps, reverse=reverse
    )
    after = exact.nn(m, jnp.broadcast_to(first, u.shape)) + u
    if reverse:
        return jnp.concatenate([after[1:], first[None]]), after[0]
    return jnp.concatenate([first[None], after[:-1]]), after[-1]


def states_before_chunks(c: Chunk, initial_state, exact: MatrixProducts):
    """Returns the state before each chunk, [N, B, H, K, V], and the final state, [B, H, K, V]."""
    return states_before_each_map(
        affine_maps_of_chunks(c, exact), initial_state, exact, reverse=False
    )


def state_gradients_after_chunks(c: Chunk, po, qo, dfinal, exact: MatrixProducts):
    """Returns the gradient of the state after each chunk, [N, B, H, K, V], and the gradient of the
    initial state, [B, H, K, V].

    A chunk maps dS', the gradient of the state after the chunk, to dS, the gradient of the state
    before the chunk:

    dS = M^T dS' + (gamma Q)^T dO - (beta gamma K)^T A^T P^T dO.

    Args:
      c: the chunks.
      po: P^T dO, [N, B, H, C, V].
      qo: (gamma Q)^T dO, [N, B, H, K, V].
      dfinal: [B, H, K, V], the gradient of the final state.
      exact: the products for the maps.
    """
    m, _ = affine_maps_of_chunks(c, exact)
    u = qo
    if c.inverse is not None:
        u = u - exact.tn(c.beta * c.decay.gamma * _apply_row_scales(c.k), exact.tn(c.inverse, po))
    return states_before_each_map((jnp.swapaxes(m, -1, -2), u), dfinal, exact, reverse=True)
