"""Draws the pictures of README.md and of the docs, from records that lie in docs/. They are SVG
files whose colours follow the reader's light or dark page.

    uv run python benchmarks/reporting/pictures.py

| picture | drawn from |
|---|---|
| `qwen3_next_80b_a3b.svg` | the config, as `qwen3next show qwen3_next_80b_a3b --svg` draws it |
| `gated_deltanet.svg`, … (one for each part of the model) | the same config, by part_figures.py |
| `page.svg` | the report of the run in docs/pictures/tiny |
| `terminal.svg` | the last events of this run, as the live panel shows them |
| `sweep.svg` | docs/sweeps/ratio.json |
| `state_alone.svg` | docs/sweeps/state.json, docs/sweeps/permutations.json |
| `state_mixture.svg` | docs/sweeps/state.json, docs/sweeps/state_ratio.json |
| `plan.svg` | docs/planner/v5p_8x8x8_16k_default.json |
| `decoding.svg` | docs/results/decoding.json |

A test compares the pictures with what this command draws. The run in docs/pictures/tiny was

    uv run train.py --config=configs/tiny.py --config.train.steps=300 --config.eval.every=50
        --config.telemetry.diagnostics_every=25 --config.checkpoint.every=50

on 2 cores of a shared CPU machine; `--run=WORKDIR` replaces it by another.
"""

import html
import io
import json
import math
import pathlib
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import NamedTuple

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from benchmarks import harness
from benchmarks.reporting.part_figures import draw_parts
from qwen3next_jax.commands.show import draw_model_of_config
from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.config.files import find_user_or_shipped_file, load_config_file
from qwen3next_jax.planner.parts import cost_by_part
from qwen3next_jax.planner.roofline import FunctionCost
from qwen3next_jax.reporting.charts import Line, line_chart, series_colour, short_number
from qwen3next_jax.reporting.page import render_report
from qwen3next_jax.reporting.runs import Run, load_run
from qwen3next_jax.runs.display import Display
from qwen3next_jax.training.stages import resolve_stages

DOCS = harness.ROOT / "docs"
RECORD = DOCS / "pictures" / "tiny"
# Sizes in SVG units. A chart of the page has 600 × 250.
WIDTH, CHART_WIDTH, CHART_HEIGHT, GAP = 1000, 470, 196, 20
# The fields of events that the pictures show; a record in docs/ holds no others.
KINDS = ("start", "train", "heldout", "sample", "checkpoint", "diagnostics")
# Of configs/sweeps/state.py: models with their labels, and what accuracies of a task mean. In
# state_recall both values of a key are one of 25, so they are equal once in 25 times.
ONE_LAYER = {
    "attention": "attention",
    "recurrent, beta 1": "recurrent, β < 1",
    "recurrent, beta 2": "β < 2",
    "2 writes, beta 2": "β < 2, 2 writes",
}
ADDED_PARTS = {
    "recurrent, beta 2": "neither",
    "with decay, beta 2": "with decay",
    "with convolution, beta 2": "with convolution",
}
TWO_LAYERS = {
    "2 of attention": "attention",
    "2 recurrent, beta 2": "recurrent",
    "1 of each, beta 1": "both, β < 1",
    "1 of each, beta 2": "both, β < 2",
}
FOUR_LAYERS = {
    "every": "attention",
    "every second, beta 2": "every second",
    "every fourth, beta 2": "every fourth",
    "none, beta 2": "recurrent",
}
FOUR_LAYERS_BY_BETA = {
    "every": "attention",
    "none, beta 2": "recurrent",
    "every fourth, beta 1": "both, β < 1",
    "every fourth, beta 2": "both, β < 2",
}
FOUR_LAYERS_BY_WRITES = {
    "every": "attention",
    "none, beta 2, 2 writes": "recurrent, 2 writes",
    "every fourth, beta 2": "both",
    "every fourth, beta 2, 2 writes": "both, 2 writes",
}
EVERY_FOURTH = {
    "every fourth, beta 1": "β < 1",
    "every fourth, beta 2": "β < 2",
    "every fourth, beta 2, no positions": "no positions",
    "every fourth, beta 2, 2 writes": "2 writes",
}
ACCURACIES = {
    "parity": [("a guess", 1 / 2)],
    "s3": [("a guess", 1 / 6), ("even or odd", 1 / 3)],
    "s5": [("a guess", 1 / 120)],
    "modular_addition": [("a guess", 1 / 5)],
    "state_recall": [("the key alone", (1 + 1 / 25) / 2)],
}


def draw_pictures() -> dict[str, str]:
    """Returns name of the file → SVG, of every picture."""
    run = load_run(RECORD)
    config = from_dict(Config, load_config_file(find_user_or_shipped_file("qwen3_next_80b_a3b")))
    state, permutations, ratio = (
        json.loads((DOCS / "sweeps" / f"{name}.json").read_text())["points"]
        for name in ("state", "permutations", "state_ratio")
    )
    return {
        "qwen3_next_80b_a3b.svg": draw_model_of_config(config),
        **draw_parts(config.model),
        "page.svg": draw_page(run),
        "terminal.svg": draw_terminal(run),
        "sweep.svg": draw_sweep(json.loads((DOCS / "sweeps" / "ratio.json").read_text())),
        "state_alone.svg": draw_state(
            "What one layer does alone",
            StateChart("Parity", "parity", ONE_LAYER, state),
            StateChart("Addition modulo 5", "modular_addition", ONE_LAYER, state),
            StateChart("Permutations of three things", "s3", ONE_LAYER, state),
            StateChart(
                "Of five: exchanges of two",
                "s5",
                ONE_LAYER,
                [p for p in permutations if p["inputs"] == "exchanges of two"],
            ),
            StateChart(
                "Of five: also turns of three",
                "s5",
                ONE_LAYER,
                [p for p in permutations if p["inputs"] == "and turns of three"],
            ),
            StateChart("Parity with a decay or a convolution", "parity", ADDED_PARTS, state),
        ),
        "state_mixture.svg": draw_state(
            "What a mixture of layers does",
            StateChart("Two layers: key and parity", "state_recall", TWO_LAYERS, state),
            StateChart("Two layers: parity", "parity", TWO_LAYERS, state),
            StateChart("Four layers: key and parity", "state_recall", FOUR_LAYERS, ratio),
            StateChart("The same, attention in every fourth", "state_recall", EVERY_FOURTH, ratio),
            StateChart("Four layers: parity", "parity", FOUR_LAYERS_BY_BETA, ratio),
            StateChart("Four layers: addition", "modular_addition", FOUR_LAYERS_BY_WRITES, ratio),
        ),
        "plan.svg": draw_plan(
            json.loads((DOCS / "planner" / "v5p_8x8x8_16k_default.json").read_text())
        ),
        "decoding.svg": draw_decoding(json.loads((DOCS / "results" / "decoding.json").read_text())),
    }


# ---- Pictures


def draw_page(run: Run) -> str:
    """Draws the top of the report of a run, and its charts of the loss, of the router and of the
    recurrent layers.
    """
    page = render_report([run])
    title, subtitle = (
        html.unescape(re.search(pattern, page)[1])
        for pattern in ("<h1>(.*?)</h1>", "<h1>.*?</h1><p>(.*?)</p>")
    )
    tiles = re.findall(r'<div class="tile"><b title="(.*?)">.*?<span>(.*?)</span>', page)[:8]
    parts = [_text(20, 34, title, 20, bold=True), _text(20, 54, subtitle, 12, dim=True)]
    width = (WIDTH - 40 - 7 * 10) / 8
    for i, (value, name) in enumerate(tiles):
        x = 20 + i * (width + 10)
        parts.append(_box(x, 68, width, 50))
        parts.append(_text(x + 9, 90, html.unescape(value), 16, bold=True))
        parts.append(_text(x + 9, 108, html.unescape(name), 11, dim=True))
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    wanted = ("Loss (nats", "Held-out bits", "Router load", "Decay half-life")
    chosen = [next(f for f in figures if f"<figcaption>{name}" in f) for name in wanted]
    charts, height = _grid(chosen, 132)
    return _svg(parts + charts, height, f"the report of the run {run.name}")


def draw_terminal(run: Run) -> str:
    """Draws the live panel as it was after the last event of a run."""
    config = from_dict(Config, run.config)
    start = run.events_by_kind["start"][-1]
    console = Console(
        record=True, file=io.StringIO(), force_terminal=True, width=104, legacy_windows=False
    )
    display = Display(
        f"{config.name} on {start['devices']} × {start['device_kind']}",
        resolve_stages(config),
        0,
        console=console,
    )
    steps = [event for event in run.all_events if event["event"] == "train"]
    shown = steps[2 * len(steps) // 3]  # the panel in the middle of a run
    for event in run.all_events:
        if event["time"] <= shown["time"]:
            display(event)
    display.set_elapsed(shown["time"] - start["time"])
    console.print(display.panel())
    fonts = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)  # they would come from the network
    return console.export_svg(
        title="train.py", code_format=fonts.sub("", CONSOLE_SVG_FORMAT), unique_id="terminal"
    )


def draw_sweep(sweep: dict) -> str:
    """Draws the findings of a sweep over ratios of layers, and its main metrics over them. Each dot
    is the mean over seeds, the band their range.
    """
    parts = [
        _text(20, 34, "Ratio of recurrent to full attention layers", 20, bold=True),
        _text(20, 54, f"{len(sweep['points'])} points, base {sweep['base']}", 12, dim=True),
    ]
    y = 78
    for finding in sweep["findings"][:2]:
        for i, line in enumerate(_wrapped(finding, 130)):
            parts.append(_text(20 if not i else 32, y, ("• " if not i else "") + line, 13))
            y += 19
    ratios = sweep["axes"]["ratio"]

    def lines(task: str, metrics: dict[str, str]) -> list[Line]:
        drawn = []
        for colour, (metric, label) in enumerate(metrics.items()):
            values = [
                [p[metric] for p in sweep["points"] if (p["task"], p["ratio"]) == (task, ratio)]
                for ratio in ratios
            ]
            mean = [math.fsum(v) / len(v) for v in values]
            ends = [list(map(end, values)) for end in (min, max)]
            drawn.append(
                Line(label, range(len(ratios)), mean, *ends, colour_index=colour, dots=True)
            )
        return drawn

    recall = {f"mqar accuracy/{pairs} pairs": f"{pairs} pairs" for pairs in (4, 8, 16)}
    options = {"x_label": "ratio", "x_names": ratios}
    figures = [
        line_chart(
            "Held-out bits per byte, text", lines("text", {"heldout bits_per_byte": ""}), **options
        ),
        line_chart("Recall of pairs, accuracy", lines("recall", recall), from_zero=True, **options),
    ]
    charts, height = _grid(figures, y)
    return _svg(parts + charts, height, "a sweep over the ratio of layers")


class StateChart(NamedTuple):
    """A chart of the accuracy of models on a task that needs a state.

    Attributes:
      caption: the title.
      task: the name of the task in ACCURACIES.
      labels: {model: label}. A model that was not run on the task has no line.
      points: points of a sweep. Those of other tasks are left out.
    """

    caption: str
    task: str
    labels: dict[str, str]
    points: list[dict]


def draw_state(title: str, *charts: StateChart) -> str:
    """Draws the accuracy of models over the positions of a row. Each dot is the mean over seeds,
    the band their range.
    """
    figures = []
    for caption, task, labels, points in charts:
        points = [point for point in points if point.get("task", task) == task]
        metrics = [name for name in points[0] if name.startswith("state accuracy/")]
        lines = []
        for colour, (model, label) in enumerate(labels.items()):
            of_model = [point for point in points if point["model"] == model]
            if not of_model:
                continue
            values = [[point[metric] for point in of_model] for metric in metrics]
            mean = [math.fsum(v) / len(v) for v in values]
            ends = [list(map(end, values)) for end in (min, max)]
            lines.append(Line(label, range(len(mean)), mean, *ends, colour_index=colour, dots=True))
        figures.append(
            line_chart(
                f"{caption}, accuracy",
                lines,
                x_label="positions of a row; the trained rows end at the vertical line",
                x_names=[name.partition("/")[2].replace("-", "–") for name in metrics],
                from_zero=True,
                reference_lines=ACCURACIES[task],
                marks=[(0.5, "the trained rows end", "stage")],
            )
        )
    drawn, height = _grid(figures, 54)
    return _svg([_text(20, 34, title, 20, bold=True), *drawn], height, title)


def draw_plan(plan: dict) -> str:
    """Draws the time of a planned step by part of the model, as one bar."""
    costs = {name: FunctionCost(**cost) for name, cost in plan["parts"].items()}
    parts = cost_by_part(costs)
    total = math.fsum(cost.seconds for cost in parts.values())
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan["mesh"].items() if size > 1)
    title = f"A step of {plan['config']} on {plan['topology']}, as predicted"
    subtitle = (
        f"{plan['step_seconds']:.3g} s for {plan['tokens_per_step']:,} tokens, {mesh}: "
        f"MFU {plan['mfu']:.0%}; no pod has run it"
    )
    drawn = [_text(20, 34, title, 20, bold=True), _text(20, 54, subtitle, 12, dim=True)]
    x, width = 20.0, WIDTH - 40
    for i, cost in enumerate(parts.values()):
        share = width * cost.seconds / total
        drawn.append(
            f'<rect x="{x:.1f}" y="70" width="{share:.1f}" height="46" '
            f'style="fill:{series_colour(i)}"/>'
        )
        x += share
    column = width / 2
    for i, (name, cost) in enumerate(parts.items()):
        left, y = 20 + i % 2 * column, 142 + i // 2 * 22
        drawn.append(
            f'<rect x="{left:.1f}" y="{y - 10}" width="11" height="11" rx="2" '
            f'style="fill:{series_colour(i)}"/>'
        )
        drawn.append(_text(left + 17, y, name, 12))
        drawn.append(
            _text(
                left + column - 24,
                y,
                f"{1e3 * cost.seconds:,.0f} ms, {cost.seconds / total:.0%}",
                12,
                dim=True,
                end=True,
            )
        )
    return _svg(drawn, 142 + -(-len(parts) // 2) * 22, title)


def draw_decoding(results: dict) -> str:
    """Draws the table of decoding: time of a prompt and of a new token, and the cache, over the
    tokens of context.

    Args:
      results: the record docs/results/decoding.json.
    """
    rows = results["rows"]
    contexts, names = (list(dict.fromkeys(column)) for column in list(zip(*rows))[:2])
    figures = []
    for i, title in enumerate(results["columns"][2:], start=2):
        lines = [
            Line(
                name.partition(" 3:1")[0],
                [_number(context) for context in contexts],
                [_number(row[i]) for row in rows if row[1] == name],
                colour_index=n,
                dots=True,
            )
            for n, name in enumerate(names)
        ]
        figures.append(
            line_chart(title, lines, x_label="tokens of context", log_y=True, log_x=True)
        )
    charts, height = _grid(figures, 20)
    return _svg(charts, height, "decoding by context")


def _number(cell: str) -> float:
    """Reads a number of a table: "77,824"."""
    return float(cell.replace(",", ""))


# ---- Parts of pictures


def _grid(figures: Sequence[str], top: float) -> tuple[list[str], float]:
    """Returns the SVG of charts, two side by side, and the y coordinate below them.

    Args:
      figures: charts as HTML, as the functions of `reporting.charts` return them.
      top: the y coordinate of the first row.
    """
    width, height = CHART_WIDTH, CHART_HEIGHT
    parts = []
    for i, figure in enumerate(figures):
        x = 20 + i % 2 * (width + GAP)
        y = top + i // 2 * (height + 70)
        caption = re.search("<figcaption>(.*?)</figcaption>", figure)[1]
        body = re.search(r'<svg class="chart" viewBox="(.*?)"[^>]*>(.*)</svg><', figure, re.DOTALL)
        parts.append(_box(x, y, width, height + 56))
        parts.append(_text(x + 12, y + 22, html.unescape(caption), 14, bold=True))
        place = x + 12
        legend = r'<path d="M0 4H18" stroke="(.*?)".*?</svg>(.*?)</span>'
        for stroke, label in re.findall(legend, figure, re.DOTALL):
            label = html.unescape(label)
            parts.append(
                f'<path d="M{place:.0f} {y + 36:.0f}h18" style="stroke:{stroke};stroke-width:2.5"/>'
            )
            parts.append(_text(place + 23, y + 40, label, 11, dim=True))
            place += 38 + 6.2 * len(label)
        parts.append(
            f'<svg x="{x + 4:.1f}" y="{y + 48:.1f}" width="{width - 8:.1f}" height="{height:.1f}" '
            f'viewBox="{body[1]}">{body[2]}</svg>'
        )
    return parts, top + -(-len(figures) // 2) * (height + 70) + 6


def _svg(parts: Iterable[str], height: float, label: str) -> str:
    """Returns an SVG file with the colours and the styles of the report's page."""
    css = resources.files("qwen3next_jax.reporting").joinpath("page.css").read_text()
    light, dark = (
        re.search(selector + r" \{(.*?)\n\}", css, re.DOTALL)[1].replace("color-scheme: light;", "")
        for selector in (":root", r':root\[data-theme="dark"\]')
    )
    rules = re.findall(r"^(svg [.a-z].*?\})$", css, re.MULTILINE)
    style = (
        f"svg {{{light}}}\n@media (prefers-color-scheme: dark) {{ svg {{{dark}}} }}\n"
        + "\n".join(rules)
        + "\ntext { font-family: system-ui, sans-serif; }\n"
        "svg text.picture { font-size: inherit; fill: var(--text); }\n"
        "svg text.dim { fill: var(--dim); }\n"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" role="img" '
        f'aria-label="{html.escape(label, quote=True)}">\n<style>{style}</style>\n'
        f'<rect width="{WIDTH}" height="{height:.0f}" style="fill:var(--background)"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(
    x: float, y: float, text: str, size: int, bold: bool = False, dim: bool = False, end=False
) -> str:
    weight = ";font-weight:600" if bold else ""
    anchor = ' text-anchor="end"' if end else ""
    return (
        f'<g style="font-size:{size}px{weight}"><text class="picture{" dim" if dim else ""}" '
        f'x="{x:.1f}" y="{y:.1f}"{anchor}>{html.escape(text)}</text></g>'
    )


def _box(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8" '
        'style="fill:var(--card);stroke:var(--rule)"/>'
    )


def _wrapped(text: str, length: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > length:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def record_run(workdir: pathlib.Path) -> None:
    """Writes the events and settings of a run that the pictures show into docs/pictures/tiny."""
    run = json.loads((workdir / "run.json").read_text())
    run["config"]["data"]["prepared_dir"] = ""
    RECORD.mkdir(exist_ok=True)
    (RECORD / "run.json").write_text(json.dumps({"config": run["config"]}) + "\n")
    with (RECORD / "metrics.jsonl").open("w") as file:
        for line in (workdir / "metrics.jsonl").read_text().splitlines():
            event = json.loads(line, parse_float=lambda text: float(f"{float(text):.5g}"))
            event["time"] = json.loads(line)["time"]
            if event["event"] in KINDS:
                file.write(json.dumps(event) + "\n")


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--run", type=pathlib.Path, help="folder of a run whose record replaces docs/pictures/tiny"
    )
    args = parser.parse_args()
    if args.run:
        record_run(args.run)
    for name, svg in draw_pictures().items():
        (DOCS / "pictures" / name).write_text(svg)
        print(f"{DOCS.name}/pictures/{name}: {short_number(len(svg.encode()))}B")


if __name__ == "__main__":
    main()
