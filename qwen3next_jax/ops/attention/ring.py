"""Causal attention over a sequence that is split over a mesh axis: ring attention
(https://arxiv.org/abs/2310.01889) with equal work on every shard.

The row has 2n blocks for n shards. Shard i holds blocks 2i and 2i+1. The causal mask gives late
queries more keys, so with these blocks the last shard would have twice the average work. Inside
this operator shard i works on blocks i and 2n-1-i instead; two `ppermute`s before and two after it
exchange them. Keys and values then go round the ring. With the keys of shard j (blocks j and
2n-1-j) shard i != j computes two pairs of blocks, each without a mask:

    its high block (2n-1-i) with the low keys (j);
    for j < i its low block (i) with the low keys, for j > i its high block with the high keys
    (2n-1-j).

With its own keys it computes causal attention over its two blocks one after the other. All of this
runs by `dispatch`. The results of a query for several blocks of keys are combined by their
logsumexp. A pair of blocks that share no document is skipped.

B batch, T tokens of a shard, N query heads, M key/value heads, D head width; n shards, i this one.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks
from qwen3next_jax.ops.attention import dispatch, xla


def attention(options: dispatch.Options, axis_name: str, q, k, v, segment_ids):
    """o [B, T, N, D] of this shard's queries over the whole row."""
    n = jax.lax.axis_size(axis_name)
    q, k, v, segment_ids = (
        None if x is None else _to_balanced(x, axis_name, n) for x in (q, k, v, segment_ids)
    )
    return _from_balanced(_ring(options, axis_name, q, k, v, segment_ids), axis_name, n)


# ---- which shard works on which block


def _owners(n: int):
    """For the even and for the odd blocks a list of (the shard that holds a block, the shard that
    works on it).
    """
    worker = lambda block: min(block, 2 * n - 1 - block)
    return tuple([(i, worker(2 * i + odd)) for i in range(n)] for odd in (0, 1))


def _to_balanced(x, axis_name, n):
    """[B, T, ...] blocks 2i, 2i+1 → blocks i, 2n-1-i."""
    even, odd = (
        jax.lax.ppermute(block, axis_name, pairs)
        for block, pairs in zip(jnp.split(x, 2, axis=1), _owners(n))
    )
    return _in_order(even, odd, axis_name)


def _from_balanced(x, axis_name, n):
    """The reverse of `_to_balanced`."""
    low, high = jnp.split(x, 2, axis=1)
    even, odd = jnp.split(_in_order(low, high, axis_name), 2, axis=1)
    back = [[(worker, holder) for holder, worker in pairs] for pairs in _owners(n)]
    return jnp.concatenate(
        [jax.lax.ppermute(block, axis_name, pairs) for block, pairs in zip((even, odd), back)],
        axis=1,
    )


def _in_order(first, second, axis_name):
    """Both blocks in order: odd shards exchange them, as their low block i is an odd one."""
    swap = jax.lax.axis_index(axis_name) % 2 == 1
    return jnp.concatenate([jnp.where(swap, second, first), jnp.where(swap, first, second)], axis=1)


# ---- the ring


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(options, axis_name, q, k, v, segment_ids):
    return _ring_forward(options, axis_name, q, k, v, segment_ids)[0]


def _ring_forward(options, axis_name, q, k, v, segment_ids):
    o, logsumexp = dispatch.forward(options, q, k, v, segment_ids, segment_ids)
    result = _split_blocks(o.astype(logsumexp.dtype), 1), _split_blocks(logsumexp, 2)
    mine, visiting = (
        tuple(_split_blocks(x, 1) for x in (q, segment_ids)),
        tuple(_split_blocks(x, 1) for x in (k, v, segment_ids)),
    )

    def pair(queries, keys, done):
        (q, ids), (k, v, kv_ids) = queries, keys
        return _combine(
            done, dispatch.forward(options._replace(causal=False), q, k, v, ids, kv_ids)
        )

    def step(earlier, visiting, result):
        for query, key in _pairs(earlier):
            arguments = _pick(mine, query), _pick(visiting, key), _pick(result, query)
            done = _if_document_shared(
                arguments[0][1], arguments[1][2], pair, lambda queries, keys, done: done, *arguments
            )
            result = _put(result, query, done)
        return (), result

    _, (o, logsumexp) = _around_ring(axis_name, visiting, (), result, step)
    o, logsumexp = blocks.save_for_backward(
        (_merge_blocks(o, 1).astype(q.dtype), _merge_blocks(logsumexp, 2)), "attention"
    )
    return o, (q, k, v, segment_ids, o, logsumexp)


def _ring_backward(options, axis_name, residuals, do):
    q, k, v, segment_ids, o, logsumexp = residuals
    dq, *dkv = (
        x.astype(logsumexp.dtype)
        for x in dispatch.backward(options, (q, k, v, segment_ids, segment_ids), o, logsumexp, do)
    )
    mine = *(_split_blocks(x, 1) for x in (q, segment_ids, o, do)), _split_blocks(logsumexp, 2)
    visiting = tuple(_split_blocks(x, 1) for x in (k, v, segment_ids))
    dkv = tuple(_split_blocks(x, 1) for x in dkv)

    def pair(queries, keys, done):
        (q, ids, o, do, logsumexp), (k, v, kv_ids) = queries, keys
        new = dispatch.backward(
            options._replace(causal=False), (q, k, v, ids, kv_ids), o, logsumexp, do
        )
        return tuple(x + y for x, y in zip(done, new))

    def step(earlier, visiting, dq):
        dkv_visiting = jax.tree.map(jnp.zeros_like, dkv)
        for query, key in _pairs(earlier):
            done = _pick(dq, query), *_pick(dkv_visiting, key)
            arguments = _pick(mine, query), _pick(visiting, key), done
            new = _if_document_shared(
                arguments[0][1], arguments[1][2], pair, lambda queries, keys, done: done, *arguments
            )
            dq, dkv_visiting = _put(dq, query, new[0]), _put(dkv_visiting, key, new[1:])
        return dkv_visiting, dq

    dkv, dq = _around_ring(axis_name, visiting, dkv, _split_blocks(dq, 1), step)
    dq, dk, dv = (_merge_blocks(x, 1).astype(like.dtype) for x, like in zip((dq, *dkv), (q, k, v)))
    return dq, dk, dv, None


_ring.defvjp(_ring_forward, _ring_backward)


def _around_ring(axis_name, visiting, gradients, result, step):
    """Sends every shard's `visiting` arrays to every other shard once, and their gradients with
    them, back to their owner.

    The arrays of the next step are sent before a step computes, so that both happen at once.

    Args:
      gradients: of this shard's arrays so far.
      step: (earlier, visiting, result) → (gradients of the visiting arrays, result); `earlier` says
        whether these arrays come from a shard before this one.

    Returns:
      The gradients of this shard's arrays, and the result.
    """
    n, shard = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    send = lambda tree: jax.lax.ppermute(tree, axis_name, [(i, (i + 1) % n) for i in range(n)])

    def turn(distance, carry):
        visiting, gradients, result = carry
        coming, arrived = send(visiting), send(gradients)
        new, result = step(distance <= shard, visiting, result)
        return coming, jax.tree.map(jnp.add, arrived, new), result

    # The last turn sends the visiting arrays once more for nothing: a turn outside the loop would
    # double the program.
    _, gradients, result = jax.lax.fori_loop(1, n, turn, (send(visiting), gradients, result))
    return send(gradients), result


def _pairs(earlier):
    """The two pairs (query block, key block) of a step; 0 is the low block, 1 the high one."""
    same = jnp.where(earlier, 0, 1)
    return (1, 0), (same, same)


def _if_document_shared(ids, kv_ids, pair, skip, *arguments):
    """pair(*arguments) where the queries and the keys before them share a document, else
    skip(*arguments).
    """
    if ids is None:
        return pair(*arguments)
    first_B = ids[:, 0]  # ids do not decrease: only the keys' last document can continue here
    shared = jnp.any((first_B > 0) & (first_B == jnp.max(kv_ids, axis=1)))
    return jax.lax.cond(shared, pair, skip, *arguments)


def _combine(done, new):
    """(o, logsumexp) of a softmax over the keys of both."""
    (o1, l1), (o2, l2) = done, new
    # A row may see none of the new keys; it has seen its own key before.
    l2 = jnp.where(l2 == xla.UNSEEN, -jnp.inf, l2)
    top = jnp.maximum(l1, l2)
    weights = jnp.exp(l1 - top), jnp.exp(l2 - top)
    total = weights[0] + weights[1]
    share1, share2 = ((w / total).swapaxes(1, 2)[..., None] for w in weights)
    return share1 * o1 + share2 * o2, top + jnp.log(total)


# ---- the two blocks of a shard, on a leading axis


def _split_blocks(x, axis: int):
    return None if x is None else jnp.stack(jnp.split(x, 2, axis=axis))


def _merge_blocks(x, axis: int):
    return jnp.concatenate([x[0], x[1]], axis=axis)


def _pick(tree, index):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _put(tree, index, new):
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0), tree, new)
