"""Causal grouped-query attention over packed documents, in memory linear in the length.

Letters: B batch, T queries, S keys, N query heads, M key/value heads (query head n reads head n // (N // M)), D head width.
"""

import functools

import jax

from qwen3next_jax.ops import blocks, checks
from qwen3next_jax.ops.attention import dispatch, ring

IMPLEMENTATIONS = ("xla", "splash")


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, segment_ids: jax.Array | None = None,
              kv_segment_ids: jax.Array | None = None, q_positions: jax.Array | None = None, scale: float | None = None,
              implementation: str | None = None, axis_name: str | None = None) -> jax.Array:
    """softmax(scale · q kᵀ) v over the keys 0 … p of a query at position p, with float32 softmax.

    Args:
      q: [B, T, N, D].
      k, v: [B, S, M, D] with N % M == 0.
      segment_ids: [B, T] integers or None: positive and non-decreasing along T, one id per document, 0 for padding at the
        end. A query sees keys of its own segment only.
      kv_segment_ids: [B, S], the same for keys; None where S = T means `segment_ids`.
      q_positions: [B, T] index of each query on the key axis (cached decoding); None means 0 … T−1.
      scale: of the scores; None means D^-1/2.
      implementation: "xla" (blockwise, or at once for few `q_positions`), "splash" (TPU; on CPU it runs interpreted; no
        `q_positions`), or None: "splash" on TPU, tokamax's kernels on an H100 where they were right when first tried, "xla"
        elsewhere and where those do not apply.
      axis_name: inside `shard_map`, the mesh axis over which T is split in order; every array is then this shard's part, the
        segment ids are those of the whole row, and T must be even. Causal self-attention over the whole row: no
        `q_positions`, no `kv_segment_ids`.

    Returns:
      o: [B, T, N, D] in q's dtype. Padding rows hold something finite and give no gradient to other rows.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
      NotImplementedError: the named implementation cannot run this problem.
    """
    _check(q, k, v, segment_ids, kv_segment_ids, q_positions, implementation)
    if axis_name is not None:
        _check_split(axis_name, q, kv_segment_ids, q_positions)
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if implementation == "splash" and q_positions is not None:
        raise NotImplementedError(f"q_positions with implementation={implementation!r}: use \"xla\" for cached decoding")
    options = dispatch.Options(implementation, scale)
    if axis_name is not None and jax.lax.axis_size(axis_name) > 1:
        return ring.attention(options, axis_name, q, k, v, segment_ids)
    return _operator(options, q, k, v, segment_ids, kv_segment_ids, q_positions)


def _check(q, k, v, segment_ids, kv_segment_ids, q_positions, implementation):
    checks.implementation(implementation, IMPLEMENTATIONS)
    checks.shapes(q=(q, "BTND"), k=(k, "BSMD"), v=(v, "BSMD"), segment_ids=(segment_ids, "BT"), q_positions=(q_positions, "BT"),
                  kv_segment_ids=(kv_segment_ids, "BS"))
    checks.integers(segment_ids=segment_ids, q_positions=q_positions, kv_segment_ids=kv_segment_ids)
    (t, n), (s, m) = q.shape[1:3], k.shape[1:3]
    if n % m:
        raise ValueError(f"q has {n} heads and k {m}: expected query heads to be a multiple of key heads")
    if q_positions is None and s != t:
        raise ValueError(f"k has {s} keys for {t} queries: expected q_positions [B, T] to place the queries")
    if segment_ids is not None and kv_segment_ids is None and s != t:
        raise ValueError(f"k has {s} keys for {t} queries: expected kv_segment_ids [B, S] beside segment_ids")
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError("kv_segment_ids given: expected segment_ids beside it")


def _check_split(axis_name, q, kv_segment_ids, q_positions):
    for name, x in (("q_positions", q_positions), ("kv_segment_ids", kv_segment_ids)):
        if x is not None:
            raise NotImplementedError(f"{name} with axis_name={axis_name!r}: expected causal self-attention over the whole row")
    if q.shape[1] % 2 and jax.lax.axis_size(axis_name) > 1:
        raise ValueError(f"q has {q.shape[1]} tokens a shard of axis {axis_name!r}: expected an even number, as each shard works "
                         "on two blocks of the row; the row's length must be a multiple of twice the axis' size")


# ---- one custom gradient outside, the choice of platform inside forward and inside backward ----------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operator(options, *inputs):
    return dispatch.forward(options, *inputs)[0]


def _operator_forward(options, *inputs):
    o, logsumexp_BNT = blocks.kept(dispatch.forward(options, *inputs))
    return o, (inputs, o, logsumexp_BNT)


def _operator_backward(options, residuals, do):
    return *dispatch.backward(options, *residuals, do), None, None, None


_operator.defvjp(_operator_forward, _operator_backward)
