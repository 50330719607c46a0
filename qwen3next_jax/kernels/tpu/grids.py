"""Functions for kernels in which each grid step computes a block of tokens and channels. The
functions choose the block sizes, call the kernel, and loop over a block's groups of 128 channels.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen3next_jax.kernels.tpu.pallas_call import pallas_call

LANES = 128
TILE_ROWS = 16  # the rows of a tile of bfloat16 numbers


def block_sizes(time: int, channels: int, largest: tuple[int, int]) -> tuple[int, int]:
    """Returns the number of rows and of channels in a block. The number of rows is the largest
    power of two from TILE_ROWS to 256 that divides `time`; the number of channels is the largest
    multiple of LANES that divides `channels`. Neither number exceeds its limit in `largest`.

    Args:
      time: number of tokens of a row, a multiple of TILE_ROWS.
      channels: number of channels, a multiple of LANES.
      largest: the largest allowed numbers of rows and of channels in a block.
    """
    return (
        next(n for n in (256, 128, 64, 32, TILE_ROWS) if n <= largest[0] and time % n == 0),
        next(n for n in range(largest[1], 0, -LANES) if channels % n == 0),
    )


def call_block_kernel(
    body,
    inputs,
    in_specs,
    out_shapes,
    out_specs,
    grid,
    *,
    name: str,
    bytes_accessed: int,
    interpret: bool,
    scratch=(),
):
    """Runs the kernel `body` over a grid with the axes (blocks of channels, rows of the batch,
    blocks of tokens) and returns its outputs. On a chip with two cores, the blocks of channels are
    divided between the cores.

    Args:
      body: the kernel, a function of the Pallas references of inputs, outputs and scratch memory.
      inputs: the input arrays.
      in_specs: the block specification of each input.
      out_shapes: the shape and dtype of each output.
      out_specs: the block specification of each output.
      grid: the size of each grid axis.
      name: name of the kernel in a compiled program.
      bytes_accessed: number of bytes that the call reads and writes. The compiler's scheduler
        estimates the time of the call from `bytes_accessed`.
      interpret: whether a CPU interprets the kernel.
      scratch: the shapes of scratch memory.
    """
    return pallas_call(
        body,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shapes,
        scratch_shapes=scratch,
        interpret=interpret,
        name=name,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=bytes_accessed),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
    )(*inputs)


def is_first_step_of_channel_block():
    """Returns whether this is the first grid step of a block of channels: the first block of tokens
    of the first row of the batch.
    """
    return (pl.program_id(1) == 0) & (pl.program_id(2) == 0)


def for_each_lane_group(channels: int, body) -> None:
    """Runs body(lanes) for every group of LANES channels; `lanes` is the slice of the group."""

    def step(i, _):
        body(pl.ds(pl.multiple_of(i * LANES, LANES), LANES))
        return 0

    jax.lax.fori_loop(0, channels // LANES, step, 0)
