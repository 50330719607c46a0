"""The report: an HTML page of charts and tables about one run, or about several runs on the same
axes. docs/report.md explains the numbers.
"""

import dataclasses
import html
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from qwen3next_jax.common.errors import UserError, join_first
from qwen3next_jax.common.storage import write_text_atomically
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.reporting import run_charts
from qwen3next_jax.reporting.chart_table import heldout_metric_name
from qwen3next_jax.reporting.charts import (
    series_colour,
    short_number,
    suitable_time_unit,
    table_html,
)
from qwen3next_jax.reporting.run_charts import MANY_RUNS, MAX_FAULTS
from qwen3next_jax.reporting.runs import (
    TRAINING,
    Run,
    faults_and_restarts,
    incomparable_reasons,
    load_run,
    runs_without_layer_statistics,
    setting_differences,
    stage_starts,
    wall_time_shares,
    wall_time_spans,
)
from qwen3next_jax.reporting.speedup import (
    arms_of_runs,
    compare_in_every_unit,
    comparisons_html,
    law_chart,
    speed_up_sentence_of_runs,
)

# The values that a table of runs compares: (kind of event, name).
COMPARED = (("train", "loss"), ("heldout", "bits_per_byte"), ("heldout", "accuracy"))
NO_STEPS: Mapping[tuple[str, str], int] = {}
MAX_SETTINGS = 6  # settings that differ, in the table of runs; the configuration has all of them
MAX_SAMPLES = 12  # sampled texts on the page; metrics.jsonl has all of them


def write_report(workdirs: Sequence[pathlib.Path], out: pathlib.Path) -> list[str]:
    """Writes the report of the runs in `workdirs` to the file `out`, atomically. Returns sentences:
    one for each thing that the report cannot show or compare and, if there are exactly two runs,
    one with the effective speed-up.

    Raises:
      UserError: a folder contains no run, or a run that has recorded nothing.
    """
    runs = _with_distinct_names([load_run(workdir) for workdir in workdirs])
    text = render_report(runs)
    # A sampled text may contain half a surrogate pair, which UTF-8 cannot encode.
    write_text_atomically(out, text, errors="backslashreplace")
    return comparison_warnings(runs) + (
        [speed_up_sentence_of_runs(*runs)] if len(runs) == 2 else []
    )


def render_report(runs: Sequence[Run]) -> str:
    """Returns the page about the given runs, whose names differ, as HTML."""
    sections = {}
    if len(runs) > 1:
        sections["Runs"] = _runs_table_html(runs)
    for name, charts in run_charts.chart_sections(runs).items():
        sections[name] = _charts_html(charts, runs)
    if len(runs) == 2:
        sections["Effective speed-up"] = _speed_up_html(*runs)
    sections["Samples"] = _samples_html(runs)
    sections["Faults and restarts"] = _faults_html(runs)
    sections["Bad records in the data"] = _bad_records_html(runs)
    sections["What runs each operator"] = _operators_html(runs)
    sections["Configuration"] = _configuration_html(runs)
    sections = {name: content for name, content in sections.items() if content}
    body = "".join(_section_html(name, content) for name, content in sections.items())
    return html_document(
        " · ".join(run.name for run in runs) if len(runs) <= 4 else f"{len(runs)} runs",
        _subtitle(runs),
        list(sections),
        _warnings_html(runs) + (_tiles_html(runs[0]) if len(runs) == 1 else "") + body,
    )


def _charts_html(charts: Sequence[str], runs: Sequence[Run]) -> str:
    """Returns the charts of a section as HTML. With more than MANY_RUNS runs, the charts that show
    a single run are folded.
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


def html_document(title: str, subtitle: str, sections: Sequence[str], body: str) -> str:
    """Returns a self-contained HTML page.

    Args:
      sections: the names of the sections of `body`; the top of the page has a link to each.
      body: HTML, in which each section has an id: the name of the section, in lower case and with
        "-" in place of spaces.
    """
    style, script = (
        resources.files(__package__).joinpath(f"page.{kind}").read_text() for kind in ("css", "js")
    )
    links = "".join(f'<a href="#{_section_id(name)}">{html.escape(name)}</a>' for name in sections)
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


def _section_html(name: str, body: str) -> str:
    return f'<section id="{_section_id(name)}"><h2>{html.escape(name)}</h2>{body}</section>'


def _section_id(name: str) -> str:
    return name.lower().replace(" ", "-")


def _with_distinct_names(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs. If an earlier run has the name of a run, a number is appended to the name
    of the later run.
    """
    result: dict[str, Run] = {}
    for run in runs:
        name, number = run.name, 1
        while name in result:
            number += 1
            name = f"{run.name} ({number})"
        result[name] = dataclasses.replace(run, name=name)
    return list(result.values())


# ---- Above the charts


def _subtitle(runs: Sequence[Run]) -> str:
    """Returns the line under the title. On the page of one run, the line names the devices, the
    version of JAX, the commit and the stages. On the page of several runs, it gives the number of
    runs.
    """
    if len(runs) > 1:
        return f"{len(runs)} runs; times are of each run's own start"
    start = runs[0].events_by_kind.get("start", [{}])[-1]
    devices, hosts = start.get("devices"), start.get("hosts")
    parts = []
    if devices:
        on_hosts = f" on {hosts} hosts" if hosts and hosts > 1 else ""
        parts.append(f"{devices} × {start.get('device_kind')}{on_hosts}")
    if "jax" in start:
        parts.append(f"JAX {start['jax']}")
    if start.get("commit"):
        parts.append(f"commit {start['commit'][:10]}")
    if faults_and_restarts(runs[0]):
        parts.append("dashed red lines: faults and restarts")
    if begun := ", ".join(f"{name} from step {step + 1}" for step, name in stage_starts(runs[0])):
        parts.append(f"stages, at grey lines: {begun}")
    return " · ".join(parts)


def _tiles_html(run: Run) -> str:
    """Returns the most important numbers of one run as tiles."""
    tiles = "".join(
        f'<div class="tile"><b title="{html.escape(value)}">{html.escape(value)}</b>'
        f"<span>{html.escape(name)}</span></div>"
        for name, value in _headline_numbers(run, unit=None).items()
    )
    return f'<div class="tiles">{tiles}</div>'


def _runs_table_html(runs: Sequence[Run]) -> str:
    """Returns a table with a row for each run: its most important numbers and the settings in which
    the runs differ. In the table, the reader can select, search and sort the runs, and choose the
    colour that each run has in all charts (page.js).
    """
    longest = max((spans[-1][1] for run in runs if (spans := wall_time_spans(run))), default=0.0)
    steps = _last_common_steps(runs)
    summaries = [_headline_numbers(run, suitable_time_unit(longest), steps) for run in runs]
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


def _speed_up_html(baseline: Run, run: Run) -> str:
    try:
        title, *arms = arms_of_runs(baseline, run)
    except UserError:
        return f"<p>{html.escape(speed_up_sentence_of_runs(baseline, run))}</p>"
    chart = law_chart(title, arms, " at the highest learning rate")
    return comparisons_html([compare_in_every_unit(*arms)]) + f'<div class="charts">{chart}</div>'


def _warnings_html(runs: Sequence[Run]) -> str:
    return "".join(
        f'<p class="warning">{html.escape(text)}</p>' for text in comparison_warnings(runs)
    )


def comparison_warnings(runs: Sequence[Run]) -> list[str]:
    """Returns a sentence for each thing that the page cannot show or compare, such as losses of
    runs with different tokenizers.
    """
    sentences = []
    if len(runs) > 1:
        sentences = [reason.full_sentence for reason in incomparable_reasons(runs).values()]
    measured = {run.name: heldout_metric_name(run) for run in runs}
    if len(set(filter(None, measured.values()))) > 1:
        metrics_text = "; ".join(f"{name}: {metric}" for name, metric in measured.items() if metric)
        sentences.append(f"Held-out metrics differ, and have charts of their own ({metrics_text}).")
    for run in runs:
        if not run.events_by_kind.get("train"):
            sentences.append(f"{run.name} has not recorded a training step yet.")
        elif not measured[run.name] and any(measured.values()):
            sentences.append(f"{run.name} has not recorded a held-out evaluation.")
    if unmeasured := runs_without_layer_statistics(runs):
        names = join_first((run.name for run in unmeasured), MANY_RUNS)
        sentences.append(
            f"Charts by layer are without {names}, where no layer was measured: "
            "telemetry.diagnostics_every says after how many steps a run measures them (0: never)."
        )
    last = {
        run.name: step for run in runs if (step := run.newest_value("train", "step")) is not None
    }
    if len(set(last.values())) > 1:
        steps = join_first((f"{name}: {step:,}" for name, step in last.items()), MANY_RUNS)
        compared = "the table also has the values at the last step that the runs have in common."
        if not _last_common_steps(runs):
            compared = "no step was recorded by all of them, so the table does not compare them."
        sentences.append(f"The runs are at different steps ({steps}): {compared}")
        sentences += _learning_rate_warnings(runs)
    return sentences


def _learning_rate_warnings(runs: Sequence[Run]) -> list[str]:
    """If the table compares training losses at a step at which the runs have different learning
    rates, returns a list with one sentence, which says so; otherwise []. The learning rates of two
    runs at the same step can differ because a learning-rate schedule depends on `train.steps`.
    """
    step = _last_common_steps(runs).get(("train", "loss"))
    rates = (
        {run.name: run.newest_value("train", "learning_rate", step) for run in runs} if step else {}
    )
    if None in rates.values() or len({f"{rate:.1e}" for rate in rates.values()}) < 2:
        return []
    rates_text = join_first((f"{name}: {rate:.1e}" for name, rate in rates.items()), MANY_RUNS)
    return [
        f"At step {step:,}, where the table compares training losses, the learning rates differ "
        f"({rates_text}): a schedule follows train.steps."
    ]


def _last_common_steps(runs: Sequence[Run]) -> dict[tuple[str, str], int]:
    """Returns the steps at which the table compares runs of different lengths: (kind of event, name
    of a metric) → the last step at which all runs that recorded the metric have a value. A metric
    is left out if all runs have their newest value at the same step, or if there is no step at
    which all of them have a value.
    """
    found = {}
    for kind, name in COMPARED:
        steps_of_runs = [
            {
                event["step"]
                for event in run.events_by_kind.get(kind, ())
                if event.get(name) is not None
            }
            for run in runs
        ]
        steps_of_runs = [steps for steps in steps_of_runs if steps]
        if len({max(steps) for steps in steps_of_runs}) > 1 and (
            common := set.intersection(*steps_of_runs)
        ):
            found[kind, name] = max(common)
    return found


def _headline_numbers(
    run: Run, unit: tuple[str, float] | None, steps: Mapping[tuple[str, str], int] = NO_STEPS
) -> dict[str, str]:
    """Returns the most important numbers of a run: name → newest value, as text.

    Args:
      unit: the unit of the wall time and the length of this unit in seconds; None: a text with
        several units, such as "2 d 3 h 5 min".
      steps: (kind of event, name of a metric) → a step. For each metric in `steps`, the result also
        has the value at the given step.
    """
    spans = wall_time_spans(run)
    faults_of_run = faults_and_restarts(run)
    step, last = run.newest_value("train", "step"), run.config.get("train", {}).get("steps")
    steps_text = f" of {last:,}" if last and step != last else ""
    summary = {"step": (f"{step:,}" if step else "–") + steps_text}

    def add(name: str, kind: str, key: str, to_text: Callable[[float], str]) -> None:
        value = run.newest_value(kind, key)
        if isinstance(value, (int, float)):
            summary[name] = to_text(value)
        if (kind, key) in steps:
            then = run.newest_value(kind, key, steps[kind, key])
            if isinstance(then, (int, float)):
                summary[f"{name} at step {steps[kind, key]:,}"] = to_text(then)

    add("tokens seen", "train", "tokens_seen", short_number)
    add("training loss", "train", "loss", "{:.4f}".format)
    if heldout_metric_name(run) == "bits per byte":
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
    summary["wall time"] = _duration_in_unit(seconds, *unit) if unit else _duration_text(seconds)
    summary["goodput"] = f"{wall_time_shares(spans)[TRAINING]:.1%}"
    summary["restarts"] = str(sum(fault.kind == "restart" for fault in faults_of_run))
    summary["skipped updates"] = str(sum(fault.kind == "skip" for fault in faults_of_run))
    return summary


def _duration_in_unit(seconds: float, unit: str, seconds_of_unit: float) -> str:
    """Returns a duration as text, in a given unit: "8.58 minutes", "0.08 minutes"."""
    amount = seconds / seconds_of_unit
    return f"{amount:.2f} {unit}" if amount < 10 else f"{amount:,.0f} {unit}"


def _duration_text(seconds: float) -> str:
    """Returns a duration as text, in several units: "75 s", "2 d 3 h 5 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    days, minutes = divmod(minutes, 1440)
    hours, minutes = divmod(minutes, 60)
    return (f"{days} d " if days else "") + (f"{hours} h " if hours else "") + f"{minutes} min"


# ---- Below the charts


def _samples_html(runs: Sequence[Run]) -> str:
    """Returns HTML with at most MAX_SAMPLES sampled texts of each run, chosen at equal distances.
    The newest text comes first; the page hides the older texts until the reader unfolds them.
    """
    parts = []
    for r, run in enumerate(runs):
        samples = run.events_by_kind.get("sample", [])
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
            run_attribute = f' data-run="{r}"' if len(runs) > 1 else ""
            parts.append(f"<div{run_attribute}>{texts[0]}{earlier}</div>")
    return "".join(parts)


def _faults_html(runs: Sequence[Run]) -> str:
    """Returns a table of faults and restarts; "" if there were none."""
    rows = [
        [
            *([run.name] if len(runs) > 1 else []),
            f"{fault.step:,}",
            _duration_text(fault.unix_seconds - run.all_events[0].get("time", 0.0)),
            fault.kind,
            fault.details,
        ]
        for run in runs
        for fault in faults_and_restarts(run)
    ]
    head = [*(["run"] if len(runs) > 1 else []), "step", "after", "what", ""]
    if not rows:
        return ""
    more = len(rows) - MAX_FAULTS
    note = f"<p>{more:,} more are in metrics.jsonl.</p>" if more > 0 else ""
    return table_html(head, rows[:MAX_FAULTS]) + note


def _bad_records_html(runs: Sequence[Run]) -> str:
    """Returns a table of the bad records that were skipped or repaired in the data; "" if there
    were none.
    """
    rows = [
        [*([run.name] if len(runs) > 1 else []), glob, f"{count:,}", text]
        for run in runs
        for glob, count, text in run.newest_value("start", "bad_records") or ()
    ]
    head = [*(["run"] if len(runs) > 1 else []), "data.path", "records", ""]
    return table_html(head, rows) if rows else ""


def _operators_html(runs: Sequence[Run]) -> str:
    """Returns a table that says which implementation has run each operator since the run's newest
    start, and why this implementation was chosen; "" if no run has recorded implementations.
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
        for entry in run.newest_value("operators", "operators") or ()
    ]
    head = [*(["run"] if len(runs) > 1 else []), "operator", "runs as", "why", "a call"]
    return table_html(head, rows) if rows else ""


def _configuration_html(runs: Sequence[Run]) -> str:
    """Returns a table of the settings that differ between the runs, and for each run a table of all
    settings.
    """
    parts = []
    if len(runs) > 1:
        rows = [[name, *map(_setting_text, values)] for name, values in setting_differences(runs)]
        parts.append(
            table_html(["setting that differs", *(run.name for run in runs)], rows)
            if rows
            else "<p>No setting differs.</p>"
        )
    for r, run in enumerate(runs):
        rows = [[name, _setting_text(value)] for name, value in flatten(run.config).items()]
        run_attribute = f' data-run="{r}"' if len(runs) > 1 else ""
        parts.append(
            f"<details{run_attribute}><summary>every setting of "
            f"{html.escape(run.name)}</summary>{table_html(['setting', 'value'], rows)}</details>"
        )
    return "".join(parts)


def _setting_text(value: Any) -> str:
    if isinstance(value, list):
        if len(value) > 1 and all(isinstance(item, str) for item in value):
            return _shorten_repeated_names(value)
        return ", ".join(map(str, value))
    return "–" if value is None else str(value) or "''"


def _shorten_repeated_names(names: Sequence[str]) -> str:
    """Returns a short text for a list of names, such as the kinds of all layers. The text counts
    repeats: "3 × a, b" stands for the names a, a, a, b, and "2 × (3 × a, b)" for these four names
    twice.
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
