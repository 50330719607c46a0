"""Which rows and columns of which tensors a slice of a parameter holds.

Every tensor is seen as [rows, columns]: its last dimension is the columns. One layer of a
parameter, once its axes are moved as its entry says, is seen so, too: its last dimensions are the
columns, and those before them (the row dimensions) count its rows. `layer_rows` says which of
these rows each row of a tensor is. So a slice is copied run by run: a run is rows that follow each
other on both sides. Nothing here knows a family, a file or a device.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qwen3next_jax.interop import shard_slices
from qwen3next_jax.interop.entries import TensorSlice
from qwen3next_jax.interop.layout import Parameter
from qwen3next_jax.interop.shard_slices import ShardSlice

# Rows copied at a time. More would leave the processor's caches, as a copy often transposes: it
# would take five times as long.
_ROWS_AT_A_TIME = 32


class Run(NamedTuple):
    """Rows of a tensor that follow each other in the parameter, too.

    Attributes:
      rows: of the tensor.
      index: where they are in the slice of one layer, once its axes are moved.
    """

    rows: slice
    index: tuple[int | slice | None, ...]


def pieces(parameter: Parameter, part: ShardSlice, most: int) -> Iterator[ShardSlice]:
    """Splits `part` into slices of at most `most` elements (or of one), so that each is few rows
    of few tensors.
    """
    stacked = len(parameter.declared.stack)
    dims = (*range(stacked), *(stacked + axis for axis in parameter.entry.axes))
    return shard_slices.split(part, dims, most)


def layers(
    parameter: Parameter, part: ShardSlice, array: np.ndarray
) -> Iterator[tuple[str, ShardSlice, np.ndarray]]:
    """The layers in `array`, which holds the slice `part` of `parameter`.

    Yields:
      the prefix of the layer's tensors, the slice of the layer's own dimensions, and a view of the
      layer's values with its axes moved.
    """
    if not parameter.declared.stack:
        yield parameter.prefixes[0], part, array.transpose(parameter.entry.axes)
        return
    for prefix, layer in zip(parameter.prefixes[part[0]], array, strict=True):
        yield prefix, part[1:], layer.transpose(parameter.entry.axes)


def layer_rows(parameter: Parameter, tensor: TensorSlice) -> range | np.ndarray:
    """[rows of the tensor] Which row of the layer, its axes moved, each row of the tensor is."""
    row_shape, _ = _row_and_column_shape(parameter, tensor)
    index, order = tensor.index, tensor.row_order
    ahead = index[:-1] if index and isinstance(index[-1], slice) else index
    if order is None and all(isinstance(position, int) for position in ahead):
        count = math.prod(row_shape[len(ahead) :])
        number = np.ravel_multi_index(ahead, row_shape[: len(ahead)]) if ahead else 0
        rows = range(int(number) * count, (int(number) + 1) * count)
        if len(ahead) == len(index):
            return rows
        side, below = row_shape[len(ahead)], count // row_shape[len(ahead)]
        start, stop, _ = index[-1].indices(side)
        return rows[start * below : stop * below]
    rows = np.arange(math.prod(row_shape)).reshape(row_shape)[index].ravel()
    return rows if order is None else rows[order]


def runs(
    parameter: Parameter, tensor: TensorSlice, part: ShardSlice, only: slice = slice(None)
) -> Iterator[Run]:
    """The runs of a tensor's rows that are in a slice of one layer.

    Args:
      parameter: the tensor's.
      tensor: one of its entry's.
      part: the slice, of a layer's own dimensions.
      only: leaves other rows of the tensor out.
    """
    row_shape, _ = _row_and_column_shape(parameter, tensor)
    if not row_shape:  # the whole tensor is one row
        yield Run(slice(0, 1), (None,))
        return
    sides = [part[axis] for axis in parameter.entry.axes][: len(row_shape)]
    rows = layer_rows(parameter, tensor)[only]
    # Most of a mixture's tensors lie outside of a slice of some experts: seen without their rows.
    if isinstance(rows, range):
        first = np.ravel_multi_index([side.start for side in sides], row_shape)
        last = np.ravel_multi_index([side.stop - 1 for side in sides], row_shape)
        if rows.stop <= first or rows.start > last:
            return
    rows = np.asarray(rows)
    coordinates = np.unravel_index(rows, row_shape)
    in_each = [(s.start <= c) & (c < s.stop) for s, c in zip(sides, coordinates, strict=True)]
    (found,) = np.nonzero(functools.reduce(np.logical_and, in_each))
    if not len(found):
        return
    # Within a run the last coordinate counts up, and the others do not change.
    last_coordinate = coordinates[-1][found]
    ends_here = (np.diff(found) != 1) | (np.diff(rows[found]) != 1) | (last_coordinate[1:] == 0)
    breaks = np.flatnonzero(ends_here) + 1
    for begin, end in zip((0, *breaks), (*breaks, len(found)), strict=True):
        start = [
            int(c[found[begin]]) - side.start for side, c in zip(sides, coordinates, strict=True)
        ]
        count = int(end - begin)
        first_row = (only.start or 0) + int(found[begin])
        yield Run(
            slice(first_row, first_row + count),
            (*start[:-1], slice(start[-1], start[-1] + count)),
        )


def slice_around_rows(
    parameter: Parameter, tensor: TensorSlice, layer: int, rows: slice
) -> ShardSlice:
    """A slice of the stacked parameter that holds `rows` of a tensor of its `layer`: a range of
    the first of the layer's dimensions, its axes moved, and all of the others.
    """
    row_shape, _ = _row_and_column_shape(parameter, tensor)
    own = list(shard_slices.full(parameter.declared.shape))
    if row_shape:
        found = layer_rows(parameter, tensor)[rows]
        per_index = math.prod(row_shape[1:])
        first, last = int(min(found)) // per_index, int(max(found)) // per_index
        own[parameter.entry.axes[0]] = slice(first, last + 1)
    return (*(slice(layer, layer + 1) for _ in parameter.declared.stack), *own)


def columns(parameter: Parameter, tensor: TensorSlice, part: ShardSlice) -> list[slice]:
    """The columns of a tensor that are in a slice of one layer, as ranges."""
    row_shape, column_shape = _row_and_column_shape(parameter, tensor)
    sides = [part[axis] for axis in parameter.entry.axes][len(row_shape) :]
    found = np.arange(math.prod(column_shape)).reshape(column_shape)[tuple(sides)].ravel()
    breaks = np.flatnonzero(np.diff(found) != 1) + 1
    return [slice(int(run[0]), int(run[-1]) + 1) for run in np.split(found, breaks)]


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies between arrays [n, …] of one shape and any strides."""
    for start in range(0, len(source), _ROWS_AT_A_TIME):
        rows = slice(start, start + _ROWS_AT_A_TIME)
        target[rows] = source[rows]


def _row_and_column_shape(
    parameter: Parameter, tensor: TensorSlice
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layer's dimensions, its axes moved: those that count rows, and those that are the
    tensor's columns.
    """
    shape = tuple(parameter.declared.shape[axis] for axis in parameter.entry.axes)
    width = tensor.shape[-1]
    first_column_dim = len(shape)
    while math.prod(shape[first_column_dim:]) < width:
        first_column_dim -= 1
    assert math.prod(shape[first_column_dim:]) == width, (
        f"{tensor.name}: its rows do not end between two axes of {parameter.path}"
    )
    return shape[:first_column_dim], shape[first_column_dim:]
