"""Finds the effective speed-ups of a sweep whose points differ in their budgets of compute.

The arms are the values of the x axis, or, if the budgets are the x axis, of the first other axis
that is not a seed. The first arm is the baseline, with which each other arm is compared.
"""

from collections.abc import Callable, Sequence

import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.reporting.speedup import LEAST_BUDGETS, Arm, Comparison, compare
from qwen3next_jax.sweeps.points import Sweep
from qwen3next_jax.sweeps.results import Result, main_metrics, seed_axes


def budget_axis(sweep: Sweep) -> str | None:
    """Returns the axis that sets the steps of the points, such as "flops" or "train.steps"; None if
    all points have the same number of steps.
    """
    if "flops" in sweep.axes:
        return "flops"
    for axis, values in sweep.axes.items():
        # No two axes set the same setting, so the steps follow from the value on one axis alone.
        steps = {value: set() for value in values}
        for point in sweep.points:
            steps[point.values[axis]].add(point.config.train.steps)
        if all(len(of) == 1 for of in steps.values()) and len(set.union(*steps.values())) > 1:
            return axis
    return None


def arm_axis(sweep: Sweep) -> str | None:
    """Returns the axis whose values are the arms; None if the sweep compares nothing."""
    hidden = {budget_axis(sweep), *seed_axes(sweep)}
    axes = [axis for axis in (sweep.x, *sweep.axes) if axis not in hidden]
    return next((axis for axis in axes if len(sweep.axes[axis]) > 1), None)


def speed_metric(results: Sequence[Result]) -> str | None:
    """Returns the metric of which the speed-up is: the first main metric, of those that count nats
    or bits, of which lower values are better. None if no point has one.
    """
    for name, metric in main_metrics(results).items():
        if metric.better == "lower" and metric.unit in ("nats", "bits"):
            return name
    return None


def group_arms(sweep: Sweep, results: Sequence[Result], metric: str) -> list[list[Arm]]:
    """Groups the points of a sweep into arms.

    Args:
      results: the results of all points.
      metric: the name of the metric whose values are the losses.

    Returns:
      Lists of arms, in the order of their axis. The points of a list have the same values on all
      axes except those of arms, budgets and seeds. Seeds that are not done at every budget are left
      out.
    """
    budgets, arms, seeds = budget_axis(sweep), arm_axis(sweep), seed_axes(sweep)
    groups: dict[str, dict[str, dict[tuple, list[Result]]]] = {}
    for result in results:
        at = result.point.values
        label = ", ".join(
            f"{axis.rpartition('.')[2]} {value}"
            for axis, value in at.items()
            if axis not in (arms, budgets, *seeds)
        )
        name = f"{at[arms]} ({label})" if label else at[arms]
        of_seed = groups.setdefault(label, {}).setdefault(name, {})
        of_seed.setdefault(tuple(at[axis] for axis in seeds), []).append(result)
    return [
        [_arm(name, list(by_seed.values()), metric) for name, by_seed in by_arm.items()]
        for by_arm in groups.values()
    ]


def _arm(name: str, seeds: Sequence[Sequence[Result]], metric: str) -> Arm:
    """Makes an arm. `seeds`: for each seed the results of all budgets, in the same order."""
    budgets = len(seeds[0])
    done = [points for points in seeds if all(metric in point.metrics for point in points)]

    def each(number: Callable[[Result], float]) -> np.ndarray:
        values = [number(result) for points in done for result in points]
        return np.array(values, float).reshape(len(done), budgets)

    tokens = each(lambda result: result.costs["tokens"])
    return Arm(
        name,
        each(lambda result: result.metrics[metric].value),
        {
            "steps": each(lambda result: result.point.config.train.steps),
            "flops": tokens * each(lambda result: result.costs["flops_per_token"]),
            # Of training alone: compiling and evaluating would weigh on the small budgets.
            "seconds": tokens / each(lambda result: result.tokens_per_second),
        },
        frozenset(name for points in done for point in points for name in point.devices),
    )


def speed_ups(sweep: Sweep, results: Sequence[Result]) -> list[Comparison]:
    """Returns the speed-up of every arm over the first, or why there is none. Returns [] for a
    sweep that compares nothing, or of which no point has a loss.

    Args:
      results: the results of all points.

    Raises:
      UserError: all points of the sweep have the same number of steps.
    """
    axis, metric = arm_axis(sweep), speed_metric(results)
    if axis is None or metric is None:
        return []
    require(
        budget_axis(sweep) is not None,
        f"every {axis.rpartition('.')[2]} has one budget; expected at least {LEAST_BUDGETS}, to "
        'which a law can be fitted: add an axis such as "flops": [1e11, 3e11, 9e11]',
    )
    return [
        compare(baseline, arm)
        for baseline, *others in group_arms(sweep, results, metric)
        for arm in others
    ]
