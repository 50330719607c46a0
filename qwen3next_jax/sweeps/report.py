"""Writes the report about a sweep: findings in words, charts of metrics and costs over the values
of the sweep's x axis, a table of the points, and the command that repeats each point.
"""

import html
import math
import pathlib
import urllib.parse
from collections.abc import Sequence

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.metrics import Metric, displayed_condition
from qwen3next_jax.common.storage import write_text_atomically
from qwen3next_jax.reporting.charts import COLOURS, Line, Link, line_chart, table_html
from qwen3next_jax.reporting.page import html_document
from qwen3next_jax.reporting.speedup import comparisons_html, law_chart, to_record
from qwen3next_jax.sweeps.costs import count_costs
from qwen3next_jax.sweeps.learning_rates import BestRate, best_along_x
from qwen3next_jax.sweeps.points import Sweep
from qwen3next_jax.sweeps.results import (
    Result,
    Spread,
    all_metrics,
    finding_sentences,
    lines_along_x,
    main_metrics,
    metric_along_x,
    metric_title,
    pareto_front,
    seed_axes,
    source_metrics,
    to_csv,
    to_json,
)
from qwen3next_jax.sweeps.speedups import compare_arms, group_arms, speed_metric

# field of `Costs` → its name in the report
COSTS = {
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
    """Writes report.html, results.csv and results.json into `workdir`, each of them atomically.

    Args:
      commands: name of each point → the command that repeats it.
    """
    try:
        records = [to_record(comparison) for comparison in compare_arms(sweep, results)]
    except UserError:  # the page says why there are none
        records = []
    files = {
        "report.html": render_report(sweep, results, commands, title),
        "results.csv": to_csv(sweep, results, commands),
        "results.json": to_json(sweep, results, commands, records),
    }
    for name, text in files.items():
        write_text_atomically(workdir / name, text, errors="backslashreplace")


def render_report(
    sweep: Sweep, results: Sequence[Result], commands: dict[str, str], title: str
) -> str:
    """Returns the page report.html as HTML. `write_report` describes the arguments."""
    done = [result for result in results if result.done]
    sections = {
        "Findings": _findings_html(sweep, results, done),
        "Figures": _charts_html(sweep, done),
        **_speed_ups(sweep, results),
        "Losses": _loss_section(results),
        **_learning_rates(sweep, results, done),
        "Cost": _cost_section(sweep, results, done),
        "Points": _points_table(sweep, results),
        "Commands": _commands_html(commands),
    }
    body = "".join(
        f'<section id="{name.lower().replace(" ", "-")}"><h2>{name}</h2>{text}</section>'
        for name, text in sections.items()
    )
    return html_document(title, _subtitle(sweep, results, len(done)), list(sections), body)


def _subtitle(sweep: Sweep, results: Sequence[Result], done: int) -> str:
    configs = [result.point.config for result in results]
    budgets = {count_costs(c).tokens for c in configs}
    tokens = " and ".join(f"{budget / 1e6:.3g} M" for budget in sorted(budgets))
    match = ""
    if sweep.match:
        match = f", MLP widths chosen so that every point has the {sweep.match} of the first"
    seed = results[0].point.config.data.seed
    return (
        f"{done} of {len(results)} points done · base {sweep.base} · {tokens} tokens a "
        f"point{match} · data seed {seed}: points on the same data see the same rows in the same "
        "order" + "".join(f" · {sentence}" for sentence in sweep.overridden)
    )


def _findings_html(sweep: Sweep, results: Sequence[Result], done: Sequence[Result]) -> str:
    """Returns the findings as an HTML list, after sentences about points that failed or are not
    done. `done`: the results of the points that are done.
    """
    sentences = finding_sentences(sweep, done)
    failed = sum(bool(result.failed) and not result.done for result in results)
    if left := len(results) - len(done) - failed:
        sentences.insert(
            0, f"{left} of {len(results)} points are not done yet: the findings may change."
        )
    if failed:
        sentences.insert(
            0,
            f"{failed} of {len(results)} points failed: the table of points says why. The "
            "findings are without them.",
        )
    if not sentences:
        return "<p>Nothing to compare yet.</p>"
    return "<ul>" + "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _charts_html(sweep: Sweep, done: Sequence[Result]) -> str:
    """Returns one chart for each metric. If a metric was measured under several conditions
    ("accuracy/8 pairs", "loss/64-127"), its chart has lines for each condition: the colour of a
    line shows the condition, and its dash pattern shows the values of the axes other than x.
    """
    kinds: dict[tuple[str, bool, Metric], list[tuple[str, str]]] = {}
    for name, metric in all_metrics(done).items():
        kind, _, place = name.partition("/")
        place = displayed_condition(kind.partition(" ")[2], place)
        kinds.setdefault((kind, bool(place), metric), []).append((name, place))
    seeds = "one seed"
    if seed_axes(sweep):
        seeds = "the line is the mean over seeds, the band their range"
    charts = []
    for (kind, _, metric), names in kinds.items():
        better = f"{metric.better.capitalize()} is better; " if metric.better else ""
        charts.append(
            line_chart(
                metric_title(kind, metric),
                _metric_lines(sweep, done, names),
                x_label=sweep.x.rpartition(".")[2],
                x_names=sweep.axes[sweep.x],
                from_zero=metric.unit == "share",
                note=f"{better}{seeds}.",
            )
        )
    if not charts:
        return "<p>No point is done yet.</p>"
    return f'<div class="charts">{"".join(charts)}</div>'


def _metric_lines(sweep: Sweep, done: Sequence[Result], names: list[tuple[str, str]]) -> list[Line]:
    """Returns the lines of the chart of one metric.

    Args:
      done: the results of the points that are done.
      names: (name of the metric with its condition, condition), for each condition.
    """
    values = sweep.axes[sweep.x]
    along = {name: metric_along_x(sweep, done, name) for name, _ in names}
    labels = list(dict.fromkeys(label for lines in along.values() for label in lines))
    by_place = len(names) > 1
    lines = []
    for i, (name, place) in enumerate(names):
        for label, line in along[name].items():
            other_axes = labels.index(label)
            title = ", ".join(filter(None, (place, label)))
            spreads = [line.get(value) for value in values]
            lines.append(
                Line(
                    place if place and len(labels) == 1 else title,
                    range(len(values)),
                    [s.mean if s else math.nan for s in spreads],
                    low=[min(s.values) if s else math.nan for s in spreads],
                    high=[max(s.values) if s else math.nan for s in spreads],
                    dots=True,
                    colour=i if by_place else other_axes,
                    dash=other_axes if by_place else 0,
                    shade=i / (len(names) - 1) if len(names) > 4 else None,
                )
            )
    return lines


def _speed_ups(sweep: Sweep, results: Sequence[Result]) -> dict[str, str]:
    """Returns the section about effective speed-ups, by its title; {} for a sweep that compares
    nothing or has no loss.
    """
    title = "Effective speed-up"
    try:
        comparisons = compare_arms(sweep, results)
    except UserError as error:
        return {title: f"<p>None: {html.escape(str(error))}.</p>"}
    metric = speed_metric(results)
    if not comparisons or metric is None:
        return {}
    name = metric_title(metric, main_metrics(results)[metric])
    charts = [law_chart(name, arms) for arms in group_arms(sweep, results, metric)]
    return {
        title: comparisons_html(comparisons) + f'<div class="charts">{"".join(charts)}</div>',
    }


def _learning_rates(
    sweep: Sweep, results: Sequence[Result], done: Sequence[Result]
) -> dict[str, str]:
    """Returns the section about the best learning rate along the x axis, by its title; {} for a
    sweep without it. It is about the first main metric of which lower values are better. `done`:
    the results of the points that are done.
    """
    metrics = [name for name, metric in main_metrics(done).items() if metric.better == "lower"]
    best = best_along_x(sweep, results, metrics[0]) if metrics else {}
    if not best:
        return {}
    x = sweep.x.rpartition(".")[2]
    title = metric_title(metrics[0], main_metrics(done)[metrics[0]])
    charts = "".join(_learning_rate_chart(title, x, label, line) for label, line in best.items())
    sentences, rows = [], []
    for label, line in best.items():
        moved = line[-1].moved
        edge = " (the best was the lowest or highest that was tried)"
        sentences.append(
            f"{label + ': ' if label else ''}from {x} {line[0].x} to {line[-1].x} the best "
            f"learning rate moves by {moved:+.1f} steps of √2"
            f"{edge if line[0].at_edge or line[-1].at_edge else ''}."
        )
        rows += [
            [
                label,
                one.x,
                f"{one.rate:.3g}" + (" (edge)" if one.at_edge else ""),
                f"{one.moved:+.1f}",
            ]
            for one in line
        ]
    listed = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    text = table_html(["", x, "best learning rate", "moved, steps of √2"], rows, numeric=True)
    return {"Learning rate": f'<ul>{listed}</ul><div class="charts">{charts}</div>{text}'}


def _learning_rate_chart(title: str, x: str, label: str, line: Sequence[BestRate]) -> str:
    """Returns the chart of a metric over the learning rate, with a line for each value of x."""
    return line_chart(
        title + (f" ({label})" if label else ""),
        [
            Line(
                f"{x} {one.x}",
                one.rates,
                one.losses,
                low=one.low,
                high=one.high,
                dots=True,
                shade=i / max(len(line) - 1, 1),
            )
            for i, one in enumerate(line)
        ],
        x_label="learning rate",
        log_x=True,
        note="The best is the minimum of the parabola through the lowest mean and its neighbours. "
        "Rates at which a point failed have no dot.",
    )


def _cost_section(sweep: Sweep, results: Sequence[Result], done: Sequence[Result]) -> str:
    """Returns the charts of the points' costs. A cost that is the same at all points has no
    chart.
    """
    charts = []
    for name, text in COSTS.items():
        lines = lines_along_x(sweep, ((r, r.costs[name]) for r in results))
        if len({spread.mean for line in lines.values() for spread in line.values()}) < 2:
            continue
        first = next(iter(lines.values()))
        if all(line == first for line in lines.values()):
            lines = {"": first}
        charts.append(_cost_chart(sweep, text[0].upper() + text[1:], lines))
    speeds = lines_along_x(sweep, ((r, r.tokens_per_second) for r in done))
    note = "On the machine that ran it, whatever else it did meanwhile."
    charts.append(_cost_chart(sweep, "Tokens per second", speeds, note))
    charts += _pareto_charts(sweep, done)
    return f'<div class="charts">{"".join(charts)}</div>'


def _cost_chart(
    sweep: Sweep, title: str, lines: dict[str, dict[str, Spread]], note: str = ""
) -> str:
    """Returns a chart over the x axis with a line of means for each entry of `lines`, which
    `results.lines_along_x` describes.
    """
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
    """Returns charts of each main metric against the bytes of cache per token of context. The
    points with the same values on the axes other than x share a chart; there is a chart only if
    their bytes differ.
    """
    charts = []
    costs = lines_along_x(sweep, ((r, r.costs["cache_bytes_per_token"]) for r in done))
    for name, metric in main_metrics(done).items():
        if not metric.better:
            continue
        for label, line in metric_along_x(sweep, done, name).items():
            points = [(costs[label][value].mean, line[value].mean) for value in line]
            if len({cost for cost, _ in points}) < 2:
                continue
            front = pareto_front(points, metric.better == "higher")
            lines = [
                Line(value, [cost], [mean], colour=k, dots=True)
                for k, (value, (cost, mean)) in enumerate(zip(line, points))
            ]
            if len(front) > 1:
                xs, ys = ([points[i][axis] for i in front] for axis in (0, 1))
                lines.insert(0, Line("best for its cost", xs, ys, colour=7, dash=1))
            title = metric_title(name, metric) + (f" ({label})" if label else "")
            charts.append(
                line_chart(
                    f"{title} against cache", lines, x_label="cache bytes per token of context"
                )
            )
    return charts


def _loss_section(results: Sequence[Result]) -> str:
    """Returns a chart of the training loss of every point over its steps."""
    lines = [
        Line(
            result.point.name,
            [step for step, _ in result.losses],
            [loss for _, loss in result.losses],
            colour=number % COLOURS,
            dash=number // COLOURS,
        )
        for number, result in enumerate(results)
        if result.losses
    ]
    note = "the table of points leads to the page of each"
    return line_chart("training loss, nats per token", lines, log=True, fit_late=True, note=note)


def _points_table(sweep: Sweep, results: Sequence[Result]) -> str:
    """Returns the table of points with the main metrics, also of each source of the data;
    results.csv has all metrics.
    """
    metrics = main_metrics(results) | source_metrics(results)
    head = [
        "point",
        *(axis.rpartition(".")[2] for axis in sweep.axes),
        "state",
        "step",
        *(metric_title(name, metric) for name, metric in metrics.items()),
        "tokens/s",
        *COSTS.values(),
        "seconds",
    ]
    rows = [
        [
            _point_cell(r),
            *r.point.values.values(),
            _state_text(r),
            f"{r.step:,} of {r.point.config.train.steps:,}",
            *(f"{r.metrics[name].value:.4g}" if name in r.metrics else "–" for name in metrics),
            f"{r.tokens_per_second:,.0f}" if r.step else "–",
            *(f"{r.costs[name]:,.0f}" for name in COSTS),
            f"{r.seconds:,.0f}",
        ]
        for r in results
    ]
    return table_html(head, rows, numeric=True)


def _point_cell(result: Result) -> str | Link:
    """Returns the name of a point, with a link to the page of its run if there is one."""
    name = result.point.name
    return Link(name, f"points/{urllib.parse.quote(name)}/report.html") if result.has_page else name


def _state_text(result: Result) -> str:
    if result.done:
        return "done"
    return f"failed: {result.failed}" if result.failed else "not done yet"


def _commands_html(commands: dict[str, str]) -> str:
    lines = "\n".join(html.escape(command) for command in commands.values())
    return f'<p>Each line repeats one point.</p><pre class="scroll">{lines}</pre>'
