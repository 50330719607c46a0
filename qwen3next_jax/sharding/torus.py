"""Where the axes of a mesh lie on the network of TPU chips."""

import numpy as np


def place_experts_in_blocks(grid: np.ndarray) -> np.ndarray:
    """`grid` with each group of `expert` a block of both dimensions of a network that has two,
    where it would be a line of one: a corner has two links to send over, the end of a line one
    (and 16 are a ring). Data × expert alone.
    """
    experts, place = grid.shape[1], np.array([device.coords for device in grid.flat])
    sides, line = place.max(axis=0) + 1, np.ptp(place[:experts], axis=0) + 1
    if (
        grid.shape[2:] != (1, 1)
        or sides[:2].prod() != grid.size
        or not 2 < experts < 16
        or experts not in line
    ):
        return grid
    shapes = [(n, experts // n) for n in range(1, experts + 1) if experts % n == 0]
    height, width = min(((h, w) for h, w in shapes if sides[0] % h == sides[1] % w == 0), key=sum)
    by_place = grid.reshape(-1)[np.lexsort((place[:, 1], place[:, 0]))]
    return (
        by_place.reshape(sides[0] // height, height, sides[1] // width, width)
        .swapaxes(1, 2)
        .reshape(grid.shape)
    )
