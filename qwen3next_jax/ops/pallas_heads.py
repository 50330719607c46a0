"""What is between attention's projections and its kernels on a TPU, in one pass over memory each
way: queries and keys are normed, rotated and parted into heads; the heads' outputs pass their
gate and go side by side.

B batch, T time in blocks of R rows, N heads of K channels, C = N · K side by side, in blocks of
whole heads, L lanes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.ops.blocks import wide
from qwen3next_jax.ops.pallas_causal_conv1d import block_sizes
from qwen3next_jax.ops.tpu import tpu

LANES = 128
_BLOCK = 256, 1024  # rows and channels, at most


def takes(time: int, width: int, rotary: int, dtype) -> bool:
    """Whether a TPU is compiled for and its kernels take rows of `time` tokens and heads of
    `width`, of which `rotary` channels turn.
    """
    fits = time % 16 == 0 and width % LANES == 0 and width <= _BLOCK[1] and 0 < rotary <= LANES
    return bool(tpu()) and fits and dtype in (jnp.bfloat16, jnp.float32)


def place(x, weight, cos, sin, half: int, eps: float):
    """x [B, T, C] → [B, N, T, K]: each head over its root mean square, times the weight [K],
    turned (2104.09864), channel i with channel half + i, by angles of which `over_lanes` gives
    cosines and sines; float32 inside.
    """
    return _place(eps, half, x, weight, cos, sin)


def gate(o, gate):
    """o [B, N, T, K] · sigmoid(gate [B, T, C]) → [B, T, C], float32 inside."""
    return _gate(o, gate)


def over_lanes(cos, sin):
    """[B, T, half] each → [B, T, L]: 1 and 0 where nothing turns, sines with the sign that a
    channel's partner gets.
    """
    rest = (*cos.shape[:2], LANES - 2 * cos.shape[2])
    return (
        jnp.concatenate((cos, cos, jnp.ones(rest)), axis=-1),
        jnp.concatenate((-sin, sin, jnp.zeros(rest)), axis=-1),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _place(eps, half, x, weight, cos, sin):
    return jax.lax.platform_dependent(
        x,
        weight,
        cos,
        sin,
        tpu=functools.partial(place_forward, eps, half),
        default=functools.partial(whole_place, eps, half),
    )


def _place_backward(eps, half, inputs, dy):
    def default(x, weight, cos, sin, dy):
        return jax.vjp(lambda x, weight: whole_place(eps, half, x, weight, cos, sin), x, weight)[1](
            dy
        )

    return (
        *jax.lax.platform_dependent(
            *inputs, dy, tpu=functools.partial(place_backward, eps, half), default=default
        ),
        None,
        None,
    )


_place.defvjp(lambda eps, half, *inputs: (_place(eps, half, *inputs), inputs), _place_backward)


@jax.custom_vjp
def _gate(o, gate):
    return jax.lax.platform_dependent(o, gate, tpu=gate_forward, default=whole_gate)


def _gate_backward(inputs, dy):
    return jax.lax.platform_dependent(
        *inputs,
        dy,
        tpu=gate_backward,
        default=lambda o, gate, dy: jax.vjp(whole_gate, o, gate)[1](dy),
    )


_gate.defvjp(lambda *inputs: (_gate(*inputs), inputs), _gate_backward)


def whole_place(eps, half, x, weight, cos, sin):
    heads = x.astype(wide(x)).reshape(*x.shape[:2], -1, weight.shape[0]).swapaxes(1, 2)
    heads = (
        heads * jax.lax.rsqrt(jnp.mean(jnp.square(heads), axis=-1, keepdims=True) + eps) * weight
    )
    first, second = heads[..., :half], heads[..., half : 2 * half]
    partner = jnp.concatenate(
        (second, first, jnp.zeros_like(heads[..., 2 * half : LANES])), axis=-1
    )
    turned = heads[..., :LANES] * cos[:, None] + partner * sin[:, None]
    return jnp.concatenate((turned, heads[..., LANES:]), axis=-1).astype(x.dtype)


def whole_gate(o, gate):
    opening = jax.nn.sigmoid(gate.reshape(*gate.shape[:2], *o.shape[1::2]).astype(wide(o)))
    return (o.swapaxes(1, 2).astype(wide(o)) * opening).astype(o.dtype).reshape(gate.shape)


def place_forward(eps, half, x, weight, cos, sin, *, interpret: bool = False):
    return _call(
        functools.partial(_place_kernel, eps, half),
        weight.shape[0],
        (x,),
        "h",
        (weight, cos, sin),
        interpret=interpret,
    )[0]


def place_backward(eps, half, x, weight, cos, sin, dy, *, interpret: bool = False):
    """Gradients of x and weight."""
    body = functools.partial(_place_backward_kernel, eps, half)
    dx, sums = _call(body, weight.shape[0], (x, dy), "c", (weight, cos, sin), True, interpret)
    return dx, jnp.sum(sums, axis=0).astype(weight.dtype)


def gate_forward(o, gate, *, interpret: bool = False):
    return _call(_gate_kernel, o.shape[3], (o, gate), "c", interpret=interpret)[0]


def gate_backward(o, gate, dy, *, interpret: bool = False):
    """Gradients of o and gate."""
    return tuple(_call(_gate_backward_kernel, o.shape[3], (o, gate, dy), "hc", interpret=interpret))


def _call(body, width, inputs, outputs, of_place=(), sums=False, interpret=False):
    """`outputs`: of each "h" for heads one after another [B, N, T, K], or "c" for side by side
    [B, T, C]; in the flat input's dtype.
    """
    like = next(x for x in inputs if x.ndim == 3)
    batch, time, d = like.shape
    rows, _ = block_sizes(time, LANES, (_BLOCK[0], LANES))
    heads = next(n for n in range(_BLOCK[1] // width, 0, -1) if d // width % n == 0)
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
    if of_place:
        weight, *turns = of_place
        of_place = weight.astype(jnp.float32)[None], *turns
        in_specs = [pl.BlockSpec((1, width), lambda c, b, t: (0, 0))] + 2 * [
            pl.BlockSpec((1, rows, LANES), lambda c, b, t: (b, t, 0))
        ]
        copied += blocks * sum(turn.size * 4 for turn in turns)
    name = getattr(body, "func", body).__name__.strip("_").removesuffix("_kernel")
    return pl.pallas_call(
        body,
        grid=(blocks, batch, time // rows),
        in_specs=in_specs + [spec["h" if x.ndim == 4 else "c"] for x in inputs],
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=interpret,
        name=name,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=copied),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
    )(*of_place, *inputs)


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


def _turned(x, cos, sin, half):
    """The first lanes of x [R, K] turned."""
    first = x[:, :LANES]
    # of lane i: i - half, i + half
    below, above = pltpu.roll(first, half, 1), pltpu.roll(first, LANES - half, 1)
    lane = jax.lax.broadcasted_iota(jnp.int32, first.shape, 1)
    turned = first * cos + jnp.where(lane < half, above, below) * sin
    return turned if x.shape[1] == LANES else jnp.concatenate((turned, x[:, LANES:]), axis=1)


def _place_kernel(eps, half, weight, cos, sin, x, y):
    def head(h, lanes):
        _, normed = _normed(eps, x[0, :, lanes].astype(jnp.float32))
        y[0, h] = _turned(normed * weight[...], cos[0], sin[0], half).astype(y.dtype)

    _each(y, head)


def _place_backward_kernel(eps, half, weight, cos, sin, x, dy, dx, dweight):
    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        dweight[...] = jnp.zeros_like(dweight)

    def head(h, lanes):
        scale, normed = _normed(eps, x[0, :, lanes].astype(jnp.float32))
        d = _turned(dy[0, h].astype(jnp.float32), cos[0], -sin[0], half)
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


def _gate_backward_kernel(o, gate, dy, do, dgate):
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
