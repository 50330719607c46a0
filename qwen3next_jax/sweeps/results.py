"""What the points of a sweep gave: read from their runs' own records, as a table and as findings
in words.

Every figure comes from a run's metrics.jsonl or is counted from its configuration; nothing else
is kept.
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
    """One point's figures. `measured`: name → value at the last step ({} until then) of every
    evaluation: "heldout loss", "mqar accuracy/8 pairs".
    """

    point: Point
    step: int
    measured: dict[str, MetricValue]
    tokens_per_second: float  # median over the logged steps; NaN before the first
    seconds: float  # wall time in all its processes
    failed: str = ""  # why it was given up

    @property
    def done(self) -> bool:
        return bool(self.measured)

    @property
    def counted(self) -> dict[str, float]:
        """Figures that follow from the configuration."""
        costs = count_costs(self.point.config)._asdict()
        del costs["tokens"]
        return costs


@dataclasses.dataclass(frozen=True)
class Spread:
    """One figure of the points that differ in nothing but their seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        spread = "" if low == high else f"{low:.4g} to {high:.4g}, "
        return (
            f"{self.mean:.4g}"
            if len(self.values) == 1
            else f"{self.mean:.4g} ({spread}{len(self.values)} seeds)"
        )


def is_done(workdir: pathlib.Path, steps: int, suites: Sequence[str]) -> bool:
    """Whether the run in `workdir` has been trained to its last step, `steps`, and evaluated
    there with all `suites`.
    """
    return bool(_measured(read_events(workdir / "metrics.jsonl"), steps, suites))


def read_result(point: Point, workdir: pathlib.Path, failed: str = "") -> Result:
    events = read_events(workdir / "metrics.jsonl")
    train = [e for e in events if e["event"] == "train"]
    speeds = [
        e["tokens_per_second"]
        for e in train
        if isinstance(e.get("tokens_per_second"), (int, float))
    ]
    seconds = 0.0
    for event, following in zip(events, events[1:]):
        if following["event"] != "start":
            seconds += following["time"] - event["time"]
    return Result(
        point,
        step=train[-1]["step"] if train else 0,
        measured=_measured(events, point.config.train.steps, point.config.eval.suites),
        tokens_per_second=statistics.median(speeds) if speeds else math.nan,
        seconds=seconds,
        failed=failed,
    )


def _measured(
    events: list[dict[str, Any]], steps: int, suites: Sequence[str]
) -> dict[str, MetricValue]:
    """The figures of the last step but for mere counts, {} unless all its evaluations are there
    and the run has not diverged.
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
    """A line per point: axes, state, figures, command. A text that a spreadsheet would execute
    has an apostrophe before it.
    """
    measured = list(dict.fromkeys(name for result in results for name in result.measured))
    counted = list(results[0].counted)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        _inert(cell)
        for cell in [
            "point",
            *sweep.axes,
            "steps",
            "steps_done",
            *measured,
            "tokens_per_second",
            *counted,
            "seconds",
            "command",
        ]
    )
    for r in results:
        writer.writerow(
            _inert(cell)
            for cell in [
                r.point.name,
                *r.point.values.values(),
                r.point.config.train.steps,
                r.step,
                *(r.measured[name].value if name in r.measured else "" for name in measured),
                round(r.tokens_per_second, 1) if r.step else "",
                *r.counted.values(),
                round(r.seconds, 1),
                commands[r.point.name],
            ]
        )
    return out.getvalue()


def _inert(cell: Any) -> Any:
    """`cell` so that a spreadsheet takes it for text or a number, never for a formula."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return cell
    with contextlib.suppress(ValueError):
        float(cell)
        return cell
    return f"'{cell}"


def to_json(sweep: Sweep, results: Sequence[Result], commands: dict[str, str]) -> str:
    """The same as JSON, with the findings: what a results page in the docs is kept from."""
    points = [
        {
            "point": r.point.name,
            **r.point.values,
            "steps": r.step,
            **{n: _short(v.value) for n, v in r.measured.items()},
            "tokens_per_second": _short(r.tokens_per_second),
            **r.counted,
            "seconds": round(r.seconds),
            "command": commands[r.point.name],
        }
        for r in results
        if r.done
    ]
    return (
        json.dumps(
            {
                "base": sweep.base,
                "axes": sweep.axes,
                "x": sweep.x,
                "findings": findings(sweep, [r for r in results if r.done]),
                "points": points,
            },
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def seed_axes(sweep: Sweep) -> tuple[str, ...]:
    """Axes over which figures are averaged."""
    return tuple(axis for axis in sweep.axes if axis.rpartition(".")[2] == "seed")


def lines_of(sweep: Sweep, results: Iterable[Result], figure: str) -> dict[str, dict[str, Spread]]:
    """One measured figure along the x axis, as `along_x` gives it."""
    return along_x(
        sweep,
        (
            (result, result.measured[figure].value)
            for result in results
            if figure in result.measured
        ),
    )


def along_x(sweep: Sweep, figures: Iterable[tuple[Result, float]]) -> dict[str, dict[str, Spread]]:
    """Name of each combination of the other axes (but seeds) → x value → spread over seeds."""
    collected: dict[str, dict[str, list[float]]] = {}
    for result, figure in figures:
        others = [
            f"{axis.rpartition('.')[2]} {value}"
            for axis, value in result.point.values.items()
            if axis != sweep.x and axis not in seed_axes(sweep)
        ]
        line = collected.setdefault(", ".join(others), {})
        line.setdefault(result.point.values[sweep.x], []).append(figure)
    return {
        name: {x: Spread(tuple(values)) for x, values in line.items()}
        for name, line in collected.items()
    }


def declared(results: Iterable[Result]) -> dict[str, Metric]:
    """Every figure that was measured."""
    return {name: value.metric for result in results for name, value in result.measured.items()}


def main_figures(results: Iterable[Result]) -> dict[str, Metric]:
    """What evaluations are judged by: a figure over all its places where there is such a value,
    else at every place.
    """
    figures = declared(results)
    return {
        name: figure
        for name, figure in figures.items()
        if figure.main and (name.partition("/")[0] not in figures or "/" not in name)
    }


def shown(name: str, figure: Metric) -> str:
    """A figure's name as text: "mqar accuracy/8 pairs" → "Mqar: accuracy 8 pairs"."""
    evaluated, _, rest = name.partition(" ")
    return f"{evaluated.capitalize()}: {figure.title} {rest.partition('/')[2]}".strip()


def findings(sweep: Sweep, results: Sequence[Result]) -> list[str]:
    """A sentence per main figure and line, computed from the numbers: which value of the x axis
    is best, and whether the seeds say so.
    """
    return [
        _finding(
            sweep.x.rpartition(".")[2],
            shown(name, figure) + (f" ({label})" if label else ""),
            figure.better,
            line,
        )
        for name, figure in main_figures(results).items()
        if figure.better
        for label, line in lines_of(sweep, results, name).items()
        if len(line) > 1
    ]


def _finding(x: str, subject: str, better: str, line: dict[str, Spread]) -> str:
    sign = 1 if better == "higher" else -1
    order = sorted(line, key=lambda value: -sign * line[value].mean)
    best, rest = line[order[0]], order[1:]
    if all(spread.mean == best.mean for spread in line.values()):
        return f"{subject} is the same at every {x}: {best}."
    extreme = "highest" if sign > 0 else "lowest"
    tied = [
        value
        for value in rest
        if sign * _best_of(line[value], sign) >= sign * _worst_of(best, sign)
    ]
    clear = [value for value in rest if value not in tied]
    sentence = f"{subject} is {extreme} at {x} {order[0]}: {best}."
    if tied:
        sentence += (
            f" {_listed(tied, line)} overlap{'s' if len(tied) == 1 else ''} with it, seed by seed."
        )
    if clear:
        sentence += (
            f" Every run of {_listed(clear, line)} is {'below' if sign > 0 else 'above'} every "
            "run of it."
        )
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


def pareto(points: Sequence[tuple[float, float]], higher: bool) -> list[int]:
    """Indices of the points (cost, figure) that no other beats in both: less cost, better
    figure.
    """
    sign = 1 if higher else -1
    front = [
        i
        for i, (cost, figure) in enumerate(points)
        if not any(
            (c <= cost and sign * f >= sign * figure) and (c, f) != (cost, figure)
            for c, f in points
        )
    ]
    return sorted(front, key=lambda i: points[i])
