"""Causal grouped-query attention over packed documents, in memory linear in the length.

B batch, T time, N query heads, M key/value heads (query head n reads head n // (N // M)), D head
width.
"""

import functools

import jax

from qwen3next_jax.ops import blocks, checks
from qwen3next_jax.ops.attention import dispatch, ring
from qwen3next_jax.ops.implementations import choose

IMPLEMENTATIONS = ("xla", "splash", "tokamax")


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """softmax(scale · q kᵀ) v over the keys up to the query, with float32 softmax.

    Args:
      q: [B, T, N, D].
      k, v: [B, T, M, D] with N % M == 0.
      segment_ids: [B, T] integers or None: positive and non-decreasing along T, one id per
        document, 0 for padding at the end. A query sees keys of its own segment only.
      scale: of the scores; None means D^-1/2.
      implementation: "xla" (blockwise), "splash" (on a TPU; on a CPU it runs interpreted),
        "tokamax" (its kernels on an H100 or H200, on a CPU the form in XLA; a training step with
        them stopped: docs/gpu.md), or None: "splash" on a TPU for rows of at least 128 tokens,
        "xla" elsewhere.
      axis_name: inside `shard_map`, the mesh axis over which T is split in order. Every array is
        then this shard's part, the segment ids are those of the whole row, and T must be even.

    Returns:
      o: [B, T, N, D] in q's dtype. Padding rows are finite and give no gradient to other rows.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
      NotImplementedError: the named implementation cannot run these arrays here.
    """
    _check(q, k, v, segment_ids, implementation)
    if axis_name is not None:
        _check_split(axis_name, q)
    chosen = choose(
        "attention", implementation, dispatch.FORMS, q=q, k=k, v=v, split=axis_name is not None
    )
    options = dispatch.Options(chosen, q.shape[-1] ** -0.5 if scale is None else float(scale))
    if axis_name is not None and jax.lax.axis_size(axis_name) > 1:
        return ring.attention(options, axis_name, q, k, v, segment_ids)
    return _operator(options, q, k, v, segment_ids, segment_ids)


def _check(q, k, v, segment_ids, implementation):
    checks.implementation(implementation, IMPLEMENTATIONS)
    checks.shapes(q=(q, "BTND"), k=(k, "BTMD"), v=(v, "BTMD"), segment_ids=(segment_ids, "BT"))
    checks.integers(segment_ids=segment_ids)
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k {k.shape[2]}: expected query heads to be a multiple "
            "of key heads"
        )


def _check_split(axis_name, q):
    if q.shape[1] % 2 and jax.lax.axis_size(axis_name) > 1:
        raise ValueError(
            f"q has {q.shape[1]} tokens a shard of axis {axis_name!r}: expected an even number, "
            "as each shard works "
            "on two blocks of the row; the row's length must be a multiple of twice the axis' size"
        )


# ---- the custom gradient around the chosen implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operator(options, *inputs):
    return dispatch.forward(options, *inputs)[0]


def _operator_forward(options, *inputs):
    o, logsumexp_BNT = dispatch.forward(options, *inputs)
    axes = options.saved_axes  # exchanges two axes, or none: it is its own inverse
    o, logsumexp_BNT = blocks.save_for_backward((o.transpose(axes), logsumexp_BNT), "attention")
    o = o.transpose(axes)
    return o, (inputs, o, logsumexp_BNT)


def _operator_backward(options, residuals, do):
    return *dispatch.backward(options, *residuals, do), None, None


_operator.defvjp(_operator_forward, _operator_backward)
