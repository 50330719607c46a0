"""TPU kernels of the causal depthwise convolution with its activation. The forward pass and the
backward pass each read their inputs from HBM once and write their outputs once. Only the last EDGE
tokens of a block are read twice, the second time for the next block.

A kernel computes a block in groups of 128 channels, one after another, with products and sums in
float32 registers. The outputs of a block also depend on the W - 1 tokens before the block, which
the kernel reads as a second, small block of x. In the backward pass, a block also needs the
gradients of the W - 1 tokens after the block. The grid of the backward pass goes from the last
block of tokens to the first, so the gradients of the W - 1 tokens after a block are still in VMEM
from the previous grid step.

B batch, T time in blocks of R tokens, W kernel width, D channels in blocks of C.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.causal_conv1d_edges import (
    count_earlier_inputs_in_document,
    gradient_of_inputs_before,
)
from qwen3next_jax.kernels.tpu import grids
from qwen3next_jax.kernels.tpu.grids import LANES

# The largest numbers of rows and of channels in a block. Among the sizes tried, the compiler spills
# the fewest registers with these sizes.
FORWARD_BLOCK = 256, 1024
BACKWARD_BLOCK = 128, 2048
EDGE = grids.TILE_ROWS  # the number of rows that a grid step reads from the block before its own


def unsupported_reason(x, kernel, activation) -> str:
    """Returns why the TPU kernels cannot run x [B, T, D] with `kernel` [W, D]; "" if they can."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"has inputs of {x.dtype}: expected bfloat16 or float32"
    if x.shape[2] % LANES or x.shape[1] % EDGE or not 2 <= kernel.shape[0] <= EDGE // 2:
        return (
            f"has {x.shape[1]} tokens of {x.shape[2]} channels and a kernel of {kernel.shape[0]}: "
            f"expected multiples of {EDGE} and {LANES}, 2 to {EDGE // 2}"
        )
    return ""


def forward(activation, before, x, kernel, ids, *, interpret: bool = False):
    """Returns the outputs y [B, T, D].

    Args:
      activation: "silu" or None.
      before: [B, W - 1, D], the inputs before the first token.
      x: [B, T, D], the inputs.
      kernel: [W, D], the weights of the convolution.
      ids: [B, W - 1 + T], the document ids of all inputs, 0 for padding at the end; None if a row
        is one document.
      interpret: whether a CPU interprets the kernel.
    """
    call = _ConvolutionCall(
        x, kernel, count_earlier_inputs_in_document(ids, kernel.shape[0]), interpret
    )
    return call(
        functools.partial(_forward_kernel, activation),
        call.before_and_x_inputs(before, x),
        call.edges,
        (call.block,),
        (jax.ShapeDtypeStruct(x.shape, x.dtype),),
        elements=2 * x.size,
    )[0]


def backward(activation, before, x, kernel, ids, dy, *, interpret: bool = False):
    """Returns the gradients of before, x and kernel, given dy [B, T, D], the gradient of y. The
    other arguments have the same meaning as in `forward`.
    """
    age, (width, d) = count_earlier_inputs_in_document(ids, kernel.shape[0]), kernel.shape
    call = _ConvolutionCall(x, kernel, age, interpret, backwards=True)
    dx, dkernel = call(
        functools.partial(_backward_kernel, activation),
        (*call.before_and_x_inputs(before, x), dy),
        (*call.edges, call.block),
        (call.block, pl.BlockSpec((8 * width, call.channels), lambda c, b, t: (0, c))),
        (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((8 * width, d), jnp.float32)),
        (pltpu.VMEM((width - 1, 8, call.channels), jnp.float32),),
        elements=3 * x.size,
    )

    return (
        gradient_of_inputs_before(activation, before, x, kernel, age, dy),
        dx,
        jnp.sum(dkernel.reshape(width, 8, d), axis=1).astype(kernel.dtype),
    )


class _ConvolutionCall:
    """The sizes of the blocks of one call, and the Pallas specifications of these blocks.

    Attributes:
      rows: R.
      channels: C.
      blocks: number of blocks of tokens.
      block: specification of a block [1, R, C].
      age_block: specification of a block [1, R, 1] of ages.
      edges: specifications of the three inputs that `before_and_x_inputs` returns.
    """

    def __init__(self, x, kernel, age, interpret, backwards=False):
        self.batch, time, d = x.shape
        self.rows, self.channels = grids.block_sizes(
            time, d, BACKWARD_BLOCK if backwards else FORWARD_BLOCK
        )
        self.blocks, self.itemsize = time // self.rows, x.dtype.itemsize
        self.kernel, self.age, self.interpret = kernel.astype(jnp.float32), age, interpret

        def at(t):
            """The block of grid step t."""
            return self.blocks - 1 - t if backwards else t

        tiles = self.rows // EDGE
        self.block = pl.BlockSpec((1, self.rows, self.channels), lambda c, b, t: (b, at(t), c))
        self.age_block = pl.BlockSpec((1, self.rows, 1), lambda c, b, t: (b, at(t), 0))
        self.edges = (
            pl.BlockSpec((1, EDGE, self.channels), lambda c, b, t: (b, 0, c)),
            pl.BlockSpec(
                (1, EDGE, self.channels), lambda c, b, t: (b, jnp.maximum(at(t) * tiles - 1, 0), c)
            ),
            self.block,
        )

    def before_and_x_inputs(self, before, x):
        """Returns three inputs of the kernel: `before`, padded to EDGE rows, and x twice. From the
        first x, a grid step reads the last EDGE rows of the previous block; from the second x, the
        grid step reads its own block.
        """
        return jnp.pad(before.astype(x.dtype), ((0, 0), (EDGE - before.shape[1], 0), (0, 0))), x, x

    def __call__(self, body, inputs, in_specs, out_specs, outputs, scratch=(), *, elements):
        """Runs the kernel `body` and returns its outputs. `elements` is the number of array
        elements that the kernel reads and writes.
        """
        width, d = self.kernel.shape
        inputs = [self.kernel, *inputs]
        in_specs = [pl.BlockSpec((width, self.channels), lambda c, b, t: (0, c)), *in_specs]
        if self.age is not None:
            inputs.insert(1, self.age[..., None])
            in_specs.insert(1, self.age_block)
        return grids.call_block_kernel(
            functools.partial(body, self.age is not None),
            inputs,
            in_specs,
            outputs,
            out_specs,
            (d // self.channels, self.batch, self.blocks),
            name=f"causal_conv1d{body.func.__name__.removesuffix('_kernel')}",
            bytes_accessed=elements * self.itemsize,
            interpret=self.interpret,
            scratch=scratch,
        )


def _shifted_inputs(first, before, tail, x, width: int, lanes):
    """Returns W arrays [R, LANES] in float32. The array with the index `back` holds for each token
    of the block the input `back` tokens before the token.

    Args:
      first: whether this is the first block of the row.
      before: [1, EDGE, C], the inputs before the row; read only if `first`.
      tail: [1, EDGE, C], the last inputs of the previous block.
      x: [1, R, C], the inputs of the block.
      width: W.
      lanes: slice of LANES channels.
    """
    edge = jnp.where(first, before[0, :, lanes], tail[0, :, lanes]).astype(jnp.float32)
    x = x[0, :, lanes].astype(jnp.float32)
    extended = jnp.concatenate([edge, x])
    return [x] + [extended[EDGE - back : EDGE - back + x.shape[0]] for back in range(1, width)]


def _broadcast_ages(age):
    """Broadcasts ages [R, 1] to [R, LANES]. A kernel calls this function once for all groups of
    channels, because the compiler would otherwise broadcast the ages again in every comparison.
    """
    return jnp.broadcast_to(age, (age.shape[0], LANES))


def _zero_if_other_document(age, x, back: int):
    """Returns x [R, LANES], but with zeros for padding, and for each token whose input `back`
    tokens earlier belongs to another document. If `age` is None, x is returned unchanged.
    """
    return x if age is None else jnp.where(age >= back, x, 0.0)


def _output_before_activation(kernel, age, taps, lanes):
    """Returns [R, LANES], the outputs before the activation: the sum of the arrays `taps` (the
    result of `_shifted_inputs`) times the rows of `kernel`, without inputs of other documents.
    """
    width = kernel.shape[0]
    return sum(
        kernel[width - 1 - back, lanes][None] * _zero_if_other_document(age, x, back)
        for back, x in enumerate(taps)
    )


def _split_ages_from_refs(has_age, refs):
    """Splits the references of a kernel into two parts. Returns the ages of a block's tokens
    [R, LANES], or None if the call has no document ids; and all references except the ages.
    """
    if not has_age:
        return None, refs
    age, *others = refs
    return _broadcast_ages(age[0]), others


def _forward_kernel(activation, has_age, kernel, *refs):
    """Computes y of a block."""
    age, (before, tail, x, y) = _split_ages_from_refs(has_age, refs)
    first = pl.program_id(2) == 0

    def column(lanes):
        z = _output_before_activation(
            kernel, age, _shifted_inputs(first, before, tail, x, kernel.shape[0], lanes), lanes
        )
        y[0, :, lanes] = (z * jax.nn.sigmoid(z) if activation == "silu" else z).astype(y.dtype)

    grids.for_each_lane_group(y.shape[2], column)


def _backward_kernel(activation, has_age, kernel, *refs):
    """Computes dx of a block and adds the block's part of the gradient of `kernel` to `dkernel`,
    which holds 8 partial sums for each number of `kernel`. The scratch memory `later` passes the
    gradients of the block's first tokens to the next grid step, which computes the block before.
    """
    age, (before, tail, x, dy, dx, dkernel, later) = _split_ages_from_refs(has_age, refs)
    width, t, blocks = kernel.shape[0], pl.program_id(2), pl.num_programs(2)

    @pl.when(t == 0)
    def _():
        later[...] = jnp.zeros_like(later)

    @pl.when(grids.is_first_step_of_channel_block())
    def _():
        dkernel[...] = jnp.zeros_like(dkernel)

    def column(lanes):
        taps = _shifted_inputs(t == blocks - 1, before, tail, x, width, lanes)
        dz = dy[0, :, lanes].astype(jnp.float32)
        if activation == "silu":
            z = _output_before_activation(kernel, age, taps, lanes)
            gate = jax.nn.sigmoid(z)
            dz = dz * (gate * (1 + z * (1 - gate)))
        rows, total = dz.shape[0], 0.0
        for back, tap in enumerate(taps):
            tap_dz, w = _zero_if_other_document(age, dz, back), width - 1 - back
            dkernel[8 * w : 8 * w + 8, lanes] += jnp.sum(
                (tap_dz * tap).reshape(rows // 8, 8, LANES), axis=0
            )
            if back:  # the output `back` tokens later read this input, so shift its gradient
                following = jnp.concatenate([tap_dz, later[back - 1, :, lanes]])
                later[back - 1, :, lanes] = tap_dz[:8]
                tap_dz = following[back : back + rows]
            total += kernel[w, lanes][None] * tap_dz
        dx[0, :, lanes] = total.astype(dx.dtype)

    grids.for_each_lane_group(dx.shape[2], column)
