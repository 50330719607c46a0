"""Writes the report about a sweep: findings in sentences, charts of metrics and costs over the
values of the sweep's x axis, a table of the points, and for each point the command that repeats it.
"""

import html
import math
import pathlib
import urllib.parse
from collections.abc import Sequence

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.metrics import Metric, displayed_condition
from qwen3next_jax.common.storage import write_text_atomically
from qwen3next_jax.reporting.charts import COLOURS, Line, LinkCell, line_chart, table_html
from qwen3next_jax.reporting.page import html_document
from qwen3next_jax.reporting.speedup import comparison_record, comparisons_html, law_chart
from qwen3next_jax.sweeps.costs import count_costs
from qwen3next_jax.sweeps.learning_rates import BestRate, best_rates_along_x
from qwen3next_jax.sweeps.points import Sweep
from qwen3next_jax.sweeps.results import (
    PointResult,
    SeedSpread,
    all_metrics,
    finding_sentences,
    lines_along_x,
    main_metrics,
    metric_along_x,
    metric_title,
    pareto_front_indices,
    seed_axes,
    source_metrics,
    to_csv,
    to_json,
)
from qwen3next_jax.sweeps.speedups import comparable_arms, compare_arms, speed_up_metric

# field of `Costs` → its name in the report
COSTS = {
    "parameters": "parameters",
    "flops_per_token": "FLOPs per token",
    "cache_bytes_per_token": "cache bytes per token",
    "state_bytes": "recurrent state, bytes",
}


def write_report(
    sweep: Sweep,
    results: Sequence[PointResult],
    commands: dict[str, str],
    title: str,
    workdir: pathlib.Path,
) -> None:
    """Writes report.html, results.csv and results.json into `workdir`, each of them atomically.

    Args:
      commands: name of each point → the command that repeats it.
    """
    try:
        records = [comparison_record(comparison) for comparison in compare_arms(sweep, results)]
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
    sweep: Sweep, results: Sequence[PointResult], commands: dict[str, str], title: str
) -> str:
    """Returns the page report.html as HTML. `write_report` describes the arguments."""
    done = [result for result in results if result.done]
    sections = {
        "Findings": _findings_html(sweep, results, done),
        "Figures": _charts_html(sweep, done),
        **_speed_up_section(sweep, results),
        "Losses": _training_loss_section(results),
        **_learning_rate_section(sweep, results, done),
        "Cost": _cost_section(sweep, results, done),
        "Points": _points_table(sweep, results),
        "Commands": _commands_html(commands),
    }
    body = "".join(
        f'<section id="{name.lower().replace(" ", "-")}"><h2>{name}</h2>{text}</section>'
        for name, text in sections.items()
    )
    return html_document(title, _subtitle(sweep, results, len(done)), list(sections), body)


def _subtitle(sweep: Sweep, results: Sequence[PointResult], done: int) -> str:
    configs = [result.point.config for result in results]
    budgets = {count_costs(c).tokens for c in configs}
    tokens = " and ".join(f"{budget / 1e6:.3g} M" for budget in sorted(budgets))
    match = ""
    if sweep.match_widths_by:
        match = (
            f", MLP widths chosen so that every point has the {sweep.match_widths_by} of the first"
        )
    seeds = sorted({config.data.seed for config in configs})
    return (
        f"{done} of {len(results)} points done · base {sweep.base_path} · {tokens} tokens a "
        f"point{match} · data seed {', '.join(map(str, seeds))}: points on the same data, with the "
        "same data seed, see the same rows in the same order"
        + "".join(f" · {sentence}" for sentence in sweep.override_sentences)
    )


def _findings_html(
    sweep: Sweep, results: Sequence[PointResult], done: Sequence[PointResult]
) -> str:
    """Returns an HTML list: sentences about points that failed or are not done, and then the
    findings. `done`: the results of the points that are done.
    """
    sentences = finding_sentences(sweep, done)
    failed = sum(bool(result.failure_reason) and not result.done for result in results)
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


def _charts_html(sweep: Sweep, done: Sequence[PointResult]) -> str:
    """Returns one chart for each metric. If a metric was measured under several conditions
    ("accuracy/8 pairs", "loss/64-127"), the chart has lines for each condition. In a chart of
    several conditions, the colour of a line shows the condition, and the dash pattern shows the
    values of all axes except the x axis.
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
                x_label=sweep.x_axis.rpartition(".")[2],
                x_names=sweep.axes[sweep.x_axis],
                from_zero=metric.unit == "share",
                note=f"{better}{seeds}.",
            )
        )
    if not charts:
        return "<p>No point is done yet.</p>"
    return f'<div class="charts">{"".join(charts)}</div>'


def _metric_lines(
    sweep: Sweep, done: Sequence[PointResult], names: list[tuple[str, str]]
) -> list[Line]:
    """Returns the lines of the chart of one metric.

    Args:
      done: the results of the points that are done.
      names: (name of the metric, which includes the condition; the condition alone), for each
        condition.
    """
    values = sweep.axes[sweep.x_axis]
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
                    band_low=[min(s.seed_values) if s else math.nan for s in spreads],
                    band_high=[max(s.seed_values) if s else math.nan for s in spreads],
                    dots=True,
                    colour_index=i if by_place else other_axes,
                    dash_index=other_axes if by_place else 0,
                    gradient_position=i / (len(names) - 1) if len(names) > 4 else None,
                )
            )
    return lines


def _speed_up_section(sweep: Sweep, results: Sequence[PointResult]) -> dict[str, str]:
    """Returns {title: HTML} of the section about effective speed-ups; {} if the sweep has no axis
    of arms or no loss.
    """
    title = "Effective speed-up"
    try:
        comparisons = compare_arms(sweep, results)
    except UserError as error:
        return {title: f"<p>None: {html.escape(str(error))}.</p>"}
    metric = speed_up_metric(results)
    if not comparisons or metric is None:
        return {}
    name = metric_title(metric, main_metrics(results)[metric])
    charts = [law_chart(name, arms) for arms in comparable_arms(sweep, results, metric)]
    return {
        title: comparisons_html(comparisons) + f'<div class="charts">{"".join(charts)}</div>',
    }


def _learning_rate_section(
    sweep: Sweep, results: Sequence[PointResult], done: Sequence[PointResult]
) -> dict[str, str]:
    """Returns {title: HTML} of the section about the best learning rate at each value of the x
    axis; {} if the sweep does not vary the learning rate. The best rate has the lowest value of the
    first main metric for which lower is better. `done`: the results of the points that are done.
    """
    metrics = [name for name, metric in main_metrics(done).items() if metric.better == "lower"]
    best = best_rates_along_x(sweep, results, metrics[0]) if metrics else {}
    if not best:
        return {}
    x = sweep.x_axis.rpartition(".")[2]
    title = metric_title(metrics[0], main_metrics(done)[metrics[0]])
    charts = "".join(_learning_rate_chart(title, x, label, line) for label, line in best.items())
    sentences, rows = [], []
    for label, line in best.items():
        moved = line[-1].moved_sqrt2_steps
        edge = " (the best was the lowest or highest that was tried)"
        if len(line) > 1:
            sentences.append(
                f"{label + ': ' if label else ''}from {x} {line[0].x_value} to {line[-1].x_value} "
                f"the best learning rate moves by {moved:+.1f} steps of √2"
                f"{edge if line[0].at_edge or line[-1].at_edge else ''}."
            )
        rows += [
            [
                label,
                one.x_value,
                f"{one.rate:.3g}" + (" (edge)" if one.at_edge else ""),
                f"{one.moved_sqrt2_steps:+.1f}",
            ]
            for one in line
        ]
    listed = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    text = table_html(["", x, "best learning rate", "moved, steps of √2"], rows, numeric=True)
    return {"Learning rate": f'<ul>{listed}</ul><div class="charts">{charts}</div>{text}'}


def _learning_rate_chart(title: str, x: str, label: str, line: Sequence[BestRate]) -> str:
    """Returns the chart of a metric over the learning rate, with a line for each value on the x
    axis of the sweep.
    """
    return line_chart(
        title + (f" ({label})" if label else ""),
        [
            Line(
                f"{x} {one.x_value}",
                one.tried_rates,
                one.mean_losses,
                band_low=one.smallest_losses,
                band_high=one.largest_losses,
                dots=True,
                gradient_position=i / max(len(line) - 1, 1),
            )
            for i, one in enumerate(line)
        ],
        x_label="learning rate",
        log_x=True,
        note="The best is the minimum of the parabola through the lowest mean and its neighbours. "
        "Rates at which a point failed have no dot.",
    )


def _cost_section(sweep: Sweep, results: Sequence[PointResult], done: Sequence[PointResult]) -> str:
    """Returns charts of the costs and the tokens per second of all points, and of the main metrics
    against the size of the cache. A cost that is the same at all points has no chart.
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
    sweep: Sweep, title: str, lines: dict[str, dict[str, SeedSpread]], note: str = ""
) -> str:
    """Returns a chart over the x axis of a sweep, with a line of means for each entry of `lines`.
    `results.lines_along_x` describes the form of `lines`.
    """
    values = sweep.axes[sweep.x_axis]
    drawn = [
        Line(
            label,
            range(len(values)),
            [line[v].mean if v in line else math.nan for v in values],
            colour_index=k,
            dots=True,
        )
        for k, (label, line) in enumerate(lines.items())
    ]
    return line_chart(
        title,
        drawn,
        x_label=sweep.x_axis.rpartition(".")[2],
        x_names=values,
        from_zero=True,
        note=note,
    )


def _pareto_charts(sweep: Sweep, done: Sequence[PointResult]) -> list[str]:
    """Returns charts of each main metric against the bytes of cache per token of context. Points
    with the same values on all axes except the x axis share a chart. A chart is left out if all its
    points need the same number of bytes.
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
            front = pareto_front_indices(points, metric.better == "higher")
            lines = [
                Line(value, [cost], [mean], colour_index=k, dots=True)
                for k, (value, (cost, mean)) in enumerate(zip(line, points))
            ]
            if len(front) > 1:
                xs, ys = ([points[i][axis] for i in front] for axis in (0, 1))
                lines.insert(0, Line("best for its cost", xs, ys, colour_index=7, dash_index=1))
            title = metric_title(name, metric) + (f" ({label})" if label else "")
            charts.append(
                line_chart(
                    f"{title} against cache", lines, x_label="cache bytes per token of context"
                )
            )
    return charts


def _training_loss_section(results: Sequence[PointResult]) -> str:
    """Returns a chart of the training loss of every point over its steps."""
    lines = [
        Line(
            result.point.name,
            [step for step, _ in result.training_losses],
            [loss for _, loss in result.training_losses],
            colour_index=number % COLOURS,
            dash_index=number // COLOURS,
        )
        for number, result in enumerate(results)
        if result.training_losses
    ]
    note = "the table of points leads to the page of each"
    return line_chart(
        "training loss, nats per token", lines, log_y=True, fit_y_to_late_values=True, note=note
    )


def _points_table(sweep: Sweep, results: Sequence[PointResult]) -> str:
    """Returns the table of points with the main metrics, over all held-out rows and for each source
    of the data. (results.csv has all metrics.)
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
            *r.point.axis_values.values(),
            _point_state_text(r),
            f"{r.last_step:,} of {r.point.config.train.steps:,}",
            *(
                f"{r.final_metrics[name].value:.4g}" if name in r.final_metrics else "–"
                for name in metrics
            ),
            f"{r.tokens_per_second:,.0f}" if math.isfinite(r.tokens_per_second) else "–",
            *(f"{r.costs[name]:,.0f}" for name in COSTS),
            f"{r.active_seconds:,.0f}",
        ]
        for r in results
    ]
    return table_html(head, rows, numeric=True)


def _point_cell(result: PointResult) -> str | LinkCell:
    """Returns the name of a point. If the run of the point has written a report, the name is a link
    to the report.
    """
    name = result.point.name
    return (
        LinkCell(name, f"points/{urllib.parse.quote(name)}/report.html")
        if result.has_report_page
        else name
    )


def _point_state_text(result: PointResult) -> str:
    if result.done:
        return "done"
    return f"failed: {result.failure_reason}" if result.failure_reason else "not done yet"


def _commands_html(commands: dict[str, str]) -> str:
    lines = "\n".join(html.escape(command) for command in commands.values())
    return f'<p>Each line repeats one point.</p><pre class="scroll">{lines}</pre>'
