"""Attention over packed documents with tokamax's kernels for Hopper GPUs (docs/gpu.md).

In a row, segment ids do not decrease before the padding, which is at the end and has the id 0. So
the keys of a document are consecutive. A query attends to the keys from the first key of its
document to the document's last key or, in causal attention, to the key of the query's own token.

B batch, T queries, S keys, N query heads, M key/value heads, D head width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.kernels import self_test
from qwen3next_jax.kernels.gpu import tokamax
from qwen3next_jax.ops.attention import xla

WIDTHS = (64, 128, 256)
ROWS = 128  # the numbers of queries and of keys must be multiples of this
# The largest allowed relative L2 difference between the kernels and the XLA implementation, which
# both round the softmax weights to bfloat16.
TOLERANCE = 0.03


def is_default(q, k, v, split: bool) -> bool:
    """Returns False, so that only a call that names these kernels runs them. The reason is that a
    training step with them never finished on the GPU (docs/gpu.md).
    """
    return False


def supports(q, k, v, split: bool) -> str:
    """Returns why the kernels cannot run a call; "" if they can.

    Args:
      q, k, v: the queries [B, T, N, D] and the keys and values [B, S, M, D].
      split: whether the sequence is split over a mesh axis. The kernels then get half of a shard's
        tokens at a time.
    """
    queries, keys = (x.shape[1] // (2 if split else 1) for x in (q, k))
    if not q.dtype == k.dtype == v.dtype == jnp.bfloat16:
        return f"has q, k, v of {q.dtype}, {k.dtype}, {v.dtype}: expected bfloat16"
    if q.shape[3] not in WIDTHS:
        return f"has heads of {q.shape[3]} channels: expected {', '.join(map(str, WIDTHS))}"
    if queries % ROWS or keys % ROWS:
        return f"has {queries} queries and {keys} keys: expected multiples of {ROWS}"
    return tokamax.unsupported()


def forward(q, k, v, segment_ids, kv_segment_ids, *, scale, causal, interpret=False):
    """Takes and returns the same as `ops.attention.xla.forward`. With `interpret`, that is, on a
    CPU, it calls `xla.forward`, because Pallas' interpreter does not support everything that the
    kernels use.
    """
    if interpret:
        return xla.forward(
            q, k, v, segment_ids, kv_segment_ids, scale=scale, causal=causal, block=xla.CPU_BLOCK
        )
    sm90 = tokamax.module("attention.pallas_mosaic_gpu_kernel_sm90")
    config = sm90.Config(block_q=64, block_kv=64 if q.shape[3] == 256 else 128, num_stages=2)
    kernel = functools.partial(
        sm90.flash_attention_kernel,
        bias=None,
        mask=None,
        is_causal=causal,
        logits_soft_cap=None,
        logits_scale=scale,
        out_dtype=q.dtype,
        normalize_output=True,
        return_residuals=True,
        use_stable_softmax=True,
        rescale_threshold=1.0,
        config=config,
    )
    o, (largest_BNT, total_BNT) = jax.vmap(
        lambda q, k, v, start, end: kernel(q, k, v, k_start=start, k_end=end)
    )(q, k, v, *_key_limits(segment_ids, kv_segment_ids))
    return o, jnp.where(total_BNT > 0, largest_BNT + jnp.log(total_BNT), xla.UNSEEN)


def backward(
    q, k, v, segment_ids, kv_segment_ids, o, logsumexp_BNT, do, *, scale, causal, interpret=False
):
    """Takes and returns the same as `ops.attention.xla.backward`. With `interpret`, that is, on a
    CPU, it calls `xla.backward`.
    """
    if interpret:
        return xla.backward(
            *(q, k, v, segment_ids, kv_segment_ids, o, logsumexp_BNT, do),
            scale=scale,
            causal=causal,
            block=xla.CPU_BLOCK,
        )
    sm90 = tokamax.module("attention.pallas_mosaic_gpu_vjp_kernel_sm90")
    # A thread has 168 registers if two warpgroups compute, and 255 if one does. Heads of 256
    # channels spill fewer registers with one.
    config = sm90.Config(
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
        num_stages=2,
        compute_wgs=1 if q.shape[3] == 256 else 2,
    )
    kernel = functools.partial(
        sm90.flash_attention_vjp_kernel,
        bias=None,
        mask=None,
        is_causal=causal,
        logits_soft_cap=None,
        logits_scale=scale,
        ds_dtype=None,
        config=config,
    )

    def row_backward(q, k, v, o, logsumexp, do, start, end):
        # The kernel takes the largest score and the sum of exponentials and computes the weights as
        # exp(score − largest) / sum. With the logsumexp and 1 in their place it computes the same
        # weights: exp(score − logsumexp) / 1.
        return kernel(
            q, k, v, (logsumexp, jnp.ones_like(logsumexp)), o, do, k_start=start, k_end=end
        )[:3]

    dq, dk, dv = jax.vmap(row_backward)(
        q,
        k,
        v,
        o.astype(q.dtype),
        logsumexp_BNT,
        do.astype(q.dtype),
        *_key_limits(segment_ids, kv_segment_ids),
    )
    return dq, dk, dv


def _key_limits(segment_ids, kv_segment_ids):
    """Returns two arrays [B, 1, T]: the index of the first key of each query's document, and one
    more than the index of the document's last key. Padding counts as one more document. Both
    results are None if `segment_ids` is None, that is, if a row is one document.

    The axis of heads has one entry, which holds for all heads. With an entry for each head, tokamax
    0.0.17 would use the limits of a wrong head for the gradients of keys that several query heads
    share.
    """
    if segment_ids is None:
        return None, None
    last = jnp.iinfo(jnp.int32).max
    ids_BT, kv_ids_BS = (
        jnp.where(ids > 0, ids, last).astype(jnp.int32) for ids in (segment_ids, kv_segment_ids)
    )
    search = lambda side: jax.vmap(functools.partial(jnp.searchsorted, side=side))(
        kv_ids_BS, ids_BT
    ).astype(jnp.int32)[:, None]
    return search("left"), search("right")


def max_error(width: int, kernels=None) -> tuple[str, float]:
    """Runs the kernels and the XLA implementation on three documents and padding, with two query
    heads per key head. Returns the name of the result in which they differ most, and the relative
    L2 difference.

    Args:
      width: D.
      kernels: two functions to test instead of `forward` and `backward`; None means `forward` and
        `backward`.
    """
    rng = np.random.default_rng(0)
    array = lambda heads: jnp.asarray(rng.normal(size=(2, 2 * ROWS, heads, width)), jnp.bfloat16)
    q, k, v, do = array(4), array(2), array(2), array(4)
    ids = jnp.asarray([[1] * 100 + [2] * 30 + [3] * 100 + [0] * 26, [1] * 256])

    def results(forward, backward, **settings):
        settings |= dict(scale=width**-0.5, causal=True)
        o, logsumexp = forward(q, k, v, ids, ids, **settings)
        return o, logsumexp, *backward(q, k, v, ids, ids, o, logsumexp, do, **settings)

    got = jax.jit(functools.partial(results, *(kernels or (forward, backward))))()
    want = jax.jit(functools.partial(results, xla.forward, xla.backward, block=ROWS))()
    return self_test.largest_error(("o", "logsumexp", "dq", "dk", "dv"), got, want)
