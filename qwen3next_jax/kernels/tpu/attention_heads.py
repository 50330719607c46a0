"""TPU kernels of what lies between attention's projections and its kernels (`ops.attention_heads`),
one pass over memory each way.

B batch, T time in blocks of R rows, N heads of K channels, C = N · K side by side, in blocks of
whole heads, L lanes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu import grids
from qwen3next_jax.kernels.tpu.grids import LANES

BLOCK = 256, 1024  # rows and channels, at most


def supports(time: int, width: int, rotary: int, dtype) -> str:
    """Why the kernels cannot run rows of `time` tokens with heads of `width` channels, `rotary` of
    them rotated; "" where they can.
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
    return _call(
        functools.partial(_norm_and_rotate_kernel, eps, half),
        weight.shape[0],
        (x,),
        "h",
        (weight, cos, sin),
        interpret=interpret,
    )[0]


def norm_and_rotate_gradients(eps, half, x, weight, cos, sin, dy, *, interpret: bool = False):
    """Gradients of x and weight."""
    body = functools.partial(_norm_and_rotate_gradients_kernel, eps, half)
    dx, sums = _call(body, weight.shape[0], (x, dy), "c", (weight, cos, sin), True, interpret)
    return dx, jnp.sum(sums, axis=0).astype(weight.dtype)


def gate(o, gate, *, interpret: bool = False):
    return _call(_gate_kernel, o.shape[3], (o, gate), "c", interpret=interpret)[0]


def gate_gradients(o, gate, dy, *, interpret: bool = False):
    """Gradients of o and gate."""
    return tuple(
        _call(_gate_gradients_kernel, o.shape[3], (o, gate, dy), "hc", interpret=interpret)
    )


def _call(body, width, inputs, outputs, of_rotation=(), sums=False, interpret=False):
    """`outputs`: a letter for each, "h" for heads one after another [B, N, T, K], "c" for heads
    side by side [B, T, C]; in the flat input's dtype.
    """
    like = next(x for x in inputs if x.ndim == 3)
    batch, time, d = like.shape
    rows, _ = grids.block_sizes(time, LANES, (BLOCK[0], LANES))
    heads = next(n for n in range(BLOCK[1] // width, 0, -1) if d // width % n == 0)
    spec = {
        "c": pl.BlockSpec((1, rows, heads * width), lambda c, b, t: (b, t, c)),
        "h": pl.BlockSpec((1, heads, rows, width), lambda c, b, t: (b, c, t, 0)),
    }
    shape = {
        "c": jax.ShapeDtypeStruct(like.shape, like.dtype),
        "h": jax.ShapeDtypeStruct((batch, d // width, time, width), like.dtype),
    }
    out_specs, out_shape = [spec[of] for of in outputs], [shape[of] for of in outputs]
    blocks = d // (heads * width)
    if sums:  # of each block of heads
        out_shape.append(jax.ShapeDtypeStruct((8 * blocks, width), jnp.float32))
        out_specs.append(pl.BlockSpec((8, width), lambda c, b, t: (c, 0)))
    in_specs, copied = [], (len(inputs) + len(outputs)) * like.size * like.dtype.itemsize
    if of_rotation:
        weight, *rotation = of_rotation
        of_rotation = weight.astype(jnp.float32)[None], *rotation
        in_specs = [pl.BlockSpec((1, width), lambda c, b, t: (0, 0))] + 2 * [
            pl.BlockSpec((1, rows, LANES), lambda c, b, t: (b, t, 0))
        ]
        copied += blocks * sum(x.size * 4 for x in rotation)
    return grids.call(
        body,
        (*of_rotation, *inputs),
        in_specs + [spec["h" if x.ndim == 4 else "c"] for x in inputs],
        out_shape,
        out_specs,
        (blocks, batch, time // rows),
        name=getattr(body, "func", body).__name__.strip("_").removesuffix("_kernel"),
        bytes_accessed=copied,
        interpret=interpret,
    )


def _each(heads, body):
    """`body`(head, its lanes side by side) for those of a block [1, N, R, K]."""

    def step(h, _):
        body(h, pl.ds(pl.multiple_of(h * heads.shape[3], LANES), heads.shape[3]))
        return 0

    jax.lax.fori_loop(0, heads.shape[1], step, 0)


def _normed(eps, x):
    """(1 / rms, x / rms)."""
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return scale, x * scale


def _rotated(x, cos, sin, half):
    """The first lanes of x [R, K] rotated."""
    first = x[:, :LANES]
    # of lane i: i - half, i + half
    below, above = pltpu.roll(first, half, 1), pltpu.roll(first, LANES - half, 1)
    lane = jax.lax.broadcasted_iota(jnp.int32, first.shape, 1)
    rotated = first * cos + jnp.where(lane < half, above, below) * sin
    return rotated if x.shape[1] == LANES else jnp.concatenate((rotated, x[:, LANES:]), axis=1)


def _norm_and_rotate_kernel(eps, half, weight, cos, sin, x, y):
    def head(h, lanes):
        _, normed = _normed(eps, x[0, :, lanes].astype(jnp.float32))
        y[0, h] = _rotated(normed * weight[...], cos[0], sin[0], half).astype(y.dtype)

    _each(y, head)


def _norm_and_rotate_gradients_kernel(eps, half, weight, cos, sin, x, dy, dx, dweight):
    @pl.when(grids.first_step())
    def _():
        dweight[...] = jnp.zeros_like(dweight)

    def head(h, lanes):
        scale, normed = _normed(eps, x[0, :, lanes].astype(jnp.float32))
        d = _rotated(dy[0, h].astype(jnp.float32), cos[0], -sin[0], half)
        dweight[...] += jnp.sum((d * normed).reshape(-1, 8, d.shape[1]), axis=0)
        d = d * weight[...]
        dx[0, :, lanes] = (
            scale * (d - normed * jnp.mean(d * normed, axis=-1, keepdims=True))
        ).astype(dx.dtype)

    _each(dy, head)


def _gate_kernel(o, gate, y):
    def head(h, lanes):
        y[0, :, lanes] = (
            o[0, h].astype(jnp.float32) * jax.nn.sigmoid(gate[0, :, lanes].astype(jnp.float32))
        ).astype(y.dtype)

    _each(o, head)


def _gate_gradients_kernel(o, gate, dy, do, dgate):
    def head(h, lanes):
        open_, d = (
            jax.nn.sigmoid(gate[0, :, lanes].astype(jnp.float32)),
            dy[0, :, lanes].astype(jnp.float32),
        )
        do[0, h] = (d * open_).astype(do.dtype)
        dgate[0, :, lanes] = (d * o[0, h].astype(jnp.float32) * open_ * (1 - open_)).astype(
            dgate.dtype
        )

    _each(o, head)
