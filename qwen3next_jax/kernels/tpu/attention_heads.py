"""TPU kernels of the two operators of `ops.attention_heads`: `norm_and_rotate` normalises and
rotates queries or keys, and `gate_heads` gates the outputs of the heads. Each kernel reads its
inputs from HBM once and writes its outputs once.

B batch, T time in blocks of R tokens, N heads of K channels, C = N · K channels of all heads, in
blocks of whole heads, L = LANES. `half` is half the number of channels of a head that rotate, and
`eps` is added to the mean square of the norm.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu import grids
from qwen3next_jax.kernels.tpu.grids import LANES

BLOCK = 256, 1024  # the largest numbers of rows and of channels in a block


def unsupported_reason(time: int, width: int, rotary: int, dtype) -> str:
    """Returns why the kernels cannot run a call of an operator; "" if they can.

    Args:
      time: number of tokens in a row (T).
      width: number of channels of a head (K).
      rotary: number of channels of a head that rotate.
      dtype: dtype of the arrays.
    """
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"has {dtype}: expected bfloat16 or float32"
    if time % grids.TILE_ROWS or width % LANES or width > BLOCK[1] or not 0 < rotary <= LANES:
        return (
            f"has {time} tokens, heads of {width}, {rotary} channels rotated: expected multiples "
            f"of {grids.TILE_ROWS} and {LANES}, at most {BLOCK[1]} and 1 to {LANES}"
        )
    return ""


def norm_and_rotate(eps, half, x, weight, cos, sin, *, interpret: bool = False):
    """Returns [B, N, T, K], the result of `ops.attention_heads.norm_and_rotate`, from x [B, T, C],
    weight [K] and cos and sin [B, T, L].
    """
    return _call_kernel(
        functools.partial(_norm_and_rotate_kernel, eps, half),
        weight.shape[0],
        (x,),
        {"h": x.dtype},
        (weight, cos, sin),
        interpret=interpret,
    )[0]


def norm_and_rotate_gradients(eps, half, x, weight, cos, sin, dy, *, interpret: bool = False):
    """Returns the gradients of x [B, T, C] and weight [K], given dy [B, N, T, K]."""
    body = functools.partial(_norm_and_rotate_gradients_kernel, eps, half)
    dx, sums = _call_kernel(
        body, weight.shape[0], (x, dy), {"c": x.dtype}, (weight, cos, sin), True, interpret
    )
    return dx, jnp.sum(sums, axis=0).astype(weight.dtype)


def gate(o, gate, *, interpret: bool = False):
    """Returns [B, T, C], the result of `ops.attention_heads.gate_heads`, from o [B, N, T, K] and
    gate [B, T, C].
    """
    outputs = {"c": o.dtype}
    return _call_kernel(_gate_kernel, o.shape[3], (o, gate), outputs, interpret=interpret)[0]


def gate_gradients(o, gate, dy, *, interpret: bool = False):
    """Returns the gradients of o [B, N, T, K] and gate [B, T, C], given dy [B, T, C]."""
    inputs, outputs = (o, gate, dy), {"h": o.dtype, "c": gate.dtype}
    return tuple(
        _call_kernel(_gate_gradients_kernel, o.shape[3], inputs, outputs, interpret=interpret)
    )


def _call_kernel(body, width, inputs, outputs, norm_inputs=(), sums=False, interpret=False):
    """Runs the kernel `body` over a grid of blocks and returns its outputs.

    Args:
      body: the kernel, a function of the Pallas references of `norm_inputs`, inputs and outputs.
      width: K.
      inputs: arrays [B, N, T, K] or [B, T, C]; at least one has the shape [B, T, C].
      outputs: the dtype of each output. The key is "h" for an output [B, N, T, K] and "c" for an
        output [B, T, C].
      norm_inputs: the norm's weight [K], the cosines [B, T, L] and the sines [B, T, L], or nothing.
      sums: whether the kernel has one more output: for each block of heads 8 rows [K] of partial
        sums, which the caller adds up.
      interpret: whether a CPU interprets the kernel.
    """
    like = next(x for x in inputs if x.ndim == 3)
    batch, time, d = like.shape
    rows, _ = grids.block_sizes(time, LANES, (BLOCK[0], LANES))
    heads = next(n for n in range(BLOCK[1] // width, 0, -1) if d // width % n == 0)
    spec = {
        "c": pl.BlockSpec((1, rows, heads * width), lambda c, b, t: (b, t, c)),
        "h": pl.BlockSpec((1, heads, rows, width), lambda c, b, t: (b, c, t, 0)),
    }
    shape = {"c": like.shape, "h": (batch, d // width, time, width)}
    out_specs = [spec[kind] for kind in outputs]
    out_shape = [jax.ShapeDtypeStruct(shape[kind], dtype) for kind, dtype in outputs.items()]
    blocks = d // (heads * width)
    if sums:
        out_shape.append(jax.ShapeDtypeStruct((8 * blocks, width), jnp.float32))
        out_specs.append(pl.BlockSpec((8, width), lambda c, b, t: (c, 0)))
    in_specs, bytes_accessed = [], (len(inputs) + len(outputs)) * like.size * like.dtype.itemsize
    if norm_inputs:
        weight, *rotation = norm_inputs
        norm_inputs = weight.astype(jnp.float32)[None], *rotation
        in_specs = [pl.BlockSpec((1, width), lambda c, b, t: (0, 0))] + 2 * [
            pl.BlockSpec((1, rows, LANES), lambda c, b, t: (b, t, 0))
        ]
        bytes_accessed += blocks * sum(x.size * 4 for x in rotation)
    return grids.call_block_kernel(
        body,
        (*norm_inputs, *inputs),
        in_specs + [spec["h" if x.ndim == 4 else "c"] for x in inputs],
        out_shape,
        out_specs,
        (blocks, batch, time // rows),
        name=getattr(body, "func", body).__name__.strip("_").removesuffix("_kernel"),
        bytes_accessed=bytes_accessed,
        interpret=interpret,
    )


def _for_each_head(heads, body):
    """Runs body(head, lanes) for every head of the block `heads` [1, N, R, K]. `head` is the index
    of the head, and `lanes` is the slice of the head's channels in a block [1, R, C].
    """

    def step(h, _):
        body(h, pl.ds(pl.multiple_of(h * heads.shape[3], LANES), heads.shape[3]))
        return 0

    jax.lax.fori_loop(0, heads.shape[1], step, 0)


def _inverse_rms_and_normed(eps, x):
    """Returns 1 / rms and x / rms, with rms over the last axis of x."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return scale, x * scale


def _rotate(x, cos, sin, half):
    """Returns x [R, K] with its first LANES channels rotated: channel i becomes x_i cos_i + x_j
    sin_i. The partner j of a rotated channel i is i + half for i < half, and i - half for larger i.
    Channels from 2 · half on have the cosine 1 and the sine 0.
    """
    first = x[:, :LANES]
    # Lane i of `below` holds channel i - half, and lane i of `above` holds channel i + half.
    below, above = pltpu.roll(first, half, 1), pltpu.roll(first, LANES - half, 1)
    lane = jax.lax.broadcasted_iota(jnp.int32, first.shape, 1)
    rotated = first * cos + jnp.where(lane < half, above, below) * sin
    return rotated if x.shape[1] == LANES else jnp.concatenate((rotated, x[:, LANES:]), axis=1)


def _norm_and_rotate_kernel(eps, half, weight, cos, sin, x, y):
    """Computes y [1, N, R, K] from x [1, R, C] for a block of heads."""

    def head(h, lanes):
        _, normed = _inverse_rms_and_normed(eps, x[0, :, lanes].astype(jnp.float32))
        y[0, h] = _rotate(normed * weight[...], cos[0], sin[0], half).astype(y.dtype)

    _for_each_head(y, head)


def _norm_and_rotate_gradients_kernel(eps, half, weight, cos, sin, x, dy, dx, dweight):
    """Computes dx of a block, and adds the block's part of the weight's gradient to `dweight`
    [8, K], 8 rows of partial sums.
    """

    @pl.when(grids.is_first_step_of_channel_block())
    def _():
        dweight[...] = jnp.zeros_like(dweight)

    def head(h, lanes):
        scale, normed = _inverse_rms_and_normed(eps, x[0, :, lanes].astype(jnp.float32))
        d = _rotate(dy[0, h].astype(jnp.float32), cos[0], -sin[0], half)
        dweight[...] += jnp.sum((d * normed).reshape(-1, 8, d.shape[1]), axis=0)
        d = d * weight[...]
        dx[0, :, lanes] = (
            scale * (d - normed * jnp.mean(d * normed, axis=-1, keepdims=True))
        ).astype(dx.dtype)

    _for_each_head(dy, head)


def _gate_kernel(o, gate, y):
    """Computes y [1, R, C] from o [1, N, R, K] and gate [1, R, C] for a block of heads."""

    def head(h, lanes):
        y[0, :, lanes] = (
            o[0, h].astype(jnp.float32) * jax.nn.sigmoid(gate[0, :, lanes].astype(jnp.float32))
        ).astype(y.dtype)

    _for_each_head(o, head)


def _gate_gradients_kernel(o, gate, dy, do, dgate):
    """Computes do [1, N, R, K] and dgate [1, R, C] for a block of heads."""

    def head(h, lanes):
        sigmoid, d = (
            jax.nn.sigmoid(gate[0, :, lanes].astype(jnp.float32)),
            dy[0, :, lanes].astype(jnp.float32),
        )
        do[0, h] = (d * sigmoid).astype(do.dtype)
        dgate[0, :, lanes] = (d * o[0, h].astype(jnp.float32) * sigmoid * (1 - sigmoid)).astype(
            dgate.dtype
        )

    _for_each_head(o, head)
