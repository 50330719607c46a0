"""The sweep's page: findings in words, figures along the x axis, what they cost, every point and
the command that repeats it.
"""

import html
import math
import os
import pathlib
from collections.abc import Sequence

from qwen3next_jax.reporting.charts import Line, line_chart, table
from qwen3next_jax.reporting.page import document
from qwen3next_jax.runs.costs import count_costs
from qwen3next_jax.sweeps.points import Sweep
from qwen3next_jax.sweeps.results import (
    Result,
    Spread,
    along_x,
    all_metrics,
    findings,
    metric_along_x,
    main_metrics,
    pareto_front,
    seed_axes,
    metric_title,
    to_csv,
    to_json,
)

COUNTED = {
    "parameters": "parameters",
    "flops_per_token": "FLOPs per token",
    "cache_bytes_per_token": "cache bytes per token",
    "state_bytes": "recurrent state, bytes",
}


def write_report(
    sweep: Sweep,
    results: Sequence[Result],
    commands: dict[str, str],
    title: str,
    workdir: pathlib.Path,
) -> None:
    """Writes report.html, results.csv and results.json into WORKDIR, each at once or not at all."""
    files = {
        "report.html": report(sweep, results, commands, title),
        "results.csv": to_csv(sweep, results, commands),
        "results.json": to_json(sweep, results, commands),
    }
    for name, text in files.items():
        temporary = workdir / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, workdir / name)


def report(sweep: Sweep, results: Sequence[Result], commands: dict[str, str], title: str) -> str:
    done = [result for result in results if result.done]
    sections = {
        "Findings": _findings(sweep, results, done),
        "Figures": _charts(sweep, done),
        "Cost": _cost(sweep, results, done),
        "Points": _points(sweep, results),
        "Commands": _commands(commands),
    }
    body = "".join(
        f'<section id="{name.lower()}"><h2>{name}</h2>{text}</section>'
        for name, text in sections.items()
    )
    matched = (
        f", every point's MLPs as wide as gives it the first one's {sweep.match}"
        if sweep.match
        else ""
    )
    config = results[0].point.config
    budgets = {count_costs(r.point.config).tokens for r in results}
    tokens = " and ".join(f"{budget / 1e6:.3g} M" for budget in sorted(budgets))
    subtitle = (
        f"{len(done)} of {len(results)} points done · base {sweep.base} · {tokens} tokens a "
        f"point{matched} · data seed "
        f"{config.data.seed}: points on the same data see the same rows in the same order"
    )
    return document(title, subtitle, list(sections), body)


def _findings(sweep: Sweep, results: Sequence[Result], done: Sequence[Result]) -> str:
    sentences = findings(sweep, done)
    failed = sum(bool(result.failed) and not result.done for result in results)
    if left := len(results) - len(done) - failed:
        sentences.insert(
            0, f"{left} of {len(results)} points are not done yet: what follows may change."
        )
    if failed:
        sentences.insert(
            0,
            f"{failed} of {len(results)} points failed: the table of points says why. What "
            "follows is without them.",
        )
    if not sentences:
        return "<p>Nothing to compare yet.</p>"
    return "<ul>" + "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _charts(sweep: Sweep, done: Sequence[Result]) -> str:
    """A chart per kind of figure; what it is split up by ("accuracy/8 pairs", "loss/64-127") are
    lines of it, coloured by that and dashed by the other axes' values.
    """
    values, charts, kinds = sweep.axes[sweep.x], [], {}
    for name, figure in all_metrics(done).items():
        kind, _, place = name.partition("/")
        kinds.setdefault((kind, bool(place), figure), []).append((name, place))
    for (kind, _, figure), names in kinds.items():
        lines = []
        labels = list(
            dict.fromkeys(label for name, _ in names for label in metric_along_x(sweep, done, name))
        )
        for i, (name, place) in enumerate(names):
            for label, line in metric_along_x(sweep, done, name).items():
                spreads = [line.get(value) for value in values]
                text = (
                    place if place and len(labels) == 1 else ", ".join(filter(None, (place, label)))
                )
                lines.append(
                    Line(
                        text,
                        range(len(values)),
                        [s.mean if s else math.nan for s in spreads],
                        low=[min(s.values) if s else math.nan for s in spreads],
                        high=[max(s.values) if s else math.nan for s in spreads],
                        dots=True,
                        colour=i if len(names) > 1 else labels.index(label),
                        dash=labels.index(label) if len(names) > 1 else 0,
                        shade=i / (len(names) - 1) if len(names) > 4 else None,
                    )
                )
        seeds = (
            "the line is the mean over seeds, the band their range"
            if seed_axes(sweep)
            else "one seed"
        )
        better = f"{figure.better.capitalize()} is better; " if figure.better else ""
        charts.append(
            line_chart(
                metric_title(kind, figure),
                lines,
                x_label=sweep.x.rpartition(".")[2],
                x_names=values,
                from_zero=figure.unit == "share",
                note=f"{better}{seeds}.",
            )
        )
    return (
        f'<div class="charts">{"".join(charts)}</div>' if charts else "<p>No point is done yet.</p>"
    )


def _cost(sweep: Sweep, results: Sequence[Result], done: Sequence[Result]) -> str:
    charts = []
    for name, text in COUNTED.items():
        lines = along_x(sweep, ((r, r.counted[name]) for r in results))
        if len({spread.mean for line in lines.values() for spread in line.values()}) > 1:
            same = all(line == next(iter(lines.values())) for line in lines.values())
            charts.append(
                _cost_chart(
                    sweep, _capital(text), {"": next(iter(lines.values()))} if same else lines
                )
            )
    speeds = along_x(sweep, ((r, r.tokens_per_second) for r in done))
    charts.append(
        _cost_chart(
            sweep,
            "Tokens per second",
            speeds,
            "On the machine that ran it, whatever else it did meanwhile.",
        )
    )
    charts += _pareto_charts(sweep, done)
    return f'<div class="charts">{"".join(charts)}</div>'


def _cost_chart(
    sweep: Sweep, title: str, lines: dict[str, dict[str, Spread]], note: str = ""
) -> str:
    values = sweep.axes[sweep.x]
    drawn = [
        Line(
            label,
            range(len(values)),
            [line[v].mean if v in line else math.nan for v in values],
            colour=k,
            dots=True,
        )
        for k, (label, line) in enumerate(lines.items())
    ]
    return line_chart(
        title, drawn, x_label=sweep.x.rpartition(".")[2], x_names=values, from_zero=True, note=note
    )


def _pareto_charts(sweep: Sweep, done: Sequence[Result]) -> list[str]:
    """Each main figure against the cache a token of context costs, for each combination of the
    other axes along which that changes.
    """
    charts = []
    costs = along_x(sweep, ((r, r.counted["cache_bytes_per_token"]) for r in done))
    for name, figure in main_metrics(done).items():
        for label, line in metric_along_x(sweep, done, name).items() if figure.better else ():
            points = [(costs[label][value].mean, line[value].mean) for value in line]
            if len({cost for cost, _ in points}) < 2:
                continue
            front = pareto_front(points, figure.better == "higher")
            lines = [
                Line(value, [cost], [mean], colour=k, dots=True)
                for k, (value, (cost, mean)) in enumerate(zip(line, points))
            ]
            if len(front) > 1:
                lines.insert(
                    0,
                    Line(
                        "best for its cost",
                        [points[i][0] for i in front],
                        [points[i][1] for i in front],
                        colour=7,
                        dash=1,
                    ),
                )
            charts.append(
                line_chart(
                    f"{metric_title(name, figure)}{f' ({label})' if label else ''} against cache",
                    lines,
                    x_label="cache bytes per token of context",
                )
            )
    return charts


def _points(sweep: Sweep, results: Sequence[Result]) -> str:
    measured = main_metrics(results)  # the rest is in results.csv
    head = [
        *(axis.rpartition(".")[2] for axis in sweep.axes),
        "state",
        "step",
        *(metric_title(name, figure) for name, figure in measured.items()),
        "tokens/s",
        *COUNTED.values(),
        "seconds",
    ]
    rows = [
        [
            *r.point.values.values(),
            "done" if r.done else f"failed: {r.failed}" if r.failed else "not done yet",
            f"{r.step:,} of {r.point.config.train.steps:,}",
            *(f"{r.measured[name].value:.4g}" if name in r.measured else "–" for name in measured),
            f"{r.tokens_per_second:,.0f}" if r.step else "–",
            *(f"{r.counted[name]:,.0f}" for name in COUNTED),
            f"{r.seconds:,.0f}",
        ]
        for r in results
    ]
    return table(head, rows, numeric=True)


def _commands(commands: dict[str, str]) -> str:
    lines = "\n".join(html.escape(command) for command in commands.values())
    return f'<p>Each line repeats one point.</p><pre class="scroll">{lines}</pre>'


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
