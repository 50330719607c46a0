"""Calls splash attention, the TPU attention kernels that come with JAX.

B batch, T queries or keys, N query heads, M key/value heads, D head width.
"""

import inspect
import math

import jax
import jax.numpy as jnp

from qwen3next_jax.kernels.tpu.grids import LANES
from qwen3next_jax.ops.blocks import accumulation_dtype
from qwen3next_jax.ops.compile_target import compile_target

SAVED_AXES = (0, 2, 1, 3)  # to [B, N, T, D], the order in which the kernels write
BLOCK, LONG_BLOCK = 512, 1024  # the number of queries, and of keys, in a block
# The long block fits in VMEM if the D channels of one token and head take at most this many bytes.
LONG_BLOCK_BYTES = 512
# The backward pass is one kernel, which computes 5 products for a pair of blocks, if a row has at
# most this many blocks of keys. For each of them the kernel writes a part of the gradient of the
# queries in their dtype, which is added up afterwards. For longer rows these parts would need much
# memory, so there are two kernels, of 4 products and of 3.
PARTS_OF_DQ = 8


def unsupported_reason(q, k, v, split: bool) -> str:
    """Returns why the kernels cannot run a call; "" if they can. The kernels take arrays of every
    shape, because arrays are padded to whole blocks.
    """
    if any(x.dtype == jnp.float64 for x in (q, k, v)):
        return "has float64 inputs: expected float32 or bfloat16"
    return ""


def is_default(q, k, v, split: bool) -> bool:
    """Returns whether a call that names no implementation runs the kernels. The call runs the
    kernels if they support it and get at least LANES tokens of a row. The kernels pad shorter rows
    to LANES tokens, so most of the work would be on padding.

    Args:
      q, k, v: the arrays of the call.
      split: whether the sequence is split over a mesh axis. If the sequence is split, the kernels
        get half of a shard's tokens at a time.
    """
    if unsupported_reason(q, k, v, split):
        return False
    return q.shape[1] // (2 if split else 1) >= LANES


def block_size(length: int, width: int, itemsize: int) -> int:
    """Returns the number of queries in a block, which is also the number of keys in a block.

    With blocks of LONG_BLOCK instead of BLOCK tokens, the work per key takes a tenth to a quarter
    fewer cycles, and the kernels copy half as many blocks. But a causal mask excludes fewer whole
    blocks of keys if blocks are longer. In a short row, the work on masked keys inside the blocks
    costs more than the long blocks save.

    Args:
      length: number of tokens of the padded row.
      width: D.
      itemsize: bytes of a number.
    """
    long = (
        length >= 4 * LONG_BLOCK
        and length % LONG_BLOCK == 0
        and width * itemsize <= LONG_BLOCK_BYTES
    )
    return LONG_BLOCK if long else min(BLOCK, length)


def _attention_function_of_row(
    x, heads: int, length: int, causal: bool, interpret: bool, save_residuals: bool
):
    """Returns JAX's attention function for one row of the batch: heads [N, T, D] of a padded row of
    `length` tokens. With `save_residuals` the attention function also returns the logsumexp.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    block = block_size(length, x.shape[-1], x.dtype.itemsize)
    sizes = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), block)
    sizes |= dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), min(BLOCK, block))
    if length // block <= PARTS_OF_DQ:
        sizes["use_fused_bwd_kernel"] = True
    else:
        sizes |= {"block_q_dq": block, "block_kv_dq": block}
    one_head = splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
    mask = splash_attention_mask.MultiHeadMask([one_head((length, length))] * heads)
    return splash_attention_kernel.make_splash_mha(
        mask,
        block_sizes=splash_attention_kernel.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
        save_residuals=save_residuals,
    )


def _padded_length(t: int) -> int:
    """Returns t rounded up to a multiple of LANES; if the result would exceed BLOCK, t rounded up
    to a multiple of BLOCK.
    """
    lanes = -(-t // LANES) * LANES
    return lanes if lanes <= BLOCK else -(-t // BLOCK) * BLOCK


def _to_splash_layout(x_BTND):
    """Rearranges [B, T, N, D] into [B, N, T, D] and pads T and D."""
    b, t, n, d = x_BTND.shape
    return jnp.pad(
        x_BTND.swapaxes(1, 2), ((0, 0), (0, 0), (0, _padded_length(t) - t), (0, -d % LANES))
    )


def _times_scale(x, scale: float):
    """Returns scale · x in x's dtype. Only the product is rounded. If the scale were rounded to
    bfloat16 first, all scores would be too large or too small by the same factor, by up to 2^-8.
    """
    return (x.astype(accumulation_dtype(x)) * scale).astype(x.dtype)


def _from_splash_layout(x_BNTD, like):
    """Rearranges [B, N, T, D] into [B, T, N, D], without the padding of `_to_splash_layout`, in the
    shape and dtype of `like`.
    """
    return x_BNTD[:, :, : like.shape[1], : like.shape[3]].swapaxes(1, 2).astype(like.dtype)


def _padded_segment_ids(q, segment_ids, kv_segment_ids, causal):
    """Returns the document ids of the padded queries and keys. Keys of padding get the id -1, which
    no query has. Returns None if the call has no ids and either the mask is causal or nothing is
    padded.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    padding = ((0, 0), (0, _padded_length(q.shape[1]) - q.shape[1]))
    if segment_ids is None:
        if causal or padding[1] == (0, 0):  # the causal mask hides the added keys
            return None
        segment_ids = kv_segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    return splash_attention_kernel.SegmentIds(
        jnp.pad(segment_ids.astype(jnp.int32), padding),
        jnp.pad(kv_segment_ids.astype(jnp.int32), padding, constant_values=-1),
    )


def _mask_kind_scope(causal: bool):
    """Returns a scope that adds the kind of mask to the kernels' names. The planner reads the kind
    of mask from the kernels' names, because nothing else in a compiled program says which mask a
    kernel has.
    """
    return jax.named_scope("splash_causal" if causal else "splash_full")


def forward(q, k, v, segment_ids, kv_segment_ids, *, scale, causal, interpret=False):
    """Computes the results that `forward` of `ops.attention.dispatch` describes. `interpret` says
    whether a CPU interprets the kernel.
    """
    t, n = q.shape[1:3]
    inputs = (
        _to_splash_layout(_times_scale(q, scale)),
        _to_splash_layout(k),
        _to_splash_layout(v),
    )
    # The TPU's compiler takes no 64-bit index.
    with _mask_kind_scope(causal), jax.enable_x64(False):
        kernel = _attention_function_of_row(
            q, n, _padded_length(t), causal, interpret, save_residuals=True
        )
        o, (logsumexp,) = jax.vmap(kernel)(
            *inputs, _padded_segment_ids(q, segment_ids, kv_segment_ids, causal)
        )
    return _from_splash_layout(o, q), logsumexp[:, :, :t].astype(accumulation_dtype(q))


def _backward_function_of_row(kernel):
    """Returns a function (q, k, v, segments, o, logsumexp, do) → (dq, dk, dv) for one row of the
    batch, which runs only the backward kernels.

    JAX has no public name for the backward kernels. In JAX 0.11.2 and 0.12.0 the private function
    `_splash_attention_bwd` runs the backward kernels and takes the arguments that this function
    passes. If JAX has no such function, the returned function uses the public gradient, which also
    runs the forward kernel again.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    private = getattr(splash_attention_kernel, "_splash_attention_bwd", None)
    if private is None or inspect.signature(private).parameters.keys() != {
        *kernel.kwargs,
        "res",
        "do",
    }:
        return lambda q, k, v, segments, o, logsumexp, do: jax.vjp(
            lambda *x: kernel(*x, segments), q, k, v
        )[1](do)

    def backward(q, k, v, segments, o, logsumexp, do):
        residuals = (
            q,
            k,
            v,
            segments,
            None,
            o,
            logsumexp,
            kernel.dq_mask_info,
            kernel.dkv_mask_info,
        )
        return private(res=residuals, do=do, **kernel.kwargs)[3:6]

    return backward


def backward(
    q, k, v, segment_ids, kv_segment_ids, o, logsumexp_BNT, do, *, scale, causal, interpret=False
):
    """Computes the gradients that `backward` of `ops.attention.dispatch` describes. `interpret`
    says whether a CPU interprets the kernels.
    """
    (t, n), chip = q.shape[1:3], compile_target().tpu_info
    # On a chip with several cores, the cores share only those grid axes of the backward kernels
    # that vmap adds. So the heads are split into one part for each core, and vmap maps over the
    # parts.
    parts = math.gcd(chip.num_cores if chip else 1, k.shape[2])
    length = _padded_length(t)
    logsumexp = jnp.pad(logsumexp_BNT.astype(jnp.float32), ((0, 0), (0, 0), (0, length - t)))
    arrays = (
        _to_splash_layout(_times_scale(q, scale)),
        _to_splash_layout(k),
        _to_splash_layout(v),
        _to_splash_layout(o),
        logsumexp,
        _to_splash_layout(do),
    )
    q_, k_, v_, o_, logsumexp, do_ = (
        x.reshape(x.shape[0], parts, -1, *x.shape[2:]) for x in arrays
    )
    with _mask_kind_scope(causal), jax.enable_x64(False):  # as in `forward`
        row = _backward_function_of_row(
            _attention_function_of_row(
                q, n // parts, length, causal, interpret, save_residuals=False
            )
        )
        grads = jax.vmap(jax.vmap(row, in_axes=(0, 0, 0, None, 0, 0, 0)))(
            q_,
            k_,
            v_,
            _padded_segment_ids(q, segment_ids, kv_segment_ids, causal),
            o_,
            logsumexp,
            do_,
        )
    dq, dk, dv = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in grads)
    return (
        _from_splash_layout(_times_scale(dq, scale), q),
        _from_splash_layout(dk, k),
        _from_splash_layout(dv, v),
    )
