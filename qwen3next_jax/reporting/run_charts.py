"""Draws the charts of the table (`chart_table`) for the runs of a page. Several runs share a chart
over steps or layers; the load of the experts and the use of wall time have a chart for each run.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qwen3next_jax.common.errors import join_first
from qwen3next_jax.common.metrics import evaluation_name_of_event
from qwen3next_jax.reporting import chart_table
from qwen3next_jax.reporting.chart_table import Chart, Quantity
from qwen3next_jax.reporting.charts import (
    Line,
    heatmap,
    line_chart,
    short_number,
    stacked_columns,
    unit_of_time,
)
from qwen3next_jax.reporting.runs import (
    POINTS,
    USES,
    Run,
    faults,
    find_incomparable,
    goodput,
    stage_starts,
    wall_time_columns,
    wall_time_spans,
    without_layers,
)

MAX_LAYER_LINES = 8  # a model with more layers gets a heatmap instead of a line for each
MANY_RUNS = 8  # with more runs, the charts that each run has for itself are folded
MAX_FAULTS = 200  # faults on the page; metrics.jsonl has all of them

Marks = Sequence[tuple[float, str, str]]  # vertical lines, as `line_chart` takes them


def chart_sections(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Returns the name of each section of charts → its figures, as HTML."""
    # With several runs it would be unclear to which run a mark belongs, so there are no marks.
    marks = _vertical_marks(runs[0]) if len(runs) == 1 else []
    by_evaluation = [_with_events_by_evaluation(run) for run in runs]
    return {
        "Loss": _draw_charts(chart_table.LOSS, runs, marks),
        "Evaluations": _draw_charts(chart_table.evaluation_charts(runs), by_evaluation, marks),
        "Optimisation": _draw_charts(chart_table.OPTIMISATION, runs, marks),
        "Speed and use of time": _draw_charts(chart_table.SPEED, runs) + _wall_time_charts(runs),
        "Experts": _load_charts(runs) + _draw_charts(chart_table.EXPERTS, runs),
        "Recurrent layers": _draw_charts(chart_table.RECURRENT_LAYERS, runs),
        "Attention and activations": _draw_charts(chart_table.ATTENTION, runs),
    }


def _draw_charts(charts: Sequence[Chart], runs: Sequence[Run], marks: Marks = ()) -> list[str]:
    """Draws the rows of the chart table for which the runs have values."""
    draw = {"steps": _over_steps, "layers": _by_layer, "groups": _by_group}
    figures = [draw[chart.over](chart, runs, marks) for chart in charts if chart.only_if(runs)]
    return [figure for figure in figures if figure]


def _line_chart(chart: Chart, lines: Sequence[Line], marks: Marks = (), **options: Any) -> str:
    """Draws lines with the title, the y axis and the note of a row of the table."""
    return line_chart(
        chart.heading,
        lines,
        log=chart.log,
        from_zero=chart.from_zero,
        fit_late=chart.fit_late,
        note=chart.note,
        marks=marks,
        **{"references": chart.references} | options,
    )


def _vertical_marks(run: Run) -> list[tuple[float, str, str]]:
    """Returns the vertical lines in charts over steps: (step, text, kind) of each fault and of the
    beginning of each stage but the first.
    """
    marks = [
        (fault.step, f"{fault.kind} at step {fault.step}: {fault.text}", "fault")
        for fault in faults(run)[:MAX_FAULTS]
    ]
    for step, name in stage_starts(run):
        if step:
            marks.append((step, f"stage {name} begins after step {step}", "stage"))
    return marks


# ---- Over steps


def _over_steps(chart: Chart, runs: Sequence[Run], marks: Marks) -> str:
    """Draws quantities over steps, such as the loss. Returns "" if no run recorded any of them.

    If there is one run, each quantity has its own colour. If there are several, each run has its
    own colour, and each quantity its own dash pattern.
    """
    several = len(runs) > 1
    points = _points_per_line(runs)
    quantities = chart_table.shown_quantities(chart, runs)
    lines = []
    for r, run in enumerate(runs):
        for q, quantity in enumerate(quantities):
            series = run.series(quantity.kind, quantity.name, points)
            if series is None:
                continue
            if not several:
                label = quantity.label
            elif len(quantities) > 1:
                label = f"{run.name} {quantity.label}".strip()
            else:
                label = run.name
            lines.append(
                Line(
                    label,
                    series.x,
                    series.y,
                    series.low,
                    series.high,
                    colour=r if several else q,
                    dash=q if several else 0,
                    dots=quantity.kind != "train",
                    run=r if several else None,
                )
            )
    if not lines:
        return ""
    references = chart.references[: len(quantities)]
    warning = _incomparable_note(quantities, runs)
    return _line_chart(chart, lines, marks, references=references, warning=warning)


def _points_per_line(runs: Sequence[Run]) -> int:
    """Returns the largest number of points of a line. With it, a page of many runs stays small."""
    return min(POINTS, max(4 * POINTS // len(runs), 75))


def _incomparable_note(quantities: Sequence[Quantity], runs: Sequence[Run]) -> str:
    """Returns sentences that say why quantities of these runs cannot be compared."""
    if len(runs) == 1:
        return ""
    depends_on = set().union(*map(_depends_on, quantities))
    reasons = find_incomparable(runs)
    return " ".join(reasons[key].short for key in sorted(depends_on & set(reasons)))


def _depends_on(quantity: Quantity) -> set[str]:
    """Returns on which of the keys of `find_incomparable` a quantity depends."""
    name, is_of_suite = quantity.name.partition("/")[0], quantity.kind.startswith("suite")
    is_loss = name in ("loss", "perplexity")
    found = set()
    # Of the other evaluations only losses are of text; the rest are tasks with tokens of their own.
    if is_loss or (name in ("accuracy", "top1", "mtp_loss", "mtp_top1") and not is_of_suite):
        found.add("tokenizer")
    if quantity.kind.startswith("heldout") or (is_of_suite and is_loss):
        found.add("heldout")
    return found


def _with_events_by_evaluation(run: Run) -> Run:
    """Returns the run with its "suite" events grouped by evaluation: `events` has a key "suite
    NAME" for each evaluation, and no other keys.
    """
    events: dict[str, list[dict[str, Any]]] = {}
    for event in run.events.get("suite", ()):
        events.setdefault(f"suite {evaluation_name_of_event(event)}", []).append(event)
    return dataclasses.replace(run, events=events)


def _by_group(chart: Chart, runs: Sequence[Run], marks: Marks) -> str:
    """Draws a statistic of the parameter groups outside the layers (embedding, head) over steps."""
    several = len(runs) > 1
    groups = sorted({name for run in runs for name in (run.last("diagnostics", "groups") or {})})
    lines = []
    for r, run in enumerate(runs):
        events = [e for e in run.events.get("diagnostics", ()) if "groups" in e]
        events = events[:: -(-len(events) // _points_per_line(runs)) or 1]
        for g, group in enumerate(groups):
            y = [e["groups"].get(group, {}).get(chart.shows) for e in events]
            values = [v if isinstance(v, (int, float)) and v > 0 else np.nan for v in y]
            if np.isfinite(values).any():
                label = group.replace("_", " ")
                lines.append(
                    Line(
                        f"{run.name} {label}" if several else label,
                        [e["step"] for e in events],
                        values,
                        colour=r if several else g,
                        dash=g if several else 0,
                        dots=True,
                        run=r if several else None,
                    )
                )
    if not lines:
        return ""
    return _line_chart(chart, lines, marks, warning=_not_measured(runs))


# ---- Over layers


def _by_layer(chart: Chart, runs: Sequence[Run], marks: Marks) -> str:
    """Draws a quantity that layers have, such as the norm of their gradient. Returns "" if no run
    recorded it.

    If there is one run, the chart shows the quantity over steps: with one line per layer, or as a
    heatmap if there are more than MAX_LAYER_LINES layers. If there are several runs, the chart
    shows the newest values of each run over the layers.
    """
    if len(runs) > 1:
        return _over_layers(chart, runs)
    measured = runs[0].layers(chart.shows)
    if measured is None:
        return ""
    steps, values = measured
    layers = [i for i in range(values.shape[1]) if np.isfinite(values[:, i]).any()]
    names = _layer_names(runs[0], values.shape[1])
    if len(layers) > MAX_LAYER_LINES:
        return heatmap(
            chart.heading,
            values[:, layers].T,
            rows=[names[i] for i in layers],
            columns=steps,
            row_label="layer",
            column_label="step",
            log=chart.log,
            note=chart.note,
        )
    lines = [
        Line(
            names[i] if names[i] == "MTP" else f"layer {names[i]}",
            steps,
            values[:, i],
            shade=depth / max(len(layers) - 1, 1),
            dots=True,
        )
        for depth, i in enumerate(layers)
    ]
    return _line_chart(chart, lines, marks)


def _over_layers(chart: Chart, runs: Sequence[Run]) -> str:
    """Draws each run's newest values of a quantity over the layers. Returns "" if no run recorded
    it.
    """
    newest = {}  # index of the run → (step, values [layers])
    for r, run in enumerate(runs):
        measured = run.layers(chart.shows)
        if measured is not None:
            newest[r] = measured[0][-1], measured[1][-1]
    layer_names = {r: _layer_names(runs[r], len(values)) for r, (_, values) in newest.items()}
    all_names = {layer for names in layer_names.values() for layer in names}
    names = sorted(all_names - {"MTP"}, key=int) + (["MTP"] if "MTP" in all_names else [])
    lines = []
    for r, (step, values) in newest.items():
        finite = np.flatnonzero(np.isfinite(values))
        lines.append(
            Line(
                f"{runs[r].name} at step {short_number(step)}",
                [names.index(layer_names[r][i]) for i in finite],
                values[finite],
                colour=r,
                dots=True,
                run=r,
            )
        )
    if not lines:
        return ""
    return _line_chart(chart, lines, x_label="layer", x_names=names, warning=_not_measured(runs))


def _layer_names(run: Run, count: int) -> list[str]:
    """Returns the names of the `count` entries of a list over layers. If the run's settings give
    another number of layers, the names are the numbers 0 … count - 1.
    """
    return run.layer_names if len(run.layer_names) == count else [str(i) for i in range(count)]


def _not_measured(runs: Sequence[Run]) -> str:
    """Returns the note of a chart over layers that names the runs without this measurement."""
    unmeasured = without_layers(runs)
    if not unmeasured:
        return ""
    return f"Not measured: {join_first((run.name for run in unmeasured), MANY_RUNS)}."


# ---- Of one run each


def _load_charts(runs: Sequence[Run]) -> list[str]:
    """Draws the newest load of every expert of each run that recorded it."""
    figures = []
    for r, run in enumerate(runs):
        load = run.last("diagnostics", "expert_load")
        if not load:
            continue
        step = next(e["step"] for e in reversed(run.events["diagnostics"]) if e.get("expert_load"))
        entropy = run.last("diagnostics", "router_entropy") or []
        names = _layer_names(run, len(entropy))
        sparse = [names[i] for i, value in enumerate(entropy) if value is not None]
        figures.append(
            heatmap(
                _title_of_run(f"Router load at step {step:,}", run, runs),
                np.array(load, float),
                rows=sparse if len(sparse) == len(load) else [str(i) for i in range(len(load))],
                columns=[str(i) for i in range(len(load[0]))],
                row_label="layer",
                column_label="expert",
                diverging=True,
                note="1 is an equal share of the tokens. Black: no token at all.",
                run=r if len(runs) > 1 else None,
            )
        )
    return figures


def _title_of_run(title: str, run: Run, runs: Sequence[Run]) -> str:
    """Returns the title of a chart about one run, with its name on a page of several runs."""
    return f"{title}: {run.name}" if len(runs) > 1 else title


def _wall_time_charts(runs: Sequence[Run]) -> list[str]:
    """Draws how each run used its wall time, all in the same unit."""
    spans_of_runs = [wall_time_spans(run) for run in runs]
    longest = max((spans[-1][1] for spans in spans_of_runs if spans), default=0.0)
    figures = []
    for r, (run, spans) in enumerate(zip(runs, spans_of_runs, strict=True)):
        if not spans:
            continue
        width, shares = wall_time_columns(spans, 160)
        start = run.log[0].get("time", 0.0)
        marks = [
            (fault.time - start, f"{fault.kind} at step {fault.step}: {fault.text}")
            for fault in faults(run)[:MAX_FAULTS]
        ]
        total = [f"{use} {share:.1%}" for use, share in goodput(spans).items() if share >= 5e-4]
        figures.append(
            stacked_columns(
                _title_of_run("Use of wall time", run, runs),
                shares,
                width=width,
                names=USES,
                colours=[f"var(--use-{i})" for i in range(len(USES))],
                marks=marks,
                note=f"{', '.join(total)}. Triangles: faults, restarts and changes of settings.",
                unit=unit_of_time(longest),
                run=r if len(runs) > 1 else None,
            )
        )
    return figures
