"""Attention whose scores and mask may be any functions of a query and a key, for variants of
attention that the kernels do not support. The function computes one chunk of queries after another,
each chunk with all keys of the row. For T queries in chunks of C queries, and S keys, the memory is
proportional to C × S and the work to T × S, whatever the mask is.

Letters: B batch, T queries, S keys, C queries of a chunk, N query heads, M key/value heads
(query head n reads head n // (N // M)), H = N // M, K head width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import blocks, checks

QUERIES_PER_CHUNK = 64  # number of queries computed at once
_HIDDEN = -1e30  # score of a masked key; finite, so that a query without any key gives no NaN


def scaled_dot(q_BCNK: jax.Array, k_BSMK: jax.Array) -> jax.Array:
    """Returns K^-1/2 q·k for every query and key, [B, N, C, S] float32."""
    b, c, n, width = q_BCNK.shape
    q_BCMHK = q_BCNK.reshape(b, c, k_BSMK.shape[2], -1, width)
    s_BMHCS = jnp.einsum("bcmhk,bsmk->bmhcs", q_BCMHK, k_BSMK, preferred_element_type=jnp.float32)
    return s_BMHCS.reshape(b, n, c, -1) * width**-0.5


def pair_attention(
    q: Any,
    k: Any,
    v: jax.Array,
    *,
    score: Callable,
    seen: Callable,
    positions: jax.Array,
    kv_positions: jax.Array,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    num_selected_keys: int = 0,
    sink: jax.Array | None = None,
    axis_name: str | None = None,
    chunk: int = QUERIES_PER_CHUNK,
) -> jax.Array:
    """Returns softmax(score) v. The softmax is in float32 and runs over the keys that the query
    "sees", that is, attends to.

    Args:
      q, k: the first arguments of `score`: arrays [B, T, …] and [B, S, …], or trees of such arrays.
      v: values, [B, S, M, K].
      score: function (q, k, positions [B, C, 1], kv_positions [B, 1, S]) → [B, N, C, S] float32,
        the scores of a chunk of queries and all keys.
      seen: function (positions, kv_positions) → bool [B, C, S], whether the query sees the key.
        If `num_selected_keys` is not 0, `seen` returns two arrays [B, C, S]: the keys that the
        query always sees, and the keys from which the keys with the highest scores are selected.
      positions, kv_positions: [B, T], [B, S] integers, the position of each query and key in its
        document.
      segment_ids, kv_segment_ids: [B, T], [B, S] integers or None, the document of each query and
        key. A query sees only keys of its document.
      num_selected_keys: the number of keys with the highest scores that each query and head sees in
        addition. 0 means none. Keys with the same score as the last selected key are seen, too.
      sink: [N] or None, one logit for each head, which enters the denominator of the softmax but
        has no value.
      axis_name: name of the mesh axis over which T and S are split in order, for a call inside
        `shard_map`. Every shard gathers the keys and values of the whole row.
      chunk: the number of queries computed at once.

    Returns:
      o: [B, T, N, K] in v's dtype. It is finite in padding, too.
    """
    checks.check_shapes(
        v=(v, "BSMK"),
        positions=(positions, "BT"),
        kv_positions=(kv_positions, "BS"),
        segment_ids=(segment_ids, "BT"),
        kv_segment_ids=(kv_segment_ids, "BS"),
    )
    if axis_name is not None:
        k, v, kv_positions, kv_segment_ids = jax.tree.map(
            lambda x: jax.lax.all_gather(x, axis_name, axis=1, tiled=True),
            (k, v, kv_positions, kv_segment_ids),
        )

    @jax.checkpoint  # the backward pass recomputes the scores, one chunk at a time
    def attend(carry, inputs):
        q, t_BC, ids_BC = inputs
        t_BC1, s_B1S = t_BC[..., None], kv_positions[:, None]
        s_BNCS, visible = score(q, k, t_BC1, s_B1S), seen(t_BC1, s_B1S)
        same_document = True if ids_BC is None else ids_BC[..., None] == kv_segment_ids[:, None]
        if num_selected_keys:
            always_BCS, maybe_BCS = (x & same_document for x in visible)
            far_BNCS = jnp.where(maybe_BCS[:, None], s_BNCS, -jnp.inf)
            least_selected_score = jax.lax.top_k(
                far_BNCS, min(num_selected_keys, far_BNCS.shape[-1])
            )[0][..., -1:]
            visible_BNCS = always_BCS[:, None] | (
                maybe_BCS[:, None] & (s_BNCS >= least_selected_score)
            )
        else:
            visible_BNCS = (visible & same_document)[:, None]
        b, n, c, keys = s_BNCS.shape
        s_BNCS = jnp.where(visible_BNCS, s_BNCS, _HIDDEN)
        if sink is not None:
            sink_BNC1 = jnp.broadcast_to(sink.astype(jnp.float32)[:, None, None], (b, n, c, 1))
            s_BNCS = jnp.concatenate([s_BNCS, sink_BNC1], axis=-1)
        p_BNCS = jax.nn.softmax(s_BNCS, axis=-1)[..., :keys].astype(v.dtype)
        p_BMHCS = p_BNCS.reshape(b, v.shape[2], -1, c, keys)
        o = jnp.einsum("bmhcs,bsmk->bcmhk", p_BMHCS, v, preferred_element_type=jnp.float32)
        return carry, o.reshape(b, c, n, v.shape[3]).astype(v.dtype)

    time = positions.shape[1]
    chunks = blocks.to_chunks((q, positions, segment_ids), 1, min(chunk, time))
    _, o = blocks.scan_or_call_once(attend, None, chunks)
    return blocks.from_chunks(o, 1, time)
