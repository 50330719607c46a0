"""Causal grouped-query attention over packed documents. Memory is linear in the length of the
sequence, because no array holds the scores of all pairs of tokens.

B batch, T time, N query heads, M key/value heads (query head n reads head n // (N // M)), D head
width.
"""

import functools

import jax

from qwen3next_jax.ops import blocks, checks
from qwen3next_jax.ops.attention import dispatch
from qwen3next_jax.ops.implementations import choose_implementation

IMPLEMENTATIONS = ("xla", "splash", "cudnn")


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
    """Returns softmax(scale · q kᵀ) v, where each query attends to its own token and the tokens
    before it. The softmax is in float32.

    Args:
      q: [B, T, N, D] queries.
      k, v: [B, T, M, D] keys and values, with N % M == 0.
      segment_ids: [B, T] integers or None. The ids of documents are positive and non-decreasing
        along T; 0 marks padding at the end. A query attends only to keys of its own segment. A NaN
        or an infinity in one document may reach other documents of the row, because the products
        that a mask hides are multiplied by zero.
      scale: factor of the scores; None means D^-1/2.
      implementation: name of the implementation, or None for the platform's best. "xla" computes
        attention block by block. "splash" runs JAX's splash attention kernels on a TPU; a CPU
        interprets the kernels. "cudnn" runs cuDNN on a Hopper GPU or a later GPU; a CPU runs the
        same calls in JAX. None means "splash" on a TPU for rows of at least 128 tokens (for shards
        of at least 256 tokens with `axis_name`), "cudnn" on a GPU on which cuDNN passed its test
        (docs/gpu.md says for which arrays), and "xla" otherwise.
      axis_name: name of the mesh axis over which T is split in order, for a call inside
        `shard_map`. With `axis_name`, every array is this shard's part, a document has the same id
        on every shard, and T is even if the axis has more than one shard.

    Returns:
      o: [B, T, N, D] in q's dtype. The outputs of padding are finite, and padding gives no gradient
        to other tokens.

    Raises:
      ValueError: shapes, dtypes or the implementation's name do not fit.
      NotImplementedError: the named implementation cannot run these arrays here.
    """
    _check_arguments(q, k, v, segment_ids, implementation)
    if axis_name is not None:
        _check_tokens_per_shard(axis_name, q)
    chosen = choose_implementation(
        "attention",
        implementation,
        dispatch.XLA_IMPLEMENTATIONS,
        q=q,
        k=k,
        v=v,
        split=axis_name is not None,
    )
    options = dispatch.AttentionOptions(
        chosen, q.shape[-1] ** -0.5 if scale is None else float(scale)
    )
    if axis_name is not None and jax.lax.axis_size(axis_name) > 1:
        from qwen3next_jax.ops.attention import ring

        return ring.ring_attention(options, axis_name, q, k, v, segment_ids)
    return _differentiable_attention(options, q, k, v, segment_ids, segment_ids)


def _check_arguments(q, k, v, segment_ids, implementation):
    checks.check_implementation_name(implementation, IMPLEMENTATIONS)
    checks.check_shapes(
        q=(q, "BTND"), k=(k, "BTMD"), v=(v, "BTMD"), segment_ids=(segment_ids, "BT")
    )
    checks.check_integers(segment_ids=segment_ids)
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k {k.shape[2]}: expected query heads to be a multiple "
            "of key heads"
        )


def _check_tokens_per_shard(axis_name, q):
    if q.shape[1] % 2 and jax.lax.axis_size(axis_name) > 1:
        raise ValueError(
            f"q has {q.shape[1]} tokens a shard of axis {axis_name!r}: expected an even number, "
            "as each shard works "
            "on two blocks of the row; the row's length must be a multiple of twice the axis' size"
        )


# ---- the custom gradient around the chosen implementation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable_attention(options, *inputs):
    return dispatch.forward(options, *inputs)[0]


def _attention_forward(options, *inputs):
    o, logsumexp_BNT = dispatch.forward(options, *inputs)
    axes = options.saved_axis_order  # swaps two axes or none, so it is its own inverse
    o, logsumexp_BNT = blocks.save_for_backward((o.transpose(axes), logsumexp_BNT), "attention")
    o = o.transpose(axes)
    return o, (inputs, o, logsumexp_BNT)


def _attention_backward(options, residuals, do):
    return *dispatch.backward(options, *residuals, do), None, None


_differentiable_attention.defvjp(_attention_forward, _attention_backward)
