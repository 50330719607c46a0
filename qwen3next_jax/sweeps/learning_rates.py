"""Finds the best learning rate for each value on the x axis of a sweep, such as the width of the
model, and measures how far the best learning rate moves along this axis.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qwen3next_jax.sweeps.points import Sweep
from qwen3next_jax.sweeps.results import PointResult, seed_axes

AXIS = "optimizer.learning_rate"


class BestRate(NamedTuple):
    """The best learning rate at one value of the x axis.

    Attributes:
      x_value: the name of the value of the x axis.
      tried_rates: the learning rates that were tried, in ascending order.
      mean_losses: [rates], the mean of the metric over the seeds.
      smallest_losses, largest_losses: [rates], the smallest and the largest metric of a seed.
      rate: the best learning rate, as `best_rate` defines it.
      at_edge: whether the best rate is the lowest or the highest rate that was tried.
      moved_sqrt2_steps: the logarithm, to the base √2, of `rate` divided by the first best rate
        along the x axis.
    """

    x_value: str
    tried_rates: tuple[float, ...]
    mean_losses: tuple[float, ...]
    smallest_losses: tuple[float, ...]
    largest_losses: tuple[float, ...]
    rate: float
    at_edge: bool
    moved_sqrt2_steps: float


def best_rate(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, bool]:
    """Finds the learning rate with the lowest loss.

    Args:
      rates: at least one learning rate, in ascending order.
      losses: the loss at each rate, infinite if training diverged.

    Returns:
      The best rate, and whether it is the first or the last of `rates`. The best rate is the
      minimum of the parabola through the lowest loss and its two neighbours, over the log of the
      rate. If the lowest loss has no finite neighbour on one of its sides, the best rate is the
      rate of the lowest loss.
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


def best_rates_along_x(
    sweep: Sweep, results: Sequence[PointResult], metric: str
) -> dict[str, list[BestRate]]:
    """Finds the best learning rate at every value of the x axis of a sweep that also has the axis
    `optimizer.learning_rate`.

    Args:
      results: the results of all points. If a point failed, for example because a seed diverged,
        the loss of its learning rate is infinite. If a point is not done yet, its learning rate is
        left out.
      metric: the name of a metric for which lower values are better.

    Returns:
      label → the best learning rate at every value of the x axis for which at least two rates were
      tried. The points of one label have the same values on all axes except the x axis, the
      learning rate and the seeds. {} if the sweep has no axis `optimizer.learning_rate`, or if the
      learning rate is the x axis.
    """
    if AXIS not in sweep.axes or sweep.x_axis == AXIS:
        return {}
    seeds = seed_axes(sweep)
    groups: dict[str, dict[str, dict[float, list[float]]]] = {}
    for result in results:
        if result.done and metric not in result.final_metrics:
            continue
        at = result.point.axis_values
        label = ", ".join(
            f"{axis.rpartition('.')[2]} {value}"
            for axis, value in at.items()
            if axis not in (sweep.x_axis, AXIS, *seeds)
        )
        rates = groups.setdefault(label, {}).setdefault(at[sweep.x_axis], {})
        loss = math.inf if result.failure_reason else math.nan  # NaN: not done yet
        if result.done:
            loss = result.final_metrics[metric].value
        rates.setdefault(result.point.config.optimizer.learning_rate, []).append(loss)
    found: dict[str, list[BestRate]] = {}
    for label, by_x in groups.items():
        for x in sweep.axes[sweep.x_axis]:
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
                    x_value=x,
                    tried_rates=rates,
                    mean_losses=losses,
                    smallest_losses=tuple(min(by_rate[rate]) for rate in rates),
                    largest_losses=tuple(max(by_rate[rate]) for rate in rates),
                    rate=rate,
                    at_edge=at_edge,
                    moved_sqrt2_steps=2 * math.log2(rate / (line[0].rate if line else rate)),
                )
            )
    return found
