"""The gated delta rule over a sequence split over a mesh axis.

A shard's tokens change the state by an affine map, S' = M S + U, and o_t = o0_t + S^T r_t: o0 is what the shard gives for
S = 0, and r_t what its queries read of the map itself. All four come out of one pass of any implementation over K more
value channels, with values zero and the identity as initial state there:

    values [v | 0], initial state [0 | I]    →    outputs [o0 | r], final state [U | M], state of every chunk [U_n | M_n]

Maps are then composed over the shards (`associative`), and what enters a shard is added: o = o0 + r S, S' = U + M S,
S_n = U_n + M_n S. Backward, dS = M^T dS' + sum_t r_t do_t^T composes the same way in reverse, and with S_n and dS' known the
implementation's backward pass runs once, over the V channels alone. docs/context_parallel.md has the costs.

A document that starts inside the shard makes M zero where the state is reset; one that starts with the shard does so here.

N chunks, B batch, H value heads, K key width, V value width.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.delta_rule import associative, dispatch, reference
from qwen3next_jax.ops.delta_rule.chunk_math import Products


def last_id_before(segment_ids, axis_name: str):
    """[B] the largest id of the shards before this one, at least 1."""
    largest = jax.lax.all_gather(jnp.max(segment_ids, axis=1).astype(jnp.int32), axis_name)  # [shards, B]
    earlier = jnp.arange(largest.shape[0]) < jax.lax.axis_index(axis_name)
    return jnp.maximum(jnp.max(jnp.where(earlier[:, None], largest, 0), axis=0), 1)


def across(options: dispatch.Options, axis_name: str, q, k, v, g, beta, initial_state, segments, before):
    """o [B, T, H, V] of this shard and the row's final state [B, H, K, V].

    `segments` are encoded with the ids of the shards `before` (`last_id_before`); both None for a row of one document.
    """
    first = jax.lax.axis_index(axis_name) == 0
    initial_state = jnp.where(first, initial_state, 0)  # as this shard's own writes, not as a state that enters
    continues = None if segments is None else jnp.abs(segments[:, 0]) == before
    arguments = q, k, v, g, beta, initial_state, segments, continues
    if options.implementation == "recurrent":
        o, final = _joined(axis_name, v, continues, *_recurrent(options, *arguments))[:2]
    else:
        o, final = _operator(options, axis_name, *arguments)
    last = jax.lax.axis_index(axis_name) == jax.lax.axis_size(axis_name) - 1
    return o, jax.lax.psum(jnp.where(last, final, 0), axis_name)


# ---- the pass over V + K channels, and what is made of it ---------------------------------------------------------


def _widened(k, v, initial_state):
    """Values [v | 0] and initial state [initial | I]."""
    width = k.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(width, dtype=initial_state.dtype), (*initial_state.shape[:-1], width))
    return jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, width))), jnp.concatenate([initial_state, identity], axis=-1)


def _recurrent(options, q, k, v, g, beta, initial_state, segments, continues):
    v, initial_state = _widened(k, v, initial_state)
    return reference.recurrent(q, k, v, g, beta, initial_state, segments, normalize_qk=options.normalize_qk, erase=options.erase)


def _joined(axis_name, v, continues, wide_o, wide_final):
    """o, the state leaving this shard, the one entering it, r [B, T, H, K] and M [B, H, K, K]."""
    width = v.shape[-1]
    (o, r), (u, m) = (jnp.split(x, [width], axis=-1) for x in (wide_o, wide_final))
    m = _where_continued(continues, m)
    entering = _where_continued(continues, _entering(axis_name, m, u, reverse=False))
    read = Products(v.dtype).nn(_heads_first(r), entering)
    o = (o + _heads_first(read)).astype(v.dtype)
    return o, u + Products(u.dtype).nn(m, entering), entering, r, m


def _where_continued(continues_B, x_BHKV):
    return x_BHKV if continues_B is None else jnp.where(continues_B[:, None, None, None], x_BHKV, 0)


def _heads_first(x_BTHK):
    return jnp.swapaxes(x_BTHK, 1, 2)


# ---- composition over the shards ----------------------------------------------------------------------------------


def _entering(axis_name, m_BHKK, u_BHKV, reverse: bool):
    """What enters this shard when zero enters the first of them (the last one in reverse), [B, H, K, V].

    Every shard composes all maps of its share of the heads: two exchanges of (2 K V + K K) / K V states in all, where an
    all-gather of the maps would take n - 1 times 1 + K / V, and the products are not repeated on every shard.
    """
    shards = jax.lax.axis_size(axis_name)
    batch, heads, _, width = u_BHKV.shape
    count = batch * heads
    maps = jnp.concatenate([m_BHKK, u_BHKV], axis=-1).reshape(count, *m_BHKK.shape[2:3], -1)
    maps = jnp.pad(maps, ((0, -count % shards), (0, 0), (0, 0))).reshape(shards, -1, *maps.shape[1:])
    maps = jax.lax.all_to_all(maps, axis_name, 0, 0)  # [shards, this one's heads, K, K + V]
    m, u = jnp.split(maps, [maps.shape[-1] - width], axis=-1)
    entering, _ = associative.states((m, u), jnp.zeros_like(u[0]), Products(u.dtype), reverse)
    entering = jax.lax.all_to_all(entering, axis_name, 0, 0)
    return entering.reshape(-1, *entering.shape[2:])[:count].reshape(u_BHKV.shape)


# ---- the custom gradient ------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _operator(options, axis_name, *arguments):
    return _forward(options, axis_name, False, *arguments)[0]


def _operator_forward(options, axis_name, *arguments):
    return _forward(options, axis_name, True, *arguments)


def _forward(options, axis_name, save: bool, q, k, v, g, beta, initial_state, segments, continues):
    """(o, the state leaving this shard) and the residuals."""
    wide_v, wide_state = _widened(k, v, initial_state)
    size = dispatch.chunk_size(q, v)
    wide_o, wide_final, states, inverses = dispatch.forward(options, size, save, q, k, wide_v, g, beta, wide_state, segments)
    o, final, entering, r, m = _joined(axis_name, v, continues, wide_o, wide_final)
    if save:
        u_n, m_n = jnp.split(states, [v.shape[-1]], axis=-1)
        states = (u_n + Products(v.dtype).nn(m_n, jnp.broadcast_to(entering, u_n.shape))).astype(v.dtype)
    return (o, final), (q, k, v, g, beta, initial_state[:0], segments, continues, states, inverses, r, m)


def _operator_backward(options, axis_name, residuals, cotangents):
    q, k, v, g, beta, initial_state, segments, continues, states, inverses, r, m = residuals
    do, dfinal = cotangents
    transposed = jnp.swapaxes(m, -1, -2)
    du = _where_continued(continues, Products(v.dtype).tn(_heads_first(r), _heads_first(do.astype(v.dtype))))
    du = du + Products(m.dtype).nn(transposed, dfinal)
    dleaving = dfinal + _entering(axis_name, transposed, du, reverse=True)
    size = dispatch.chunk_size(q, v)
    gradients = dispatch.backward(options, size, q, k, v, g, beta, segments, states, inverses, do, dleaving)
    return *(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v, g, beta, initial_state))), None, None


_operator.defvjp(_operator_forward, _operator_backward)
