"""Slices of a parameter: a range in each of its dimensions, such as a device's shard."""

import math
from collections.abc import Iterator, Sequence

# Of a stacked parameter: one slice (start, stop) for each dimension.
ShardSlice = tuple[slice, ...]


def bounded(index: tuple[slice, ...], shape: tuple[int, ...]) -> ShardSlice:
    """`index` into an array of `shape`, with a start and a stop in each dimension."""
    return tuple(slice(*side.indices(size)[:2]) for side, size in zip(index, shape, strict=True))


def full(shape: tuple[int, ...]) -> ShardSlice:
    """All of an array of `shape`."""
    return tuple(slice(0, size) for size in shape)


def shape_of(part: ShardSlice) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in part)


def size_of(part: ShardSlice) -> int:
    """How many elements it has."""
    return math.prod(shape_of(part))


def bounding(parts: Sequence[ShardSlice]) -> ShardSlice:
    """The smallest slice that holds all of `parts`."""
    return tuple(
        slice(min(side.start for side in sides), max(side.stop for side in sides))
        for sides in zip(*parts, strict=True)
    )


def intersection(one: ShardSlice, other: ShardSlice) -> ShardSlice | None:
    """What both have in common; None: nothing."""
    sides = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return sides if all(side.start < side.stop for side in sides) else None


def relative_to(outer: ShardSlice, part: ShardSlice) -> ShardSlice:
    """`part` as an index into the array that holds `outer`, which contains it."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, outer, strict=True)
    )


def split(part: ShardSlice, dims: Sequence[int], most: int) -> Iterator[ShardSlice]:
    """Splits a slice into slices of at most `most` elements, or of one.

    Args:
      part: the slice.
      dims: its dimensions, in the order in which they are split: a later one is split only once
        those before it are down to one index.
      most: elements of a result.
    """
    if size_of(part) <= most or not dims:
        yield part
        return
    dim, *later = dims
    side = part[dim]
    step = max(1, most * (side.stop - side.start) // size_of(part))
    for start in range(side.start, side.stop, step):
        narrower = slice(start, min(start + step, side.stop))
        yield from split((*part[:dim], narrower, *part[dim + 1 :]), later, most)
