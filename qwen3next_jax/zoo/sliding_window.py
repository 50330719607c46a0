"""Sliding-window attention: a query sees only the most recent keys (2004.05150). The first tokens
of a document may stay visible beyond the window (2309.17453), and each head may have a sink logit,
as in gpt-oss.

Letters: B batch, T queries, S keys, W = window - 1 (the number of keys before the first query), N
query heads, M key/value heads (query head n reads head n // (N // M)), H = N // M, K head width, C
queries of a chunk, F first tokens.
"""

import dataclasses
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks, checks
from qwen3next_jax.sharding.rules import TENSOR, activation_spec, num_shards, per_shard
from qwen3next_jax.zoo.attention_references import gated_attention, positions_and_causal_mask
from qwen3next_jax.zoo.biased_projections import BiasedProjections

EXAMPLES = {
    "sliding_window": {
        "linear_mixer": "sliding_window",
        "mixer": {
            "window": 7,
            "first_tokens": 2,
            "sink_logit": True,
            "attention_bias": "qkvo",
        },
    }
}
QUERIES_PER_CHUNK = 128  # number of queries computed at once
_HIDDEN = -1e30  # score of a masked key; finite, so that a query without any key gives no NaN


class SlidingWindowAttention(BiasedProjections):
    """`GatedAttention` whose queries see only the last `window` keys. The cache holds the keys and
    values of the window (and of the first tokens), so that its size is constant.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(BiasedProjections.Settings):
        # number of keys that a query sees, including its own
        window: Annotated[int, "at least 1"] = 1024
        # number of keys at the start of a document that stay visible beyond the window
        first_tokens: Annotated[int, "0 or more"] = 0
        # whether each head has a learned sink logit s, which adds e^s to the softmax's denominator
        sink_logit: bool = False

    settings_free_after_training = ("window", "first_tokens")
    cache_kind = "state"
    writes_cache_in_place = False

    def __init__(self, config, make, layer_indices):
        super().__init__(config, make, layer_indices)
        if self.settings(config).sink_logit:
            self.sink = make.parameter(
                jnp.zeros, (config.num_attention_heads,), "query_heads", kind="rate"
            )

    def attend(self, q_BTNK, k_BTMK, v_BTMK, context, cache=None):
        s, mesh, positions = self.settings(self.config), context.mesh, context.positions
        ids, k, v, first, kv_ids = context.segment_ids, k_BTMK, v_BTMK, None, None
        if cache is not None:
            ids = jnp.ones_like(positions) if ids is None else (ids > 0).astype(jnp.int32)
            # slots for positions before a row's first token are empty
            is_cached = jnp.arange(1 - s.window, 0) + positions[:, :1] >= 0
            k = jnp.concatenate([cache["k"], k], axis=1)
            v = jnp.concatenate([cache["v"], v], axis=1)
            kv_ids = jnp.concatenate([jnp.where(is_cached, 1, -1), ids], axis=1)
            cache = self._cache_after_tokens(cache, k, v, k_BTMK, v_BTMK, ids, positions)
        if s.first_tokens and cache is None:
            first = (k, v, jnp.arange(positions.shape[1]) - positions)
        elif s.first_tokens:
            first = (cache["first_k"], cache["first_v"], jnp.zeros_like(positions))
        if k.shape[2] % num_shards(mesh, TENSOR):
            k, v, *first_kv = (
                jnp.repeat(x, q_BTNK.shape[2] // x.shape[2], axis=2)
                for x in (k, v, *(first or ())[:2])
            )
            first = first and (*first_kv, first[2])

        def run(q, k, v, ids, kv_ids, first, positions, sink):
            return window_attention(
                q,
                k,
                v,
                segment_ids=ids,
                kv_segment_ids=kv_ids,
                sink=sink,
                first=first and FirstTokens(*first, positions, s.first_tokens),
                window=s.window,
                axis_name=context.mesh_time_axis,
            )

        heads = activation_spec("batch", context.logical_time_axis, "heads")
        tokens = activation_spec("batch", context.logical_time_axis)
        firsts = first and (heads, heads, tokens)
        in_specs = (heads, heads, heads, tokens, tokens, firsts, tokens, activation_spec("heads"))
        sink = self.sink[...] if s.sink_logit else None
        o_BTNK = per_shard(run, mesh, in_specs, heads)(
            q_BTNK, k, v, ids, kv_ids, first, positions, sink
        )
        return o_BTNK, cache

    def _cache_after_tokens(self, cache, k_BSMK, v_BSMK, k_BTMK, v_BTMK, ids_BT, positions_BT):
        """Returns the cache after the new tokens, without the padding at the end of the row.

        Args:
          k_BSMK, v_BSMK: the W cached keys and values, followed by the keys and values of the new
            tokens.
          k_BTMK, v_BTMK: the keys and values of the new tokens.
          ids_BT: 0 for padding, 1 for other tokens.
          positions_BT: the position of each token in its document.
        """
        s = self.settings(self.config)
        last = jax.vmap(
            lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, s.window - 1),
        )
        length_B = jnp.sum(ids_BT > 0, axis=1)
        row_B1 = jnp.arange(ids_BT.shape[0])[:, None]
        slot_BT = jnp.where(ids_BT > 0, positions_BT, s.first_tokens)
        return {
            "k": last(k_BSMK, length_B),
            "v": last(v_BSMK, length_B),
            "first_k": cache["first_k"].at[row_B1, slot_BT].set(k_BTMK, mode="drop"),
            "first_v": cache["first_v"].at[row_B1, slot_BT].set(v_BTMK, mode="drop"),
        }

    @classmethod
    def init_cache(cls, config, batch, length):
        s = cls.settings(config)

        def empty(rows):
            shape = (batch, rows, config.num_key_value_heads, config.head_dim)
            return jnp.zeros(shape, config.dtype)

        return {
            "k": empty(s.window - 1),
            "v": empty(s.window - 1),
            "first_k": empty(s.first_tokens),
            "first_v": empty(s.first_tokens),
        }

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of two products of K numbers for each key that a query sees:
        one for the score, one for the weighted sum of values.
        """
        s = cls.settings(config)
        window = min(s.window, length)
        keys = sum(
            min(t + 1, window) + min(s.first_tokens, max(0, t + 1 - window)) for t in range(length)
        )
        return 4 * config.num_attention_heads * config.head_dim * (keys / length)


def sliding_window_reference(config, params, x):
    s = config.settings_of_mixer("sliding_window")
    i, j, causal = positions_and_causal_mask(x)
    seen = causal & ((i - j < s.window) | (j < s.first_tokens))
    return gated_attention(config, params, x, seen=seen, distance=i - j, sink=params.get("sink"))


REFERENCES = {"sliding_window": sliding_window_reference}


# ---- the operator
# --------------------------------------------------------------------------------------------------


class FirstTokens(NamedTuple):
    """The first tokens of documents, which stay visible beyond the window.

    Attributes:
      k, v: keys and values, [B, S, M, K], including those of the first tokens of every document.
      query_document_start: [B, T], for each query the index along S of the first token of its
        document.
      query_position: [B, T], the position of each query in its document.
      tokens_per_document: F, the number of first tokens of a document that stay visible.
    """

    k: jax.Array
    v: jax.Array
    query_document_start: jax.Array
    query_position: jax.Array
    tokens_per_document: int


def window_attention(
    q,
    k,
    v,
    *,
    segment_ids=None,
    kv_segment_ids=None,
    sink=None,
    first: FirstTokens | None = None,
    axis_name: str | None = None,
    window: int,
):
    """Computes softmax(K^-1/2 q kᵀ) v with a float32 softmax. Query i sees the keys j of its
    document with i - window < j ≤ i. The queries are computed one chunk after the other, so that
    the work for T queries is proportional to T × (window + chunk), and the memory to chunk ×
    (window + chunk).

    Args:
      q: queries, [B, T, N, K].
      k, v: keys and values, [B, W + T, M, K], where the first W = window - 1 keys come before the
        first query; or [B, T, M, K] if there are no keys before the first query. N is a multiple of
        M. segment_ids: [B, T] integers or None, the document of each query.
      kv_segment_ids: [B, W + T] integers, the document of each key, -1 where there is no key. None
        if k has T keys.
      sink: [N] or None, a logit s of each head that adds e^s to the softmax's denominator.
      first: the first tokens of documents, which stay visible beyond the window; or None.
      axis_name: inside `shard_map`, the mesh axis over which T is split in order. If T is split, k
        has T keys, `first.k` and `first.v` are k and v of this shard, and the indices in
        `first.query_document_start` are indices in the whole row. The function gathers the keys and
        values of the whole row.
      window: the number of keys that a query sees, 1 or more.

    Returns:
      o: [B, T, N, K] in q's dtype. It is finite in padding, too.

    Raises:
      ValueError: the arguments' shapes or dtypes do not fit, or the window is less than 1.
    """
    _check_shapes(q, k, v, segment_ids, kv_segment_ids, window)
    batch, time = q.shape[:2]
    before = window - 1
    ids = jnp.ones((batch, time), jnp.int32) if segment_ids is None else segment_ids
    if kv_segment_ids is None:
        k, v, kv_ids, first = _prepend_earlier_keys(k, v, ids, first, before, axis_name)
    else:
        kv_ids = kv_segment_ids
    size = min(QUERIES_PER_CHUNK, time)
    end = [(0, 0), (0, -time % size)]
    k_padded, v_padded = (jnp.pad(x, end + [(0, 0), (0, 0)]) for x in (k, v))
    ids_padded = jnp.pad(kv_ids, end, constant_values=-1)

    @jax.checkpoint  # so that the backward pass, too, holds the scores of one chunk at a time
    def attend(start, chunk):
        rows = lambda x: jax.lax.dynamic_slice_in_dim(x, start, before + size, axis=1)
        o_BCNK = _attend_chunk(
            chunk, rows(k_padded), rows(v_padded), rows(ids_padded), sink, first, window
        )
        return start + size, o_BCNK

    by_query = (
        (q, ids) if first is None else (q, ids, first.query_document_start, first.query_position)
    )
    _, o = blocks.scan_or_call_once(attend, 0, blocks.to_chunks(by_query, 1, size))
    return blocks.from_chunks(o, 1, time)


def _check_shapes(q, k, v, segment_ids, kv_segment_ids, window):
    if window < 1:
        raise ValueError(f"window = {window}: expected 1 or more")
    checks.check_shapes(
        q=(q, "BTND"),
        segment_ids=(segment_ids, "BT"),
        k=(k, "BSMD"),
        v=(v, "BSMD"),
        kv_segment_ids=(kv_segment_ids, "BS"),
    )
    checks.check_integers(segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)
    heads, groups, time, keys = q.shape[2], k.shape[2], q.shape[1], k.shape[1]
    if heads % groups:
        raise ValueError(
            f"q has {heads} heads and k {groups}: expected query heads to be a multiple of key "
            "heads"
        )
    if kv_segment_ids is None and keys != time:
        raise ValueError(
            f"k has {keys} keys for {time} queries: expected kv_segment_ids [B, {window - 1} + T]"
        )
    if kv_segment_ids is not None and keys != window - 1 + time:
        raise ValueError(
            f"k has {keys} keys for {time} queries and a window of {window}: expected "
            f"{window - 1 + time}"
        )


def _attend_chunk(chunk, k_BSMK, v_BSMK, kv_ids_BS, sink, first, window):
    """Computes the output o [B, C, N, K] of a chunk of queries.

    Args:
      chunk: (q [B, C, N, K], document ids [B, C]), and with `first` also
        `first.query_document_start` and `first.query_position` of the chunk.
      k_BSMK, v_BSMK, kv_ids_BS: the W + C keys that the chunk's queries may see, and the values and
        documents of the keys.
      sink, first, window: as for `window_attention`.
    """
    q_BCNK, ids_BC, *first_of_chunk = chunk
    groups, width = k_BSMK.shape[2:]
    size, keys = q_BCNK.shape[1], k_BSMK.shape[1]
    q_BCMHK = q_BCNK.reshape(*q_BCNK.shape[:2], groups, -1, width)
    scores = lambda pattern, k: (
        jnp.einsum(pattern, q_BCMHK, k, preferred_element_type=jnp.float32) * width**-0.5
    )

    s_BMHCS = scores("bcmhd,bsmd->bmhcs", k_BSMK)
    distance_CS = jnp.arange(size)[:, None] + (keys - size) - jnp.arange(keys)
    seen_BCS = (
        (distance_CS >= 0) & (distance_CS < window) & (ids_BC[:, :, None] == kv_ids_BS[:, None])
    )
    columns = [jnp.where(seen_BCS[:, None, None], s_BMHCS, _HIDDEN)]
    if first is not None:
        start_BC, position_BC = first_of_chunk
        first_k, first_v = _keys_and_values_of_first_tokens(first, start_BC, groups, width)
        s_BMHCF = scores("bcmhd,bcfmd->bmhcf", first_k)
        is_beyond = position_BC[..., None] - jnp.arange(first.tokens_per_document) >= window
        columns.append(jnp.where(is_beyond[:, None, None], s_BMHCF, _HIDDEN))
    if sink is not None:
        logit = sink.astype(jnp.float32).reshape(groups, -1)[None, :, :, None, None]
        columns.append(jnp.broadcast_to(logit, (*s_BMHCS.shape[:-1], 1)))

    p = jax.nn.softmax(jnp.concatenate(columns, axis=-1), axis=-1).astype(v_BSMK.dtype)
    sums = lambda pattern, p, v: jnp.einsum(pattern, p, v, preferred_element_type=jnp.float32)
    o = sums("bmhcs,bsmd->bcmhd", p[..., :keys], v_BSMK)
    if first is not None:
        p_first = p[..., keys:][..., : first.tokens_per_document]
        o = o + sums("bmhcf,bcfmd->bcmhd", p_first, first_v)
    return o.reshape(q_BCNK.shape).astype(q_BCNK.dtype)


def _keys_and_values_of_first_tokens(first: FirstTokens, start_BC, groups, width):
    """Returns the keys and the values [B, C, F, M, K] of the first tokens of each query's
    document.
    """
    # If a document has fewer than F tokens, other tokens take the missing places. `_attend_chunk`
    # hides them, because it shows only tokens that are a window or more before the query.
    index = jnp.clip(
        start_BC[..., None] + jnp.arange(first.tokens_per_document), 0, first.k.shape[1] - 1
    )
    flat = index.reshape(index.shape[0], -1, 1, 1)
    return (
        jnp.take_along_axis(x, flat, axis=1).reshape(*index.shape, groups, width)
        for x in (first.k, first.v)
    )


def _prepend_earlier_keys(k, v, ids, first, before: int, axis_name):
    """Returns k, v and the document ids with W = `before` entries added before the first query. The
    added entries come from the shards before this one, or are padding at the start of the row. The
    fourth result is `first` with the keys and values of the whole row.
    """
    start, shard_count = 0, 1
    if axis_name is not None:
        start = jax.lax.axis_index(axis_name) * k.shape[1]
        shard_count = jax.lax.axis_size(axis_name)
        k, v, ids = (jax.lax.all_gather(x, axis_name, axis=1, tiled=True) for x in (k, v, ids))
        first = first and first._replace(k=k, v=v)
    time = k.shape[1] // shard_count
    front = [(0, 0), (before, 0)]
    part = lambda x: jax.lax.dynamic_slice_in_dim(x, start, before + time, axis=1)
    return (
        part(jnp.pad(k, front + [(0, 0), (0, 0)])),
        part(jnp.pad(v, front + [(0, 0), (0, 0)])),
        part(jnp.pad(ids, front, constant_values=-1)),
        first,
    )
