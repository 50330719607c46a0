"""Finds the best learning rate of the points of a sweep, and how far it moves along the x axis of
the sweep, such as the width of the model.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qwen3next_jax.sweeps.points import Sweep
from qwen3next_jax.sweeps.results import Result, seed_axes

AXIS = "optimizer.learning_rate"


class BestRate(NamedTuple):
    """The best learning rate at one value of the x axis.

    Attributes:
      x: the name of this value.
      rates: the learning rates that were tried, in ascending order.
      losses: [rates] the metric, the mean over the seeds.
      low, high: [rates] the least and the largest over the seeds.
      rate: the best learning rate, by `best_rate`.
      at_edge: whether the best is the lowest or the highest that was tried.
      moved: in steps of √2 from the best at the first value of the x axis.
    """

    x: str
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    rate: float
    at_edge: bool
    moved: float


def best_rate(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, bool]:
    """Finds the learning rate with the lowest loss.

    Args:
      rates: at least one learning rate, in ascending order.
      losses: the loss at each, infinite where training diverged.

    Returns:
      The minimum of the parabola over the log of the rate through the lowest loss and its two
      neighbours, and False. If the lowest loss has no finite neighbour on one of its sides: the
      rate that has it, and whether that is the first or the last rate.
    """
    i = int(np.argmin(losses))
    if i in (0, len(rates) - 1):
        return float(rates[i]), True
    x, y = np.log(rates[i - 1 : i + 2]), np.asarray(losses[i - 1 : i + 2], float)
    if not np.isfinite(y).all():
        return float(rates[i]), False
    c2, c1, _ = np.polyfit(x - x[1], y, 2)
    if c2 <= 0:
        return float(rates[i]), False
    return float(np.exp(np.clip(x[1] - c1 / (2 * c2), x[0], x[2]))), False


def best_along_x(sweep: Sweep, results: Sequence[Result], metric: str) -> dict[str, list[BestRate]]:
    """Finds the best learning rate at every value of the x axis of a sweep that has the axis
    `optimizer.learning_rate` beside it.

    Args:
      results: the results of all points. A rate at which a point failed, such as a seed that
        diverged, has an infinite loss; one of which a point is not done yet is left out.
      metric: the name of a metric of which lower values are better.

    Returns:
      label → the best of every value on the x axis with at least two rates. The points of a label
      have the same values on all axes except x, learning rates and seeds. {} if the sweep has no
      such axis, or it is the x axis.
    """
    if AXIS not in sweep.axes or sweep.x == AXIS:
        return {}
    seeds = seed_axes(sweep)
    groups: dict[str, dict[str, dict[float, list[float]]]] = {}
    for result in results:
        if result.done and metric not in result.metrics:
            continue
        at = result.point.values
        label = ", ".join(
            f"{axis.rpartition('.')[2]} {value}"
            for axis, value in at.items()
            if axis not in (sweep.x, AXIS, *seeds)
        )
        rates = groups.setdefault(label, {}).setdefault(at[sweep.x], {})
        loss = math.inf if result.failed else math.nan  # NaN: not done yet
        if result.done:
            loss = result.metrics[metric].value
        rates.setdefault(result.point.config.optimizer.learning_rate, []).append(loss)
    found: dict[str, list[BestRate]] = {}
    for label, by_x in groups.items():
        for x in sweep.axes[sweep.x]:
            by_rate = {
                rate: losses
                for rate, losses in by_x.get(x, {}).items()
                if not np.isnan(losses).any()
            }
            if len(by_rate) < 2 or not np.isfinite([np.mean(v) for v in by_rate.values()]).any():
                continue
            rates = tuple(sorted(by_rate))
            losses = tuple(float(np.mean(by_rate[rate])) for rate in rates)
            rate, at_edge = best_rate(rates, losses)
            line = found.setdefault(label, [])
            line.append(
                BestRate(
                    x=x,
                    rates=rates,
                    losses=losses,
                    low=tuple(min(by_rate[rate]) for rate in rates),
                    high=tuple(max(by_rate[rate]) for rate in rates),
                    rate=rate,
                    at_edge=at_edge,
                    moved=2 * math.log2(rate / (line[0].rate if line else rate)),
                )
            )
    return found
