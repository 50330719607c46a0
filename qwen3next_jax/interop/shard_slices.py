"""Index arithmetic for slices of an array, such as the shard on a device."""

import math
from collections.abc import Iterator, Sequence

# A contiguous part of an array: for each dimension a slice with a start and a stop.
ShardSlice = tuple[slice, ...]


def with_start_and_stop(index: tuple[slice, ...], shape: tuple[int, ...]) -> ShardSlice:
    """Returns `index` with an explicit start and stop in each dimension. `index` is an index of an
    array of `shape`.
    """
    return tuple(slice(*dim.indices(size)[:2]) for dim, size in zip(index, shape, strict=True))


def full_slice(shape: tuple[int, ...]) -> ShardSlice:
    """Returns the slice that holds all of an array of `shape`."""
    return tuple(slice(0, size) for size in shape)


def shape_of(part: ShardSlice) -> tuple[int, ...]:
    """Returns the shape of the values that `part` selects."""
    return tuple(dim.stop - dim.start for dim in part)


def num_elements(part: ShardSlice) -> int:
    """Returns the number of elements in `part`."""
    return math.prod(shape_of(part))


def bounding_slice(parts: Sequence[ShardSlice]) -> ShardSlice:
    """Returns the smallest slice that contains all of `parts`."""
    return tuple(
        slice(min(dim.start for dim in dims), max(dim.stop for dim in dims))
        for dims in zip(*parts, strict=True)
    )


def intersection(first: ShardSlice, second: ShardSlice) -> ShardSlice | None:
    """Returns the slice of the elements that `first` and `second` share; None if they share no
    element.
    """
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(first, second, strict=True)
    )
    return common if all(dim.start < dim.stop for dim in common) else None


def relative_to(outer: ShardSlice, part: ShardSlice) -> ShardSlice:
    """Returns the index of the slice `part` in the values of the slice `outer`, which contains
    `part`. `part` and `outer` are slices of the same array.
    """
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, outer, strict=True)
    )


def split_slice(part: ShardSlice, dims: Sequence[int], max_elements: int) -> Iterator[ShardSlice]:
    """Splits a slice into slices of at most `max_elements` elements.

    Args:
      part: the slice to split.
      dims: the dimensions that may be split, in order. A dimension is split only if the slices are
        still too large after all earlier dimensions were split into single indices. If this is not
        enough for the last of `dims` either, the results have more than `max_elements` elements.
      max_elements: the largest number of elements of a result.
    """
    if num_elements(part) <= max_elements or not dims:
        yield part
        return
    dim, *later_dims = dims
    start, stop = part[dim].start, part[dim].stop
    step = max(1, max_elements * (stop - start) // num_elements(part))
    for first in range(start, stop, step):
        narrower = slice(first, min(first + step, stop))
        yield from split_slice((*part[:dim], narrower, *part[dim + 1 :]), later_dims, max_elements)
