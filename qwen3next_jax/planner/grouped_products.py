"""The steps of a kernel for grouped products, which multiplies each row by the matrix of its group.

XLA's `ragged_dot` and megablox go through tiles of rows, and visit a tile once for each group that
has rows in it. The kernels compute whole tiles: in a tile, rows of other groups, and columns beyond
the end of a matrix, cost as much time as the rows and columns that are needed. The number of visits
depends on the sizes of the groups, so the compiler's text does not state how often the loops over
tiles run.
"""

import math
import re
from typing import NamedTuple

from qwen3next_jax.planner.compiled import is_tpu_kernel
from qwen3next_jax.planner.hlo import Computation, Instruction, Program

# The attribute in which XLA states the tile of a `ragged_dot`. Megablox states none; a caller may
# put it into the name of a scope, ragged_dot_tiling_512_1024_1024, as
# benchmarks/planner/measured_kernels.py does.
TILING = "ragged_dot_tiling"


class GroupedProductCall(NamedTuple):
    """A call of a kernel for grouped products, or for their gradients. The rows have the shape [R,
    width] or [R, columns]; the matrix of each group has the shape [width, columns].

    Attributes:
      step_tile: rows, width and columns of the tiles that one step of the kernel's grid multiplies.
      tile_visits: number of visits of tiles of rows, an upper bound: it assumes that all rows
        belong to groups, that all groups have rows, and that no group but the last ends with a
        tile.
      tile_counts_width_columns: number of tiles along the width, and along the columns.
      group_count: number of groups.
      computes_matrix_gradients: whether the kernel computes the gradients of the matrices, which
        are sums over rows.
      schedule_is_one_step: whether the compiler's schedule of the kernel is that of one step. True
        for XLA's kernel, because the compiler does not state the trips of its loop. False for
        megablox, because the loop of megablox contains the product twice: for the last tile of the
        contracted axis, and for the other tiles.
    """

    step_tile: tuple[int, int, int]
    tile_visits: int
    tile_counts_width_columns: tuple[int, int]
    group_count: int
    computes_matrix_gradients: bool
    schedule_is_one_step: bool


def parse_grouped_product(
    program: Program, computation: Computation, instruction: Instruction
) -> GroupedProductCall | None:
    """Parses an instruction that is a call of a kernel for grouped products, or a fusion that
    contains such a call; returns None for any other instruction.
    """
    candidates = [(computation, instruction)]
    if instruction.opcode == "fusion":
        inner = [program.computations[name] for name in instruction.called_computations]
        candidates = [(within, i) for within in inner for i in within.values()]
    calls = (_parse_kernel_call(within, i) for within, i in candidates if is_tpu_kernel(i))
    return next((call for call in calls if call), None)


def _parse_kernel_call(computation: Computation, kernel: Instruction) -> GroupedProductCall | None:
    """Parses a call of a kernel for grouped products; returns None for any other kernel."""
    by_xla = re.search(rf'{TILING}="(\d+),(\d+),(\d+)"', kernel.attributes)
    found = by_xla or re.search(rf"{TILING}_(\d+)_(\d+)_(\d+)", kernel.op_name)
    if not found:
        return None
    tile = tuple(map(int, found.groups()))
    operands = [shape for name in kernel.operands for shape in computation[name].shapes]
    arrays = [shape.dims for shape in operands if shape.dtype[0] not in "su"]
    out = kernel.shapes[0].dims
    computes_matrix_gradients = len(out) == 3
    if computes_matrix_gradients:
        groups, width, columns = out
        rows = math.prod(arrays[0]) // width
    else:
        rows, columns = out
        groups, *matrix = next(dims for dims in arrays if len(dims) == 3)
        width = math.prod(matrix) // columns
    return GroupedProductCall(
        tile,
        tile_visits=-(-rows // tile[0]) + groups - 1,
        tile_counts_width_columns=(-(-width // tile[1]), -(-columns // tile[2])),
        group_count=groups,
        computes_matrix_gradients=computes_matrix_gradients,
        schedule_is_one_step=bool(by_xla),
    )
