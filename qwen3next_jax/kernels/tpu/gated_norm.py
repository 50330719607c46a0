"""TPU kernels that apply an RMS norm to each head and multiply the result by silu(gate). The
forward pass and the backward pass each read their inputs from HBM once and write their outputs
once.

B batch, T time in blocks of R tokens, H heads of V = LANES channels in blocks of whole heads.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from qwen3next_jax.kernels.tpu import grids
from qwen3next_jax.kernels.tpu.grids import LANES

BLOCK = 256, 1024  # the largest numbers of rows and of channels in a block


def unsupported_reason(o, gate, weight, eps: float) -> str:
    """Returns why the kernels cannot run o and gate [B, T, H · V] with a weight [V]; "" if they
    can.
    """
    width = weight.shape[0]
    if not all(x.dtype in (jnp.bfloat16, jnp.float32) for x in (o, gate)):
        return f"has o and gate of {o.dtype} and {gate.dtype}: expected bfloat16 or float32"
    if width != LANES or o.shape[1] % grids.TILE_ROWS:
        return (
            f"has {o.shape[1]} tokens and heads of {width}: expected a multiple of "
            f"{grids.TILE_ROWS}, and {LANES}"
        )
    return ""


def forward(eps, o, gate, weight, *, interpret: bool = False):
    """Returns y [B, T, H · V], the result of `ops.gated_norm`, in o's dtype."""
    return _call_kernel(
        functools.partial(_forward_kernel, eps), o, (o, gate), weight, (o.dtype,), interpret
    )[0]


def backward(eps, o, gate, weight, dy, *, interpret: bool = False):
    """Returns the gradients of o, gate and weight, given dy [B, T, H · V], the gradient of y."""
    body = functools.partial(_backward_kernel, eps)
    do, dgate, dweight = _call_kernel(
        body, o, (o, gate, dy), weight, (o.dtype, gate.dtype), interpret, sums=True
    )
    return do, dgate, jnp.sum(dweight, axis=0).astype(weight.dtype)


def _call_kernel(body, like, inputs, weight, dtypes, interpret, sums=False):
    """Runs the kernel `body` and returns its outputs: one array in the shape of `like` for each of
    `dtypes`. With `sums` there is one more output: for each block of channels 8 rows [V] of partial
    sums, which the caller adds up.
    """
    batch, time, d = like.shape
    rows, channels = grids.block_sizes(time, d, BLOCK)
    block = pl.BlockSpec((1, rows, channels), lambda c, b, t: (b, t, c))
    outputs = [jax.ShapeDtypeStruct(like.shape, dtype) for dtype in dtypes]
    out_specs = [block] * len(dtypes)
    if sums:
        outputs.append(jax.ShapeDtypeStruct((8 * (d // channels), LANES), jnp.float32))
        out_specs.append(pl.BlockSpec((8, LANES), lambda c, b, t: (c, 0)))
    return grids.call_block_kernel(
        body,
        (weight.astype(jnp.float32)[None], *inputs),
        [pl.BlockSpec((1, LANES), lambda c, b, t: (0, 0))] + [block] * len(inputs),
        outputs,
        out_specs,
        (d // channels, batch, time // rows),
        name="gated_norm" + body.func.__name__.removesuffix("_kernel"),
        bytes_accessed=(len(inputs) + len(dtypes)) * like.size * like.dtype.itemsize,
        interpret=interpret,
    )


def _normed_and_silu_of_gate(eps, o, gate, lanes):
    """Returns four arrays of one head in float32: 1 / rms, o / rms, silu(gate) and the derivative
    of silu at `gate`.
    """
    o, gate = o[0, :, lanes].astype(jnp.float32), gate[0, :, lanes].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + eps)
    sigmoid = jax.nn.sigmoid(gate)
    return scale, o * scale, gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))


def _forward_kernel(eps, weight, o, gate, y):
    """Computes y of a block."""

    def head(lanes):
        _, normed, silu, _ = _normed_and_silu_of_gate(eps, o, gate, lanes)
        y[0, :, lanes] = (normed * weight[...] * silu).astype(y.dtype)

    grids.for_each_lane_group(y.shape[2], head)


def _backward_kernel(eps, weight, o, gate, dy, do, dgate, dweight):
    """Computes do and dgate of a block, and adds the block's part of the weight's gradient to
    `dweight` [8, V], 8 rows of partial sums.
    """

    @pl.when(grids.is_first_step_of_channel_block())
    def _():
        dweight[...] = jnp.zeros_like(dweight)

    def head(lanes):
        scale, normed, silu, slope = _normed_and_silu_of_gate(eps, o, gate, lanes)
        d = dy[0, :, lanes].astype(jnp.float32)
        dgate[0, :, lanes] = (d * normed * weight[...] * slope).astype(dgate.dtype)
        d = d * silu
        dweight[...] += jnp.sum((d * normed).reshape(-1, 8, LANES), axis=0)
        d = d * weight[...]
        do[0, :, lanes] = (
            scale * (d - normed * jnp.mean(d * normed, axis=-1, keepdims=True))
        ).astype(do.dtype)

    grids.for_each_lane_group(do.shape[2], head)
