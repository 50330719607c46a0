"""Reads the results of a sweep's points from the folders of their runs, and writes findings:
sentences that say which values on the x axis are best.

Every number of a result comes from the metrics.jsonl of a run, or is computed from the run's
configuration.
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
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import to_dict
from qwen3next_jax.reporting.runs import differing_heldout_settings
from qwen3next_jax.sweeps.costs import count_costs
from qwen3next_jax.sweeps.points import Point, Sweep


@dataclasses.dataclass(frozen=True)
class PointResult:
    """The result of one point.

    Attributes:
      point: the point.
      last_step: the last step that metrics.jsonl records; 0 if it records none.
      final_metrics: name → value at the last step of the run, for the metrics of all evaluations,
        such as "heldout loss" or "mqar accuracy/8 pairs"; {} until the point is done.
      tokens_per_second: the median over the "train" events; NaN before the first such event.
      active_seconds: the wall time during which a process of the run was active. Steps that were
        lost count; the time between the end of a process and a restart does not.
      failure_reason: why the runner gave up the point; "" if it did not.
      training_losses: (step, training loss) of the run so far.
      has_report_page: whether the run has written its report.html.
      device_names: the devices that trained the point, such as {"8 × TPU v5"}.
    """

    point: Point
    last_step: int
    final_metrics: dict[str, MetricValue]
    tokens_per_second: float
    active_seconds: float
    failure_reason: str = ""
    training_losses: tuple[tuple[int, float], ...] = ()
    has_report_page: bool = False
    device_names: frozenset[str] = frozenset()

    @property
    def done(self) -> bool:
        """Whether the run has taken its last step and recorded all evaluations of this step."""
        return bool(self.final_metrics)

    @functools.cached_property
    def costs(self) -> dict[str, float]:
        """The costs of the point, computed from its configuration: field of `Costs` → value."""
        return count_costs(self.point.config)._asdict()


@dataclasses.dataclass(frozen=True)
class SeedSpread:
    """The values of one metric at points that differ only in their seeds."""

    seed_values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seed_values)

    def __str__(self) -> str:
        """Returns, for example, "0.5" for one seed, and "0.5 (0.4 to 0.6, 2 seeds)" for several."""
        if len(self.seed_values) == 1:
            return f"{self.mean:.4g}"
        low, high = min(self.seed_values), max(self.seed_values)
        spread = "" if low == high else f"{low:.4g} to {high:.4g}, "
        return f"{self.mean:.4g} ({spread}{len(self.seed_values)} seeds)"


def is_done(workdir: pathlib.Path, steps: int, suites: Sequence[str]) -> bool:
    """Whether the run in `workdir` has trained to its last step, `steps`, and has recorded the
    held-out evaluation and all evaluations in `suites` at that step.
    """
    return bool(_final_metrics(read_events(workdir / "metrics.jsonl"), steps, suites))


def read_result(point: Point, workdir: pathlib.Path, failed: str = "") -> PointResult:
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
        end = following["time"]
        if following["event"] == "start":  # events of lost steps were removed before it
            end = following.get("previous_end") or event["time"]
        seconds += max(end - event["time"], 0.0)
    return PointResult(
        point,
        last_step=train[-1]["step"] if train else 0,
        final_metrics=_final_metrics(events, point.config.train.steps, point.config.eval.suites),
        tokens_per_second=statistics.median(speeds) if speeds else math.nan,
        active_seconds=seconds,
        failure_reason=failed,
        training_losses=tuple(
            (e["step"], e["loss"]) for e in train if isinstance(e.get("loss"), float)
        ),
        has_report_page=(workdir / "report.html").exists(),
        device_names=training_devices(events),
    )


def _final_metrics(
    events: list[dict[str, Any]], steps: int, suites: Sequence[str]
) -> dict[str, MetricValue]:
    """Returns the metrics of all evaluations at the step `steps`, the last of the run, except for
    metrics that are counts. Returns {} if an evaluation is missing, or if the run has diverged.
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


def to_csv(sweep: Sweep, results: Sequence[PointResult], commands: dict[str, str]) -> str:
    """Returns a table of all points as CSV: name, values on the axes, steps, metrics, costs and
    command. An apostrophe precedes each text that a spreadsheet would read as a formula.

    Args:
      commands: name of each point → the command that repeats it.
    """
    metrics = list(dict.fromkeys(name for result in results for name in result.final_metrics))
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
            *r.point.axis_values.values(),
            r.point.config.train.steps,
            r.last_step,
            *(r.final_metrics[name].value if name in r.final_metrics else "" for name in metrics),
            round(r.tokens_per_second, 1) if math.isfinite(r.tokens_per_second) else "",
            *r.costs.values(),
            round(r.active_seconds, 1),
            commands[r.point.name],
        ]
        for r in results
    ]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        map(_escape_spreadsheet_formula, row) for row in [head, *rows]
    )
    return out.getvalue()


def _escape_spreadsheet_formula(cell: Any) -> Any:
    """Returns `cell` in a form that a spreadsheet reads as text or a number, never as a formula."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return cell
    with contextlib.suppress(ValueError):
        float(cell)
        return cell
    return f"'{cell}"


def to_json(
    sweep: Sweep,
    results: Sequence[PointResult],
    commands: dict[str, str],
    speed_ups: Sequence[dict[str, Any]],
) -> str:
    """Returns results.json: the points that are done, the findings and the effective speed-ups.
    `docs/sweeps` contains such files.

    Args:
      speed_ups: the effective speed-ups, each in the form of `reporting.speedup.comparison_record`.

    `to_csv` describes the other arguments.
    """
    done = [r for r in results if r.done]
    points = [
        {
            "point": r.point.name,
            **r.point.axis_values,
            "steps": r.last_step,
            **{name: _round_to_five_digits(value.value) for name, value in r.final_metrics.items()},
            "tokens_per_second": _finite_or_none(r.tokens_per_second),
            **r.costs,
            "seconds": round(r.active_seconds),
            "command": commands[r.point.name],
        }
        for r in done
    ]
    record = {
        "base": sweep.base_path,
        "axes": sweep.axes,
        "x": sweep.x_axis,
        "findings": finding_sentences(sweep, done),
        "speed_ups": speed_ups,
        "points": points,
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def _finite_or_none(value: float) -> float | None:
    """Returns `value` rounded to five significant digits; None for NaN, which JSON cannot hold."""
    return _round_to_five_digits(value) if math.isfinite(value) else None


def _round_to_five_digits(value: float) -> float:
    """Returns `value` rounded to five significant digits."""
    return float(f"{value:.5g}")


def seed_axes(sweep: Sweep) -> tuple[str, ...]:
    """Returns the axes that are a setting named `seed`, such as `train.seed`. Charts and
    findings show means over the seeds."""
    return tuple(axis for axis in sweep.axes if axis.rpartition(".")[2] == "seed")


def metric_along_x(
    sweep: Sweep, results: Iterable[PointResult], name: str
) -> dict[str, dict[str, SeedSpread]]:
    """Groups the values of the metric `name` into the lines of a chart, in the form that
    `lines_along_x` returns. Results without this metric are left out.
    """
    measured = [result for result in results if name in result.final_metrics]
    return lines_along_x(sweep, ((result, result.final_metrics[name].value) for result in measured))


def lines_along_x(
    sweep: Sweep, values: Iterable[tuple[PointResult, float]]
) -> dict[str, dict[str, SeedSpread]]:
    """Groups values into the lines of a chart over the x axis.

    Args:
      values: (result, value of a metric or cost at its point).

    Returns:
      label of a line → {name of a value on the x axis: the metric or cost of the points with this
      value, one number for each seed}. The points of a line have the same values on all axes except
      the x axis and the axes of seeds; the label names these values.
    """
    hidden = (sweep.x_axis, *seed_axes(sweep))
    lines: dict[str, dict[str, list[float]]] = {}
    for result, value in values:
        shown = {axis: at for axis, at in result.point.axis_values.items() if axis not in hidden}
        label = ", ".join(f"{axis.rpartition('.')[2]} {at}" for axis, at in shown.items())
        line = lines.setdefault(label, {})
        line.setdefault(result.point.axis_values[sweep.x_axis], []).append(value)
    return {
        label: {x: SeedSpread(tuple(seeds)) for x, seeds in line.items()}
        for label, line in lines.items()
    }


def all_metrics(results: Iterable[PointResult]) -> dict[str, Metric]:
    """Returns name → declaration of every metric that at least one point has."""
    return {
        name: value.metric for result in results for name, value in result.final_metrics.items()
    }


def main_metrics(results: Iterable[PointResult]) -> dict[str, Metric]:
    """Returns name → declaration of the metrics by which points are compared: the metrics that an
    evaluation declares as main. If a metric has a value under each of several conditions and also a
    value over all conditions, the result contains only the value over all conditions.
    """
    metrics = all_metrics(results)
    return {
        name: metric
        for name, metric in metrics.items()
        if metric.main and ("/" not in name or name.partition("/")[0] not in metrics)
    }


def source_metrics(results: Iterable[PointResult]) -> dict[str, Metric]:
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


def finding_sentences(sweep: Sweep, results: Sequence[PointResult]) -> list[str]:
    """Returns findings: one for each line in the chart of each main metric, where the metric is
    measured over all held-out rows or over the rows of one data source. A finding says which value
    on the x axis has the best mean over the seeds, which other values have seeds that are as good
    as a seed of the best value, and which values are worse at every seed. If the points of a line
    were evaluated on different text, the first sentence says so.
    """
    x = sweep.x_axis.rpartition(".")[2]
    sentences = []
    if differing := heldout_settings_along(sweep, results, sweep.x_axis):
        sentences.append(
            f"Points with different {x} were evaluated on different text "
            f"({', '.join(differing)}): a better value may come from easier text."
        )
    for name, metric in (main_metrics(results) | source_metrics(results)).items():
        if not metric.better:
            continue
        for label, line in metric_along_x(sweep, results, name).items():
            if len(line) > 1:
                subject = metric_title(name, metric) + (f" ({label})" if label else "")
                sentences.append(_finding_sentence(x, subject, metric.better, line))
    return sentences


def heldout_settings_along(
    sweep: Sweep, results: Iterable[PointResult], *axes: str | None
) -> list[str]:
    """Returns the settings that choose the held-out text and that differ between points whose
    values differ only on `axes`. Points with different seeds are not compared with each other.
    """
    compared = {*axes} - {*seed_axes(sweep)}
    lines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for result in results:
        line = tuple(at for axis, at in result.point.axis_values.items() if axis not in compared)
        lines.setdefault(line, []).append(flatten(to_dict(result.point.config)))
    return list(
        dict.fromkeys(
            name for settings in lines.values() for name in differing_heldout_settings(settings)
        )
    )


def _finding_sentence(x: str, subject: str, better: str, line: dict[str, SeedSpread]) -> str:
    """Returns sentences that compare the values on the x axis, for one line of a chart.

    Args:
      x: the name of the x axis.
      subject: the name of the metric and of the line, with which the sentences begin.
      better: "higher" or "lower".
      line: name of a value on the x axis → the values of the metric at this value.
    """
    sign = 1 if better == "higher" else -1
    order = sorted(line, key=lambda value: -sign * line[value].mean)
    best, rest = line[order[0]], order[1:]
    if all(spread.mean == best.mean for spread in line.values()):
        return f"{subject} is the same at every {x}: {best}."
    worst_of_best = _worst_seed_value(best, sign)
    tied = [
        value
        for value in rest
        if sign * _best_seed_value(line[value], sign) >= sign * worst_of_best
    ]
    clear = [value for value in rest if value not in tied]
    sentence = f"{subject} is {'highest' if sign > 0 else 'lowest'} at {x} {order[0]}: {best}."
    if tied:
        verb = "overlaps" if len(tied) == 1 else "overlap"
        sentence += f" {_values_with_means_text(tied, line)} {verb} with it, seed by seed."
    if clear:
        side = "below" if sign > 0 else "above"
        sentence += (
            f" Every run of {_values_with_means_text(clear, line)} is {side} every run of it."
        )
    if len(best.seed_values) == 1:
        sentence += " One seed only: differences of this size may be chance."
    if len({len(spread.seed_values) for spread in line.values()}) > 1:
        sentence += " Some points are missing, so these are means over different seeds."
    return sentence


def _best_seed_value(spread: SeedSpread, sign: int) -> float:
    return max(spread.seed_values, key=lambda v: sign * v)


def _worst_seed_value(spread: SeedSpread, sign: int) -> float:
    return min(spread.seed_values, key=lambda v: sign * v)


def _values_with_means_text(x_values: Sequence[str], line: dict[str, SeedSpread]) -> str:
    """Returns the names in `x_values`, each with the mean of the metric, as text: "a (1.2), b (1.3)
    and c (1.4)".
    """
    parts = [f"{value} ({line[value].mean:.4g})" for value in x_values]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def pareto_front_indices(points: Sequence[tuple[float, float]], higher: bool) -> list[int]:
    """Returns the indices of the Pareto-optimal points, by ascending cost. A point is
    Pareto-optimal if no other point is at least as good in both cost and metric, and better in one
    of them.

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
