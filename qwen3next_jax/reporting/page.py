"""The report: an HTML page of charts and tables about one run, or about several runs on the same
axes. docs/report.md explains the numbers.
"""

import dataclasses
import html
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from qwen3next_jax.common.metrics import (
    MetricValue,
    evaluation_of_event,
    metric_values_of_event,
    mtp_target,
)
from qwen3next_jax.common.storage import write_whole
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.reporting.charts import (
    Line,
    heatmap,
    line_chart,
    series_colour,
    short_number,
    stacked_columns,
    table,
    unit_of_time,
)
from qwen3next_jax.reporting.runs import (
    POINTS,
    TRAINING,
    USES,
    Run,
    faults,
    goodput,
    incomparable,
    load_run,
    setting_differences,
    stages,
    wall_time_columns,
    wall_time_spans,
)

MAX_LAYER_LINES = 8  # a model with more layers gets a heatmap instead of a line for each
MANY_RUNS = 8  # with more runs, the charts that each run has for itself are folded
# The values that a table of runs compares: (kind of event, name).
COMPARED = (("train", "loss"), ("heldout", "bits_per_byte"), ("heldout", "accuracy"))
NO_STEPS: Mapping[tuple[str, str], int] = {}
MAX_SETTINGS = 6  # settings that differ, in the table of runs; the configuration has all of them
MAX_SAMPLES = 12  # sampled texts on the page; metrics.jsonl has all of them
MAX_FAULTS = 200  # faults on the page; metrics.jsonl has all of them
# (label, value) of published values, which charts show as reference lines.
# docs/reference/metrics.md names the sources.
SINKS = (("without output gate .467", 0.467), ("with gate .048", 0.048))
ACTIVATIONS = (("without output gate 1053", 1053.0), ("with gate 94", 94.0))
MASSIVE = (("massive: 1000 × the median", 1000.0),)
ACCEPTANCE = (("released model .897", 0.897), (".719", 0.719), (".476", 0.476))


def write_report(workdirs: Sequence[pathlib.Path], out: pathlib.Path) -> list[str]:
    """Writes the report of the runs in `workdirs` to the file `out`, atomically. Returns a sentence
    for each thing that it cannot show or compare.

    Raises:
      UserError: a folder contains no run, or a run that has recorded nothing.
    """
    runs = _with_distinct_names([load_run(workdir) for workdir in workdirs])
    text = render_report(runs)
    # A sampled text may contain half a surrogate pair, which UTF-8 cannot encode.
    write_whole(out, text, errors="backslashreplace")
    return warnings(runs)


def render_report(runs: Sequence[Run]) -> str:
    """Returns the page about the given runs, whose names differ, as HTML."""
    # With several runs it would be unclear to which run a mark belongs, so there are no marks.
    marks = _vertical_marks(runs[0]) if len(runs) == 1 else []
    chart_sections = {
        "Loss": _loss_charts(runs, marks),
        "Evaluations": _evaluation_charts(runs, marks),
        "Optimisation": _optimisation_charts(runs, marks),
        "Speed and use of time": _speed_charts(runs),
        "Experts": _expert_charts(runs),
        "Recurrent layers": _recurrent_charts(runs),
        "Attention and activations": _attention_charts(runs),
    }
    sections = {}
    if len(runs) > 1:
        sections["Runs"] = _runs_html(runs)
    sections |= {name: _charts_html(charts, runs) for name, charts in chart_sections.items()}
    sections["Samples"] = _samples_html(runs)
    sections["Faults and restarts"] = _faults_html(runs)
    sections["Bad records in the data"] = _bad_records_html(runs)
    sections["What runs each operator"] = _operators_html(runs)
    sections["Configuration"] = _configuration_html(runs)
    sections = {name: content for name, content in sections.items() if content}
    body = "".join(_section(name, content) for name, content in sections.items())
    return document(
        " · ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs",
        _subtitle(runs),
        list(sections),
        _warnings_html(runs) + (_tiles_html(runs[0]) if len(runs) == 1 else "") + body,
    )


def _charts_html(charts: Sequence[str], runs: Sequence[Run]) -> str:
    """Returns the charts of a section as HTML. With many runs the charts that are about one run
    alone are folded.
    """
    if not charts:
        return ""
    own = [chart for chart in charts if "data-run=" in chart[: chart.index(">")]]
    if len(runs) <= MANY_RUNS or not own:
        return f'<div class="charts">{"".join(charts)}</div>'
    common = [chart for chart in charts if chart not in own]
    return (
        f'<div class="charts">{"".join(common)}</div>'
        f"<details><summary>{len(own)} charts of single runs</summary>"
        f'<div class="charts">{"".join(own)}</div></details>'
    )


def _vertical_marks(run: Run) -> list[tuple[float, str, str]]:
    """Returns the vertical lines in charts over steps, for the argument `marks` of `line_chart`:
    (step, text, kind) of each fault and of the beginning of each stage but the first.
    """
    marks = [
        (fault.step, f"{fault.kind} at step {fault.step}: {fault.text}", "fault")
        for fault in faults(run)[:MAX_FAULTS]
    ]
    for step, name in stages(run):
        if step:
            marks.append((step, f"stage {name} begins after step {step}", "stage"))
    return marks


def document(title: str, subtitle: str, sections: Sequence[str], body: str) -> str:
    """Returns a self-contained HTML page.

    Args:
      sections: the names of the sections of `body`; the top of the page has a link to each.
      body: HTML, in which the id of each section is `_anchor` of its name.
    """
    style, script = (
        resources.files(__package__).joinpath(f"page.{kind}").read_text() for kind in ("css", "js")
    )
    links = "".join(f'<a href="#{_anchor(name)}">{html.escape(name)}</a>' for name in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, '
        'initial-scale=1"><link rel="icon" '
        f'href="data:,"><title>{html.escape(title)}</title><style>{style}</style></head>'
        f"<body><main><header><div><h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p></div>"
        '<div class="controls"><label title="exponential moving average of the lines with many '
        'points">smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01" '
        'value="0"></label><button id="theme" type="button">light / dark</button></div></header>'
        f"<nav>{links}</nav>{body}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def _section(name: str, body: str) -> str:
    return f'<section id="{_anchor(name)}"><h2>{html.escape(name)}</h2>{body}</section>'


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _with_distinct_names(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs with a number added to names that occur more than once."""
    seen: dict[str, int] = {}
    result = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        if seen[run.name] > 1:
            run = dataclasses.replace(run, name=f"{run.name} ({seen[run.name]})")
        result.append(run)
    return result


# ---- Above the charts


def _subtitle(runs: Sequence[Run]) -> str:
    """Returns the line under the title: for one run its devices, versions and stages, for several
    runs their number.
    """
    if len(runs) > 1:
        return f"{len(runs)} runs; times are of each run's own start"
    start = runs[0].events.get("start", [{}])[-1]
    devices, hosts = start.get("devices"), start.get("hosts")
    parts = []
    if devices:
        on_hosts = f" on {hosts} hosts" if hosts and hosts > 1 else ""
        parts.append(f"{devices} × {start.get('device_kind')}{on_hosts}")
    if "jax" in start:
        parts.append(f"JAX {start['jax']}")
    if start.get("commit"):
        parts.append(f"commit {start['commit'][:10]}")
    if faults(runs[0]):
        parts.append("dashed red lines: faults and restarts")
    if begun := ", ".join(f"{name} from step {step + 1}" for step, name in stages(runs[0])):
        parts.append(f"stages, at grey lines: {begun}")
    return " · ".join(parts)


def _tiles_html(run: Run) -> str:
    """Returns the most important numbers of one run as tiles."""
    tiles = "".join(
        f'<div class="tile"><b title="{html.escape(value)}">{html.escape(value)}</b>'
        f"<span>{html.escape(name)}</span></div>"
        for name, value in _summary(run, unit=None).items()
    )
    return f'<div class="tiles">{tiles}</div>'


def _runs_html(runs: Sequence[Run]) -> str:
    """Returns a table with a row for each run: its most important numbers and the settings in which
    the runs differ. page.js makes it choose, search, sort and colour the runs in all charts.
    """
    longest = max((spans[-1][1] for run in runs if (spans := wall_time_spans(run))), default=0.0)
    steps = _steps_to_compare(runs)
    summaries = [_summary(run, unit_of_time(longest), steps) for run in runs]
    names = list(dict.fromkeys(name for summary in summaries for name in summary))
    differing = [
        (setting, [_setting_text(value) for value in values])
        for setting, values in setting_differences(runs)
        if setting != "name"
    ]
    shown = differing[:MAX_SETTINGS]
    head = ["run", *(name for name, _ in shown), *names]
    rows = []
    for r, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        cells = "".join(
            f'<td class="setting"><span title="{text}">{text}</span></td>'
            for text in (html.escape(values[r]) for _, values in shown)
        )
        cells += "".join(f"<td>{html.escape(summary.get(name, '–'))}</td>" for name in names)
        rows.append(
            f'<tr data-run="{r}"><td><label><input type="checkbox" checked>'
            f'<i style="background:{series_colour(r)}"></i>{html.escape(run.name)}</label></td>'
            f"{cells}</tr>"
        )
    options = "".join(
        f'<option value="{i}">{html.escape(setting)}</option>'
        for i, (setting, _) in enumerate(differing)
    )
    settings = json.dumps(dict(differing)).replace("<", "\\u003c")
    return (
        '<div class="chooser"><input id="search" type="search" placeholder="name or setting=value">'
        f'<label>colour by <select id="colour"><option value="">run</option>{options}</select>'
        '</label><button id="all" type="button">all</button>'
        '<button id="none" type="button">none</button><span id="chosen"></span></div>'
        '<div id="groups" class="legend"></div>'
        '<div class="scroll"><table id="runs-table" class="numeric"><thead><tr>'
        # A name of a setting breaks after its dots, so that more columns are in sight.
        + "".join(f"<th>{html.escape(name).replace('.', '.<wbr>')}</th>" for name in head)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<script id="settings" type="application/json">{settings}</script>'
    )


def _warnings_html(runs: Sequence[Run]) -> str:
    return "".join(f'<p class="warning">{html.escape(text)}</p>' for text in warnings(runs))


def warnings(runs: Sequence[Run]) -> list[str]:
    """Returns a sentence for each thing that the page cannot show or compare."""
    sentences = []
    if len(runs) > 1:
        sentences = [reason.sentence for reason in incomparable(runs).values()]
    measured = {run.name: _heldout_metric(run) for run in runs}
    if len(set(filter(None, measured.values()))) > 1:
        of_runs = "; ".join(f"{name}: {metric}" for name, metric in measured.items() if metric)
        sentences.append(f"Held-out metrics differ, and have charts of their own ({of_runs}).")
    for run in runs:
        if not run.events.get("train"):
            sentences.append(f"{run.name} has not recorded a training step yet.")
        elif not measured[run.name] and any(measured.values()):
            sentences.append(f"{run.name} has not recorded a held-out evaluation.")
    if unmeasured := _without_layers(runs):
        sentences.append(
            f"Charts by layer are without {_names(unmeasured)}, where no layer was measured: "
            "telemetry.diagnostics_every says after how many steps a run measures them (0: never)."
        )
    last = {run.name: step for run in runs if (step := run.last("train", "step")) is not None}
    if len(set(last.values())) > 1:
        of_runs = ", ".join(f"{name}: {step:,}" for name, step in list(last.items())[:MANY_RUNS])
        compared = "the table also has the values at the last step that the runs have in common."
        if not _steps_to_compare(runs):
            compared = "no step was recorded by all of them, so the table does not compare them."
        sentences.append(
            f"The runs are at different steps ({of_runs}{', …' * (len(last) > MANY_RUNS)}): "
            f"{compared}"
        )
        sentences += _unequal_learning_rates(runs)
    return sentences


def _unequal_learning_rates(runs: Sequence[Run]) -> list[str]:
    """Returns a sentence if the runs have other learning rates at the step where the table compares
    their training losses: a schedule follows `train.steps`.
    """
    step = _steps_to_compare(runs).get(("train", "loss"))
    rates = {run.name: run.last("train", "learning_rate", step) for run in runs} if step else {}
    if None in rates.values() or len({f"{rate:.1e}" for rate in rates.values()}) < 2:
        return []
    of_runs = [f"{name}: {rate:.1e}" for name, rate in rates.items()]
    listed = ", ".join(of_runs[:MANY_RUNS]) + ", …" * (len(of_runs) > MANY_RUNS)
    return [
        f"At step {step:,}, where the table compares training losses, the learning rates differ "
        f"({listed}): a schedule follows train.steps."
    ]


def _without_layers(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs that trained and did not measure their layers; none, where no run did."""
    if not any(run.events.get("diagnostics") for run in runs):
        return []
    return [r for r in runs if r.events.get("train") and not r.events.get("diagnostics")]


def _names(runs: Sequence[Run]) -> str:
    """Returns the names of the runs, of the first MANY_RUNS if there are more."""
    return ", ".join(run.name for run in runs[:MANY_RUNS]) + ", …" * (len(runs) > MANY_RUNS)


def _not_measured(runs: Sequence[Run]) -> str:
    """Returns what a chart of the runs' layers says of those that did not measure them."""
    unmeasured = _without_layers(runs)
    return f"Not measured: {_names(unmeasured)}." if unmeasured else ""


def _steps_to_compare(runs: Sequence[Run]) -> dict[tuple[str, str], int]:
    """Returns where runs compare whose newest values are of different steps: (kind of event, name)
    of a loss → the last step at which all runs that measured it have a value. It is left out if
    their newest values are of the same step, or if there is no such step.
    """
    found = {}
    for kind, name in COMPARED:
        of_runs = [
            {event["step"] for event in run.events.get(kind, ()) if event.get(name) is not None}
            for run in runs
        ]
        of_runs = [steps for steps in of_runs if steps]
        if len({max(steps) for steps in of_runs}) > 1 and (common := set.intersection(*of_runs)):
            found[kind, name] = max(common)
    return found


def _heldout_metric(run: Run) -> str:
    """Returns by which metric the run is judged on held-out rows; "" if it has recorded none."""
    if run.last("heldout", "bits_per_byte") is not None:
        return "bits per byte"
    return "accuracy" if run.last("heldout", "accuracy") is not None else ""


def _summary(
    run: Run, unit: tuple[str, float] | None, steps: Mapping[tuple[str, str], int] = NO_STEPS
) -> dict[str, str]:
    """Returns the most important numbers of a run: name → newest value, as text.

    Args:
      unit: the unit of the wall time and its seconds; None: what suits this run.
      steps: (kind of event, name) of a value → the step whose value is shown beside the newest.
    """
    spans = wall_time_spans(run)
    faults_of_run = faults(run)
    step, last = run.last("train", "step"), run.config.get("train", {}).get("steps")
    of_steps = f" of {last:,}" if last and step != last else ""
    summary = {"step": (f"{step:,}" if step else "–") + of_steps}

    def add(name: str, kind: str, key: str, to_text: Callable[[float], str]) -> None:
        value = run.last(kind, key)
        if isinstance(value, (int, float)):
            summary[name] = to_text(value)
        if (kind, key) in steps:
            then = run.last(kind, key, steps[kind, key])
            if isinstance(then, (int, float)):
                summary[f"{name} at step {steps[kind, key]:,}"] = to_text(then)

    add("tokens seen", "train", "tokens_seen", short_number)
    add("training loss", "train", "loss", "{:.4f}".format)
    if _heldout_metric(run) == "bits per byte":
        add("held-out bits/byte", "heldout", "bits_per_byte", "{:.4f}".format)
    else:
        add("held-out accuracy", "heldout", "accuracy", "{:.1%}".format)
    add("bits/byte of the average", "heldout_average", "bits_per_byte", "{:.4f}".format)
    add("MTP acceptance", "heldout", "mtp_acceptance/0", "{:.1%}".format)
    add("tokens in the loss", "train", "target_share", "{:.1%}".format)
    add("tokens/s", "train", "tokens_per_second", "{:,.0f}".format)
    add("model FLOP/s", "train", "model_flops_per_second", short_number)
    add("MFU", "train", "mfu", "{:.1%}".format)
    seconds = spans[-1][1] if spans else 0.0
    summary["wall time"] = _in_unit(seconds, *unit) if unit else _duration(seconds)
    summary["goodput"] = f"{goodput(spans)[TRAINING]:.1%}"
    summary["restarts"] = str(sum(fault.kind == "restart" for fault in faults_of_run))
    summary["skipped updates"] = str(sum(fault.kind == "skip" for fault in faults_of_run))
    return summary


def _in_unit(seconds: float, unit: str, seconds_of_unit: float) -> str:
    """Writes a duration in a given unit: "8.58 minutes", "0.08 minutes"."""
    amount = seconds / seconds_of_unit
    return f"{amount:.2f} {unit}" if amount < 10 else f"{amount:,.0f} {unit}"


def _duration(seconds: float) -> str:
    """Writes a duration as text: "75 s", "2 d 3 h 5 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    days, minutes = divmod(minutes, 1440)
    hours, minutes = divmod(minutes, 60)
    return (f"{days} d " if days else "") + (f"{hours} h " if hours else "") + f"{minutes} min"


# ---- Charts over steps


def _chart_over_steps(
    title: str,
    runs: Sequence[Run],
    quantities: Sequence[tuple[str, str, str]],
    marks=(),
    **options: Any,
) -> str:
    """Draws quantities over steps, such as the loss. Returns "" if no run recorded any of them.

    If there is one run, each quantity has its own colour. If there are several, each run has its
    own colour, and each quantity its own dash pattern.

    Args:
      quantities: (label, kind of event, name of the quantity's field in the event).
      marks, options: as in `line_chart`.
    """
    several = len(runs) > 1
    points = _points(runs)
    incomparable_runs = incomparable(runs) if several else {}
    reasons = {reason for _, kind, name in quantities for reason in _depends_on(kind, name)}
    warnings = [
        incomparable_runs[reason].short for reason in sorted(reasons & set(incomparable_runs))
    ]
    lines = []
    for r, run in enumerate(runs):
        for q, (label, kind, name) in enumerate(quantities):
            series = run.series(kind, name, points)
            if series is None:
                continue
            if several:
                label = f"{run.name} {label}".strip() if len(quantities) > 1 else run.name
            lines.append(
                Line(
                    label,
                    series.x,
                    series.y,
                    series.low,
                    series.high,
                    colour=r if several else q,
                    dash=q if several else 0,
                    dots=kind != "train",
                    run=r if several else None,
                )
            )
    if not lines:
        return ""
    return line_chart(title, lines, marks=marks, warning=" ".join(warnings), **options)


def _points(runs: Sequence[Run]) -> int:
    """Returns the largest number of points of a line. With it, a page of many runs stays small."""
    return min(POINTS, max(4 * POINTS // len(runs), 75))


def _depends_on(kind: str, name: str) -> list[str]:
    """Returns which of the keys of `incomparable` a quantity depends on.

    Args:
      kind, name: as in the argument `quantities` of `_chart_over_steps`.
    """
    name, of_suite = name.partition("/")[0], kind.startswith("suite")
    is_loss = name in ("loss", "perplexity")
    # Of the other evaluations only losses are of text; the rest are tasks with tokens of their own.
    per_token = is_loss or (name in ("accuracy", "top1", "mtp_loss", "mtp_top1") and not of_suite)
    on_text = kind.startswith("heldout") or (of_suite and is_loss)
    return ["tokenizer"] * per_token + ["heldout"] * on_text


def _loss_charts(runs: Sequence[Run], marks) -> list[str]:
    """Returns the charts of training and held-out loss, of MTP and of accuracy."""
    names = [name for run in runs for name in run.names("train", "mtp_loss/")]
    depths = {name.removeprefix("mtp_loss/") for name in names}
    depths = sorted((depth for depth in depths if depth.isdecimal()), key=int)
    targets = {depth: mtp_target(int(depth)) for depth in depths}

    def with_average(label: str, label_beside: str, metric: str) -> list[tuple[str, str, str]]:
        """Returns a held-out metric of the parameters, and of their average (train.ema) if a run
        has measured it.
        """
        if not any("heldout_average" in run.events for run in runs):
            return [(label, "heldout", metric)]
        average = ("held-out, average", "heldout_average", metric)
        return [(label_beside, "heldout", metric), average]

    return _nonempty(
        (
            _chart_over_steps(
                "Loss (nats per token)",
                runs,
                [("training", "train", "loss"), *with_average("held-out", "held-out", "loss")],
                marks,
                fit_late=True,
                note="Cross-entropy of the next token. A nat is 1.44 bits.",
            ),
            _chart_over_steps(
                "Held-out bits per byte",
                runs,
                with_average("", "held-out", "bits_per_byte"),
                marks,
                fit_late=True,
            ),
            # Where every run has bits per byte, accuracy says nothing more.
            _chart_over_steps(
                "Held-out accuracy", runs, with_average("", "held-out", "accuracy"), marks
            )
            if any(_heldout_metric(run) == "accuracy" for run in runs)
            else "",
            _chart_over_steps(
                "MTP loss (nats per token)",
                runs,
                [(target, "train", f"mtp_loss/{d}") for d, target in targets.items()],
                marks,
                fit_late=True,
                note="Of the token after the next (t+2) and of later ones.",
            ),
            _chart_over_steps(
                "MTP drafts accepted, held-out text",
                runs,
                [(target, "heldout", f"mtp_acceptance/{d}") for d, target in targets.items()],
                marks,
                from_zero=True,
                references=ACCEPTANCE[: len(depths)],
                note="Share of positions whose drafts so far are all what the model itself "
                "finds most likely.",
            ),
            _chart_over_steps(
                "Accuracy in training",
                runs,
                [
                    ("next token, t+1", "train", "top1"),
                    *((f"MTP {t}", "train", f"mtp_top1/{d}") for d, t in targets.items()),
                ],
                marks,
                from_zero=True,
            ),
            _chart_over_steps(
                "Share of tokens in the loss",
                runs,
                [("", "train", "target_share")],
                marks,
                from_zero=True,
                note="With loss weights (conversations), the loss counts tokens with weights above "
                "0.",
            ),
            _chart_over_steps(
                "Balance loss",
                runs,
                [("", "train", "balance_loss")],
                marks,
                fit_late=True,
                references=(("perfect balance 1", 1.0),),
            ),
        )
    )


def _evaluation_charts(runs: Sequence[Run], marks) -> list[str]:
    """Returns a chart for each metric of each evaluation in `eval.suites`, except for metrics with
    the unit "count".
    """
    # (evaluation, kind of number) → {name of the number: one of its values}
    measured: dict[tuple[str, str], dict[str, MetricValue]] = {}
    for run in runs:
        for event in run.events.get("suite", ()):
            evaluation = evaluation_of_event(event)
            for value in metric_values_of_event(event):
                if value.metric.unit != "count":
                    measured.setdefault((evaluation, value.kind), {})[value.name] = value
    runs = [_with_events_by_evaluation(run) for run in runs]
    charts = []
    for (evaluation, _), values in measured.items():
        metric = next(reversed(values.values())).metric
        label_of_all = "all" if len(values) > 1 else ""
        quantities = [
            (value.condition or label_of_all, f"suite {evaluation}", name)
            for name, value in values.items()
        ]
        charts.append(
            _chart_over_steps(
                f"{evaluation}: {metric.title}",
                runs,
                quantities,
                marks,
                from_zero=metric.unit == "share",
                note=f"{metric.better.capitalize()} is better." if metric.better else "",
            )
        )
    return _nonempty(charts)


def _with_events_by_evaluation(run: Run) -> Run:
    """Returns the run with its "suite" events grouped by evaluation: `events` has a key "suite
    NAME" for each evaluation, and no other keys.
    """
    events: dict[str, list[dict[str, Any]]] = {}
    for event in run.events.get("suite", ()):
        events.setdefault(f"suite {evaluation_of_event(event)}", []).append(event)
    return dataclasses.replace(run, events=events)


def _optimisation_charts(runs: Sequence[Run], marks) -> list[str]:
    """Returns the charts of the learning rate and of gradient and parameter norms."""
    groups = sorted({name for run in runs for name in (run.last("diagnostics", "groups") or {})})
    return _nonempty(
        (
            _chart_over_steps(
                "Gradient norm, before clipping",
                runs,
                [("", "train", "grad_norm")],
                marks,
                log=True,
            ),
            _chart_over_steps(
                "Learning rate", runs, [("", "train", "learning_rate")], marks, from_zero=True
            ),
            _chart_by_layer("Gradient norm by layer", runs, "grad_norm", marks, log=True),
            _chart_by_layer("Parameter norm by layer", runs, "param_norm", marks),
            _chart_by_layer(
                "Largest norm weight by layer",
                runs,
                "norm_weight_max",
                marks,
                note="max |w| of the layer's norms; most of them start at 0.",
            ),
            _chart_by_group("Gradient norm outside the layers", runs, groups, "grad_norm", marks),
            _chart_by_group("Parameter norm outside the layers", runs, groups, "param_norm", marks),
        )
    )


def _chart_by_group(
    title: str, runs: Sequence[Run], groups: Sequence[str], name: str, marks
) -> str:
    """Draws a statistic of the parameter groups outside the layers (embedding, head) over steps.

    Args:
      groups: the names of the parameter groups.
      name: the name of the statistic, such as "grad_norm".
    """
    lines = []
    for r, run in enumerate(runs):
        events = [e for e in run.events.get("diagnostics", ()) if "groups" in e]
        events = events[:: -(-len(events) // _points(runs)) or 1]
        for g, group in enumerate(groups):
            y = [e["groups"].get(group, {}).get(name) for e in events]
            values = [v if isinstance(v, (int, float)) and v > 0 else np.nan for v in y]
            if np.isfinite(values).any():
                label = group.replace("_", " ")
                lines.append(
                    Line(
                        f"{run.name} {label}" if len(runs) > 1 else label,
                        [e["step"] for e in events],
                        values,
                        colour=r if len(runs) > 1 else g,
                        dash=g if len(runs) > 1 else 0,
                        dots=True,
                        run=r if len(runs) > 1 else None,
                    )
                )
    if not lines:
        return ""
    return line_chart(title, lines, log=True, marks=marks, warning=_not_measured(runs))


def _speed_charts(runs: Sequence[Run]) -> list[str]:
    """Returns the charts of throughput, memory and the use of wall time."""
    charts = [
        _chart_over_steps(
            "Tokens per second", runs, [("", "train", "tokens_per_second")], from_zero=True
        ),
        _chart_over_steps("Model FLOP/s utilisation", runs, [("", "train", "mfu")], from_zero=True),
        # Of a chip without a known peak there is no MFU.
        _chart_over_steps(
            "Model FLOP/s", runs, [("", "train", "model_flops_per_second")], from_zero=True
        )
        if any(run.last("train", "mfu") is None for run in runs)
        else "",
        _chart_over_steps(
            "Share of the time spent waiting for data",
            runs,
            [("", "train", "data_wait")],
            from_zero=True,
        ),
        _chart_over_steps(
            "Peak memory (bytes)", runs, [("", "train", "memory_bytes")], from_zero=True
        ),
    ]
    several = len(runs) > 1
    longest = max((spans[-1][1] for run in runs if (spans := wall_time_spans(run))), default=0.0)
    for r, run in enumerate(runs):
        title = "Use of wall time" + (f": {run.name}" if several else "")
        index = r if several else None
        charts.append(_wall_time_chart(title, run, unit_of_time(longest), index))
    return _nonempty(charts)


def _wall_time_chart(title: str, run: Run, unit: tuple[str, float], index: int | None) -> str:
    """Draws how the run used its wall time; returns "" if it recorded none.

    Args:
      unit: the unit of time and its seconds.
      index: the index of the run on a page of several runs.
    """
    spans = wall_time_spans(run)
    if not spans:
        return ""
    width, shares = wall_time_columns(spans, 160)
    start = run.log[0].get("time", 0.0)
    marks = [
        (fault.time - start, f"{fault.kind} at step {fault.step}: {fault.text}")
        for fault in faults(run)[:MAX_FAULTS]
    ]
    total = [f"{use} {share:.1%}" for use, share in goodput(spans).items() if share >= 5e-4]
    return stacked_columns(
        title,
        shares,
        width=width,
        names=USES,
        colours=[f"var(--use-{i})" for i in range(len(USES))],
        marks=marks,
        note=f"{', '.join(total)}. Triangles: faults, restarts and changes of settings.",
        unit=unit,
        run=index,
    )


# ---- Charts over layers


def _chart_by_layer(title: str, runs: Sequence[Run], name: str, marks=(), **options: Any) -> str:
    """Draws a quantity that layers have, such as the norm of their gradient. Returns "" if no run
    recorded it.

    If there is one run, the chart shows the quantity over steps: with one line per layer, or as a
    heatmap if there are more than MAX_LAYER_LINES layers. If there are several runs, the chart
    shows the newest values of each run over the layers.

    Args:
      name: the name of the quantity in "diagnostics" events.
    """
    if len(runs) > 1:
        return _chart_over_layers(title, runs, name, **options)
    measured = runs[0].layers(name)
    if measured is None:
        return ""
    steps, values = measured
    layers = [i for i in range(values.shape[1]) if np.isfinite(values[:, i]).any()]
    names = _layer_names(runs[0], values.shape[1])
    if len(layers) > MAX_LAYER_LINES:
        return heatmap(
            title,
            values[:, layers].T,
            rows=[names[i] for i in layers],
            columns=steps,
            row_label="layer",
            column_label="step",
            log=options.get("log", False),
            note=options.get("note", ""),
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
    return line_chart(title, lines, marks=marks, **options)


def _chart_over_layers(title: str, runs: Sequence[Run], name: str, **options: Any) -> str:
    """Draws each run's newest values of a quantity over the layers. Returns "" if no run recorded
    it.
    """
    newest = {}  # index of the run → (step, values [layers])
    for r, run in enumerate(runs):
        measured = run.layers(name)
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
    options["warning"] = _not_measured(runs)
    return line_chart(title, lines, x_label="layer", x_names=names, **options)


def _layer_names(run: Run, count: int) -> list[str]:
    """Returns the names of the `count` entries of a list over layers. If the run's settings give
    another number of layers, the names are the numbers 0 … count - 1.
    """
    return run.layer_names if len(run.layer_names) == count else [str(i) for i in range(count)]


def _expert_charts(runs: Sequence[Run]) -> list[str]:
    """Returns the charts of the experts' load and of the router."""
    load_charts = [
        _load_chart(run, f": {run.name}" if len(runs) > 1 else "", r if len(runs) > 1 else None)
        for r, run in enumerate(runs)
    ]
    return _nonempty(
        load_charts
        + [
            _chart_by_layer(
                "Dead experts by layer",
                runs,
                "dead_experts",
                note="Experts that no token of the batch chose.",
                from_zero=True,
            ),
            _chart_by_layer(
                "Load: coefficient of variation by layer", runs, "load_cv", from_zero=True
            ),
            _chart_by_layer(
                "Load: largest violation by layer",
                runs,
                "load_max_violation",
                note="Busiest expert's load over the mean, less 1.",
                from_zero=True,
            ),
            _chart_by_layer(
                "Router entropy by layer",
                runs,
                "router_entropy",
                note="Of a token's probabilities, over ln E: 1 is undecided, 0 is certain.",
            ),
            _chart_by_layer(
                "Router z by layer", runs, "router_z", note="Mean of logsumexp(logits)²."
            ),
        ]
    )


def _load_chart(run: Run, title_suffix: str, index: int | None) -> str:
    """Draws the newest load of every expert; returns "" if the run recorded none. `index`: the
    index of the run on a page of several runs.
    """
    load = run.last("diagnostics", "expert_load")
    if not load:
        return ""
    step = next(e["step"] for e in reversed(run.events["diagnostics"]) if e.get("expert_load"))
    entropy = run.last("diagnostics", "router_entropy") or []
    names = _layer_names(run, len(entropy))
    sparse = [names[i] for i, value in enumerate(entropy) if value is not None]
    return heatmap(
        f"Router load at step {step:,}{title_suffix}",
        np.array(load, float),
        rows=sparse if len(sparse) == len(load) else [str(i) for i in range(len(load))],
        columns=[str(i) for i in range(len(load[0]))],
        row_label="layer",
        column_label="expert",
        diverging=True,
        note="1 is an equal share of the tokens. Black: no token at all.",
        run=index,
    )


def _recurrent_charts(runs: Sequence[Run]) -> list[str]:
    """Returns the charts of the recurrent layers' decay and state."""
    return _nonempty(
        (
            _chart_by_layer(
                "Decay half-life by layer (tokens)",
                runs,
                "half_life",
                log=True,
                note="−ln 2 / mean g; geometric mean over heads.",
            ),
            _chart_by_layer(
                "Longest half-life of a head (tokens)", runs, "half_life_max", log=True
            ),
            _chart_by_layer(
                "Write strength β by layer", runs, "beta", note="Mean over tokens and heads."
            ),
            _chart_by_layer(
                "State norm by layer",
                runs,
                "state_norm",
                log=True,
                note="‖S‖ (Frobenius) after the last token, mean over rows and heads.",
            ),
        )
    )


def _attention_charts(runs: Sequence[Run]) -> list[str]:
    """Returns the charts of attention sinks, gates and activations."""
    return _nonempty(
        (
            _chart_by_layer(
                "Attention on the first token",
                runs,
                "first_token_share",
                from_zero=True,
                references=SINKS,
                note="Mean over heads and over the queries after it.",
            ),
            _chart_by_layer(
                "Heads with more than 0.3 on the first token",
                runs,
                "first_token_heads",
                from_zero=True,
                note="Share of the layer's heads.",
            ),
            _chart_by_layer(
                "Largest attention logit by layer",
                runs,
                "logit_max",
                note="Over heads and pairs of query and key.",
            ),
            _chart_by_layer("Output gate of attention, mean", runs, "gate_mean", from_zero=True),
            _chart_by_layer(
                "Output gate of attention below 0.1",
                runs,
                "gate_closed",
                from_zero=True,
                note="Share of the gate's entries.",
            ),
            _chart_by_layer(
                "Largest activation by layer",
                runs,
                "activation_max",
                log=True,
                references=ACTIVATIONS,
                note="max |x| after the layer.",
            ),
            _chart_by_layer(
                "Largest activation over the median",
                runs,
                "activation_ratio",
                log=True,
                references=MASSIVE,
            ),
        )
    )


# ---- Below the charts


def _samples_html(runs: Sequence[Run]) -> str:
    """Returns HTML with at most MAX_SAMPLES sampled texts of each run, chosen at equal distances.
    The newest text comes first; the page hides the others until the reader unfolds them.
    """
    parts = []
    for r, run in enumerate(runs):
        samples = run.events.get("sample", [])
        indices = np.linspace(0, len(samples) - 1, min(MAX_SAMPLES, len(samples)))
        chosen = [samples[i] for i in np.unique(indices.round().astype(int))]
        run_name = f"{html.escape(run.name)}, " if len(runs) > 1 else ""
        texts = [
            f"<pre><small>{run_name}step {s['step']:,}</small>"
            f"{html.escape(str(s.get('text', '')))}</pre>"
            for s in reversed(chosen)
        ]
        earlier = ""
        if len(texts) > 1:
            earlier = (
                f"<details><summary>{len(texts) - 1} "
                f"earlier</summary>{''.join(texts[1:])}</details>"
            )
        if texts:
            of_run = f' data-run="{r}"' if len(runs) > 1 else ""
            parts.append(f"<div{of_run}>{texts[0]}{earlier}</div>")
    return "".join(parts)


def _faults_html(runs: Sequence[Run]) -> str:
    """Returns a table of faults and restarts; "" if there were none."""
    rows = [
        [
            *([run.name] if len(runs) > 1 else []),
            f"{fault.step:,}",
            _duration(fault.time - run.log[0].get("time", 0.0)),
            fault.kind,
            fault.text,
        ]
        for run in runs
        for fault in faults(run)
    ]
    head = [*(["run"] if len(runs) > 1 else []), "step", "after", "what", ""]
    if not rows:
        return ""
    more = len(rows) - MAX_FAULTS
    note = f"<p>{more:,} more are in metrics.jsonl.</p>" if more > 0 else ""
    return table(head, rows[:MAX_FAULTS]) + note


def _bad_records_html(runs: Sequence[Run]) -> str:
    """Returns a table of the records that were left out of the data or mended; "" without any."""
    rows = [
        [*([run.name] if len(runs) > 1 else []), glob, f"{count:,}", text]
        for run in runs
        for glob, count, text in run.last("start", "bad_records") or ()
    ]
    head = [*(["run"] if len(runs) > 1 else []), "data.path", "records", ""]
    return table(head, rows) if rows else ""


def _operators_html(runs: Sequence[Run]) -> str:
    """Returns a table of what ran each operator since the newest start, and why; "" if no run has
    recorded it.
    """
    rows = [
        [
            *([run.name] if len(runs) > 1 else []),
            entry["operator"],
            entry["implementation"],
            " · ".join(filter(None, (entry["consequence"], entry["why"]))),
            entry["call"],
        ]
        for run in runs
        for entry in run.last("operators", "operators") or ()
    ]
    head = [*(["run"] if len(runs) > 1 else []), "operator", "runs as", "why", "a call"]
    return table(head, rows) if rows else ""


def _configuration_html(runs: Sequence[Run]) -> str:
    """Returns a table of the settings that differ between the runs, and all settings of each."""
    parts = []
    if len(runs) > 1:
        rows = [[name, *map(_setting_text, values)] for name, values in setting_differences(runs)]
        parts.append(
            table(["setting that differs", *(run.name for run in runs)], rows)
            if rows
            else "<p>No setting differs.</p>"
        )
    for r, run in enumerate(runs):
        rows = [[name, _setting_text(value)] for name, value in flatten(run.config).items()]
        of_run = f' data-run="{r}"' if len(runs) > 1 else ""
        parts.append(
            f"<details{of_run}><summary>every setting of "
            f"{html.escape(run.name)}</summary>{table(['setting', 'value'], rows)}</details>"
        )
    return "".join(parts)


def _setting_text(value: Any) -> str:
    if isinstance(value, list):
        if len(value) > 1 and all(isinstance(item, str) for item in value):
            return _repeats_text(value)
        return ", ".join(map(str, value))
    return "–" if value is None else str(value) or "''"


def _repeats_text(names: Sequence[str]) -> str:
    """Writes names of which many are equal, such as those of layers: "3 × a, b" for a, a, a, b, and
    "2 × (3 × a, b)" for this twice.
    """
    count = len(names)
    period = next(p for p in range(1, count + 1) if names == names[:p] * (count // p))
    parts = []
    for name, group in itertools.groupby(names[:period]):
        times = len(list(group))
        parts.append(f"{times} × {name}" if times > 1 else name)
    text = ", ".join(parts)
    if period == count:
        return text
    return f"{count // period} × " + (f"({text})" if len(parts) > 1 else text)


def _nonempty(charts: Iterable[str]) -> list[str]:
    return [chart for chart in charts if chart]
