"""Finds the effective speed-ups of a sweep whose points differ in their budgets of compute.

The arms are the values of the x axis. If the x axis sets the budgets, the arms are the values of
the first other axis that is not a seed. The first arm is the baseline, with which each other arm is
compared.
"""

from collections.abc import Callable, Sequence

import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.reporting.speedup import LEAST_BUDGETS, Arm, Comparison, compare_in_every_unit
from qwen3next_jax.sweeps.points import Sweep
from qwen3next_jax.sweeps.results import (
    PointResult,
    heldout_settings_along,
    main_metrics,
    seed_axes,
)


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
            steps[point.axis_values[axis]].add(point.config.train.steps)
        if all(len(of) == 1 for of in steps.values()) and len(set.union(*steps.values())) > 1:
            return axis
    return None


def arm_axis(sweep: Sweep) -> str | None:
    """Returns the axis whose values are the arms; None if every axis with several values sets
    budgets or seeds.
    """
    hidden = {budget_axis(sweep), *seed_axes(sweep)}
    axes = [axis for axis in (sweep.x_axis, *sweep.axes) if axis not in hidden]
    return next((axis for axis in axes if len(sweep.axes[axis]) > 1), None)


def speed_up_metric(results: Sequence[PointResult]) -> str | None:
    """Returns the name of the metric that serves as the loss of a speed-up: the first main metric
    in nats or bits for which lower values are better. None if no point has such a metric.
    """
    for name, metric in main_metrics(results).items():
        if metric.better == "lower" and metric.unit in ("nats", "bits"):
            return name
    return None


def comparable_arms(sweep: Sweep, results: Sequence[PointResult], metric: str) -> list[list[Arm]]:
    """Groups the points of a sweep into arms.

    Args:
      results: the results of all points.
      metric: the name of the metric whose values are the losses.

    Returns:
      Lists of arms; the arms of a list are in the order of their axis. The points of a list have
      the same values on all axes except the axes of arms, budgets and seeds. Seeds of an arm that
      are not done at every budget are left out.
    """
    budgets, arms, seeds = budget_axis(sweep), arm_axis(sweep), seed_axes(sweep)
    groups: dict[str, dict[str, dict[tuple, list[PointResult]]]] = {}
    for result in results:
        at = result.point.axis_values
        label = ", ".join(
            f"{axis.rpartition('.')[2]} {value}"
            for axis, value in at.items()
            if axis not in (arms, budgets, *seeds)
        )
        name = f"{at[arms]} ({label})" if label else at[arms]
        results_by_seed = groups.setdefault(label, {}).setdefault(name, {})
        results_by_seed.setdefault(tuple(at[axis] for axis in seeds), []).append(result)
    return [
        [_make_arm(name, list(by_seed.values()), metric) for name, by_seed in by_arm.items()]
        for by_arm in groups.values()
    ]


def _make_arm(name: str, seeds: Sequence[Sequence[PointResult]], metric: str) -> Arm:
    """Makes an arm. `seeds`: for each seed, the results of all budgets; all seeds have the budgets
    in the same order.
    """
    budgets = len(seeds[0])
    done = [points for points in seeds if all(metric in point.final_metrics for point in points)]

    def each(number: Callable[[PointResult], float]) -> np.ndarray:
        values = [number(result) for points in done for result in points]
        return np.array(values, float).reshape(len(done), budgets)

    tokens = each(lambda result: result.costs["tokens"])
    return Arm(
        name,
        each(lambda result: result.final_metrics[metric].value),
        {
            "steps": each(lambda result: result.point.config.train.steps),
            "flops": tokens * each(lambda result: result.costs["flops_per_token"]),
            # Of training alone: compiling and evaluating would weigh on the small budgets.
            "seconds": tokens / each(lambda result: result.tokens_per_second),
        },
        frozenset(name for points in done for point in points for name in point.device_names),
    )


def compare_arms(sweep: Sweep, results: Sequence[PointResult]) -> list[Comparison]:
    """Returns, for every arm after the first, the speed-up over the first arm, or the reason why
    there is no speed-up. Returns [] if the sweep has no axis of arms, or if its points have no
    loss.

    Args:
      results: the results of all points.

    Raises:
      UserError: all points of the sweep have the same number of steps, or the points that would be
        compared were evaluated on different text.
    """
    axis, metric = arm_axis(sweep), speed_up_metric(results)
    if axis is None or metric is None:
        return []
    require(
        budget_axis(sweep) is not None,
        f"every {axis.rpartition('.')[2]} has one budget; expected at least {LEAST_BUDGETS}, to "
        'which a law can be fitted: add an axis such as "flops": [1e11, 3e11, 9e11]',
    )
    differing = heldout_settings_along(sweep, results, axis, budget_axis(sweep))
    require(
        not differing,
        f"points with different {axis.rpartition('.')[2]} were evaluated on different text "
        f"({', '.join(differing)}), so their losses do not compare: give all of them the same",
    )
    return [
        compare_in_every_unit(baseline, arm)
        for baseline, *others in comparable_arms(sweep, results, metric)
        for arm in others
    ]
