"""The report: series are shortened without losing spikes, wall time is divided correctly, a browser
shows the whole page, and damaged records do not prevent it.
"""

import html
import json
import re
import shutil

import numpy as np
import pytest

from benchmarks.reporting.report import open_in_chromium, write_run
from qwen3next_jax.config import DataConfig
from qwen3next_jax.data.pipeline import TextData
from qwen3next_jax.reporting import page, runs
from qwen3next_jax.reporting.charts import Axis, Line, heatmap, line_chart, tick_labels
from qwen3next_jax.reporting.page import write_report
from qwen3next_jax.reporting.runs import DOWN, LOST, OTHER, STARTING, TRAINING, load_run
from qwen3next_jax.runs import train
from tests.refusals import refused

# This script runs in the page. It finds labels outside their drawing, labels over each other, empty
# charts, and a page wider than the window; and it points at a chart, which must show values.
AUDIT = """<script>window.addEventListener("load", () => {
  const found = [], shown = e => { const b = e.getBoundingClientRect(); return b.width > 0 && b.height > 0; };
  for (const figure of document.querySelectorAll("figure")) {
    const title = figure.querySelector("figcaption").textContent, svg = figure.querySelector("svg.chart");
    if (!svg) { found.push(title + ": no drawing"); continue; }
    const frame = svg.getBoundingClientRect(), labels = [...svg.querySelectorAll("text")].filter(shown);
    const boxes = labels.map(label => [label.textContent, label.getBoundingClientRect()]);
    for (const [text, b] of boxes)
      if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)
        found.push(title + ": '" + text + "' is cut off");
    for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
      const [s, a] = boxes[i], [t, b] = boxes[j];
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
        found.push(title + ": '" + s + "' over '" + t + "'");
    }
    if (!svg.querySelector("path, image")) found.push(title + ": empty");
  }
  if (document.documentElement.scrollWidth > window.innerWidth) found.push("wider than the window");
  // Pointing at a chart shows its values.
  const first = document.querySelector("figure[data-kind=lines] svg.chart"), b = first.getBoundingClientRect();
  first.dispatchEvent(new PointerEvent("pointermove", {clientX: b.left + b.width / 2, clientY: b.top + b.height / 2}));
  document.documentElement.dataset.audit = JSON.stringify({found, tip: document.querySelector(".tip").textContent,
    figures: document.querySelectorAll("figure").length, theme: document.documentElement.dataset.theme});
});</script>"""  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "small", steps=1000, restarts=(300,), mtp_depth=3)
    write_run(folder / "other", steps=2000, layers=8, experts=16, seed=1)
    write_run(folder / "deep", steps=2000, layers=48, experts=64)
    return folder


@pytest.mark.skipif(
    not shutil.which("chromium"),
    reason="no chromium to open the page in (apt-get install chromium)",
)
@pytest.mark.parametrize(
    "names, width, theme",
    [
        (("small",), 1280, "light"),
        pytest.param(("small",), 700, "dark", marks=pytest.mark.slow),
        pytest.param(("deep",), 1280, "dark", marks=pytest.mark.slow),
        (
            ("small", "other"),
            500,
            "light",
        ),  # page.js draws anew: the window is narrower than a chart
    ],
)
def test_a_browser_shows_the_page_whole(folder, tmp_path, names, width, theme):
    page = tmp_path / "report.html"
    write_report([folder / name for name in names], page)
    text = page.read_text()
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    assert "@import" not in text
    assert "url(" not in text
    page.write_text(text.replace("</head>", AUDIT + "</head>"))
    dark = ("--blink-settings=preferredColorScheme=0",) if theme == "dark" else ()
    dom, _ = open_in_chromium(page, "--dump-dom", f"--window-size={width},900", *dark)
    assert "data-error=" not in dom
    audit = json.loads(html.unescape(re.search(r'data-audit="([^"]*)"', dom)[1]))
    assert audit["found"] == []
    assert audit["theme"] == theme
    assert audit["figures"] > 25
    assert "step" in audit["tip"]
    assert len(audit["tip"]) > 12


# This script chooses among many runs as a reader does, and records what the page then shows.
CHOOSE = """<script>window.addEventListener("load", async () => {
  const shown = {}, frame = () => new Promise(done => setTimeout(done, 20));
  const figure = document.querySelector("figure"), lines = () => figure.querySelectorAll("path.line:not(.raw)");
  const set = async (id, value, kind) => {
    const part = document.getElementById(id);
    part.value = value;
    part.dispatchEvent(new Event(kind));
    await frame();
  };
  const press = name => [...figure.querySelectorAll("button")].find(button => button.textContent === name).click();
  shown.all = lines().length;
  await set("search", "seed=1", "input");
  shown.found = [...new Set([...lines()].map(line => line.dataset.run))];
  const seed = [...document.querySelectorAll("#colour option")].find(option => option.textContent === "data.seed");
  await set("colour", seed.value, "change");
  shown.colours = new Set([...lines()].map(line => line.getAttribute("stroke"))).size;
  await set("smoothing", 0.9, "input");
  shown.raw = figure.querySelectorAll("path.raw").length;
  const before = figure.querySelector("path.raw").getAttribute("d");
  press("log y");
  shown.moved = figure.querySelector("path.raw").getAttribute("d") !== before;
  let file = null;
  URL.createObjectURL = blob => { file = blob; return "#"; };
  press("CSV");
  shown.csv = (await file.text()).trim().split("\\n");
  location.hash = figure.id + "@51";
  await frame();
  shown.held = figure.querySelector(".pinned").textContent;
  shown.link = location.hash.slice(figure.id.length + 1);
  document.documentElement.dataset.shown = JSON.stringify(shown);
});</script>"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium to open the page in")
def test_a_reader_chooses_among_many_runs(tmp_path):
    folders = [tmp_path / f"run{i}" for i in range(12)]
    for i, folder in enumerate(folders):
        write_run(folder, steps=200, seed=i)
        record = json.loads((folder / "run.json").read_text())
        record["config"]["data"]["seed"] = i // 2
        (folder / "run.json").write_text(json.dumps(record))
    page = tmp_path / "page.html"
    write_report(folders, page)
    page.write_text(page.read_text().replace("</head>", CHOOSE + "</head>"))
    dom, _ = open_in_chromium(page, "--dump-dom", "--virtual-time-budget=5000")
    assert "data-error=" not in dom
    shown = json.loads(html.unescape(re.search(r'data-shown="([^"]*)"', dom)[1]))
    assert shown["all"] == 24  # training and held-out loss of each
    assert shown["found"] == ["2", "3"]
    assert shown["colours"] == 1
    assert shown["raw"] == 2
    assert shown["moved"]
    run = load_run(folders[3])
    expected = {f'"run3 training",{e["step"]},{e["loss"]:.5g}' for e in run.events_by_kind["train"]}
    recorded = {",".join(line.split(",")[:3]) for line in shown["csv"]}
    assert expected <= recorded
    assert len(shown["csv"]) == 1 + 2 * 2 * len(expected)
    assert shown["link"] == "@50"
    assert f"{run.events_by_kind['train'][4]['loss']:.5g}" in shown["held"]


def test_runs_that_cannot_be_compared_are_named(tmp_path):
    def warnings(**changes):
        folders = []
        for name, change in changes.items():
            write_run(tmp_path / name, steps=100)
            path = tmp_path / name / "run.json"
            path.write_text(json.dumps(change(json.loads(path.read_text()))))
            folders.append(tmp_path / name)
        write_report(folders, tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text()
        return re.findall('<p class="warning">(.*?)</p>', text), text.count("note warning")

    def other_text(record):
        record["config"]["data"]["path"] = "b/*.txt"
        return record

    assert warnings(a=dict, b=dict) == ([], 0)
    (tokenizers,), charts = warnings(a=dict, b=lambda record: record | {"tokenizer": "other"})
    assert "a | b" in tokenizers
    assert charts == 3  # loss, MTP loss, accuracy: not bits per byte

    def other_settings(**changes):
        def change(record):
            for name, value in changes.items():
                group, _, key = name.partition("__")
                record["config"][group][key] = value
            return record

        return change

    # The order of the held-out rows depends on the sizes of the sources, not on their weights.
    assert warnings(a=dict, b=other_settings(data__weights="3,1")) == ([], 0)
    (texts,), _ = warnings(a=dict, b=other_settings(data__seed=1, train__sequence_length=64))
    assert "data.seed, train.sequence_length: a | b" in texts
    (texts,), charts = warnings(a=dict, b=other_text)
    assert "data.path: a | b" in texts
    assert charts == 3  # loss, bits per byte, drafts


def test_runs_are_compared_at_common_steps(tmp_path):
    write_run(tmp_path / "a", steps=200)
    write_run(tmp_path / "b", steps=300)
    warning, of_rates, _ = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html")
    assert "(a: 200, b: 300)" in warning
    events = load_run(tmp_path / "b").events_by_kind["train"]
    (rate,) = (event["learning_rate"] for event in events if event["step"] == 200)
    assert f"b: {rate:.1e}" in of_rates
    assert "200" in of_rates
    rows = re.findall("<tr data-run.*?</tr>", (tmp_path / "page.html").read_text())
    for name, row in zip("ab", rows, strict=True):
        events = load_run(tmp_path / name).events_by_kind
        for kind, field in ("train", "loss"), ("heldout", "bits_per_byte"):
            (value,) = (event[field] for event in events[kind] if event["step"] == 200)
            assert f"{value:.4f}" in row


def test_a_run_without_metrics_is_named(tmp_path):
    kinds_of_runs = {"a": "train heldout diagnostics", "b": "start", "c": "train diagnostics"}
    for name, kinds in (kinds_of_runs | {"d": "train heldout"}).items():
        write_run(tmp_path / name, steps=100)
        path = tmp_path / name / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(x for x in lines if json.loads(x)["event"] in kinds.split()))
    write_report([tmp_path / name for name in "abcd"], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    *warnings, layers = re.findall('<p class="warning">(.*?)</p>', text)
    assert [warning.split()[0] for warning in warnings] == ["b", "c"]
    assert " without d," in layers
    assert "telemetry.diagnostics_every" in layers
    by_layer = [f for f in re.findall("<figure.*?</figure>", text, re.S) if " by layer<" in f]
    assert by_layer
    assert all("Not measured: d." in figure for figure in by_layer)


def test_runs_of_one_page_have_distinct_names():
    named = [runs.run_from_events(name, {}, []) for name in ("a", "a", "a (2)")]
    assert len({run.name for run in page._with_distinct_names(named)}) == 3


def test_ticks_of_steps_are_whole_numbers():
    for last in (1, 2, 3, 7, 13, 120):
        ticks = Axis(0, last, 0, 600, whole_ticks=True).tick_values(6)
        assert len(ticks) > 1
        assert all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize("low, high", [(2.0001, 2.0004), (0.0, 3e-13), (1.2e6, 1.2001e6)])
def test_neighbouring_ticks_have_different_labels(low, high):
    labels = tick_labels(Axis(low, high, 0, 600).tick_values(5))
    assert len(set(labels)) == len(labels) > 1


def test_a_band_is_drawn_around_gaps():
    y, low, high = ([v, v + 1, np.nan, v, v + 1] for v in (2.0, 1.0, 3.0))
    (band,) = re.findall(
        'class="band" d="(.*?)"', line_chart("", [Line("a", range(5), y, low, high)])
    )
    assert band.count("Z") == 2
    assert "nan" not in band


def test_a_heatmap_names_exact_steps():
    steps = np.array([123_450, 123_460])
    page = heatmap("", np.eye(2), rows="ab", columns=steps, row_label="", column_label="step")
    assert '"columns":["123450","123460"]' in page


def test_a_legend_has_only_named_lines():
    lines = [Line("law", [1, 2], [1, 2]), Line("", [1, 2], [1, 2], joined=False)]
    assert line_chart("", lines).count("<span>") == 1
    assert line_chart("", lines[1:] * 2).count("<span>") == 0


@pytest.fixture(scope="module")
def shortened():
    """A sine of 100,000 points with a spike, a gap and an infinity, in at most 400."""
    x = np.arange(100_000.0)
    y = np.sin(x / 1e4)
    y[31_415], y[500:700], y[92_653] = 99.0, np.nan, np.inf
    series = runs.downsample(x, y, 400)
    assert len(series.steps) <= 400
    assert (np.diff(series.steps) > 0).all()
    return series


def test_a_shortened_series_keeps_its_spike(shortened):
    assert np.nanmax(shortened.largest) == 99.0


def test_a_shortened_series_lies_in_its_range(shortened):
    inside = np.isfinite(shortened.means)
    assert (shortened.smallest[inside] <= shortened.means[inside]).all()
    assert (shortened.means[inside] <= shortened.largest[inside]).all()


def test_a_shortened_series_is_close(shortened):
    quiet = np.isfinite(shortened.means) & (shortened.largest < 2)
    assert quiet.sum() >= 398
    assert np.abs(shortened.means - np.sin(shortened.steps / 1e4))[quiet].max() < 0.02


def test_goodput_is_the_share_of_training_that_stayed():
    """The run takes 20 s to start, 10 steps of 1 s, 5 s of evaluation, 10 steps; it is killed 10
    steps later, which are lost. After 30 s it starts again, takes 15 s, and 10 steps.
    """
    events = [
        {
            "event": "start",
            "step": 0,
            "time": 0.0,
            "first_step": 0,
            "previous_end": None,
            "lost_steps": 0,
        },
        {"event": "train", "step": 10, "time": 30.0, "seconds": 10.0},
        {"event": "heldout", "step": 10, "time": 35.0},
        {"event": "train", "step": 20, "time": 45.0, "seconds": 10.0},
        {"event": "checkpoint", "step": 20, "time": 45.0},
        {
            "event": "start",
            "step": 20,
            "time": 85.0,
            "first_step": 20,
            "previous_end": 55.0,
            "lost_steps": 10,
        },
        {"event": "train", "step": 30, "time": 110.0, "seconds": 10.0},
    ]
    run = runs.run_from_events("r", {}, events)
    share = runs.wall_time_shares(runs.wall_time_spans(run))
    assert {use: round(value * 110, 6) for use, value in share.items()} == {
        TRAINING: 30,
        STARTING: 35,
        OTHER: 5,
        LOST: 10,
        DOWN: 30,
    }
    _, columns = runs.wall_time_shares_by_column(runs.wall_time_spans(run), 37)
    np.testing.assert_allclose(columns.sum(axis=1), 1, atol=1e-9)
    np.testing.assert_allclose(columns.mean(axis=0), list(share.values()), atol=1e-9)
    assert [(fault.kind, fault.step) for fault in runs.faults_and_restarts(run)] == [
        ("restart", 20)
    ]


def test_a_step_logged_with_its_compilation_is_no_training():
    events = [
        {"event": "start", "step": 0, "time": 0.0, "first_step": 0},
        {"event": "train", "step": 1, "time": 9.0, "seconds": 8.0},
        {"event": "train", "step": 2, "time": 10.0, "seconds": 1.0},
    ]
    assert runs.wall_time_shares(runs.wall_time_spans(runs.run_from_events("r", {}, events)))[
        TRAINING
    ] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "layers, text",
    [
        ("a a a b a a a b", "2 × (3 × a, b)"),
        ("a a a", "3 × a"),
        ("a b a", "a, b, a"),
        ("b a a a b", "b, 3 × a, b"),
        ("a b a b", "2 × (a, b)"),
        ("a", "a"),
    ],
)
def test_equal_layers_of_a_setting_are_counted(layers, text):
    assert page._setting_text(layers.split()) == text


def test_differences_name_what_differs(folder):
    names = [
        name
        for name, _ in runs.setting_differences(
            [runs.load_run(folder / name) for name in ("small", "other")]
        )
    ]
    assert names == [
        "model.mtp_depth",
        "model.num_experts",
        "model.num_experts_per_tok",
        "model.num_hidden_layers",
        "name",
        "train.steps",
    ]


@pytest.mark.parametrize(
    "content, names",
    [
        (None, ()),
        ("{", ()),
        ('{"config": {}}', ()),
    ],
)
def test_a_folder_without_a_run_is_one_line(tmp_path, content, names):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with refused(*names):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


BAD_LINES = [
    '{"event": "train", "step": 2, "time": "noon", "loss": 1}',
    '{"event": "train", "step": 2, "time": 1, "loss": {"a": 1}, "seconds": 1}',
    '{"event": "train", "step": 2, "time": 1, "seconds": "x"}',
    '{"event": "diagnostics", "step": 2, "time": 1, "beta": 3}',
    '{"event": "diagnostics", "step": 2, "time": 1, "beta": [[1], 2], "activation_max": "x", '
    '"state_norm": [1]}',
    '{"event": "sample", "step": 2, "time": 1, "text": 5}',
    '{"event": "start", "step": 2, "time": 1, "previous_end": "x", "lost_steps": "y"}',
    '{"event": "changed", "step": 2, "time": 1, "changes": [1]}',
    '{"event": "train", "step": 1' + "0" * 400 + ', "time": 1, "loss": 1}',
    '{"event": "train", "step": true, "time": 1e999, "loss": 1e999}',
    '{"event": "train", "step": 2, "time": 1, "loss": 1' + "0" * 400 + "}",
    '{"event": "train", "step": -5, "time": 1, "loss": 1e999, "mtp_loss/x": 1}',
    '{"event": "diagnostics", "step": 2, "time": 1, "expert_load": [[1, 2], 3], "router_entropy": '
    "[1]}",
    '{"event": "suite", "step": 2, "time": 1, "a/b": 1}',
    '{"event": "diagnostics", "step": 2, "time": 1, "groups": {"a": 3}}',
    '{"event": "stop", "step": 2, "reason": [1], "time": null}',
    '{"event": "start", "step": 0, "time": 5, "devices": "x", "hosts": "many", "commit": 3, '
    '"jax": []}',
    '{"event": ["train"], "step": 2, "time": 1}',
    '{"event": "start", "step": 0, "time": 5, "bad_records": [["a", "b"]]}',
    '{"event": "heldout", "step": 2, "time": 1, "loss": "x", "bits_per_byte": []}',
    "[" * 10**5,
    '{"event": "x", "step": ' + "1" * 5000 + "}",
    '{"event": "train", "step": 2, "time": 1, "loss": 1e308, "grad_norm": 5e-324, "mfu": -1e308}',
    '{"event": "sample", "step": 2, "time": 1, "text": "half a pair: \\ud800"}',
    '{"event": "suite", "step": 2, "time": 1, "suite": "mqar", "figures": {"accuracy": {}}}',
    "null",
]


@pytest.mark.parametrize(
    "name, value",
    [("num_hidden_layers", -1), ("num_hidden_layers", "many"), ("num_hidden_layers", 10**12)],
)
def test_wrong_settings_do_not_end_a_report(tmp_path, name, value):
    (tmp_path / "run.json").write_text(json.dumps({"config": {"model": {name: value}}}))
    (tmp_path / "metrics.jsonl").write_text(
        '{"event": "train", "step": 1, "time": 1.0, "loss": 2.0}\n'
    )
    with refused(tmp_path):
        write_report([tmp_path], tmp_path / "report.html")


def test_wrong_lines_do_not_end_a_report(tmp_path):
    """Each bad line is tested alone between two good ones, and then all of them together."""
    (tmp_path / "run.json").write_text('{"config": {}}')
    good = [
        '{"event": "start", "step": 0, "time": 0.0, "first_step": 0}',
        '{"event": "train", "step": 1, "time": 1.0, "loss": 2.0, "seconds": 1.0}',
    ]
    for lines in (*([line] for line in BAD_LINES), BAD_LINES):
        (tmp_path / "metrics.jsonl").write_text(
            "\n".join([*good, *lines, good[1].replace("1", "3")]) + "\n"
        )
        write_report([tmp_path], tmp_path / "report.html")
        assert "Loss (nats per token)" in (tmp_path / "report.html").read_text()


def test_a_record_with_holes_still_gives_a_page(tmp_path):
    """The record has NaN as text, missing values, a single event of a kind, and HTML in names."""
    (tmp_path / "run.json").write_text(json.dumps({"config": {"name": "<b>&"}}))
    events = [
        {"event": "start", "step": 0, "time": 0, "bad_records": [["a<b.jsonl", 7, "NUL"]]},
        {"event": "train", "step": 1, "time": 1.0, "loss": "nan", "grad_norm": "inf"},
        {
            "event": "diagnostics",
            "step": 1,
            "time": 1.0,
            "beta": [None, "nan"],
            "activation_max": ["inf", 3.0],
        },
        {"event": "sample", "step": 1, "time": 2.0, "text": "</pre><script>alert(1)</script>"},
        {"event": "stop", "step": 1, "time": 3.0, "reason": "<i>"},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)) + '\n{"event": "tr')
    write_report([tmp_path], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in text
    assert "<i>" not in text
    assert "nan" not in re.findall(r' d="([^"]*)"', text)
    assert "a&lt;b.jsonl" in text


def test_the_page_shows_bad_records(tmp_path):
    lines = ['{"text": "a document"}', '{"text": null}', '{"text": "another one"}', "{"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = DataConfig(
        path=f"{tmp_path}/a.jsonl",
        prepared_dir=f"{tmp_path}/p",
        bad_records="skip",
        bad_records_limit=1.0,
    )
    stages = [TextData(config, length, 1) for length in (8, 16)]
    bad_records = train._bad_records_by_glob(stages)
    event = {"event": "start", "step": 0, "time": 0.0, "bad_records": bad_records}
    (tmp_path / "run.json").write_text('{"config": {}}')
    (tmp_path / "metrics.jsonl").write_text(json.dumps(event))
    write_report([tmp_path], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert text.count("2 bad records") == 1  # both stages have the same files
    assert "a.jsonl:2, a.jsonl:4" in text
