"""The page: which charts a report holds, in which order, for one run or several. docs/report.md
says what each means.
"""

import html
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from qwen3next_jax.common.figures import Value, evaluation, recorded
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.reporting.charts import Line, heatmap, line_chart, short, stacked_columns, table
from qwen3next_jax.reporting.runs import (
    POINTS,
    TRAINING,
    USES,
    Run,
    differences,
    faults,
    goodput,
    load_run,
    stages,
    wall_time,
    wall_time_columns,
)

FEW_LAYERS = 8  # more are drawn as a heatmap of layers over steps
SAMPLES = 12  # shown; the rest is in metrics.jsonl
# Published values that charts are compared with: (label, value). Sources in docs/report.md.
SINKS = (("without output gate .467", 0.467), ("with gate .048", 0.048))
ACTIVATIONS = (("without output gate 1053", 1053.0), ("with gate 94", 94.0))
MASSIVE = (("massive: 1000 × the median", 1000.0),)
ACCEPTANCE = (("released model .897", 0.897), (".719", 0.719), (".476", 0.476))


def write_report(workdirs: Sequence[pathlib.Path], out: pathlib.Path) -> None:
    """Writes the report of the runs in `workdirs` to `out`, at once or not at all.

    Raises:
      UserError: one of them is not the folder of a run that has recorded something.
    """
    text = report([load_run(workdir) for workdir in workdirs])
    temporary = out.with_suffix(".tmp")
    # a sampled text may hold half a surrogate pair, which is no UTF-8
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, out)


def report(runs: Sequence[Run]) -> str:
    """The whole page for one run, or for several on the same axes."""
    runs = _distinct(runs)
    marks = [
        (fault.step, f"{fault.kind} at step {fault.step}: {fault.text}", "fault")
        for fault in faults(runs[0])[:200]
    ]
    marks += [
        (step, f"stage {name} begins after step {step}", "stage")
        for step, name in stages(runs[0])
        if step
    ]
    marks = marks if len(runs) == 1 else []
    sections = {
        "Loss": _loss(runs, marks),
        "Evaluations": _evaluations(runs, marks),
        "Optimisation": _optimisation(runs, marks),
        "Speed and use of time": _speed(runs),
        "Experts": _experts(runs),
        "Recurrent layers": _recurrent(runs),
        "Attention and activations": _attention(runs),
    }
    body = "".join(
        _section(name, f'<div class="charts">{"".join(found)}</div>')
        for name, found in sections.items()
        if found
    )
    rest = {
        "Samples": _samples(runs),
        "Faults and restarts": _faults(runs),
        "Configuration": _configuration(runs),
    }
    body += "".join(_section(name, text) for name, text in rest.items() if text)
    names = [name for name in sections if sections[name]] + [name for name in rest if rest[name]]
    return document(
        " · ".join(run.name for run in runs), _subtitle(runs), names, _overview(runs) + body
    )


def document(title: str, subtitle: str, sections: Sequence[str], body: str) -> str:
    """A self-contained page around `body`, whose sections (see `_section`) are linked at its
    top.
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
        '<button id="theme" type="button">light / '
        f"dark</button></header><nav>{links}</nav>{body}</main>"
        f"<script>{script}</script></body></html>\n"
    )


def _section(name: str, body: str) -> str:
    return f'<section id="{_anchor(name)}"><h2>{html.escape(name)}</h2>{body}</section>'


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """The same runs, folders of the same name numbered."""
    seen: dict[str, int] = {}
    result = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        result.append(
            Run(f"{run.name} ({seen[run.name]})", run.config, run.log, run.events)
            if seen[run.name] > 1
            else run
        )
    return result


# ---- above the charts
# ------------------------------------------------------------------------------------------


def _subtitle(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs; times are of each run's own start"
    start = runs[0].events.get("start", [{}])[-1]
    devices, hosts = start.get("devices"), start.get("hosts")
    where = (
        f"{devices} × {start.get('device_kind')}"
        + (f" on {hosts} hosts" if hosts and hosts > 1 else "")
        if devices
        else ""
    )
    code = f"commit {start['commit'][:10]}" if start.get("commit") else ""
    lines = "dashed red lines: faults and restarts" if faults(runs[0]) else ""
    begun = ", ".join(f"{name} from step {step + 1}" for step, name in stages(runs[0]))
    return " · ".join(
        filter(
            None,
            (
                where,
                f"JAX {start['jax']}" if "jax" in start else "",
                code,
                lines,
                begun and f"stages, at grey lines: {begun}",
            ),
        )
    )


def _overview(runs: Sequence[Run]) -> str:
    facts = [_facts(run) for run in runs]
    if len(runs) == 1:
        tiles = "".join(
            '<div class="tile"><b '
            f'title="{html.escape(value)}">{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
            for name, value in facts[0].items()
        )
        return f'<div class="tiles">{tiles}</div>'
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    rows = [[name, *(fact.get(name, "–") for fact in facts)] for name in names]
    return (
        "<div "
        f'class="overview">{table(["", *(run.name for run in runs)], rows, numeric=True)}</div>'
    )


def _facts(run: Run) -> dict[str, str]:
    spans = wall_time(run)
    found = faults(run)
    step, steps = run.last("train", "step"), run.config.get("train", {}).get("steps")
    facts = {
        "step": (f"{step:,}" if step else "–")
        + (f" of {steps:,}" if steps and step != steps else "")
    }

    def add(name: str, kind: str, key: str, form: Callable[[float], str]) -> None:
        value = run.last(kind, key)
        if isinstance(value, (int, float)):
            facts[name] = form(value)

    add("tokens seen", "train", "tokens_seen", short)
    add("training loss", "train", "loss", "{:.4f}".format)
    if run.last("heldout", "bits_per_byte") is not None:
        add("held-out bits/byte", "heldout", "bits_per_byte", "{:.4f}".format)
    else:
        add("held-out accuracy", "heldout", "accuracy", "{:.1%}".format)
    add("MTP acceptance", "heldout", "mtp_acceptance/0", "{:.1%}".format)
    add("tokens/s", "train", "tokens_per_second", "{:,.0f}".format)
    add("model FLOP/s", "train", "model_flops_per_second", short)
    add("MFU", "train", "mfu", "{:.1%}".format)
    facts["wall time"] = _duration(spans[-1][1] if spans else 0.0)
    facts["goodput"] = f"{goodput(spans)[TRAINING]:.1%}"
    facts["restarts"] = str(sum(fault.kind == "restart" for fault in found))
    facts["skipped updates"] = str(sum(fault.kind == "skip" for fault in found))
    return facts


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    days, rest = divmod(minutes, 1440)
    return (
        (f"{days} d " if days else "")
        + (f"{rest // 60} h " if rest >= 60 else "")
        + f"{rest % 60} min"
    )


# ---- charts over steps
# -----------------------------------------------------------------------------------------


def _over_steps(
    title: str, runs: Sequence[Run], parts: Sequence[tuple[str, str, str]], marks=(), **options: Any
) -> str:
    """A chart of `parts` (label, kind of event, name), or "" where no run has any. One run: a
    colour for each part; several: a colour for each run, a dash for each part.
    """
    lines = []
    for r, run in enumerate(runs):
        for p, (label, kind, name) in enumerate(parts):
            series = run.series(kind, name, POINTS if len(runs) < 5 else POINTS // 2)
            if series is not None:
                several = len(runs) > 1
                name = (
                    " ".join(filter(None, (run.name, label)))
                    if several and len(parts) > 1
                    else run.name
                    if several
                    else label
                )
                lines.append(
                    Line(
                        name,
                        series.x,
                        series.y,
                        series.low,
                        series.high,
                        colour=r if several else p,
                        dash=p if several else 0,
                        dots=kind != "train",
                    )
                )
    return line_chart(title, lines, marks=marks, **options) if lines else ""


def _loss(runs: Sequence[Run], marks) -> list[str]:
    depths = sorted(
        {
            name.partition("/")[2]
            for run in runs
            for name in run.names("train", "mtp_loss/")
            if name[9:].isdecimal()
        },
        key=int,
    )
    accepted = [(f"depth {d}", "heldout", f"mtp_acceptance/{d}") for d in depths]
    return _only(
        (
            _over_steps(
                "Loss (nats per token)",
                runs,
                [("training", "train", "loss"), ("held-out", "heldout", "loss")],
                marks,
                late=True,
            ),
            _over_steps(
                "Held-out bits per byte", runs, [("", "heldout", "bits_per_byte")], marks, late=True
            )
            or _over_steps("Held-out accuracy", runs, [("", "heldout", "accuracy")], marks),
            _over_steps(
                "MTP loss by depth (nats per token)",
                runs,
                [(f"depth {d}", "train", f"mtp_loss/{d}") for d in depths],
                marks,
                late=True,
            ),
            _over_steps(
                "MTP drafts accepted by depth, held-out text",
                runs,
                accepted,
                marks,
                from_zero=True,
                references=ACCEPTANCE[: len(depths)],
                note="Share of positions whose drafts so far all match the trunk's greedy tokens.",
            ),
            _over_steps(
                "Next-token accuracy in training",
                runs,
                [
                    ("trunk", "train", "top1"),
                    *((f"MTP depth {d}", "train", f"mtp_top1/{d}") for d in depths),
                ],
                marks,
                from_zero=True,
            ),
            _over_steps(
                "Balance loss",
                runs,
                [("", "train", "balance_loss")],
                marks,
                late=True,
                references=(("perfect balance 1", 1.0),),
            ),
        )
    )


def _evaluations(runs: Sequence[Run], marks) -> list[str]:
    """A chart for each evaluation of `eval.suites` and each of its figures, but for mere counts."""
    charts: dict[tuple[str, str], dict[str, Value]] = {}
    for run in runs:
        for event in run.events.get("suite", ()):
            for value in recorded(event):
                if value.figure.unit != "count":
                    charts.setdefault((evaluation(event), value.kind), {})[value.name] = value
    split = [
        Run(
            run.name,
            run.config,
            run.log,
            {
                f"suite {suite}": [e for e in run.events.get("suite", ()) if evaluation(e) == suite]
                for suite, _ in charts
            },
        )
        for run in runs
    ]
    found = []
    for (suite, _), values in charts.items():
        figure = next(reversed(values.values())).figure
        parts = [
            (value.place or "all" * (len(values) > 1), f"suite {suite}", name)
            for name, value in values.items()
        ]
        found.append(
            _over_steps(
                f"{suite}: {figure.title}",
                split,
                parts,
                marks,
                from_zero=figure.unit == "share",
                note=f"{figure.better.capitalize()} is better." if figure.better else "",
            )
        )
    return _only(found)


def _optimisation(runs: Sequence[Run], marks) -> list[str]:
    groups = sorted({name for run in runs for name in (run.last("diagnostics", "groups") or {})})
    return _only(
        (
            _over_steps(
                "Gradient norm, before clipping",
                runs,
                [("", "train", "grad_norm")],
                marks,
                log=True,
            ),
            _over_steps(
                "Learning rate", runs, [("", "train", "learning_rate")], marks, from_zero=True
            ),
            _by_layer("Gradient norm by layer", runs, "grad_norm", marks, log=True),
            _by_layer("Parameter norm by layer", runs, "param_norm", marks),
            _by_layer(
                "Largest norm weight by layer",
                runs,
                "norm_weight_max",
                marks,
                note="max |w| of the layer's norms; most of them start at 0.",
            ),
            _by_group("Gradient norm outside the layers", runs, groups, "grad_norm", marks),
            _by_group("Parameter norm outside the layers", runs, groups, "param_norm", marks),
        )
    )


def _by_group(title: str, runs: Sequence[Run], groups: Sequence[str], name: str, marks) -> str:
    lines = []
    for r, run in enumerate(runs):
        events = [e for e in run.events.get("diagnostics", ()) if "groups" in e][-2000:]
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
                    )
                )
    return line_chart(title, lines, log=True, marks=marks) if lines else ""


def _speed(runs: Sequence[Run]) -> list[str]:
    found = [
        _over_steps(
            "Tokens per second", runs, [("", "train", "tokens_per_second")], from_zero=True
        ),
        _over_steps("Model FLOP/s utilisation", runs, [("", "train", "mfu")], from_zero=True)
        or _over_steps(
            "Model FLOP/s", runs, [("", "train", "model_flops_per_second")], from_zero=True
        ),
        _over_steps(
            "Share of the time spent waiting for data",
            runs,
            [("", "train", "data_wait")],
            from_zero=True,
        ),
        _over_steps("Peak memory (bytes)", runs, [("", "train", "memory_bytes")], from_zero=True),
    ]
    for run in runs:
        spans = wall_time(run)
        if spans:
            width, shares = wall_time_columns(spans, 160)
            zero = run.log[0].get("time", 0.0)
            marks = [
                (fault.time - zero, f"{fault.kind} at step {fault.step}: {fault.text}")
                for fault in faults(run)[:200]
            ]
            used = ", ".join(
                f"{use} {share:.1%}" for use, share in goodput(spans).items() if share >= 5e-4
            )
            found.append(
                stacked_columns(
                    "Use of wall time" + (f": {run.name}" if len(runs) > 1 else ""),
                    shares,
                    width=width,
                    names=USES,
                    colours=[f"var(--use-{i})" for i in range(len(USES))],
                    marks=marks,
                    note=f"{used}. Triangles: faults and restarts.",
                )
            )
    return _only(found)


# ---- charts over layers
# ----------------------------------------------------------------------------------------


def _by_layer(title: str, runs: Sequence[Run], name: str, marks=(), **options: Any) -> str:
    """A number of each layer. One run: over steps, as lines or, of many layers, as a heatmap.
    Several runs: over layers, at the newest step of each.
    """
    if len(runs) > 1:
        return _profile(title, runs, name, **options)
    measured = runs[0].layers(name)
    if measured is None:
        return ""
    steps, values = measured
    layers = [i for i in range(values.shape[1]) if np.isfinite(values[:, i]).any()]
    names = _layer_names(runs[0], values.shape[1])
    if len(layers) > FEW_LAYERS:
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
            shade=p / max(len(layers) - 1, 1),
            dots=True,
        )
        for p, i in enumerate(layers)
    ]
    return line_chart(title, lines, marks=marks, **options)


def _profile(title: str, runs: Sequence[Run], name: str, **options: Any) -> str:
    measured = {r: found for r, run in enumerate(runs) if (found := run.layers(name)) is not None}
    mine = {r: _layer_names(runs[r], values.shape[1]) for r, (_, values) in measured.items()}
    found = {n for layer_names in mine.values() for n in layer_names}
    names = [*sorted(found - {"MTP"}, key=int), *(["MTP"] if "MTP" in found else [])]
    lines = []
    for r, (steps, values) in measured.items():
        kept = np.flatnonzero(np.isfinite(values[-1]))
        lines.append(
            Line(
                f"{runs[r].name} at step {short(steps[-1])}",
                [names.index(mine[r][i]) for i in kept],
                values[-1][kept],
                colour=r,
                dots=True,
            )
        )
    return line_chart(title, lines, x_label="layer", x_names=names, **options) if lines else ""


def _layer_names(run: Run, count: int) -> list[str]:
    return run.layer_names if len(run.layer_names) == count else [str(i) for i in range(count)]


def _experts(runs: Sequence[Run]) -> list[str]:
    found = []
    for run in runs:
        load = run.last("diagnostics", "expert_load")
        if load:
            step = next(
                e["step"] for e in reversed(run.events["diagnostics"]) if e.get("expert_load")
            )
            entropy = run.last("diagnostics", "router_entropy") or []
            names = _layer_names(run, len(entropy))
            sparse = [names[i] for i, value in enumerate(entropy) if value is not None]
            found.append(
                heatmap(
                    f"Router load at step {step:,}" + (f": {run.name}" if len(runs) > 1 else ""),
                    np.array(load, float),
                    rows=sparse if len(sparse) == len(load) else [str(i) for i in range(len(load))],
                    columns=[str(i) for i in range(len(load[0]))],
                    row_label="layer",
                    column_label="expert",
                    diverging=True,
                    note="1 is an equal share of the tokens. Black: no token at all.",
                )
            )
    return _only(
        found
        + [
            _by_layer(
                "Dead experts by layer",
                runs,
                "dead_experts",
                note="Experts that no token of the batch chose.",
                from_zero=True,
            ),
            _by_layer("Load: coefficient of variation by layer", runs, "load_cv", from_zero=True),
            _by_layer(
                "Load: largest violation by layer",
                runs,
                "load_max_violation",
                note="Busiest expert's load over the mean, less 1.",
                from_zero=True,
            ),
            _by_layer(
                "Router entropy by layer",
                runs,
                "router_entropy",
                note="Of a token's probabilities, over ln E: 1 is undecided, 0 is certain.",
            ),
            _by_layer("Router z by layer", runs, "router_z", note="Mean of logsumexp(logits)²."),
        ]
    )


def _recurrent(runs: Sequence[Run]) -> list[str]:
    return _only(
        (
            _by_layer(
                "Decay half-life by layer (tokens)",
                runs,
                "half_life",
                log=True,
                note="−ln 2 / mean g; geometric mean over heads.",
            ),
            _by_layer("Longest half-life of a head (tokens)", runs, "half_life_max", log=True),
            _by_layer(
                "Write strength β by layer", runs, "beta", note="Mean over tokens and heads."
            ),
            _by_layer(
                "State norm by layer",
                runs,
                "state_norm",
                log=True,
                note="‖S‖ (Frobenius) after the last token, mean over rows and heads.",
            ),
        )
    )


def _attention(runs: Sequence[Run]) -> list[str]:
    return _only(
        (
            _by_layer(
                "Attention on the first token",
                runs,
                "first_token_share",
                from_zero=True,
                references=SINKS,
                note="Mean over heads and over the queries after it.",
            ),
            _by_layer(
                "Heads with more than 0.3 on the first token",
                runs,
                "first_token_heads",
                from_zero=True,
                note="Share of the layer's heads.",
            ),
            _by_layer(
                "Largest attention logit by layer",
                runs,
                "logit_max",
                note="Over heads and pairs of query and key.",
            ),
            _by_layer("Output gate of attention, mean", runs, "gate_mean", from_zero=True),
            _by_layer(
                "Output gate of attention below 0.1",
                runs,
                "gate_closed",
                from_zero=True,
                note="Share of the gate's entries.",
            ),
            _by_layer(
                "Largest activation by layer",
                runs,
                "activation_max",
                log=True,
                references=ACTIVATIONS,
                note="max |x| after the layer.",
            ),
            _by_layer(
                "Largest activation over the median",
                runs,
                "activation_ratio",
                log=True,
                references=MASSIVE,
            ),
        )
    )


# ---- below the charts
# ------------------------------------------------------------------------------------------


def _samples(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        samples = run.events.get("sample", [])
        places = np.linspace(0, len(samples) - 1, min(SAMPLES, len(samples)))
        chosen = [samples[i] for i in np.unique(places.round().astype(int))]
        texts = [
            f"<pre><small>{html.escape(run.name) + ', ' if len(runs) > 1 else ''}step "
            f"{s['step']:,}</small>{html.escape(str(s.get('text', '')))}</pre>"
            for s in reversed(chosen)
        ]
        parts += texts[:1]
        if len(texts) > 1:
            parts.append(
                f"<details><summary>{len(texts) - 1} "
                f"earlier</summary>{''.join(texts[1:])}</details>"
            )
    return "".join(parts)


def _faults(runs: Sequence[Run]) -> str:
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
    more = f"<p>{len(rows) - 200:,} more are in metrics.jsonl.</p>" if len(rows) > 200 else ""
    return table(head, rows[:200]) + more if rows else ""


def _configuration(runs: Sequence[Run]) -> str:
    parts = []
    if len(runs) > 1:
        rows = [[name, *map(_shown, values)] for name, values in differences(runs)]
        parts.append(
            table(["setting that differs", *(run.name for run in runs)], rows)
            if rows
            else "<p>No setting differs.</p>"
        )
    for run in runs:
        rows = [[name, _shown(value)] for name, value in flatten(run.config).items()]
        parts.append(
            "<details><summary>every setting of "
            f"{html.escape(run.name)}</summary>{table(['setting', 'value'], rows)}</details>"
        )
    return "".join(parts)


def _shown(value: Any) -> str:
    text = (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else "–"
        if value is None
        else repr(value)
        if value == ""
        else str(value)
    )
    return text if len(text) <= 300 else text[:300] + " …"


def _only(figures: Iterable[str]) -> list[str]:
    return [figure for figure in figures if figure]
