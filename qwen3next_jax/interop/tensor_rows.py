"""Computes which rows and columns of which tensors a slice of a parameter holds.

This module treats tensors and parameters as matrices. The last dimension of a tensor is its
columns; all other dimensions of the tensor, flattened, are its rows. One layer of a parameter,
transposed as the `ParameterEntry` says, is a matrix, too: the last dimensions, flattened, are the
columns, and the dimensions before the columns ("row dimensions"), flattened, are the rows.
`tensor_row_indices_in_layer` maps the rows of a tensor to the rows of the layer. Rows are copied in
runs: a run is a range of rows that are consecutive both in the tensor and in the slice. This module
does not depend on a family of models, a file format or a device.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from qwen3next_jax.interop import shard_slices
from qwen3next_jax.interop.entries import TensorSlice
from qwen3next_jax.interop.layout import StoredParameter
from qwen3next_jax.interop.shard_slices import ShardSlice

# The number of rows that `copy_rows` copies at once. Most copies transpose. With more rows at once,
# the data do not fit into the processor's caches, and the copy takes five times as long.
_ROWS_PER_COPY = 32


class RowRun(NamedTuple):
    """A range of rows that are consecutive in a tensor and in a slice of a layer.

    Attributes:
      tensor_rows: the range of the tensor's rows.
      index_in_slice: the index of the same rows in the slice of the transposed layer.
    """

    tensor_rows: slice
    index_in_slice: tuple[int | slice | None, ...]


def split_along_rows(
    parameter: StoredParameter, part: ShardSlice, max_elements: int
) -> Iterator[ShardSlice]:
    """Splits the slice `part` of a parameter into slices of at most `max_elements` elements (but at
    least one element). `part` is split first by layer, and then along the first dimensions of the
    transposed layer, so that each result needs few rows of few tensors.
    """
    num_stack_dims = len(parameter.declaration.stack_shape)
    layer_dims = (num_stack_dims + axis for axis in parameter.entry.transpose_axes)
    return shard_slices.split_slice(part, (*range(num_stack_dims), *layer_dims), max_elements)


def transposed_layers(
    parameter: StoredParameter, part: ShardSlice, array: np.ndarray
) -> Iterator[tuple[str, ShardSlice, np.ndarray]]:
    """Iterates over the layers in `array`, which holds the slice `part` of `parameter`.

    Yields:
      (prefix, layer_part, layer). prefix is the beginning of the names of the layer's tensors.
      layer_part is the slice of the layer's parameter that `array` holds. layer is a view of the
      values of layer_part, transposed as the `ParameterEntry` says.
    """
    if not parameter.declaration.stack_shape:
        yield parameter.layer_prefixes[0], part, array.transpose(parameter.entry.transpose_axes)
        return
    for prefix, layer in zip(parameter.layer_prefixes[part[0]], array, strict=True):
        yield prefix, part[1:], layer.transpose(parameter.entry.transpose_axes)


def tensor_row_indices_in_layer(
    parameter: StoredParameter, tensor: TensorSlice
) -> range | np.ndarray:
    """Returns, for each row of the tensor, the index of the same row in the transposed layer:
    integers [number of rows of the tensor].
    """
    row_shape, _ = _split_shape_into_rows_and_columns(parameter, tensor)
    index, order = tensor.index_in_layer, tensor.row_order
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


def row_runs(
    parameter: StoredParameter, tensor: TensorSlice, part: ShardSlice, selected: slice = slice(None)
) -> Iterator[RowRun]:
    """Yields the runs (`RowRun`) of a tensor's rows that a slice of one layer holds.

    Args:
      parameter: the parameter that the tensor belongs to.
      tensor: one of the slices of the parameter's entry.
      part: the slice of the layer's parameter, not transposed.
      selected: the range of the tensor's rows to look at.
    """
    row_shape, _ = _split_shape_into_rows_and_columns(parameter, tensor)
    if not row_shape:  # the whole tensor is one row
        yield RowRun(slice(0, 1), (None,))
        return
    row_dims = [part[axis] for axis in parameter.entry.transpose_axes][: len(row_shape)]
    rows = tensor_row_indices_in_layer(parameter, tensor)[selected]
    # A shard that holds some of the experts has no row of most experts' tensors. This test finds
    # that out before any array is made.
    if isinstance(rows, range):
        first_held = np.ravel_multi_index([dim.start for dim in row_dims], row_shape)
        last_held = np.ravel_multi_index([dim.stop - 1 for dim in row_dims], row_shape)
        if rows.stop <= first_held or rows.start > last_held:
            return
    rows = np.asarray(rows)
    coordinates = np.unravel_index(rows, row_shape)
    inside = [
        (dim.start <= coordinate) & (coordinate < dim.stop)
        for dim, coordinate in zip(row_dims, coordinates, strict=True)
    ]
    (held,) = np.nonzero(functools.reduce(np.logical_and, inside))
    if not len(held):
        return
    # Within a run, only the last of a row's coordinates changes, by 1 for each row.
    last_coordinate = coordinates[-1][held]
    ends_here = (np.diff(held) != 1) | (np.diff(rows[held]) != 1) | (last_coordinate[1:] == 0)
    breaks = np.flatnonzero(ends_here) + 1
    for begin, end in zip((0, *breaks), (*breaks, len(held)), strict=True):
        start = [
            int(coordinate[held[begin]]) - dim.start
            for dim, coordinate in zip(row_dims, coordinates, strict=True)
        ]
        count = int(end - begin)
        first_row = (selected.start or 0) + int(held[begin])
        yield RowRun(
            slice(first_row, first_row + count),
            (*start[:-1], slice(start[-1], start[-1] + count)),
        )


def slice_around_rows(
    parameter: StoredParameter, tensor: TensorSlice, layer: int, rows: slice
) -> ShardSlice:
    """Returns a slice of the stacked parameter that contains the range `rows` of a tensor's rows,
    for the layer with the index `layer`. Of the transposed layer, the slice has a range of the
    first dimension, and the whole of each other dimension.
    """
    row_shape, _ = _split_shape_into_rows_and_columns(parameter, tensor)
    layer_part = list(shard_slices.full_slice(parameter.declaration.shape))
    if row_shape:
        numbers = tensor_row_indices_in_layer(parameter, tensor)[rows]
        rows_per_index = math.prod(row_shape[1:])
        first, last = int(min(numbers)) // rows_per_index, int(max(numbers)) // rows_per_index
        layer_part[parameter.entry.transpose_axes[0]] = slice(first, last + 1)
    return (*(slice(layer, layer + 1) for _ in parameter.declaration.stack_shape), *layer_part)


def column_ranges(parameter: StoredParameter, tensor: TensorSlice, part: ShardSlice) -> list[slice]:
    """Returns the ranges of a tensor's columns that the slice `part` of one layer holds."""
    row_shape, column_shape = _split_shape_into_rows_and_columns(parameter, tensor)
    column_dims = [part[axis] for axis in parameter.entry.transpose_axes][len(row_shape) :]
    numbers = np.arange(math.prod(column_shape)).reshape(column_shape)[tuple(column_dims)].ravel()
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [slice(int(run[0]), int(run[-1]) + 1) for run in np.split(numbers, breaks)]


def copy_rows(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` into `target`. Both arrays have the same shape [n, …]; their strides may
    differ.
    """
    for start in range(0, len(source), _ROWS_PER_COPY):
        rows = slice(start, start + _ROWS_PER_COPY)
        target[rows] = source[rows]


def _split_shape_into_rows_and_columns(
    parameter: StoredParameter, tensor: TensorSlice
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Splits the shape of the transposed layer in two: the sizes of the axes that a tensor's row
    index runs over, and the sizes of the axes that its column index runs over.
    """
    shape = tuple(parameter.declaration.shape[axis] for axis in parameter.entry.transpose_axes)
    width = tensor.shape[-1]
    first_column_dim = len(shape)
    while math.prod(shape[first_column_dim:]) < width:
        first_column_dim -= 1
    assert math.prod(shape[first_column_dim:]) == width, (
        f"{tensor.name}: its rows do not end between two axes of {parameter.path}"
    )
    return shape[:first_column_dim], shape[first_column_dim:]
