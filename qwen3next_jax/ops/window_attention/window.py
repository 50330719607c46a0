"""Attention to a window of keys, a block of queries after the other, so that work and memory are
T × (window + block).

Letters: B batch, T queries, W = window − 1 keys before the first query, N query heads, M
key/value heads, D head width, F first tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks, checks

BLOCK = 128  # queries worked at once
_HIDDEN = -1e30  # score of a key that is not seen; finite, so that a row without keys stays finite


class First(NamedTuple):
    """The first tokens of documents, which stay visible beyond the window.

    k, v: [B, S, M, D], rows of which some are first tokens. start: [B, T], the row of k of the
    first token of each query's document. position: [B, T] of each query in its document. count:
    F, how many there are.
    """

    k: jax.Array
    v: jax.Array
    start: jax.Array
    position: jax.Array
    count: int


def window_attention(
    q,
    k,
    v,
    *,
    segment_ids=None,
    kv_segment_ids=None,
    sink=None,
    first: First | None = None,
    axis_name: str | None = None,
    window: int,
):
    """softmax(D^-1/2 q kᵀ) v over the keys i − window < j ≤ i of a query's document, with
    float32 softmax.

    Args:
      q: [B, T, N, D].
      k, v: [B, W + T, M, D] with N % M == 0, the W = window − 1 rows before the first query in
      front; or [B, T, M, D] where there are none. segment_ids: [B, T] integers or None, the
      document of each query. kv_segment_ids: of the keys, [B, W + T], with -1 where there is
        none; None where k has T rows.
      sink: [N] or None, a logit per head that takes weight and gives nothing.
      first: None, or the first tokens that every query of a document sees (`StreamingLLM`,
      https://arxiv.org/abs/2309.17453). axis_name: inside `shard_map`, the mesh axis over which
      T is split in order; k has T rows, `first.k` and `first.v` are this shard's
        rows of k and v, and `first.start` counts rows of the whole row. Keys and values of the
        whole row are gathered.
      window: 1 or more.

    Returns:
      o: [B, T, N, D] in q's dtype. Padding rows hold something finite.

    Raises:
      ValueError: shapes, dtypes or the window do not fit.
    """
    if window < 1:
        raise ValueError(f"window = {window}: expected 1 or more")
    checks.shapes(
        q=(q, "BTND"),
        segment_ids=(segment_ids, "BT"),
        k=(k, "BSMD"),
        v=(v, "BSMD"),
        kv_segment_ids=(kv_segment_ids, "BS"),
    )
    checks.integers(segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)
    (batch, time, heads, width), groups, before = q.shape, k.shape[2], window - 1
    if heads % groups:
        raise ValueError(
            f"q has {heads} heads and k {groups}: expected query heads to be a multiple of key "
            "heads"
        )
    ids = jnp.ones((batch, time), jnp.int32) if segment_ids is None else segment_ids
    if kv_segment_ids is None:
        if k.shape[1] != time:
            raise ValueError(
                f"k has {k.shape[1]} keys for {time} queries: expected kv_segment_ids [B, "
                f"{before} + T]"
            )
        k, v, kv_ids, first = _with_keys_before(k, v, ids, first, before, axis_name)
    else:
        kv_ids = kv_segment_ids
        if k.shape[1] != before + time:
            raise ValueError(
                f"k has {k.shape[1]} keys for {time} queries and a window of {window}: expected "
                f"{before + time}"
            )
    size = min(BLOCK, time)
    shape = lambda x: x.reshape(*x.shape[:2], groups, -1, width)

    @jax.checkpoint  # scores live for one block at a time, in the backward pass, too
    def attend(start, block):
        q, ids, *first_of_block = block
        rows = lambda x: jax.lax.dynamic_slice_in_dim(x, start, before + size, axis=1)
        keys, values, kv_ids = rows(k_padded), rows(v_padded), rows(ids_padded)
        s_BMHCS = (
            jnp.einsum("bcmhd,bsmd->bmhcs", shape(q), keys, preferred_element_type=jnp.float32)
            * width**-0.5
        )
        distance = jnp.arange(size)[:, None] + before - jnp.arange(before + size)
        seen = (distance >= 0) & (distance < window) & (ids[:, :, None] == kv_ids[:, None])
        scores = [jnp.where(seen[:, None, None], s_BMHCS, _HIDDEN)]
        if first is not None:
            at, position = first_of_block
            # Those behind the row's end are hidden by `beyond`: a token that is seen stands before
            # the query.
            index = jnp.clip(at[..., None] + jnp.arange(first.count), 0, first.k.shape[1] - 1)
            first_k, first_v = (
                jnp.take_along_axis(x, index.reshape(batch, -1, 1, 1), axis=1).reshape(
                    *index.shape, groups, width
                )
                for x in (first.k, first.v)
            )
            s_BMHCF = (
                jnp.einsum(
                    "bcmhd,bcfmd->bmhcf", shape(q), first_k, preferred_element_type=jnp.float32
                )
                * width**-0.5
            )
            beyond = position[..., None] - jnp.arange(first.count) >= window
            scores.append(jnp.where(beyond[:, None, None], s_BMHCF, _HIDDEN))
        if sink is not None:
            logit = sink.astype(jnp.float32).reshape(groups, -1)[None, :, :, None, None]
            scores.append(jnp.broadcast_to(logit, (*s_BMHCS.shape[:-1], 1)))
        p = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(v.dtype)
        o = jnp.einsum(
            "bmhcs,bsmd->bcmhd", p[..., : before + size], values, preferred_element_type=jnp.float32
        )
        if first is not None:
            o = o + jnp.einsum(
                "bmhcf,bcfmd->bcmhd",
                p[..., before + size :][..., : first.count],
                first_v,
                preferred_element_type=jnp.float32,
            )
        return start + size, o.reshape(q.shape).astype(q.dtype)

    by_query = (q, ids) if first is None else (q, ids, first.start, first.position)
    end = [(0, 0), (0, -time % size)]
    k_padded, v_padded = (jnp.pad(x, end + [(0, 0), (0, 0)]) for x in (k, v))
    ids_padded = jnp.pad(kv_ids, end, constant_values=-1)
    _, o = blocks.scan(attend, 0, blocks.to_chunks(by_query, 1, size))
    return blocks.from_chunks(o, 1, time)


def _with_keys_before(k, v, ids, first, before: int, axis_name):
    """k, v, ids with the rows before the first query, and `first` with rows of the whole row."""
    if axis_name is None:
        start = 0
    else:
        start = jax.lax.axis_index(axis_name) * k.shape[1]
        k, v, ids = (jax.lax.all_gather(x, axis_name, axis=1, tiled=True) for x in (k, v, ids))
        first = first and first._replace(k=k, v=v)
    time = k.shape[1] if axis_name is None else k.shape[1] // jax.lax.axis_size(axis_name)
    front = [(0, 0), (before, 0)]
    part = lambda x: jax.lax.dynamic_slice_in_dim(x, start, before + time, axis=1)
    return (
        *(part(jnp.pad(x, front + [(0, 0), (0, 0)])) for x in (k, v)),
        part(jnp.pad(ids, front, constant_values=-1)),
        first,
    )
