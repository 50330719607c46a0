"""TPU kernels of the residual streams (`zoo.ops.residual_streams`): the mix of the streams into the
input of a block, and the addition of the block's output to the streams. Each kernel reads and
writes each array of the streams once. VMEM holds a tile of tokens of all streams. For the mix, VMEM
also holds both matrices of the gate.

N tokens in tiles of M, S streams of D channels, E = S · D, X columns of the matrix `down`: the
columns for the rank of the gate and the columns for the factors, padded with zeros to a multiple of
LANES.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu import chip
from qwen3next_jax.kernels.tpu.grids import LANES
from qwen3next_jax.kernels.tpu.pallas_call import pallas_call

TILES = 256, 128  # the numbers of tokens in a tile; the first that VMEM holds is used
CHUNKS = 512, 384, 256, 128  # channels that a step of a loop computes; the first that divides D

_NT = (((1,), (1,)), ((), ()))  # x yᵀ


def unsupported_reason(tokens: int, width: int, streams: int, columns: int, dtype) -> str:
    """Returns why the kernels cannot run a call of the operator on the chip; "" if they can.

    Args:
      tokens: number of tokens (N).
      width: number of channels of a stream (D).
      streams: number of streams (S).
      columns: number of columns of the first product (X).
      dtype: dtype of the streams.
    """
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"has {dtype}: expected bfloat16 or float32"
    smallest = TILES[-1] * chip.core_count()
    if tokens % smallest or width % LANES or columns % LANES:
        return (
            f"has {tokens} tokens, streams of {width} and {columns} columns: expected multiples "
            f"of {smallest}, {LANES} and {LANES}"
        )
    needed = _needed_vmem_bytes(TILES[-1], width, streams, columns, jnp.dtype(dtype).itemsize)
    if needed > chip.vmem_budget_bytes():
        return f"needs {needed} bytes of VMEM of {int(chip.vmem_budget_bytes())}"
    return ""


def forward(eps, streams, weights, h, *, interpret: bool = False):
    """Returns x [N, D], inner [N, X] float32 and the sizes [N, S] float32 (defined in
    `zoo.ops.residual_streams`), given h [N, E] and the weights: scale [E] float32, down [E, X] and
    up [X, E].
    """
    scale, down, up = weights
    spec = _CallSpecs(h, streams, down.shape[1])
    return spec.call_kernel(
        functools.partial(_forward_kernel, eps),
        (h, scale[None], down, up),
        (
            spec.token_rows_spec(spec.e),
            spec.whole_array_spec(scale[None]),
            spec.whole_array_spec(down),
            spec.whole_array_spec(up),
        ),
        [(spec.d, h.dtype), (spec.x, jnp.float32), (streams, jnp.float32)],
        scratch=(pltpu.VMEM((spec.tile, spec.x), h.dtype),),
        products=2,
        interpret=interpret,
    )


def backward(weights, h, inner, sizes, dh, dx, dinner, *, interpret: bool = False):
    """Computes the gradients of all arrays with an axis of tokens in the backward pass of the mix.

    Args:
      weights, h: the arguments of `forward`.
      inner, sizes: the second and the third result of `forward`.
      dh: [N, E], the gradient of the streams that does not pass through the mix.
      dx, dinner: [N, D] and [N, X] float32, the gradients of x and of inner.

    Returns:
      dh [N, E] with the gradient that passes through the mix; dgate [N, E], the gradient of the
      gate before its sigmoid; dinner [N, X] in h's dtype, with the gradient that passes through the
      gate; rows [8 · cores, E] float32, which add up to the part of the gradient of scale that does
      not pass through down.
    """
    scale, down, up = weights
    spec = _CallSpecs(h, sizes.shape[1], down.shape[1])
    rows = spec.token_rows_spec
    return spec.call_kernel(
        _backward_kernel,
        (h, scale[None], down, up, inner, sizes, dh, dx, dinner),
        (
            rows(spec.e),
            *map(spec.whole_array_spec, (scale[None], down, up)),
            *(rows(width) for width in (spec.x, sizes.shape[1], spec.e, spec.d, spec.x)),
        ),
        [(spec.e, h.dtype), (spec.e, h.dtype), (spec.x, h.dtype)],
        sums=spec.e,
        scratch=(
            pltpu.VMEM((spec.tile, spec.x), h.dtype),
            pltpu.VMEM((spec.tile, spec.x), jnp.float32),
            pltpu.VMEM((spec.tile, spec.d), jnp.float32),
        ),
        products=3,
        interpret=interpret,
    )


def write(h, y, a, *, interpret: bool = False):
    """Returns the streams [N, E] after the write of a block's output y [N, D]: each stream of h
    [N, E] plus y times the stream's factor in a [N, S].
    """
    spec = _CallSpecs(h, a.shape[1])
    widths = spec.e, spec.d, spec.streams
    return spec.call_kernel(
        _write_kernel,
        (h, y, a),
        map(spec.token_rows_spec, widths),
        [(spec.e, h.dtype)],
        interpret=interpret,
    )[0]


def write_gradients(y, a, dh, *, interpret: bool = False):
    """Returns the gradients of y [N, D] and of a [N, S] in `write`, given dh [N, E]."""
    spec = _CallSpecs(dh, a.shape[1])
    widths = spec.d, spec.streams, spec.e
    return spec.call_kernel(
        _write_gradients_kernel,
        (y, a, dh),
        map(spec.token_rows_spec, widths),
        [(spec.d, y.dtype), (spec.streams, a.dtype)],
        interpret=interpret,
    )


def _needed_vmem_bytes(tile: int, width: int, streams: int, columns: int, size: int) -> int:
    """Returns the bytes of VMEM that the backward kernel needs with tiles of `tile` tokens."""
    e = streams * width
    matrices = 2 * e * columns * size
    # The compiler double-buffers the windows: h, dh twice, dgate; dx; dinner; inner, dinner; sizes.
    row = (4 * e + width + columns) * size + (2 * columns + LANES) * 4
    scratch = columns * (4 + size) + width * 4
    values = 6 * CHUNKS[0] * 4  # what a step of the loops computes
    sums = (2 * 8 + 2) * e * 4
    return matrices + sums + tile * (2 * row + scratch + values)


class _CallSpecs:
    """The sizes of a call, the block specifications of its arrays, and the method that runs a
    kernel. The grid has the axes (cores, tiles of a core).
    """

    def __init__(self, h, streams: int, columns: int = 0):
        self.n, self.e = h.shape
        self.d, self.streams, self.x = self.e // streams, streams, columns
        sizes = self.d, streams, columns, h.dtype.itemsize
        self.cores = chip.core_count()
        self.tile = next(
            (
                tile
                for tile in TILES
                if self.n % (tile * self.cores) == 0
                and _needed_vmem_bytes(tile, *sizes) <= chip.vmem_budget_bytes()
            ),
            TILES[-1],
        )
        self.tiles = self.n // (self.tile * self.cores)

    def token_rows_spec(self, width: int):
        """Returns the block specification of an array [N, width]."""
        return pl.BlockSpec((self.tile, width), lambda c, t: (c * self.tiles + t, 0))

    @staticmethod
    def whole_array_spec(x):
        """Returns the block specification of an array that stays in VMEM as a whole."""
        return pl.BlockSpec(x.shape, lambda c, t: (0, 0), pipeline_mode=pl.Buffered(1))

    def call_kernel(
        self, body, inputs, in_specs, outputs, *, sums=0, scratch=(), products=0, interpret
    ):
        """Runs the kernel `body` and returns its outputs.

        Args:
          body: the kernel, a function of the Pallas references of inputs, outputs and scratch
            memory.
          inputs: the input arrays.
          in_specs: the block specification of each input.
          outputs: (width, dtype) of each output [N, width].
          sums: the width of one more output, 8 rows of float32 sums for each core; 0: there is
            none.
          scratch: the shapes of scratch memory.
          products: number of products of N rows with a matrix of the gate.
          interpret: whether a CPU interprets the kernel.
        """
        shapes = [jax.ShapeDtypeStruct((self.n, width), dtype) for width, dtype in outputs]
        out_specs = [self.token_rows_spec(width) for width, _ in outputs]
        if sums:
            shapes.append(jax.ShapeDtypeStruct((8 * self.cores, sums), jnp.float32))
            out_specs.append(pl.BlockSpec((8, sums), lambda c, t: (c, 0)))
        return pallas_call(
            body,
            grid=(self.cores, self.tiles),
            in_specs=list(in_specs),
            out_specs=out_specs,
            out_shape=shapes,
            scratch_shapes=scratch,
            interpret=interpret,
            name="residual_streams" + getattr(body, "func", body).__name__.removesuffix("_kernel"),
            cost_estimate=pl.CostEstimate(
                flops=2 * products * self.n * self.e * self.x,
                transcendentals=self.n * self.e if products else 0,
                bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*inputs, *shapes)),
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=chip.vmem_bytes()
            ),
        )(*inputs)


def _dot(a, b, dims=(((1,), (0,)), ((), ()))):
    """Returns a @ b, or the product with the dimension numbers `dims`, in float32."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def _sigmoid(x):
    """Returns the sigmoid, computed with tanh, because tanh is a single instruction of the chip."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


def _for_each_channel_chunk(width: int, body) -> None:
    """Runs body(start, size) for every chunk of a stream's channels."""
    size = next(n for n in CHUNKS if width % n == 0)

    def step(i, _):
        body(i * size, size)
        return 0

    jax.lax.fori_loop(0, width // size, step, 0)


def _chunk_slice(stream: int, width: int, start, size: int):
    """Returns the slice of a chunk of one stream's channels in an array [·, E]."""
    return pl.ds(pl.multiple_of(stream * width + start, LANES), size)


class _ForwardRefs(NamedTuple):
    """The references of `_forward_kernel`. `down_products` and `inverse_rms` are `inner` and the
    sizes in the formulas of `zoo.ops.residual_streams`.
    """

    stream_values: Any  # [M, E]
    norm_scale: Any  # [1, E]
    gate_down: Any  # [E, X]
    gate_up: Any  # [X, E]
    block_input: Any  # output [M, D]
    down_products: Any  # output [M, X]
    inverse_rms: Any  # output [M, S]
    gate_hidden: Any  # scratch [M, X], silu(down_products / S)


def _forward_kernel(eps, *refs):
    """Computes the block's input, the products with the gate's down matrix and the inverse RMS of
    the streams for a tile of tokens.
    """
    refs = _ForwardRefs(*refs)
    streams, d = refs.inverse_rms.shape[1], refs.block_input.shape[1]
    size_of = []
    for s in range(streams):
        stream = slice(s * d, (s + 1) * d)
        square = jnp.sum(
            jnp.square(refs.stream_values[:, stream].astype(jnp.float32)), axis=1, keepdims=True
        )
        size_of.append(jax.lax.rsqrt(square / d + eps))
        refs.inverse_rms[:, s : s + 1] = size_of[s]
        part = size_of[s] * _dot(refs.stream_values[:, stream], refs.gate_down[stream])
        refs.down_products[...] = part if s == 0 else refs.down_products[...] + part
    z = refs.down_products[...] / streams
    refs.gate_hidden[...] = (z * _sigmoid(z)).astype(refs.gate_hidden.dtype)

    def chunk(start, size):
        total = 0.0
        for s in range(streams):
            lanes = _chunk_slice(s, d, start, size)
            gate = _sigmoid(_dot(refs.gate_hidden[...], refs.gate_up[:, lanes]))
            total += gate * (
                refs.stream_values[:, lanes].astype(jnp.float32)
                * size_of[s]
                * refs.norm_scale[:, lanes]
            )
        refs.block_input[:, _chunk_slice(0, d, start, size)] = (total / streams).astype(
            refs.block_input.dtype
        )

    _for_each_channel_chunk(d, chunk)


class _BackwardRefs(NamedTuple):
    """The references of `_backward_kernel`. `dstreams_past_mix` is the part of a gradient that does
    not pass through the mix, `ddown_products_past_gate` the part that does not pass through the
    gate; the kernel adds the remaining parts.
    """

    stream_values: Any  # [M, E]
    norm_scale: Any  # [1, E]
    gate_down: Any  # [E, X]
    gate_up: Any  # [X, E]
    down_products: Any  # [M, X]
    inverse_rms: Any  # [M, S]
    dstreams_past_mix: Any  # [M, E]
    dblock_input: Any  # [M, D]
    ddown_products_past_gate: Any  # [M, X]
    dstreams: Any  # output [M, E]
    dgate: Any  # output [M, E]
    ddown_products: Any  # output [M, X]
    dnorm_scale: Any  # output [8, E], partial sums over the tokens
    gate_hidden: Any  # scratch [M, X], silu(down_products / S)
    dgate_hidden: Any  # scratch [M, X], the gradient of `gate_hidden`
    dnormed: Any  # scratch [M, D], the gradient of one stream after its norm


def _backward_kernel(*refs):
    """Computes the gradients of a tile, and adds the tile's part to `dnorm_scale`."""
    refs = _BackwardRefs(*refs)
    streams, d = refs.inverse_rms.shape[1], refs.dblock_input.shape[1]
    size_of = [refs.inverse_rms[:, s : s + 1] for s in range(streams)]
    z = refs.down_products[...] / streams
    sigmoid = _sigmoid(z)
    refs.gate_hidden[...] = (z * sigmoid).astype(refs.gate_hidden.dtype)
    refs.dgate_hidden[...] = jnp.zeros_like(refs.dgate_hidden)

    @pl.when(pl.program_id(1) == 0)
    def _():
        refs.dnorm_scale[...] = jnp.zeros_like(refs.dnorm_scale)

    # From x to the gate. The gradient that reaches the normed stream past the gate waits in
    # `dstreams`.
    def propagate_through_gate(start, size):
        dx_chunk = (
            refs.dblock_input[:, _chunk_slice(0, d, start, size)].astype(jnp.float32) / streams
        )
        for s in range(streams):
            lanes = _chunk_slice(s, d, start, size)
            gate = _sigmoid(_dot(refs.gate_hidden[...], refs.gate_up[:, lanes]))
            gated = dx_chunk * gate
            product = gated * (refs.stream_values[:, lanes].astype(jnp.float32) * size_of[s])
            refs.dnorm_scale[:, lanes] += jnp.sum(product.reshape(-1, 8, size), axis=0)
            refs.dgate[:, lanes] = (product * refs.norm_scale[:, lanes] * (1 - gate)).astype(
                refs.dgate.dtype
            )
            refs.dstreams[:, lanes] = (gated * refs.norm_scale[:, lanes]).astype(
                refs.dstreams.dtype
            )
            refs.dgate_hidden[...] += _dot(refs.dgate[:, lanes], refs.gate_up[:, lanes], _NT)

    _for_each_channel_chunk(d, propagate_through_gate)
    dz = (
        refs.dgate_hidden[...] * (sigmoid * (1 + z * (1 - sigmoid))) / streams
        + refs.ddown_products_past_gate[...]
    )
    refs.ddown_products[...] = dz.astype(refs.ddown_products.dtype)

    # From the sums to the streams, and through their norm.
    for s in range(streams):

        def propagate_through_down(start, size, s=s):
            lanes = _chunk_slice(s, d, start, size)
            # `down` is [E, X], so its rows are channels.
            product = _dot(refs.ddown_products[...], refs.gate_down[lanes], _NT)
            refs.dnormed[:, _chunk_slice(0, d, start, size)] = product + refs.dstreams[
                :, lanes
            ].astype(jnp.float32)

        _for_each_channel_chunk(d, propagate_through_down)
        stream = slice(s * d, (s + 1) * d)
        normed = refs.stream_values[:, stream].astype(jnp.float32) * size_of[s]
        mean = jnp.sum(refs.dnormed[...] * normed, axis=1, keepdims=True) / d
        refs.dstreams[:, stream] = (
            refs.dstreams_past_mix[:, stream].astype(jnp.float32)
            + size_of[s] * (refs.dnormed[...] - normed * mean)
        ).astype(refs.dstreams.dtype)


def _write_kernel(h, y, a, out):
    """Adds y [M, D], times the factor of each stream in a [M, S], to the streams h [M, E] of a
    tile.
    """
    d = y.shape[1]
    factors = [a[:, s : s + 1] for s in range(a.shape[1])]

    def chunk(start, size):
        added = y[:, _chunk_slice(0, d, start, size)].astype(jnp.float32)
        for s, factor in enumerate(factors):
            lanes = _chunk_slice(s, d, start, size)
            out[:, lanes] = (h[:, lanes].astype(jnp.float32) + factor * added).astype(out.dtype)

    _for_each_channel_chunk(d, chunk)


def _write_gradients_kernel(y, a, dh, dy, da):
    """Computes dy [M, D] and da [M, S] of a tile."""
    d = y.shape[1]
    factors = [a[:, s : s + 1] for s in range(a.shape[1])]
    da[...] = jnp.zeros_like(da)

    def chunk(start, size):
        here = _chunk_slice(0, d, start, size)
        added, total = y[:, here].astype(jnp.float32), 0.0
        for s, factor in enumerate(factors):
            dstream = dh[:, _chunk_slice(s, d, start, size)].astype(jnp.float32)
            total += factor * dstream
            da[:, s : s + 1] += jnp.sum(dstream * added, axis=1, keepdims=True)
        dy[:, here] = total.astype(dy.dtype)

    _for_each_channel_chunk(d, chunk)
