"""Rotary positions stretched to texts of `yarn_factor` times the trained context, beside
`layers.yarn`: how much slower each pair of dimensions turns, and what multiplies cos and sin.
"""

import math

import numpy as np


def linear(half: int, theta: float, factor: float, context: int) -> tuple[np.ndarray, float]:
    """Position interpolation (2306.15595): all of them by the factor."""
    return np.full(half, 1 / factor, np.float32), 1.0


def ntk(half: int, theta: float, factor: float, context: int) -> tuple[np.ndarray, float]:
    """The base times factor^(R / (R − 2)), R = 2 · half: the fastest pair as it was, the slowest
    by the factor.
    """
    return (factor ** (-np.arange(half) / max(half - 1, 1))).astype(np.float32), 1.0


def truncated(half: int, theta: float, factor: float, context: int) -> tuple[np.ndarray, float]:
    """A truncated basis (Giraffe, 2308.10882): pairs that turn once within the trained context
    stay; of the others those that would turn within the stretched one turn once in it, the
    slowest not at all. The paper leaves the two borders open; these are ours.
    """
    frequency, once, stretched = (
        theta ** (-np.arange(half) / half),
        2 * math.pi / context,
        2 * math.pi / (context * factor),
    )
    return np.where(
        frequency >= once, 1, np.where(frequency > stretched, stretched / frequency, 0)
    ).astype(np.float32), 1.0
