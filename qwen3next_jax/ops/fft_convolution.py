"""A causal convolution as long as the row, by Fourier transforms, document by document.

B batch, T time, D channels (any trailing axes, flattened).
"""

import functools
import math

import jax
import jax.numpy as jnp

from qwen3next_jax.ops import checks
from qwen3next_jax.zoo.ops.scans import starts


def fft_convolution(x, kernel, *, segment_ids=None, axis_name: str | None = None):
    """y_t = sum_{s <= t} kernel_{t-s} x_s over the tokens s of t's document, each channel by
    itself.

    A transform mixes the whole row, so that every document is transformed alone: the work is
    that of one document times the number of them in the row that has most.

    Args:
      x: [B, T, *channels].
      kernel: [L, *channels], L >= T (of the whole row): by distance, the token's own first.
      segment_ids: [B, T] integers or None. Positive and non-decreasing along T, 0 for padding at
      the end, whose rows give zeros. axis_name: inside `shard_map`, the mesh axis over which T
      is split in order; the kernel is then the whole row's. Every shard
        transforms whole rows of its part of the channels, which go there and back.

    Returns:
      y: [B, T, *channels] in x's dtype, computed in float32 (float64 for float64).

    Raises:
      ValueError: shapes or dtypes do not fit.
    """
    channels, shards = x.shape[2:], 1 if axis_name is None else jax.lax.axis_size(axis_name)
    checks.shapes(
        x=(x, ("B", "T", *channels)),
        kernel=(kernel, ("L", *channels)),
        segment_ids=(segment_ids, "BT"),
    )
    checks.integers(segment_ids=segment_ids)
    if kernel.shape[0] < x.shape[1] * shards:
        raise ValueError(
            f"kernel has {kernel.shape[0]} rows: expected at least the {x.shape[1] * shards} of x"
        )
    size, wide = math.prod(channels), jnp.promote_types(jnp.float32, x.dtype)
    x_BTD, kernel_TD = (
        x.reshape(*x.shape[:2], size).astype(wide),
        kernel.reshape(-1, size)[: x.shape[1] * shards].astype(wide),
    )
    if axis_name is not None:
        share = -(-size // shards)
        x_BTD, kernel_TD = (
            jnp.pad(y, [(0, 0)] * (y.ndim - 1) + [(0, share * shards - size)])
            for y in (x_BTD, kernel_TD)
        )
        x_BTD = jax.lax.all_to_all(x_BTD, axis_name, split_axis=2, concat_axis=1, tiled=True)
        kernel_TD = jax.lax.dynamic_slice_in_dim(
            kernel_TD, jax.lax.axis_index(axis_name) * share, share, axis=1
        )
        segment_ids = (
            None
            if segment_ids is None
            else jax.lax.all_gather(segment_ids, axis_name, axis=1, tiled=True)
        )
    if segment_ids is None:
        document_BT = jnp.ones(x_BTD.shape[:2], jnp.int32)
    else:
        new_BT, live_BT = starts(segment_ids, None)
        # a row's first token starts none: no id stands before it
        document_BT = jnp.where(live_BT, 1 + jnp.cumsum(new_BT, axis=1), 0)
    y_BTD = _convolve(x_BTD, kernel_TD, document_BT)
    if axis_name is not None:
        y_BTD = jax.lax.all_to_all(y_BTD, axis_name, split_axis=1, concat_axis=2, tiled=True)[
            ..., :size
        ]
    return y_BTD.reshape(x.shape).astype(x.dtype)


def _by_document(step, start, document_BT, *arrays):
    """`start` after step(it, arrays of one document alone [B, T, D], where it is), one document
    of each row after the other.
    """

    def one(carry):
        i, total = carry
        here = (document_BT == i)[..., None]
        return i + 1, step(total, here, *(jnp.where(here, x, 0) for x in arrays))

    return jax.lax.while_loop(
        lambda carry: carry[0] <= jnp.max(document_BT), one, (jnp.ones((), jnp.int32), start)
    )[1]


def _transforms(time: int):
    """Real Fourier transform along the second-last axis of twice as many rows, and back to the
    rows that are kept.
    """
    n = 1 << (2 * time - 1).bit_length()
    return functools.partial(jnp.fft.rfft, n=n, axis=-2), lambda x: jnp.fft.irfft(x, n=n, axis=-2)[
        ..., :time, :
    ]


@jax.custom_vjp
def _convolve(x_BTD, kernel_TD, document_BT):
    there, back = _transforms(x_BTD.shape[1])
    transformed = there(kernel_TD)
    return _by_document(
        lambda y, here, x: y + jnp.where(here, back(there(x) * transformed), 0),
        jnp.zeros_like(x_BTD),
        document_BT,
        x_BTD,
    )


def _backward(residuals, dy_BTD):
    x_BTD, kernel_TD, document_BT = residuals
    there, back = _transforms(x_BTD.shape[1])
    mirrored = jnp.conj(there(kernel_TD))

    def step(total, here, x, dy):
        of_dy = there(dy)
        return total[0] + jnp.where(here, back(of_dy * mirrored), 0), total[1] + jnp.sum(
            jnp.conj(there(x)) * of_dy, axis=0
        )

    dx, dkernel = _by_document(
        step, (jnp.zeros_like(x_BTD), jnp.zeros_like(mirrored)), document_BT, x_BTD, dy_BTD
    )
    return dx, back(dkernel), None


_convolve.defvjp(lambda *inputs: (_convolve(*inputs), inputs), _backward)
