"""Reads the results of a sweep's points from the records of their runs, and states findings.

Every number comes from a run's metrics.jsonl or follows from its configuration.
"""

import contextlib
import csv
import dataclasses
import io
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from qwen3next_jax.common.events import divergence_reason, read_events
from qwen3next_jax.common.metrics import (
    Metric,
    MetricValue,
    evaluation_of_event,
    metric_values_of_event,
)
from qwen3next_jax.runs.costs import count_costs
from qwen3next_jax.sweeps.points import Point, Sweep


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one point.

    Attributes:
      step: the last step that its record has.
      metrics: name → value at the last step of the run, of every evaluation: "heldout loss",
        "mqar accuracy/8 pairs". {} until the point is done.
      tokens_per_second: median over the logged steps; NaN before the first.
      seconds: wall time of all its processes together.
      failed: why the runner gave it up; "" if it did not.
    """

    point: Point
    step: int
    metrics: dict[str, MetricValue]
    tokens_per_second: float
    seconds: float
    failed: str = ""

    @property
    def done(self) -> bool:
        return bool(self.metrics)

    @property
    def costs(self) -> dict[str, float]:
        """Costs that follow from the configuration: parameters, FLOPs per token, cache."""
        costs = count_costs(self.point.config)._asdict()
        del costs["tokens"]
        return costs


@dataclasses.dataclass(frozen=True)
class Spread:
    """The values of one metric at points that differ in their seeds alone."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def __str__(self) -> str:
        """ "0.5" for one seed, "0.5 (0.4 to 0.6, 2 seeds)" for several."""
        if len(self.values) == 1:
            return f"{self.mean:.4g}"
        low, high = min(self.values), max(self.values)
        spread = "" if low == high else f"{low:.4g} to {high:.4g}, "
        return f"{self.mean:.4g} ({spread}{len(self.values)} seeds)"


def is_done(workdir: pathlib.Path, steps: int, suites: Sequence[str]) -> bool:
    """Whether the run in `workdir` has trained to its last step, `steps`, and has the held-out
    evaluation and all `suites` of that step.
    """
    return bool(_final_metrics(read_events(workdir / "metrics.jsonl"), steps, suites))


def read_result(point: Point, workdir: pathlib.Path, failed: str = "") -> Result:
    """Reads the result of a point from its run's folder. `failed`: why the runner gave it up."""
    events = read_events(workdir / "metrics.jsonl")
    train = [e for e in events if e["event"] == "train"]
    speeds = [e.get("tokens_per_second") for e in train]
    speeds = [speed for speed in speeds if isinstance(speed, (int, float))]
    seconds = 0.0
    for event, following in zip(events, events[1:]):
        if following["event"] != "start":
            seconds += following["time"] - event["time"]
    return Result(
        point,
        step=train[-1]["step"] if train else 0,
        metrics=_final_metrics(events, point.config.train.steps, point.config.eval.suites),
        tokens_per_second=statistics.median(speeds) if speeds else math.nan,
        seconds=seconds,
        failed=failed,
    )


def _final_metrics(
    events: list[dict[str, Any]], steps: int, suites: Sequence[str]
) -> dict[str, MetricValue]:
    """The metrics of the evaluations after the last step, without mere counts. {} if one of the
    evaluations is missing, or the run has diverged.
    """
    last = {
        name: event
        for event in events
        if event["step"] == steps and (name := evaluation_of_event(event))
    }
    if {"heldout", *suites} - last.keys():
        return {}
    loss = last["heldout"].get("loss")
    if not isinstance(loss, (int, float)) or not math.isfinite(loss):
        return {}
    if divergence_reason(events, steps):
        return {}
    return {
        f"{name} {value.name}": value
        for name, event in last.items()
        for value in metric_values_of_event(event)
        if value.metric.unit != "count" and math.isfinite(value.value)
    }


def to_csv(sweep: Sweep, results: Sequence[Result], commands: dict[str, str]) -> str:
    """The table of points as CSV: axes, state, metrics, costs, command. A text that a spreadsheet
    would execute gets an apostrophe in front.

    Args:
      commands: name of each point → the command that repeats it.
    """
    metrics = list(dict.fromkeys(name for result in results for name in result.metrics))
    head = [
        "point",
        *sweep.axes,
        "steps",
        "steps_done",
        *metrics,
        "tokens_per_second",
        *results[0].costs,
        "seconds",
        "command",
    ]
    rows = [
        [
            r.point.name,
            *r.point.values.values(),
            r.point.config.train.steps,
            r.step,
            *(r.metrics[name].value if name in r.metrics else "" for name in metrics),
            round(r.tokens_per_second, 1) if r.step else "",
            *r.costs.values(),
            round(r.seconds, 1),
            commands[r.point.name],
        ]
        for r in results
    ]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(_inert, row) for row in [head, *rows])
    return out.getvalue()


def _inert(cell: Any) -> Any:
    """`cell` in a form that a spreadsheet reads as text or a number, never as a formula."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return cell
    with contextlib.suppress(ValueError):
        float(cell)
        return cell
    return f"'{cell}"


def to_json(sweep: Sweep, results: Sequence[Result], commands: dict[str, str]) -> str:
    """The points that are done, and the findings, as JSON. `docs/sweeps` holds such files.
    `commands` as for `to_csv`.
    """
    done = [r for r in results if r.done]
    points = [
        {
            "point": r.point.name,
            **r.point.values,
            "steps": r.step,
            **{name: _round(value.value) for name, value in r.metrics.items()},
            "tokens_per_second": _round(r.tokens_per_second),
            **r.costs,
            "seconds": round(r.seconds),
            "command": commands[r.point.name],
        }
        for r in done
    ]
    record = {
        "base": sweep.base,
        "axes": sweep.axes,
        "x": sweep.x,
        "findings": findings(sweep, done),
        "points": points,
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def _round(value: float) -> float:
    """`value` with five significant digits."""
    return float(f"{value:.5g}")


def seed_axes(sweep: Sweep) -> tuple[str, ...]:
    """The axes whose setting is a seed. Charts and findings show the mean over them."""
    return tuple(axis for axis in sweep.axes if axis.rpartition(".")[2] == "seed")


def metric_along_x(
    sweep: Sweep, results: Iterable[Result], name: str
) -> dict[str, dict[str, Spread]]:
    """The metric `name` along the x axis, as `along_x` returns it."""
    measured = [result for result in results if name in result.metrics]
    return along_x(sweep, ((result, result.metrics[name].value) for result in measured))


def along_x(sweep: Sweep, values: Iterable[tuple[Result, float]]) -> dict[str, dict[str, Spread]]:
    """Groups the values of results into lines along the x axis.

    Returns:
      Label of a line, which names the values of all other axes but seeds → value of the x axis →
      the values at its points, one for each seed.
    """
    hidden = (sweep.x, *seed_axes(sweep))
    lines: dict[str, dict[str, list[float]]] = {}
    for result, value in values:
        shown = {axis: at for axis, at in result.point.values.items() if axis not in hidden}
        label = ", ".join(f"{axis.rpartition('.')[2]} {at}" for axis, at in shown.items())
        line = lines.setdefault(label, {})
        line.setdefault(result.point.values[sweep.x], []).append(value)
    return {
        label: {x: Spread(tuple(seeds)) for x, seeds in line.items()}
        for label, line in lines.items()
    }


def all_metrics(results: Iterable[Result]) -> dict[str, Metric]:
    """Name → declaration of every metric that a point has."""
    return {name: value.metric for result in results for name, value in result.metrics.items()}


def main_metrics(results: Iterable[Result]) -> dict[str, Metric]:
    """The metrics by which points are compared: those that an evaluation declares as main. A metric
    that has a value for each of several places counts as its overall value, if it has one.
    """
    metrics = all_metrics(results)
    return {
        name: metric
        for name, metric in metrics.items()
        if metric.main and ("/" not in name or name.partition("/")[0] not in metrics)
    }


def metric_title(name: str, metric: Metric) -> str:
    """A metric's name for readers: "mqar accuracy/8 pairs" → "Mqar: accuracy 8 pairs"."""
    evaluated, _, rest = name.partition(" ")
    return f"{evaluated.capitalize()}: {metric.title} {rest.partition('/')[2]}".strip()


def findings(sweep: Sweep, results: Sequence[Result]) -> list[str]:
    """One sentence for each main metric and line: which value of the x axis is best, and whether
    every seed of it beats every seed of the others.
    """
    x = sweep.x.rpartition(".")[2]
    sentences = []
    for name, metric in main_metrics(results).items():
        if not metric.better:
            continue
        for label, line in metric_along_x(sweep, results, name).items():
            if len(line) > 1:
                subject = metric_title(name, metric) + (f" ({label})" if label else "")
                sentences.append(_finding(x, subject, metric.better, line))
    return sentences


def _finding(x: str, subject: str, better: str, line: dict[str, Spread]) -> str:
    sign = 1 if better == "higher" else -1
    order = sorted(line, key=lambda value: -sign * line[value].mean)
    best, rest = line[order[0]], order[1:]
    if all(spread.mean == best.mean for spread in line.values()):
        return f"{subject} is the same at every {x}: {best}."
    worst_of_best = _worst_of(best, sign)
    tied = [value for value in rest if sign * _best_of(line[value], sign) >= sign * worst_of_best]
    clear = [value for value in rest if value not in tied]
    sentence = f"{subject} is {'highest' if sign > 0 else 'lowest'} at {x} {order[0]}: {best}."
    if tied:
        verb = "overlaps" if len(tied) == 1 else "overlap"
        sentence += f" {_listed(tied, line)} {verb} with it, seed by seed."
    if clear:
        side = "below" if sign > 0 else "above"
        sentence += f" Every run of {_listed(clear, line)} is {side} every run of it."
    if len(best.values) == 1:
        sentence += " One seed only: differences of this size may be chance."
    return sentence


def _best_of(spread: Spread, sign: int) -> float:
    return max(spread.values, key=lambda v: sign * v)


def _worst_of(spread: Spread, sign: int) -> float:
    return min(spread.values, key=lambda v: sign * v)


def _listed(values: Sequence[str], line: dict[str, Spread]) -> str:
    parts = [f"{value} ({line[value].mean:.4g})" for value in values]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def pareto_front(points: Sequence[tuple[float, float]], higher: bool) -> list[int]:
    """Indices of the points (cost, metric) that no other point beats in both, by ascending cost.
    `higher`: whether a higher metric is better.
    """
    sign = 1 if higher else -1

    def is_beaten(point: tuple[float, float]) -> bool:
        cost, metric = point
        return any(
            c <= cost and sign * m >= sign * metric and (c, m) != (cost, metric) for c, m in points
        )

    front = [i for i, point in enumerate(points) if not is_beaten(point)]
    return sorted(front, key=lambda i: points[i])
