"""A box of a parameter (a range in each of its dimensions) ↔ the rows of the tensors that hold it.

Every tensor is seen as [rows, columns], its last dimension being the columns. The parameter of
one layer, its axes moved as its entry says, is seen so too: its last dimensions are the columns,
those before (`lead`) count its rows, and `rows_of` says which of these each row of a tensor is.
So a box is copied run by run: rows that follow each other on both sides. Nothing here knows a
family, a file or a device.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from qwen3next_jax.interop.layout import Parameter
from qwen3next_jax.model.hf_entries import Slice

Box = tuple[slice, ...]  # of a stacked parameter, one slice (start, stop) for each dimension
_BLOCK = 32  # rows copied at a time: transposing more at once leaves the caches (5 times slower)


class Run(NamedTuple):
    """`rows` of a tensor are `place` of the layer's box, its axes moved."""

    rows: slice
    place: tuple[int | slice, ...]


def bounded(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box of `index` into an array of `shape`."""
    return tuple(slice(*side.indices(size)[:2]) for side, size in zip(index, shape, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    return tuple(slice(0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)


def size(box: Box) -> int:
    return math.prod(shape_of(box))


def around(several: Sequence[Box]) -> Box:
    """The smallest box that holds them all."""
    return tuple(
        slice(min(side.start for side in sides), max(side.stop for side in sides))
        for sides in zip(*several, strict=True)
    )


def overlap(box: Box, other: Box) -> Box | None:
    sides = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, other, strict=True)
    )
    return sides if all(side.start < side.stop for side in sides) else None


def within(box: Box, outer: Box) -> Box:
    """The place of `box` in an array that holds `outer`."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True)
    )


def pieces(parameter: Parameter, box: Box, most: int) -> Iterator[Box]:
    """Cuts `box` into boxes of at most `most` elements (or of one), so that each is few rows of
    few tensors.
    """
    stacked = len(parameter.declared.stack)
    return _cut(box, (*range(stacked), *(stacked + axis for axis in parameter.entry.axes)), most)


def _cut(box: Box, dims: tuple[int, ...], most: int) -> Iterator[Box]:
    if size(box) <= most or not dims:
        yield box
        return
    dim, side = dims[0], box[dims[0]]
    step = max(1, most * (side.stop - side.start) // size(box))
    for start in range(side.start, side.stop, step):
        yield from _cut(
            (*box[:dim], slice(start, min(start + step, side.stop)), *box[dim + 1 :]),
            dims[1:],
            most,
        )


def layers(
    parameter: Parameter, box: Box, array: np.ndarray
) -> Iterator[tuple[str, Box, np.ndarray]]:
    """(prefix, box of the layer's own dimensions, view with its axes moved) of every layer in
    `array`, which is `box`.
    """
    stacked = len(parameter.declared.stack)
    prefixes = parameter.prefixes[box[0]] if stacked else parameter.prefixes
    for prefix, layer in zip(prefixes, array if stacked else array[None], strict=True):
        yield prefix, box[stacked:], layer.transpose(parameter.entry.axes)


def rows_of(parameter: Parameter, part: Slice) -> range | np.ndarray:
    """Of every row of the tensor `part`: which row of the layer, its axes moved, it is."""
    lead, _ = _split(parameter, part)
    order = part.row_order
    if order is None and all(isinstance(i, int) for i in part.index):
        size = math.prod(lead[len(part.index) :])
        first = (
            int(np.ravel_multi_index(part.index, lead[: len(part.index)])) * size
            if part.index
            else 0
        )
        return range(first, first + size)
    rows = np.arange(math.prod(lead)).reshape(lead)[part.index].ravel()
    return rows if order is None else rows[order]


def runs(parameter: Parameter, part: Slice, box: Box, only: slice = slice(None)) -> Iterator[Run]:
    """The runs of the tensor `part` in `box`, of a layer's own dimensions; `only`: of these of
    its rows.
    """
    lead, _ = _split(parameter, part)
    moved = [box[axis] for axis in parameter.entry.axes][: len(lead)]
    if not lead:  # the whole tensor is one row
        yield Run(slice(0, 1), (None,))
        return
    rows = rows_of(parameter, part)[only]
    # most of a mixture's tensors lie outside of a box of some experts: told at once
    if isinstance(rows, range):
        first = np.ravel_multi_index([side.start for side in moved], lead)
        last = np.ravel_multi_index([side.stop - 1 for side in moved], lead)
        if rows.stop <= first or rows.start > last:
            return
    rows = np.asarray(rows)
    coordinates = np.unravel_index(rows, lead)
    inside = functools.reduce(
        np.logical_and, ((side.start <= c) & (c < side.stop) for side, c in zip(moved, coordinates))
    )
    (found,) = np.nonzero(inside)
    if not len(found):
        return
    within = coordinates[-1][found]  # of a run the last coordinate counts up, and the others stay
    breaks = (
        np.flatnonzero((np.diff(found) != 1) | (np.diff(rows[found]) != 1) | (within[1:] == 0)) + 1
    )
    for begin, end in zip((0, *breaks), (*breaks, len(found))):
        *prefix, start = (int(c[found[begin]]) - side.start for side, c in zip(moved, coordinates))
        row, count = (only.start or 0) + int(found[begin]), int(end - begin)
        yield Run(slice(row, row + count), (*prefix, slice(start, start + count)))


def around_rows(parameter: Parameter, part: Slice, layer: int, only: slice) -> Box:
    """A box of the stacked parameter that holds the rows `only` of the tensor `part` of its
    `layer`: a range of the first of the layer's dimensions, its axes moved, and all of the
    others.
    """
    lead, _ = _split(parameter, part)
    own = list(whole(parameter.declared.shape))
    if lead:
        rows, below = rows_of(parameter, part)[only], math.prod(lead[1:])
        own[parameter.entry.axes[0]] = slice(int(min(rows)) // below, int(max(rows)) // below + 1)
    return (*(slice(layer, layer + 1) for _ in parameter.declared.stack), *own)


def columns(parameter: Parameter, part: Slice, box: Box) -> list[slice]:
    """The columns of the tensor `part` that are in `box`, as ranges."""
    lead, rest = _split(parameter, part)
    moved = [box[axis] for axis in parameter.entry.axes][len(lead) :]
    found = np.arange(math.prod(rest)).reshape(rest)[tuple(moved)].ravel()
    breaks = np.flatnonzero(np.diff(found) != 1) + 1
    return [slice(int(part[0]), int(part[-1]) + 1) for part in np.split(found, breaks)]


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Between arrays [n, …] of one shape and any strides."""
    for start in range(0, len(source), _BLOCK):
        target[start : start + _BLOCK] = source[start : start + _BLOCK]


def _split(parameter: Parameter, part: Slice) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layer's dimensions, its axes moved: those that count rows, and those that are the
    columns of the tensor `part`.
    """
    shape = tuple(parameter.declared.shape[axis] for axis in parameter.entry.axes)
    at = len(shape)
    while math.prod(shape[at:]) < part.shape[-1]:
        at -= 1
    assert math.prod(shape[at:]) == part.shape[-1], (
        f"{part.name}: its rows do not end between two axes of {parameter.path}"
    )
    return shape[:at], shape[at:]
