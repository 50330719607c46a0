"""Attention in XLA alone, computed block by block with online softmax (FlashAttention,
https://arxiv.org/abs/2205.14135).

B batch, T queries, S keys, N query heads, M key/value heads (query head n reads key/value head
n // (N // M)), H = N // M query heads per key/value head, D head width, C queries or keys per
block, L = H · C rows of a block of queries for one key/value head, n number of blocks of queries.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks

# The number of queries in a block, which is also the number of keys in a block. On a CPU the scores
# of a block stay in the cache. benchmarks/ops/attention.py measures these sizes.
CPU_BLOCK = 64
GPU_BLOCK = 512
# The score of a pair of a query and a key that is masked. It is finite, so that the output of a
# query that may attend to no key stays finite.
_HIDDEN = -1e30
# The logsumexp that stands for a query that may attend to no key. It is so large that the query's
# softmax weights in the backward pass, exp(score - logsumexp), are all 0.
UNSEEN = -_HIDDEN


def _block_sizes_positions_ids(block, causal, q, k, segment_ids, kv_segment_ids):
    """Splits queries and keys into blocks, and returns a tuple of five entries:

    1. the number of queries in a block (C of the queries);
    2. the number of keys in a block (C of the keys);
    3. [n, B, C], the index of the last key that each query may attend to apart from segment ids;
    4. [n, B, C], the segment ids of the queries, or None;
    5. [blocks of keys, B, C], the segment ids of the keys, or None.
    """
    (b, t), s = q.shape[:2], k.shape[1]
    size_q, size_k = min(t, block), min(s, block)
    positions = jnp.arange(t, dtype=jnp.int32) if causal else jnp.full((t,), s - 1, jnp.int32)
    positions = jnp.broadcast_to(positions, (b, t))
    return (
        size_q,
        size_k,
        *blocks.to_chunks((positions, segment_ids), 1, size_q),
        blocks.to_chunks(kv_segment_ids, 1, size_k),
    )


def _to_query_blocks(q_BTND, groups, size):
    """Rearranges queries [B, T, N, D] into blocks [n, B, M, L, D]."""
    b, t, n, d = q_BTND.shape
    q_BMHTD = q_BTND.reshape(b, t, groups, n // groups, d).transpose(0, 2, 3, 1, 4)
    x = blocks.to_chunks(q_BMHTD, 3, size)
    return x.reshape(*x.shape[:3], -1, d)


def _from_query_blocks(x, t, n):
    """The reverse of `_to_query_blocks`: rearranges [n, B, M, L, D] into [B, T, N, D]."""
    count, b, m, _, d = x.shape
    x_BMHTD = blocks.from_chunks(x.reshape(count, b, m, n // m, -1, d), 3, t)
    return x_BMHTD.transpose(0, 3, 1, 2, 4).reshape(b, t, n, d)


def _visible_mask(position_BC, segment_BC, kv_segment_BC, first_key, size_k):
    """Returns booleans [B, 1, 1, C, C]: whether each query of a block (second last axis) may attend
    to each key of a block (last axis): a key of its own document that is not after it.
    """
    key = first_key + jnp.arange(size_k, dtype=jnp.int32)
    mask = key[None, None] <= position_BC[:, :, None]
    if segment_BC is not None:
        mask &= segment_BC[:, :, None] == kv_segment_BC[:, None]
    return mask[:, None, None]


def _masked_scores(scale, q_BMLD, k_BMCD, mask):
    """Returns the scores [B, M, L, C] of a block of queries and a block of keys, with _HIDDEN where
    `mask` is False.
    """
    s_BMLC = (
        jnp.einsum(
            "bmld,bmcd->bmlc",
            q_BMLD,
            k_BMCD,
            preferred_element_type=blocks.accumulation_dtype(q_BMLD),
        )
        * scale
    )
    b, _, _, c, keys = mask.shape
    grouped = s_BMLC.reshape(b, s_BMLC.shape[1], -1, c, keys)
    return jnp.where(mask, grouped, _HIDDEN).reshape(s_BMLC.shape)


def _visible_key_blocks(position_BC, segment_BC, kv_segments, size_k, keys):
    """Returns the range of the blocks of keys that some query of this block may attend to: the
    index of the first block of keys, and one more than the index of the last block of keys.
    """
    last = jnp.minimum(jnp.max(position_BC), keys - 1) // size_k + 1
    if segment_BC is None:
        return 0, last
    kv_BS = jnp.moveaxis(kv_segments, 0, 1).reshape(segment_BC.shape[0], -1)[:, :keys]
    first_B1 = segment_BC[:, :1]
    before_BS = jnp.where(first_B1 > 0, (kv_BS > 0) & (kv_BS < first_B1), kv_BS > 0)
    return jnp.min(jnp.sum(before_BS, axis=1)) // size_k, last


def _add_at_index(x, j, term):
    """Returns x with `term` added to x[j]. XLA updates x in place; `.at[j].add` would run as a
    scatter.
    """
    return jax.lax.dynamic_update_index_in_dim(x, x[j] + term, j, 0)


def _normalize_softmax_sums(o, largest, total):
    """Returns (o [..., D], logsumexp [...]) of each query from its sums over the keys.

    Args:
      o: [..., D], the sum Σ p v over the keys, with p = exp(score − largest).
      largest: [...], the largest score of the query.
      total: [...], the sum Σ p over the keys.
    """
    # If a score is NaN, so is `total`, but `largest` only on platforms whose maximum keeps a NaN.
    seen = (largest > _HIDDEN / 2) | jnp.isnan(total)
    return jnp.where(seen[..., None], o / total[..., None], 0), jnp.where(
        seen, largest + jnp.log(total), UNSEEN
    )


def merge_attention_over_key_sets(done, new):
    """Combines the results of attention to two disjoint sets of keys. `done` and `new` are pairs
    (o, logsumexp), one pair for each set of keys. Returns the pair (o, logsumexp) for the union of
    both sets.
    """
    (o1, l1), (o2, l2) = done, new
    # A query may attend to none of the new keys. Its `l1` is always finite, because `done` includes
    # the query's own key.
    l2 = jnp.where(l2 == UNSEEN, -jnp.inf, l2)
    top = jnp.maximum(l1, l2)
    weights = jnp.exp(l1 - top), jnp.exp(l2 - top)
    total = weights[0] + weights[1]
    share1, share2 = ((w / total).swapaxes(1, 2)[..., None] for w in weights)
    return share1 * o1 + share2 * o2, top + jnp.log(total)


def forward(q, k, v, segment_ids, kv_segment_ids, *, scale, block, causal):
    """Computes the results that `forward` in `dispatch.py` describes, in blocks of at most `block`
    queries and `block` keys.

    Args:
      q: [B, T, N, D].
      k, v: [B, S, M, D].
      segment_ids: [B, T] or None.
      kv_segment_ids: [B, S] or None.
      scale: factor of the scores.
      block: largest number of queries, and of keys, in a block.
      causal: whether a query attends only to its own token and the tokens before it.

    Returns:
      o [B, T, N, D] in q's dtype, and logsumexp [B, N, T] in float32 (float64 for float64). For a
      query that may attend to no key, o is 0 and logsumexp is UNSEEN.
    """
    size_q, size_k, position, segment, kv_segment = _block_sizes_positions_ids(
        block, causal, q, k, segment_ids, kv_segment_ids
    )
    (t, n), (s, m) = q.shape[1:3], k.shape[1:3]
    k_blocks, v_blocks = blocks.to_chunks((k.swapaxes(1, 2), v.swapaxes(1, 2)), 2, size_k)
    wide = blocks.accumulation_dtype(q)

    def query_block(carry, inputs):
        q_BMLD, position_BC, segment_BC = inputs

        def key_block(j, carry):
            o_BMLD, largest_BML, total_BML = carry
            mask = _visible_mask(
                position_BC,
                segment_BC,
                None if kv_segment is None else kv_segment[j],
                j * size_k,
                size_k,
            )
            s_BMLC = _masked_scores(scale, q_BMLD, k_blocks[j], mask)
            new_BML = jnp.maximum(largest_BML, jnp.max(s_BMLC, axis=-1))
            p_BMLC = jnp.exp(s_BMLC - new_BML[..., None])
            rescale_BML = jnp.exp(largest_BML - new_BML)
            o_BMLD = o_BMLD * rescale_BML[..., None] + jnp.einsum(
                "bmlc,bmcd->bmld", p_BMLC.astype(v.dtype), v_blocks[j], preferred_element_type=wide
            )
            return o_BMLD, new_BML, total_BML * rescale_BML + jnp.sum(p_BMLC, axis=-1)

        zero = (
            jnp.zeros(q_BMLD.shape, wide),
            jnp.full(q_BMLD.shape[:-1], _HIDDEN, wide),
            jnp.zeros(q_BMLD.shape[:-1], wide),
        )
        if size_k >= s:
            o_BMLD, largest_BML, total_BML = key_block(0, zero)
        else:
            first, last = _visible_key_blocks(position_BC, segment_BC, kv_segment, size_k, s)
            o_BMLD, largest_BML, total_BML = jax.lax.fori_loop(first, last, key_block, zero)
        o_BMLD, logsumexp_BML = _normalize_softmax_sums(o_BMLD, largest_BML, total_BML)
        return carry, (o_BMLD.astype(q.dtype), logsumexp_BML)

    _, (o, logsumexp) = blocks.scan_or_call_once(
        query_block, None, (_to_query_blocks(q, m, size_q), position, segment)
    )
    logsumexp_BTN = _from_query_blocks(logsumexp[..., None], t, n)[..., 0]
    return _from_query_blocks(o, t, n), logsumexp_BTN.swapaxes(1, 2)


def backward(q, k, v, segment_ids, kv_segment_ids, o, logsumexp_BNT, do, *, scale, block, causal):
    """Computes the gradients that `backward` in `dispatch.py` describes, in the same blocks as
    `forward`. Returns dq [B, T, N, D], dk and dv [B, S, M, D], given do [B, T, N, D], the gradient
    of o.
    """
    size_q, size_k, position, segment, kv_segment = _block_sizes_positions_ids(
        block, causal, q, k, segment_ids, kv_segment_ids
    )
    (t, n), (s, m) = q.shape[1:3], k.shape[1:3]
    k_blocks, v_blocks = blocks.to_chunks((k.swapaxes(1, 2), v.swapaxes(1, 2)), 2, size_k)
    wide = blocks.accumulation_dtype(q)
    delta_BTN = jnp.sum(o.astype(wide) * do.astype(wide), axis=-1)

    def query_block(carry, inputs):
        q_BMLD, do_BMLD, logsumexp_BML1, delta_BML1, position_BC, segment_BC = inputs

        def key_block(j, carry):
            dq_BMLD, dk_blocks, dv_blocks = carry
            mask = _visible_mask(
                position_BC,
                segment_BC,
                None if kv_segment is None else kv_segment[j],
                j * size_k,
                size_k,
            )
            p_BMLC = jnp.exp(_masked_scores(scale, q_BMLD, k_blocks[j], mask) - logsumexp_BML1)
            dp_BMLC = jnp.einsum(
                "bmld,bmcd->bmlc", do_BMLD, v_blocks[j], preferred_element_type=wide
            )
            ds_BMLC = (p_BMLC * (dp_BMLC - delta_BML1) * scale).astype(q.dtype)
            dv_BMCD = jnp.einsum(
                "bmlc,bmld->bmcd", p_BMLC.astype(q.dtype), do_BMLD, preferred_element_type=wide
            )
            dk_BMCD = jnp.einsum("bmlc,bmld->bmcd", ds_BMLC, q_BMLD, preferred_element_type=wide)
            dq_BMLD += jnp.einsum(
                "bmlc,bmcd->bmld", ds_BMLC, k_blocks[j], preferred_element_type=wide
            )
            return (
                dq_BMLD,
                _add_at_index(dk_blocks, j, dk_BMCD),
                _add_at_index(dv_blocks, j, dv_BMCD),
            )

        zero = (jnp.zeros(q_BMLD.shape, wide), *carry)
        if size_k >= s:
            dq_BMLD, *carry = key_block(0, zero)
        else:
            dq_BMLD, *carry = jax.lax.fori_loop(
                *_visible_key_blocks(position_BC, segment_BC, kv_segment, size_k, s),
                key_block,
                zero,
            )
        return tuple(carry), dq_BMLD.astype(q.dtype)

    logsumexp_BTN1 = logsumexp_BNT.swapaxes(1, 2)[..., None]
    by_query = (
        _to_query_blocks(x, m, size_q) for x in (q, do, logsumexp_BTN1, delta_BTN[..., None])
    )
    zero = jnp.zeros(k_blocks.shape, wide), jnp.zeros(k_blocks.shape, wide)
    carry, dq = blocks.scan_or_call_once(query_block, zero, (*by_query, position, segment))
    dk, dv = (blocks.from_chunks(x, 2, s).swapaxes(1, 2).astype(k.dtype) for x in carry)
    return _from_query_blocks(dq, t, n), dk, dv
