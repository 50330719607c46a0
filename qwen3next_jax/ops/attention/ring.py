"""Causal attention over a sequence that is split over a mesh axis: ring attention
(https://arxiv.org/abs/2310.01889) with equal work on every shard.

The tokens of a row are split into 2n blocks for n shards, and shard i holds blocks 2i and 2i+1.
Under a causal mask, later queries attend to more keys. If each shard computed the queries of the
two blocks that it holds, the last shard would have almost twice the average work. To balance the
work, shard i computes the queries of block i (its low block) and of block 2n-1-i (its high block).
Two calls of `ppermute` for each array move each block to the shard that computes it, and two calls
move the outputs back.

The shards send their keys and values around a ring. When shard i has received the keys of another
shard j, which are the blocks j (low) and 2n-1-j (high), shard i computes two pairs of a query block
and a key block, both without a mask:

    1. queries of its high block, keys of j's low block;
    2. if j < i: queries of its low block, keys of j's low block;
       if j > i: queries of its high block, keys of j's high block.

For its own keys, a shard computes causal attention over the concatenation of its low and its high
block. `dispatch` runs all computations of attention. From the logsumexps of a query, the shard
combines the query's results for several blocks of keys. A query block and a key block that share no
document are skipped.

B batch, T tokens of a shard, N query heads, M key/value heads, D head width; n shards, i the index
of this shard.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks
from qwen3next_jax.ops.attention import dispatch, xla


def ring_attention(options: dispatch.AttentionOptions, axis_name: str, q, k, v, segment_ids):
    """Returns o [B, T, N, D], the attention of this shard's queries to the keys of the whole row.

    Args:
      options: static settings of the call.
      axis_name: name of the mesh axis over which T is split.
      q: [B, T, N, D].
      k, v: [B, T, M, D].
      segment_ids: [B, T] or None.
    """
    n = jax.lax.axis_size(axis_name)
    q, k, v, segment_ids = (
        None if x is None else _exchange_to_balanced_blocks(x, axis_name, n)
        for x in (q, k, v, segment_ids)
    )
    return _exchange_from_balanced_blocks(
        _differentiable_ring(options, axis_name, q, k, v, segment_ids), axis_name, n
    )


# ---- which shard computes which block


def _holding_and_computing_shards(n: int):
    """Returns two lists, the first list for the even blocks, the second list for the odd blocks.
    Each entry of a list is (the shard that holds a block, the shard that computes this block).
    """
    worker = lambda block: min(block, 2 * n - 1 - block)
    return tuple([(i, worker(2 * i + odd)) for i in range(n)] for odd in (0, 1))


def _exchange_to_balanced_blocks(x, axis_name, n):
    """Exchanges blocks between the shards. x [B, T, ...] of shard i holds blocks 2i and 2i+1; the
    result, of the same shape, holds blocks i and 2n-1-i.
    """
    even, odd = (
        jax.lax.ppermute(block, axis_name, pairs)
        for block, pairs in zip(jnp.split(x, 2, axis=1), _holding_and_computing_shards(n))
    )
    return _concatenate_swapped_on_odd_shards(even, odd, axis_name)


def _exchange_from_balanced_blocks(x, axis_name, n):
    """The reverse of `_exchange_to_balanced_blocks`."""
    low, high = jnp.split(x, 2, axis=1)
    even, odd = jnp.split(_concatenate_swapped_on_odd_shards(low, high, axis_name), 2, axis=1)
    back = [
        [(worker, holder) for holder, worker in pairs] for pairs in _holding_and_computing_shards(n)
    ]
    return jnp.concatenate(
        [jax.lax.ppermute(block, axis_name, pairs) for block, pairs in zip((even, odd), back)],
        axis=1,
    )


def _concatenate_swapped_on_odd_shards(first, second, axis_name):
    """Concatenates two blocks: `first` before `second` on even shards, and `second` before `first`
    on odd shards. (The low block of shard i is block i, so the low block of an odd shard is an odd
    block.)
    """
    swap = jax.lax.axis_index(axis_name) % 2 == 1
    return jnp.concatenate([jnp.where(swap, second, first), jnp.where(swap, first, second)], axis=1)


# ---- the ring


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable_ring(options, axis_name, q, k, v, segment_ids):
    return _ring_forward(options, axis_name, q, k, v, segment_ids)[0]


def _ring_forward(options, axis_name, q, k, v, segment_ids):
    o, logsumexp = dispatch.forward(options, q, k, v, segment_ids, segment_ids)
    result = (
        _split_low_high_blocks(o.astype(logsumexp.dtype), 1),
        _split_low_high_blocks(logsumexp, 2),
    )
    mine, visiting = (
        tuple(_split_low_high_blocks(x, 1) for x in (q, segment_ids)),
        tuple(_split_low_high_blocks(x, 1) for x in (k, v, segment_ids)),
    )

    def pair(queries, keys, done):
        (q, ids), (k, v, kv_ids) = queries, keys
        new = dispatch.forward(options._replace(causal=False), q, k, v, ids, kv_ids)
        return xla.merge_attention_over_key_sets(done, new)

    def step(earlier, visiting, result):
        for query, key in _query_key_block_pairs(earlier):
            arguments = (
                _take_block(mine, query),
                _take_block(visiting, key),
                _take_block(result, query),
            )
            done = _call_if_document_shared(
                arguments[0][1], arguments[1][2], pair, lambda queries, keys, done: done, *arguments
            )
            result = _replace_block(result, query, done)
        return (), result

    _, (o, logsumexp) = _send_around_ring(axis_name, visiting, (), result, step)
    o, logsumexp = blocks.save_for_backward(
        (_merge_low_high_blocks(o, 1).astype(q.dtype), _merge_low_high_blocks(logsumexp, 2)),
        "attention",
    )
    return o, (q, k, v, segment_ids, o, logsumexp)


def _ring_backward(options, axis_name, residuals, do):
    q, k, v, segment_ids, o, logsumexp = residuals
    dq, *dkv = (
        x.astype(logsumexp.dtype)
        for x in dispatch.backward(options, (q, k, v, segment_ids, segment_ids), o, logsumexp, do)
    )
    mine = (
        *(_split_low_high_blocks(x, 1) for x in (q, segment_ids, o, do)),
        _split_low_high_blocks(logsumexp, 2),
    )
    visiting = tuple(_split_low_high_blocks(x, 1) for x in (k, v, segment_ids))
    dkv = tuple(_split_low_high_blocks(x, 1) for x in dkv)

    def pair(queries, keys, done):
        (q, ids, o, do, logsumexp), (k, v, kv_ids) = queries, keys
        new = dispatch.backward(
            options._replace(causal=False), (q, k, v, ids, kv_ids), o, logsumexp, do
        )
        return tuple(x + y for x, y in zip(done, new))

    def step(earlier, visiting, dq):
        dkv_visiting = jax.tree.map(jnp.zeros_like, dkv)
        for query, key in _query_key_block_pairs(earlier):
            done = _take_block(dq, query), *_take_block(dkv_visiting, key)
            arguments = _take_block(mine, query), _take_block(visiting, key), done
            new = _call_if_document_shared(
                arguments[0][1], arguments[1][2], pair, lambda queries, keys, done: done, *arguments
            )
            dq, dkv_visiting = (
                _replace_block(dq, query, new[0]),
                _replace_block(dkv_visiting, key, new[1:]),
            )
        return dkv_visiting, dq

    dkv, dq = _send_around_ring(axis_name, visiting, dkv, _split_low_high_blocks(dq, 1), step)
    dq, dk, dv = (
        _merge_low_high_blocks(x, 1).astype(like.dtype) for x, like in zip((dq, *dkv), (q, k, v))
    )
    return dq, dk, dv, None


_differentiable_ring.defvjp(_ring_forward, _ring_backward)


def _send_around_ring(axis_name, visiting, gradients, result, step):
    """Sends every shard's `visiting` arrays around the ring, so that every other shard gets the
    arrays once. The gradients of the arrays follow the arrays around the ring, and return to the
    shard that owns the arrays.

    A shard starts to send the arrays of the next step before it computes the current step, so that
    the transfer and the computation overlap.

    Args:
      axis_name: name of the mesh axis.
      visiting: the arrays of this shard that the other shards need.
      gradients: the gradients of this shard's `visiting` arrays before the first step.
      result: the result of this shard before the first step, such as its output so far.
      step: function (earlier, visiting, result) → (gradients of the visiting arrays, new result).
        `earlier` is a boolean: whether the visiting arrays belong to a shard before this shard.

    Returns:
      The summed gradients of this shard's `visiting` arrays, and the result after the last step.
    """
    n, shard = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    send = lambda tree: jax.lax.ppermute(tree, axis_name, [(i, (i + 1) % n) for i in range(n)])

    def send_and_compute(distance, carry):
        visiting, gradients, result = carry
        coming, arrived = send(visiting), send(gradients)
        new, result = step(distance <= shard, visiting, result)
        return coming, jax.tree.map(jnp.add, arrived, new), result

    # The last call sends the visiting arrays although no shard needs them any more. A last call
    # outside the loop would avoid that, but XLA would compile the body of the loop twice.
    _, gradients, result = jax.lax.fori_loop(
        1, n, send_and_compute, (send(visiting), gradients, result)
    )
    return send(gradients), result


def _query_key_block_pairs(earlier):
    """Returns the two pairs (query block, key block) that a step of the ring computes, with 0 for
    the low block and 1 for the high block. `earlier` says whether the keys come from an earlier
    shard.
    """
    same = jnp.where(earlier, 0, 1)
    return (1, 0), (same, same)


def _call_if_document_shared(ids, kv_ids, pair, skip, *arguments):
    """Returns pair(*arguments) if the block of queries and the block of keys share a document in
    any row of the batch, else skip(*arguments). The block of keys lies before the block of queries.

    Args:
      ids: [B, T], segment ids of the block of queries; None if a row is one document.
      kv_ids: [B, T], segment ids of the block of keys.
    """
    if ids is None:
        return pair(*arguments)
    # Ids do not decrease, so only the last document of the keys can continue in the queries.
    first_B = ids[:, 0]
    shared = jnp.any((first_B > 0) & (first_B == jnp.max(kv_ids, axis=1)))
    return jax.lax.cond(shared, pair, skip, *arguments)


# ---- the two blocks of a shard, stacked on a leading axis


def _split_low_high_blocks(x, axis: int):
    """Splits `axis` into the low and the high block, on a new leading axis. Returns None if x is
    None.
    """
    return None if x is None else jnp.stack(jnp.split(x, 2, axis=axis))


def _merge_low_high_blocks(x, axis: int):
    """Concatenates the low block x[0] and the high block x[1] along `axis`."""
    return jnp.concatenate([x[0], x[1]], axis=axis)


def _take_block(tree, index):
    """Returns x[index] for every array x of the tree."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _replace_block(tree, index, new):
    """Returns the tree with x[index] replaced by the array of `new` for every array x."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0), tree, new)
