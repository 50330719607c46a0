"""What kernels over blocks of tokens and channels share: block sizes, the call, the loop over the
lanes of a block.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
TILE_ROWS = 16  # of bfloat16


def block_sizes(time: int, channels: int, largest: tuple[int, int]) -> tuple[int, int]:
    """Rows and channels of a block: the largest that divide both, rows in whole tiles, channels in
    whole lanes.

    Args:
      time: a multiple of `TILE_ROWS`. channels: a multiple of `LANES`. largest: rows and channels.
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
    """`body` over a grid of blocks of channels, which a chip's cores share, rows of the batch, and
    blocks of tokens.

    Args:
      bytes_accessed: what the call copies, which is all that it costs.
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
    """Whether this is the first grid step of its block of channels."""
    return (pl.program_id(1) == 0) & (pl.program_id(2) == 0)


def for_each_column(channels: int, body) -> None:
    """`body`(lanes) for every column of `LANES` channels."""

    def step(i, _):
        body(pl.ds(pl.multiple_of(i * LANES, LANES), LANES))
        return 0

    jax.lax.fori_loop(0, channels // LANES, step, 0)
