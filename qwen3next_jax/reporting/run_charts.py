"""Draws the charts that `chart_table` lists, for the runs of a page. Charts over steps or layers
show all runs together. The load of the experts and the use of wall time have one chart for each
run.
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
    stacked_columns,
    suitable_time_unit,
)
from qwen3next_jax.reporting.runs import (
    POINTS,
    USES,
    Run,
    faults_and_restarts,
    incomparable_reasons,
    runs_without_layer_statistics,
    stage_starts,
    wall_time_shares,
    wall_time_shares_by_column,
    wall_time_spans,
)

MAX_LAYER_LINES = 8  # a model with more layers gets a heatmap instead of a line for each
MANY_RUNS = 8  # with more runs, the charts that each run has for itself are folded
MAX_FAULTS = 200  # faults on the page; metrics.jsonl has all of them

Marks = Sequence[tuple[float, str, str]]  # vertical lines, as `line_chart` takes them


def chart_sections(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Returns the name of each section of charts → its figures, as HTML."""
    # With several runs it would be unclear to which run a mark belongs, so there are no marks.
    marks = _fault_and_stage_marks(runs[0]) if len(runs) == 1 else []
    by_evaluation = [_group_suite_events(run) for run in runs]
    return {
        "Loss": _draw_charts(chart_table.LOSS, runs, marks),
        "Evaluations": _draw_charts(chart_table.evaluation_charts(runs), by_evaluation, marks),
        "Optimisation": _draw_charts(chart_table.OPTIMISATION, runs, marks),
        "Speed and use of time": _draw_charts(chart_table.SPEED, runs) + _wall_time_charts(runs),
        "Experts": _expert_load_heatmaps(runs) + _draw_charts(chart_table.EXPERTS, runs),
        "Recurrent layers": _draw_charts(chart_table.RECURRENT_LAYERS, runs),
        "Attention and activations": _draw_charts(chart_table.ATTENTION, runs),
    }


def _draw_charts(charts: Sequence[Chart], runs: Sequence[Run], marks: Marks = ()) -> list[str]:
    """Draws every chart for which the runs have recorded values."""
    draw = {
        "quantity": _draw_over_steps,
        "layer": _draw_by_layer,
        "group": _draw_by_parameter_group,
    }
    figures = [
        draw[chart.line_for_each](chart, runs, marks) for chart in charts if chart.only_if(runs)
    ]
    return [figure for figure in figures if figure]


def _draw_lines_of_chart(
    chart: Chart, lines: Sequence[Line], marks: Marks = (), **options: Any
) -> str:
    """Draws lines with the title, the kind of y axis and the note that `chart` gives."""
    return line_chart(
        chart.title_with_unit,
        lines,
        log_y=chart.log_y,
        from_zero=chart.from_zero,
        fit_y_to_late_values=chart.fit_y_to_late_values,
        note=chart.note,
        marks=marks,
        **{"reference_lines": chart.reference_lines} | options,
    )


def _fault_and_stage_marks(run: Run) -> list[tuple[float, str, str]]:
    """Returns the vertical lines in charts over steps: (step, text, kind) of each fault and
    restart, and of the beginning of each stage except the first.
    """
    marks = [
        (fault.step, f"{fault.kind} at step {fault.step}: {fault.details}", "fault")
        for fault in faults_and_restarts(run)[:MAX_FAULTS]
    ]
    for step, name in stage_starts(run):
        if step:
            marks.append((step, f"stage {name} begins after step {step}", "stage"))
    return marks


# ---- Over steps


def _draw_over_steps(chart: Chart, runs: Sequence[Run], marks: Marks) -> str:
    """Draws the quantities of a chart, such as the loss, over steps. Returns "" if no run recorded
    any quantity of the chart.

    If there is one run, each quantity has its own colour. If there are several runs, each run has
    its own colour, and each quantity its own dash pattern.
    """
    several = len(runs) > 1
    points = _most_points_per_line(runs)
    quantities = chart_table.expand_quantities(chart, runs)
    lines = []
    for r, run in enumerate(runs):
        for q, quantity in enumerate(quantities):
            series = run.series(quantity.event_kind, quantity.event_field, points)
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
                    series.steps,
                    series.means,
                    series.smallest,
                    series.largest,
                    colour_index=r if several else q,
                    dash_index=q if several else 0,
                    dots=quantity.event_kind != "train",
                    run_index=r if several else None,
                )
            )
    if not lines:
        return ""
    reference_lines = chart.reference_lines[: len(quantities)]
    warning = _incomparable_note(quantities, runs)
    return _draw_lines_of_chart(
        chart, lines, marks, reference_lines=reference_lines, warning=warning
    )


def _most_points_per_line(runs: Sequence[Run]) -> int:
    """Returns the largest number of points that a line may have. The more runs the page has, the
    fewer points a line may have, so that the page of many runs stays small.
    """
    return min(POINTS, max(4 * POINTS // len(runs), 75))


def _incomparable_note(quantities: Sequence[Quantity], runs: Sequence[Run]) -> str:
    """Returns sentences that say why the quantities of a chart cannot be compared between the runs;
    "" if the quantities can be compared.
    """
    if len(runs) == 1:
        return ""
    depends_on = set().union(*map(_reason_keys_for_quantity, quantities))
    reasons = incomparable_reasons(runs)
    return " ".join(reasons[key].chart_note for key in sorted(depends_on & set(reasons)))


def _reason_keys_for_quantity(quantity: Quantity) -> set[str]:
    """Returns the differences between runs that make a quantity incomparable, as a set of keys of
    `incomparable_reasons`: "tokenizer", "heldout", both or neither.
    """
    name, is_of_suite = (
        quantity.event_field.partition("/")[0],
        quantity.event_kind.startswith("suite"),
    )
    is_loss = name in ("loss", "perplexity")
    found = set()
    # Of the other evaluations only losses are of text; the rest are tasks with tokens of their own.
    if is_loss or (name in ("accuracy", "top1", "mtp_loss", "mtp_top1") and not is_of_suite):
        found.add("tokenizer")
    if quantity.event_kind.startswith("heldout") or (is_of_suite and is_loss):
        found.add("heldout")
    return found


def _group_suite_events(run: Run) -> Run:
    """Returns the run with its "suite" events grouped by evaluation. In the result,
    `events_by_kind` has a key "suite NAME" for each evaluation, and no other keys.
    """
    events: dict[str, list[dict[str, Any]]] = {}
    for event in run.events_by_kind.get("suite", ()):
        events.setdefault(f"suite {evaluation_name_of_event(event)}", []).append(event)
    return dataclasses.replace(run, events_by_kind=events)


def _draw_by_parameter_group(chart: Chart, runs: Sequence[Run], marks: Marks) -> str:
    """Draws a statistic of the parameter groups outside the layers (embedding, head) over steps."""
    several = len(runs) > 1
    groups = sorted(
        {name for run in runs for name in (run.newest_value("diagnostics", "groups") or {})}
    )
    lines = []
    for r, run in enumerate(runs):
        events = [e for e in run.events_by_kind.get("diagnostics", ()) if "groups" in e]
        events = events[:: -(-len(events) // _most_points_per_line(runs)) or 1]
        for g, group in enumerate(groups):
            y = [e["groups"].get(group, {}).get(chart.quantities) for e in events]
            values = [v if isinstance(v, (int, float)) and v > 0 else np.nan for v in y]
            if np.isfinite(values).any():
                label = group.replace("_", " ")
                lines.append(
                    Line(
                        f"{run.name} {label}" if several else label,
                        [e["step"] for e in events],
                        values,
                        colour_index=r if several else g,
                        dash_index=g if several else 0,
                        dots=True,
                        run_index=r if several else None,
                    )
                )
    if not lines:
        return ""
    return _draw_lines_of_chart(chart, lines, marks, warning=_unmeasured_runs_note(runs))


# ---- Over layers


def _draw_by_layer(chart: Chart, runs: Sequence[Run], marks: Marks) -> str:
    """Draws a quantity of each layer, such as the norm of the layer's gradient. Returns "" if no
    run recorded the quantity.

    If there is one run, the chart shows the quantity over steps: with one line per layer, or as a
    heatmap if there are more than MAX_LAYER_LINES layers. If there are several runs, the chart
    shows the newest values of each run over the layers.
    """
    if len(runs) > 1:
        return _draw_newest_over_layers(chart, runs)
    measured = runs[0].layer_values(chart.quantities)
    if measured is None:
        return ""
    steps, values = measured
    layers = [i for i in range(values.shape[1]) if np.isfinite(values[:, i]).any()]
    names = _layer_labels(runs[0], values.shape[1])
    if len(layers) > MAX_LAYER_LINES:
        return heatmap(
            chart.title_with_unit,
            values[:, layers].T,
            rows=[names[i] for i in layers],
            columns=steps,
            row_label="layer",
            column_label="step",
            log=chart.log_y,
            note=chart.note,
        )
    lines = [
        Line(
            names[i] if names[i] == "MTP" else f"layer {names[i]}",
            steps,
            values[:, i],
            gradient_position=depth / max(len(layers) - 1, 1),
            dots=True,
        )
        for depth, i in enumerate(layers)
    ]
    return _draw_lines_of_chart(chart, lines, marks)


def _draw_newest_over_layers(chart: Chart, runs: Sequence[Run]) -> str:
    """Draws each run's newest values of a quantity over the layers. Returns "" if no run recorded
    the quantity.
    """
    newest = {}  # index of the run → (step, values [layers])
    for r, run in enumerate(runs):
        measured = run.layer_values(chart.quantities)
        if measured is not None:
            newest[r] = measured[0][-1], measured[1][-1]
    layer_names = {r: _layer_labels(runs[r], len(values)) for r, (_, values) in newest.items()}
    all_names = {layer for names in layer_names.values() for layer in names}
    names = sorted(all_names - {"MTP"}, key=int) + (["MTP"] if "MTP" in all_names else [])
    lines = []
    for r, (step, values) in newest.items():
        finite = np.flatnonzero(np.isfinite(values))
        lines.append(
            Line(
                f"{runs[r].name} at step {step:,}",
                [names.index(layer_names[r][i]) for i in finite],
                values[finite],
                colour_index=r,
                dots=True,
                run_index=r,
            )
        )
    if not lines:
        return ""
    return _draw_lines_of_chart(
        chart, lines, x_label="layer", x_names=names, warning=_unmeasured_runs_note(runs)
    )


def _layer_labels(run: Run, count: int) -> list[str]:
    """Returns a label for each of the `count` entries of a list over layers: `run.layer_names` if
    there are `count` names, otherwise the numbers 0 … count - 1.
    """
    return run.layer_names if len(run.layer_names) == count else [str(i) for i in range(count)]


def _unmeasured_runs_note(runs: Sequence[Run]) -> str:
    """Returns a note that names the runs which trained but did not measure their layers; "" if
    there are none.
    """
    unmeasured = runs_without_layer_statistics(runs)
    if not unmeasured:
        return ""
    return f"Not measured: {join_first((run.name for run in unmeasured), MANY_RUNS)}."


# ---- Of one run each


def _expert_load_heatmaps(runs: Sequence[Run]) -> list[str]:
    """Draws a heatmap of the newest load of every expert, for each run that recorded loads."""
    figures = []
    for r, run in enumerate(runs):
        load = run.newest_value("diagnostics", "expert_load")
        if not load:
            continue
        step = next(
            e["step"] for e in reversed(run.events_by_kind["diagnostics"]) if e.get("expert_load")
        )
        entropy = run.newest_value("diagnostics", "router_entropy") or []
        names = _layer_labels(run, len(entropy))
        sparse = [names[i] for i, value in enumerate(entropy) if value is not None]
        figures.append(
            heatmap(
                _title_with_run_name(f"Router load at step {step:,}", run, runs),
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


def _title_with_run_name(title: str, run: Run, runs: Sequence[Run]) -> str:
    """Returns the title of a chart about one run. On a page of several runs the title contains the
    name of the run.
    """
    return f"{title}: {run.name}" if len(runs) > 1 else title


def _wall_time_charts(runs: Sequence[Run]) -> list[str]:
    """For each run, draws a chart of the uses of the run's wall time. All charts have the same unit
    of time.
    """
    spans_of_runs = [wall_time_spans(run) for run in runs]
    longest = max((spans[-1][1] for spans in spans_of_runs if spans), default=0.0)
    figures = []
    for r, (run, spans) in enumerate(zip(runs, spans_of_runs, strict=True)):
        if not spans:
            continue
        width, shares = wall_time_shares_by_column(spans, 160)
        start = run.all_events[0].get("time", 0.0)
        marks = [
            (fault.unix_seconds - start, f"{fault.kind} at step {fault.step}: {fault.details}")
            for fault in faults_and_restarts(run)[:MAX_FAULTS]
        ]
        total = [
            f"{use} {share:.1%}" for use, share in wall_time_shares(spans).items() if share >= 5e-4
        ]
        figures.append(
            stacked_columns(
                _title_with_run_name("Use of wall time", run, runs),
                shares,
                width=width,
                names=USES,
                colours=[f"var(--use-{i})" for i in range(len(USES))],
                marks=marks,
                note=f"{', '.join(total)}. Triangles: faults, restarts and changes of settings.",
                unit=suitable_time_unit(longest),
                run=r if len(runs) > 1 else None,
            )
        )
    return figures
