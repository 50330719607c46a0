"""What a kernel for grouped products computes. Such a kernel (XLA's `ragged_dot`, or megablox)
multiplies each row by the matrix of its group. It goes through tiles of rows, and visits a tile
once for each group that has rows in it. It computes whole tiles: rows of other groups, and columns
beyond the end of a matrix, count as much as those that are wanted.

The number of visits depends on the groups, so the compiler's text states no trips of these loops.
"""

import math
import re
from typing import NamedTuple

from qwen3next_jax.planner.compiled import is_kernel
from qwen3next_jax.planner.hlo import Computation, Instruction

# The attribute in which XLA states the tile of a `ragged_dot`: rows, contracted width, columns. A
# kernel of Pallas has the numbers in the name of a scope around it, RAGGED_DOT_TILING_1_2_3.
TILING = "ragged_dot_tiling"


class GroupedProduct(NamedTuple):
    """A call of a kernel for grouped products.

    Attributes:
      tile: rows, contracted width and columns of the tile that a step multiplies.
      visits: number of visits of tiles of rows, if all groups have rows and none ends with a tile.
      steps: number of tiles along each of the other two axes.
      schedule_is_step: whether the compiler's schedule of the kernel is that of one step.
    """

    tile: tuple[int, int, int]
    visits: int
    steps: tuple[int, int]
    schedule_is_step: bool


def grouped_product(computation: Computation, instruction: Instruction) -> GroupedProduct | None:
    """Returns what a call of a kernel for grouped products computes; None for any other
    instruction.
    """
    if not is_kernel(instruction):
        return None
    by_xla = re.search(rf'{TILING}="(\d+),(\d+),(\d+)"', instruction.attributes)
    found = by_xla or re.search(rf"{TILING}_(\d+)_(\d+)_(\d+)", instruction.op_name)
    if not found:
        return None
    tile = tuple(map(int, found.groups()))
    operands = [shape for name in instruction.operands for shape in computation[name].shapes]
    floats = [shape.dims for shape in operands if shape.dtype[0] not in "su"]
    integers = [shape.dims[0] for shape in operands if shape.dtype[0] in "su" and shape.dims]
    out = instruction.shapes[0].dims
    matrices = out if len(out) == 3 else next(dims for dims in floats if len(dims) == 3)
    if len(out) == 3:  # the gradient of the matrices; its rows are contracted
        width, columns = out[1:]
        rows = math.prod(floats[0]) // width
    else:
        rows, columns = out
        width = math.prod(matrices[1:]) // columns
    visits = min(-(-rows // tile[0]) + matrices[0] - 1, max(integers))
    steps = -(-width // tile[1]), -(-columns // tile[2])
    return GroupedProduct(tile, visits, steps, schedule_is_step=bool(by_xla))
