"""The gated delta rule over a sequence split over a mesh axis.

A shard's tokens change the state that enters by an affine map, S' = U + M S, and their outputs
depend on it linearly: o = o0 + r S. So, forward and backward,

    1. U, M and r of every shard at once, and the inverses of its chunks, in one pass
       (`affine_map`);
    2. the maps composed over the shards (`associative`): S, the state that enters each shard;
    3. the forward pass of any implementation from S, with the inverses known;
    4. backward, dS = M^T dS' + r^T dO composes the same way in reverse: dS', the gradient of the
       state that leaves;
    5. the backward pass of the implementation from dS'.

docs/context_parallel.md has the costs. A document that starts inside a shard makes its M zero,
by the decays that reset the state there; one that starts with a shard does so here.

B batch, H value heads, K key width, V value width.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks
from qwen3next_jax.ops.delta_rule import associative, chunked, dispatch, reference
from qwen3next_jax.ops.delta_rule.chunk_math import Inputs, Products


def last_id_before(segment_ids, axis_name: str):
    """[B] the largest id of the shards before this one, at least 1."""
    # [shards, B]
    largest = jax.lax.all_gather(jnp.max(segment_ids, axis=1).astype(jnp.int32), axis_name)
    earlier = jnp.arange(largest.shape[0]) < jax.lax.axis_index(axis_name)
    return jnp.maximum(jnp.max(jnp.where(earlier[:, None], largest, 0), axis=0), 1)


def across(options: dispatch.Options, axis_name: str, x: Inputs, initial_state, before):
    """o [B, T, H, V] of this shard and the row's final state [B, H, K, V].

    The segments are encoded with the ids of the shards `before` (`last_id_before`); both None
    for a row of one document.
    """
    shard, shards = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    initial_state = jnp.where(shard == 0, initial_state, 0)
    continues = None if x.segments is None else jnp.abs(x.segments[:, 0]) == before
    run = _recurrent if options.chosen.name == "recurrent" else _operator
    o, final = run(options, axis_name, x, initial_state, continues)
    return o, jax.lax.psum(jnp.where(shard == shards - 1, final, 0), axis_name)


def _recurrent(options, axis_name, x: Inputs, initial_state, continues):
    """The oracle, by plain autodiff: every quantity by the recurrence."""
    pass_over = functools.partial(
        reference.recurrent, normalize_qk=options.normalize_qk, erase=options.erase
    )
    batch, heads, width, _ = initial_state.shape
    identity = jnp.broadcast_to(
        jnp.eye(width, dtype=initial_state.dtype), (batch, heads, width, width)
    )
    _, u = pass_over(x, initial_state)
    _, m = pass_over(x._replace(v=jnp.zeros((*x.v.shape[:3], width), x.v.dtype)), identity)
    return pass_over(x, initial_state + _entering(axis_name, continues, m, u))


# ---- composition over the shards
# ----------------------------------------------------------------------------------


def _entering(axis_name, continues, m_BHKK, u_BHKV):
    """The state entering this shard from the ones before, [B, H, K, V]; zero where this shard
    starts a document.
    """
    return chunked.zero_unless_continued(
        continues,
        composed(
            axis_name, chunked.zero_unless_continued(continues, m_BHKK), u_BHKV, reverse=False
        ),
    )


def composed(axis_name, m_BHKK, u_BHKV, reverse: bool):
    """What enters this shard when zero enters the first of them (the last one in reverse), [B,
    H, K, V].

    Each shard composes the maps of all shards for its share of the heads: with two exchanges a
    shard receives K (K + 2 V) numbers a head, where gathering all maps on every shard would take
    (n - 1) K (K + V), and no product is computed twice.
    """
    shards = jax.lax.axis_size(axis_name)
    batch, heads, key, value = u_BHKV.shape
    count = batch * heads
    maps = jnp.concatenate([m_BHKK, u_BHKV], axis=-1).reshape(count, key, -1)
    maps = jnp.pad(maps, ((0, -count % shards), (0, 0), (0, 0))).reshape(
        shards, -1, *maps.shape[1:]
    )
    maps = jax.lax.all_to_all(maps, axis_name, 0, 0)  # [shards, this one's heads, K, K + V]
    m, u = jnp.split(maps, [key], axis=-1)
    entering, _ = associative.states((m, u), jnp.zeros_like(u[0]), Products(u.dtype), reverse)
    entering = jax.lax.all_to_all(entering, axis_name, 0, 0)
    return entering.reshape(-1, key, value)[:count].reshape(u_BHKV.shape)


# ---- the custom gradient
# ------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _operator(options, axis_name, *arguments):
    return _forward(options, axis_name, False, *arguments)[0]


def _operator_forward(options, axis_name, *arguments):
    return blocks.save_for_backward(_forward(options, axis_name, True, *arguments))


def _forward(options, axis_name, save: bool, x: Inputs, initial_state, continues):
    """(o, the state leaving this shard) and the residuals."""
    u, m, r, inverses = dispatch.affine_map(options, x, initial_state)
    state = initial_state + _entering(axis_name, continues, m, u)
    o, final, states, inverses = dispatch.forward(options, x, state, inverses, save=save)
    return (o, final), (x, initial_state[:0], continues, states, inverses, r, m)


def _operator_backward(options, axis_name, residuals, cotangents):
    x, initial_state, continues, states, inverses, r, m = residuals
    do, dfinal = cotangents
    transposed = jnp.swapaxes(chunked.zero_unless_continued(continues, m), -1, -2)
    du = chunked.zero_unless_continued(
        continues, chunked.map_gradient(r, do).astype(m.dtype)
    ) + Products(m.dtype).nn(transposed, dfinal)
    dleaving = dfinal + composed(axis_name, transposed, du, reverse=True)
    *gradients, dinitial = dispatch.backward(options, x, states, inverses, do, dleaving)
    return x.cast(gradients), dinitial.astype(initial_state.dtype), None


_operator.defvjp(_operator_forward, _operator_backward)
