"""TPU kernels of the causal depthwise convolution with its activation: one pass over the tokens
forward, one backward.

Products and sums are float32 in registers, one column of lanes after another; what a block reads
of its neighbours comes as a second block of the same input (forward), or stays in VMEM from the
block before, which is the later one (backward).

B batch, T time in blocks of R rows, W kernel width, D channels in blocks of C.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.ops.tpu import tpu

_LANES = 128
# rows and channels of a block, at most: what spills least of a column
_FORWARD, _BACKWARD = (256, 1024), (128, 2048)
_EDGE = 16  # rows of a neighbour: a tile of bfloat16


def kernels(name: str, activation: str | None, x, kernel) -> dict:
    """{"tpu": `forward` or `backward`} of that activation where it takes inputs [B, T, D] on the
    chip compiled for, on a GPU that of `pallas_gpu_causal_conv1d.py` where it may; else nothing.
    """
    if jax.default_backend() == "gpu":
        from qwen3next_jax.ops import pallas_gpu_causal_conv1d  # which imports this

        return pallas_gpu_causal_conv1d.platforms(name, activation, x, kernel)
    fits = tpu() and x.dtype in (jnp.bfloat16, jnp.float32) and takes(x, kernel)
    return {"tpu": functools.partial(globals()[name], activation)} if fits else {}


def takes(x, kernel) -> bool:
    return (
        x.shape[2] % _LANES == 0 and x.shape[1] % _EDGE == 0 and 2 <= kernel.shape[0] <= _EDGE // 2
    )


def forward(activation, before, x, kernel, ids, *, interpret: bool = False):
    """y [B, T, D].

    Args:
      before: [B, W - 1, D], the inputs before the first. x: [B, T, D]. kernel: [W, D].
      ids: [B, W - 1 + T] documents of all inputs, 0 for padding at the end; None: they are one.
    """
    call = _Call(x, kernel, ages(ids, kernel.shape[0]), interpret)
    return call(
        functools.partial(_forward, activation),
        call.rows_before(before, x),
        call.edges,
        (call.block,),
        (jax.ShapeDtypeStruct(x.shape, x.dtype),),
        copied=2 * x.size,
    )[0]


def backward(activation, before, x, kernel, ids, dy, *, interpret: bool = False):
    """Gradients of `forward`: of before, x and kernel."""
    age, (width, d) = ages(ids, kernel.shape[0]), kernel.shape
    call = _Call(x, kernel, age, interpret, backwards=True)
    dx, dkernel = call(
        functools.partial(_backward, activation),
        (*call.rows_before(before, x), dy),
        (*call.edges, call.block),
        (call.block, pl.BlockSpec((8 * width, call.channels), lambda c, b, t: (0, c))),
        (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((8 * width, d), jnp.float32)),
        (pltpu.VMEM((width - 1, 8, call.channels), jnp.float32),),
        copied=3 * x.size,
    )

    return (
        gradient_before(activation, before, x, kernel, age, dy),
        dx,
        jnp.sum(dkernel.reshape(width, 8, d), axis=1).astype(kernel.dtype),
    )


def gradient_before(activation, before, x, kernel, age, dy):
    """Of the inputs before the first."""
    width = kernel.shape[0]

    def first(before):  # they meet these outputs only
        extended = jnp.concatenate([before, x[:, : width - 1]], axis=1).astype(jnp.float32)
        z = sum(
            kernel[w].astype(jnp.float32)
            * extended[:, w : w + width - 1]
            * (1.0 if age is None else (age[:, : width - 1, None] >= width - 1 - w))
            for w in range(width)
        )
        return (jax.nn.silu(z) if activation == "silu" else z).astype(dy.dtype)

    return jax.vjp(first, before)[1](dy[:, : width - 1])[0]


def ages(ids, width: int):
    """[B, T] how many of the W - 1 inputs before a token are of its document, -1 where it is
    padding; None without documents.
    """
    if ids is None:
        return None
    here = ids[:, width - 1 :]
    same = sum((ids[:, w : w + here.shape[1]] == here).astype(jnp.int32) for w in range(width - 1))
    return jnp.where(here > 0, same, -1)


def block_sizes(time: int, channels: int, most: tuple[int, int]) -> tuple[int, int]:
    """Rows and channels of a block: the largest that divide both; time of whole tiles, channels
    of whole lanes.
    """
    return (
        next(n for n in (256, 128, 64, 32, 16) if n <= most[0] and time % n == 0),
        next(n for n in range(most[1], 0, -_LANES) if channels % n == 0),
    )


class _Call:
    def __init__(self, x, kernel, age, interpret, backwards=False):
        self.batch, time, d = x.shape
        self.rows, self.channels = block_sizes(time, d, _BACKWARD if backwards else _FORWARD)
        self.blocks, self.size = time // self.rows, x.dtype.itemsize
        self.kernel, self.age, self.interpret = kernel.astype(jnp.float32), age, interpret
        at = (lambda t: self.blocks - 1 - t) if backwards else (lambda t: t)
        tiles = self.rows // _EDGE
        self.block = pl.BlockSpec((1, self.rows, self.channels), lambda c, b, t: (b, at(t), c))
        self.age_block = pl.BlockSpec((1, self.rows, 1), lambda c, b, t: (b, at(t), 0))
        self.edges = (
            pl.BlockSpec((1, _EDGE, self.channels), lambda c, b, t: (b, 0, c)),
            pl.BlockSpec(
                (1, _EDGE, self.channels), lambda c, b, t: (b, jnp.maximum(at(t) * tiles - 1, 0), c)
            ),
            self.block,
        )

    def rows_before(self, before, x):
        return jnp.pad(before.astype(x.dtype), ((0, 0), (_EDGE - before.shape[1], 0), (0, 0))), x, x

    def __call__(self, body, inputs, in_specs, out_specs, outputs, scratch=(), *, copied):
        width, d = self.kernel.shape
        inputs, in_specs = (
            [self.kernel, *inputs],
            [pl.BlockSpec((width, self.channels), lambda c, b, t: (0, c)), *in_specs],
        )
        if self.age is not None:
            inputs.insert(1, self.age[..., None])
            in_specs.insert(1, self.age_block)
        return pl.pallas_call(
            functools.partial(body, self.age is not None),
            grid=(d // self.channels, self.batch, self.blocks),
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=outputs,
            scratch_shapes=scratch,
            interpret=self.interpret,
            name=f"causal_conv1d{body.func.__name__}",
            cost_estimate=pl.CostEstimate(
                flops=0, transcendentals=0, bytes_accessed=copied * self.size
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary")
            ),
        )(*inputs)


def columns(channels: int, body) -> None:
    """`body`(lanes) for every column of lanes."""

    def step(i, _):
        body(pl.ds(pl.multiple_of(i * _LANES, _LANES), _LANES))
        return 0

    jax.lax.fori_loop(0, channels // _LANES, step, 0)


def _taps(first, before, tail, x, width: int, lanes):
    """The inputs of each tap, the current token's first: [R, lanes] float32 each."""
    edge = jnp.where(first, before[0, :, lanes], tail[0, :, lanes]).astype(jnp.float32)
    x = x[0, :, lanes].astype(jnp.float32)
    extended = jnp.concatenate([edge, x])
    return [x] + [extended[_EDGE - back : _EDGE - back + x.shape[0]] for back in range(1, width)]


def _over_lanes(age):
    """[R, 1] → [R, lanes], once for all columns: a comparison first would be spread over the
    lanes anew for each tap of each column.
    """
    return jnp.broadcast_to(age, (age.shape[0], _LANES))


def _own(age, x, back: int):
    return x if age is None else jnp.where(age >= back, x, 0.0)


def _before_activation(kernel, age, taps, lanes):
    width = kernel.shape[0]
    return sum(
        kernel[width - 1 - back, lanes][None] * _own(age, x, back) for back, x in enumerate(taps)
    )


def _forward(activation, aged, kernel, *refs):
    age = _over_lanes(refs[0][0]) if aged else None
    before, tail, x, y = refs[aged:]
    first = pl.program_id(2) == 0

    def column(lanes):
        z = _before_activation(
            kernel, age, _taps(first, before, tail, x, kernel.shape[0], lanes), lanes
        )
        y[0, :, lanes] = (z * jax.nn.sigmoid(z) if activation == "silu" else z).astype(y.dtype)

    columns(y.shape[2], column)


def _backward(activation, aged, kernel, *refs):
    age = _over_lanes(refs[0][0]) if aged else None
    before, tail, x, dy, dx, dkernel, later = refs[aged:]
    width, t, blocks = kernel.shape[0], pl.program_id(2), pl.num_programs(2)

    @pl.when(t == 0)
    def _():
        later[...] = jnp.zeros_like(later)

    @pl.when((t == 0) & (pl.program_id(1) == 0))
    def _():
        dkernel[...] = jnp.zeros_like(dkernel)

    def column(lanes):
        taps = _taps(t == blocks - 1, before, tail, x, width, lanes)
        dz = dy[0, :, lanes].astype(jnp.float32)
        if activation == "silu":
            z = _before_activation(kernel, age, taps, lanes)
            gate = jax.nn.sigmoid(z)
            dz = dz * (gate * (1 + z * (1 - gate)))
        rows, total = dz.shape[0], 0.0
        for back, tap in enumerate(taps):
            own, place = _own(age, dz, back), width - 1 - back
            dkernel[8 * place : 8 * place + 8, lanes] += jnp.sum(
                (own * tap).reshape(rows // 8, 8, _LANES), axis=0
            )
            if back:  # input s meets output s + back
                following = jnp.concatenate([own, later[back - 1, :, lanes]])
                later[back - 1, :, lanes] = own[:8]
                own = following[back : back + rows]
            total += kernel[place, lanes][None] * own
        dx[0, :, lanes] = total.astype(dx.dtype)

    columns(dx.shape[2], column)
