"""What the kernels over blocks of tokens and channels share: block sizes, the call, the loop over a
block's columns of lanes.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
TILE_ROWS = 16  # of a tile of bfloat16


def block_sizes(time: int, channels: int, largest: tuple[int, int]) -> tuple[int, int]:
    """The rows and channels of a block: the largest up to `largest` that divide `time` and
    `channels`, in multiples of TILE_ROWS and LANES.

    Args:
      time: tokens of a row, a multiple of TILE_ROWS.
      channels: a multiple of LANES.
      largest: rows and channels of a block, at most.
    """
    return (
        next(n for n in (256, 128, 64, 32, TILE_ROWS) if n <= largest[0] and time % n == 0),
        next(n for n in range(largest[1], 0, -LANES) if channels % n == 0),
    )


def call(
    body,
    inputs,
    in_specs,
    outputs,
    out_specs,
    grid,
    *,
    name: str,
    bytes_accessed: int,
    interpret: bool,
    scratch=(),
):
    """The results of `body` over a grid (blocks of channels, rows of the batch, blocks of tokens).
    The cores of a chip share the blocks of channels.

    Args:
      body: the kernel; takes the references of inputs, outputs and scratch memory.
      outputs: shapes.
      bytes_accessed: what the call reads and writes; its cost to the compiler's scheduler.
    """
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=outputs,
        scratch_shapes=scratch,
        interpret=interpret,
        name=name,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=bytes_accessed),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
    )(*inputs)


def first_step():
    """Whether this is the first grid step of a block of channels."""
    return (pl.program_id(1) == 0) & (pl.program_id(2) == 0)


def for_each_column(channels: int, body) -> None:
    """Runs body(lanes) for every column of LANES channels; `lanes` is its slice."""

    def step(i, _):
        body(pl.ds(pl.multiple_of(i * LANES, LANES), LANES))
        return 0

    jax.lax.fori_loop(0, channels // LANES, step, 0)
