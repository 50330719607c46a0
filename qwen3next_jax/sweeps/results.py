"""Reads the results of a sweep's points from the records of their runs, and states findings: which
values of the x axis are best.

Every number comes from a run's metrics.jsonl or is computed from its configuration.
"""

import contextlib
import csv
import dataclasses
import functools
import io
import json
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from qwen3next_jax.common.events import divergence_reason, read_events, training_devices
from qwen3next_jax.common.metrics import (
    Metric,
    MetricValue,
    displayed_condition,
    evaluation_name_of_event,
    metric_values_of_event,
)
from qwen3next_jax.sweeps.costs import count_costs
from qwen3next_jax.sweeps.points import Point, Sweep


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one point.

    Attributes:
      point: the point.
      step: the last step that the record of the run contains.
      metrics: name → value at the last step of the run, for the metrics of all evaluations, such as
        "heldout loss" or "mqar accuracy/8 pairs"; {} until the point is done.
      tokens_per_second: the median over the "train" events; NaN before the first one.
      seconds: the wall time in which a process of the run was active, without the time between an
        end and a restart.
      failed: why the runner gave the point up; "" if it did not.
      losses: (step, training loss) of the run so far.
      has_page: whether the run has written its report.html.
      devices: the devices that trained it, such as {"8 × TPU v5"}.
    """

    point: Point
    step: int
    metrics: dict[str, MetricValue]
    tokens_per_second: float
    seconds: float
    failed: str = ""
    losses: tuple[tuple[int, float], ...] = ()
    has_page: bool = False
    devices: frozenset[str] = frozenset()

    @property
    def done(self) -> bool:
        """Whether the run has taken its last step and recorded all its evaluations there."""
        return bool(self.metrics)

    @functools.cached_property
    def costs(self) -> dict[str, float]:
        """Name → value of the fields of `Costs`, computed from the configuration."""
        return count_costs(self.point.config)._asdict()


@dataclasses.dataclass(frozen=True)
class Spread:
    """The values of one metric at points that differ only in their seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def __str__(self) -> str:
        """Returns, for example, "0.5" for one seed, and "0.5 (0.4 to 0.6, 2 seeds)" for several."""
        if len(self.values) == 1:
            return f"{self.mean:.4g}"
        low, high = min(self.values), max(self.values)
        spread = "" if low == high else f"{low:.4g} to {high:.4g}, "
        return f"{self.mean:.4g} ({spread}{len(self.values)} seeds)"


def is_done(workdir: pathlib.Path, steps: int, suites: Sequence[str]) -> bool:
    """Whether the run in `workdir` has trained to its last step, `steps`, and has recorded the
    held-out evaluation and all evaluations in `suites` at that step.
    """
    return bool(_final_metrics(read_events(workdir / "metrics.jsonl"), steps, suites))


def read_result(point: Point, workdir: pathlib.Path, failed: str = "") -> Result:
    """Reads the result of a point from the folder of its run.

    Args:
      failed: why the runner gave the point up; "" if it did not.
    """
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
        losses=tuple((e["step"], e["loss"]) for e in train if isinstance(e["loss"], float)),
        has_page=(workdir / "report.html").exists(),
        devices=training_devices(events),
    )


def _final_metrics(
    events: list[dict[str, Any]], steps: int, suites: Sequence[str]
) -> dict[str, MetricValue]:
    """Returns the metrics of the evaluations after the last step, except for counts. Returns {} if
    one of the evaluations is missing, or if the run has diverged.
    """
    last = {
        name: event
        for event in events
        if event["step"] == steps and (name := evaluation_name_of_event(event))
    }
    if {"heldout", *suites} - last.keys():
        return {}
    loss = last["heldout"].get("loss")
    if not isinstance(loss, (int, float)) or not math.isfinite(loss):
        return {}
    if divergence_reason(events, steps):
        return {}
    return {
        f"{name} {value.key}": value
        for name, event in last.items()
        for value in metric_values_of_event(event)
        if value.metric.unit != "count" and math.isfinite(value.value)
    }


def to_csv(sweep: Sweep, results: Sequence[Result], commands: dict[str, str]) -> str:
    """Returns a table of all points as CSV: name, values on the axes, steps, metrics, costs and
    command. An apostrophe precedes each text that a spreadsheet would read as a formula.

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
    csv.writer(out, lineterminator="\n").writerows(
        map(_without_formula, row) for row in [head, *rows]
    )
    return out.getvalue()


def _without_formula(cell: Any) -> Any:
    """Returns `cell` in a form that a spreadsheet reads as text or a number, never as a formula."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return cell
    with contextlib.suppress(ValueError):
        float(cell)
        return cell
    return f"'{cell}"


def to_json(
    sweep: Sweep,
    results: Sequence[Result],
    commands: dict[str, str],
    speed_ups: Sequence[dict[str, Any]],
) -> str:
    """Returns the points that are done, the findings and the speed-ups as JSON. `docs/sweeps`
    contains such files.

    Args:
      speed_ups: the effective speed-ups, as `reporting.speedup.to_record` returns each.

    `to_csv` describes the other arguments.
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
        "findings": finding_sentences(sweep, done),
        "speed_ups": speed_ups,
        "points": points,
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def _round(value: float) -> float:
    """Returns `value` rounded to five significant digits."""
    return float(f"{value:.5g}")


def seed_axes(sweep: Sweep) -> tuple[str, ...]:
    """Returns the axes that are a setting named `seed`, such as `train.seed`. Charts and
    findings show means over the seeds."""
    return tuple(axis for axis in sweep.axes if axis.rpartition(".")[2] == "seed")


def metric_along_x(
    sweep: Sweep, results: Iterable[Result], name: str
) -> dict[str, dict[str, Spread]]:
    """Groups the values of the metric `name` as `lines_along_x` does. Results without this metric
    are left out.
    """
    measured = [result for result in results if name in result.metrics]
    return lines_along_x(sweep, ((result, result.metrics[name].value) for result in measured))


def lines_along_x(
    sweep: Sweep, values: Iterable[tuple[Result, float]]
) -> dict[str, dict[str, Spread]]:
    """Groups values into the lines of a chart over the x axis.

    Args:
      values: (result, value of a metric or cost at its point).

    Returns:
      label of a line → {name of a value of the x axis: the values of the points there, one for each
      seed}. The points of a line have the same values on all axes except x and the axes of seeds;
      the label names these values.
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
    """Returns name → declaration of every metric that at least one point has."""
    return {name: value.metric for result in results for name, value in result.metrics.items()}


def main_metrics(results: Iterable[Result]) -> dict[str, Metric]:
    """Returns name → declaration of the metrics by which points are compared. These are the metrics
    that an evaluation declares as main. If a metric has values under several conditions and also a
    value over all conditions, only the value over all conditions is returned.
    """
    metrics = all_metrics(results)
    return {
        name: metric
        for name, metric in metrics.items()
        if metric.main and ("/" not in name or name.partition("/")[0] not in metrics)
    }


def source_metrics(results: Iterable[Result]) -> dict[str, Metric]:
    """Returns name → declaration of the main held-out metrics of each source of the data, such as
    "heldout bits_per_byte/web"; {} for data of one source.
    """
    metrics, main = all_metrics(results), main_metrics(results)
    return {
        name: metric
        for name, metric in metrics.items()
        if name.startswith("heldout ") and "/" in name and name.partition("/")[0] in main
    }


def metric_title(name: str, metric: Metric) -> str:
    """Returns a metric's name for readers: "Mqar: accuracy 8 pairs" for "mqar accuracy/8 pairs"."""
    evaluated, _, rest = name.partition(" ")
    kind, _, condition = rest.partition("/")
    return (
        f"{evaluated.capitalize()}: {metric.title} {displayed_condition(kind, condition)}".strip()
    )


def finding_sentences(sweep: Sweep, results: Sequence[Result]) -> list[str]:
    """Returns one finding for each main metric, over all held-out rows and over those of each
    source of the data, and each line of its chart: which value of the x axis has the best mean over
    the seeds, which other values overlap with it, and which are worse at every seed.
    """
    x = sweep.x.rpartition(".")[2]
    sentences = []
    for name, metric in (main_metrics(results) | source_metrics(results)).items():
        if not metric.better:
            continue
        for label, line in metric_along_x(sweep, results, name).items():
            if len(line) > 1:
                subject = metric_title(name, metric) + (f" ({label})" if label else "")
                sentences.append(_finding_sentence(x, subject, metric.better, line))
    return sentences


def _finding_sentence(x: str, subject: str, better: str, line: dict[str, Spread]) -> str:
    """Returns the sentences that compare the values of the x axis on one line of a chart.

    Args:
      x: the name of the x axis.
      subject: the name of the metric and of the line, with which the sentences begin.
      better: "higher" or "lower".
      line: name of a value of the x axis → the values of the metric there.
    """
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
        sentence += f" {_values_with_means(tied, line)} {verb} with it, seed by seed."
    if clear:
        side = "below" if sign > 0 else "above"
        sentence += f" Every run of {_values_with_means(clear, line)} is {side} every run of it."
    if len(best.values) == 1:
        sentence += " One seed only: differences of this size may be chance."
    return sentence


def _best_of(spread: Spread, sign: int) -> float:
    return max(spread.values, key=lambda v: sign * v)


def _worst_of(spread: Spread, sign: int) -> float:
    return min(spread.values, key=lambda v: sign * v)


def _values_with_means(values: Sequence[str], line: dict[str, Spread]) -> str:
    """Returns the values with the mean of the metric at each value, as text: "a (1.2), b (1.3) and
    c (1.4)".
    """
    parts = [f"{value} ({line[value].mean:.4g})" for value in values]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def pareto_front(points: Sequence[tuple[float, float]], higher: bool) -> list[int]:
    """Returns the indices of the Pareto-optimal points, by ascending cost. These are the points to
    which no point is superior: at least as good in both cost and metric, and better in one of them.

    Args:
      points: (cost, metric) of each point; a lower cost is better.
      higher: whether a higher metric is better.
    """
    sign = 1 if higher else -1

    def is_beaten(point: tuple[float, float]) -> bool:
        cost, metric = point
        return any(
            c <= cost and sign * m >= sign * metric and (c, m) != (cost, metric) for c, m in points
        )

    front = [i for i, point in enumerate(points) if not is_beaten(point)]
    return sorted(front, key=lambda i: points[i])
