"""The state pass as an associative scan: one chunk is an affine map of the state, S' = M S + U, and
affine maps compose.

  M = carry I - K^T rho A beta gamma K     U = K^T rho A beta V
  (M2, U2) after (M1, U1) = (M2 M1, M2 U1 + U2)

`context` composes shards of a sequence across devices in the same way. M stays in float32, because
it is a product of contractions whose errors compound. A document boundary inside a chunk makes M
zero: there carry is 0, and rho or gamma is 0 in every row.

N chunks, B batch, H value heads, C chunk length, K key width, V value width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule.chunk_math import Chunk, Products, Scaled


def compose(first, second, exact: Products):
    """The affine map `second` after `first`. Each map is (M [..., K, K], U [..., K, V])."""
    (m1, u1), (m2, u2) = first, second
    return exact.nn(m2, m1), exact.nn(m2, u1) + u2


def _normalised(k):
    return k.column * k.raw if isinstance(k, Scaled) else k


def affine_maps(c: Chunk, exact: Products):
    """(M [N, B, H, K, K], U [N, B, H, K, V]) of every chunk."""
    k = _normalised(c.k)
    identity = c.decay.carry * jnp.eye(k.shape[-1], dtype=exact.operand)
    k_rho = c.decay.rho * k
    if c.inverse is None:
        return identity, exact.tn(k_rho, c.beta * c.v)
    erased = exact.nn(c.inverse, c.beta * c.decay.gamma * k)
    return identity - exact.tn(k_rho, erased), exact.tn(k_rho, exact.nn(c.inverse, c.beta * c.v))


def states(maps, first, exact: Products, reverse: bool):
    """The state that enters every map [N, ...], and the state that leaves the last one.

    Args:
      maps: (M [N, ..., K, K], U [N, ..., K, V]).
      first: the state that enters the first map, in reverse the last one.
      reverse: whether the state passes from the last map to the first.
    """
    m, u = jax.lax.associative_scan(lambda a, b: compose(a, b, exact), maps, reverse=reverse)
    after = exact.nn(m, jnp.broadcast_to(first, u.shape)) + u
    if reverse:
        return jnp.concatenate([after[1:], first[None]]), after[0]
    return jnp.concatenate([first[None], after[:-1]]), after[-1]


def forward_pass(c: Chunk, initial_state, dots: Products, exact: Products):
    """The state that enters each chunk [N, B, H, K, V], and the final state."""
    return states(affine_maps(c, exact), initial_state, exact, reverse=False)


def backward_pass(c: Chunk, po, qo, dfinal, dots: Products, exact: Products):
    """The gradient of the state that leaves each chunk, and that of the initial state:

    dS = M^T dS' + (gamma Q)^T dO - (beta gamma K)^T A^T P^T dO.

    Args:
      po: P^T dO. qo: (gamma Q)^T dO.
    """
    m, _ = affine_maps(c, exact)
    u = qo
    if c.inverse is not None:
        u = u - exact.tn(c.beta * c.decay.gamma * _normalised(c.k), exact.tn(c.inverse, po))
    return states((jnp.swapaxes(m, -1, -2), u), dfinal, exact, reverse=True)
