"""Sweeps: points and their refusals, a runner that resumes and retries, findings that say no
more than the numbers.
"""

import csv
import dataclasses
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import numpy as np
import pytest

from qwen3next_jax.common.errors import ExitCode, UserError
from qwen3next_jax.common.metrics import Metric, pair_with_declarations
from qwen3next_jax.config import Config, from_dict
from qwen3next_jax.config.files import apply_overrides, load_config_file
from qwen3next_jax.evals.heldout import Heldout
from qwen3next_jax.model.flops import flops_per_token, parameter_counts
from qwen3next_jax.sweeps import points, runner
from qwen3next_jax.sweeps.check import check_points_can_run, check_settings_have_effect
from qwen3next_jax.sweeps.folder import open_sweep_folder
from qwen3next_jax.sweeps.points import load_sweep, sweep_manifest
from qwen3next_jax.sweeps.report import render_report, write_report
from qwen3next_jax.sweeps.results import (
    PointResult,
    finding_sentences,
    heldout_settings_along,
    is_done,
    metric_along_x,
    pareto_front_indices,
    read_result,
    to_csv,
    to_json,
)
from qwen3next_jax.sweeps.speedups import compare_arms
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
NANO = {
    "model.num_hidden_layers": 2,
    "model.full_attention_interval": 2,
    "model.hidden_size": 16,
    "model.intermediate_size": 16,
    "model.vocab_size": 32,
    "model.head_dim": 8,
    "data.synthetic.pairs": 2,
    "train.batch_size": 2,
    "train.sequence_length": 16,
    "train.steps": 4,
    "train.log_every": 1,
    "eval.every": 4,
    "eval.rows": 2,
    "checkpoint.every": 2,
    "telemetry.diagnostics_every": 0,
}


def sweep_file(folder, record):
    path = folder / "sweep.py"
    path.write_text(f"def get_sweep():\n    return {record!r}\n")
    return path


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def ratios(tmp_path):
    """A sweep over ratios, sizes and seeds, with a setting of the command line."""
    record = {
        "base": "configs/tiny.py",
        "set": {"model.num_hidden_layers": 8},
        "axes": {
            "ratio": ["0:1", "3:1", "1:0"],
            "size": {"a": {"model.hidden_size": 64}, "b": {}},
            "train.seed": [0, 1],
        },
    }
    return load_sweep(sweep_file(tmp_path, record), {"train.steps": 7})


def test_points_are_all_combinations(ratios):
    assert [p.name for p in ratios.points[:3]] == [
        "ratio=0-1,size=a,seed=0",
        "ratio=0-1,size=a,seed=1",
        "ratio=0-1,size=b,seed=0",
    ]
    assert len(ratios.points) == 12
    assert ratios.x_axis == "ratio"
    check_points_can_run(ratios)


def test_points_have_the_settings_of_their_axes(ratios):
    full = {
        p.axis_values["ratio"]: p.config.model.resolved_layer_types.count("full_attention")
        for p in ratios.points
    }
    assert full == {"0:1": 8, "3:1": 2, "1:0": 0}
    assert {p.config.model.hidden_size for p in ratios.points} == {64, 128}
    assert {p.config.train.steps for p in ratios.points} == {7}


def test_the_command_of_a_point_is_plain(ratios):
    command = runner.train_arguments(ratios, ratios.points[4], Path("w"))
    assert "--config.model.full_attention_interval=4" in command
    assert "--workdir=w/points/ratio=3-1,size=a,seed=0" in command


def test_a_shipped_sweep_is_checked_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = load_sweep("configs/sweeps/ratio.py")
    check_settings_have_effect(sweep)
    assert all(
        "--config=configs/tiny.py" in line for line in runner.one_line_commands(sweep, tmp_path)
    )


def test_a_billion_points_are_refused_at_once(tmp_path):
    axes = {f"train.{name}": list(range(1, 1001)) for name in ("seed", "steps", "batch_size")}
    path = tmp_path / "sweep.py"
    path.write_text(f"def get_sweep():\n    return {{'base': 'tiny', 'axes': {axes}}}\n")
    with refused("1,000,000,000", "1,000"):
        load_sweep(path)


def test_the_printed_command_of_a_point_is_that_point(tmp_path, monkeypatch):
    """Read by a shell, and its settings as train.py reads them; from any folder."""
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base's.py"
    base.write_text((ROOT / "configs/tiny.py").read_text())
    long = tuple(f"file '{i}' \"of\" $many; `such`" for i in range(40))
    settings = {
        "data.path": ",".join(long),
        "data.weights": ",".join(map(str, np.linspace(0.1, 1, 40))),
        "eval.sample_prompt": ' it\'s\t\\ $HOME `x` "é" *.py ',
        "train.stages": ({"name": "a b'", "steps": 3, "learning_rate": 1e-5}, {"steps": 497}),
        "model.mtp_depth": 0,
        "model.norm_topk_prob": False,
    }
    record = {
        "base": base.name,
        "set": settings,
        "axes": {
            "model.layer_types": [("gated_deltanet", kind) * 2 for kind in ("kda", "gla")],
            "it's": {"é $(x)": {}},
        },
    }
    record["axes"]["long"] = {"y" * 300: {"train.seed": 1}, "y" * 300 + "z": {"train.seed": 2}}
    monkeypatch.setattr(points, "call_function_of_file", lambda *_: record)
    sweep, workdir = load_sweep("sweep.py"), tmp_path / "out $1"
    lines = runner.one_line_commands(sweep, workdir)
    for point, line in zip(sweep.points, lines, strict=True):
        said = subprocess.run(
            ["sh", "-c", f"uv() {{ printf '%s\\0' \"$@\"; }}; {line}"],
            capture_output=True,
            text=True,
        ).stdout.split("\0")[:-1]
        script, file, *overrides, folder = said[said.index(str(ROOT / "train.py")) :]
        values = load_config_file(Path(file.removeprefix("--config=")))
        apply_overrides(
            values, [tuple(o.removeprefix("--config.").split("=", 1)) for o in overrides]
        )
        assert from_dict(Config, values) == point.config
        folder = Path(folder.removeprefix("--workdir="))
        folder.mkdir(parents=True)
        assert folder.parent == workdir / "points"
    record["set"] = {"eval.sample_prompt": "two\nlines"}
    with refused("--emit"):
        runner.one_line_commands(load_sweep("sweep.py"), workdir)


@pytest.mark.parametrize(
    "match, amount",
    [
        ("parameters", lambda c: parameter_counts(c.model).total),
        ("flops", lambda c: flops_per_token(c.model, c.train.sequence_length)),
    ],
)
def test_matched_points_have_the_first_ones_amount(tmp_path, match, amount):
    sweep = load_sweep(
        sweep_file(
            tmp_path,
            {
                "base": "configs/mqar.py",
                "set": {"model.num_hidden_layers": 8},
                "match": match,
                "axes": {"ratio": ["0:1", "1:1", "1:0"]},
            },
        )
    )
    amounts = [amount(p.config) for p in sweep.points]
    assert all(abs(a / amounts[0] - 1) < 0.02 for a in amounts)
    widths = [p.config.model.intermediate_size for p in sweep.points]
    assert len(set(widths)) > 1
    assert widths[0] == 128


def test_matched_points_have_their_own_lengths(tmp_path):
    axes = {"train.sequence_length": [256, 64]}
    record = {"base": "configs/tiny.py", "match": "flops", "axes": axes}
    first, second = (point.config for point in load_sweep(sweep_file(tmp_path, record)).points)
    flops = [flops_per_token(c.model, c.train.sequence_length) for c in (first, second)]
    # Widths are multiples of 8, and FLOPs are linear in the width.
    wider = dataclasses.replace(first.model, moe_intermediate_size=136)
    assert abs(flops[1] - flops[0]) <= (flops_per_token(wider, 256) - flops[0]) / 2


@pytest.mark.parametrize(
    "record, names",
    [
        ({"axes": {"ratios": ["3:1"]}}, ("'ratio'",)),
        ({"axes": {"train.sed": [0]}}, ("train.sed", "'seed'")),
        ({"axes": {"ratio": ["1:2"]}}, ("'1:2'", "LINEAR:FULL")),
        (
            {"axes": {"ratio": ["3:1"], "m": {"a b": {}, "a:b": {}}}},
            ("ratio=3-1,m=a-b",),
        ),
        ({"axes": {"model.head_dim": [32, 31]}}, ("head_dim=31",)),
        ({"axes": {"model": [1]}}, ()),
        ({"axes": {}}, ()),
        ({"axes": {"ratio": []}}, ()),
        ({"axis": {}}, ("'axis'", "'axes'")),
        (
            {"axes": {"ratio": ["3:1"]}, "base": "configs/tinny.py"},
            ("base = configs/tinny.py", "'tiny.py'"),
        ),
        (
            {"axes": {"ratio": ["3:1"]}, "set": {"eval.suites": ("mqra",)}},
            ("eval.suites = 'mqra'", "'mqar'"),
        ),
        (
            {
                "axes": {"ratio": ["3:1"]},
                "set": {"eval.suites": ("niah",), "eval.suite_lengths": (10**6,)},
            },
            ("ratio=3-1", "1000000"),
        ),
        (
            {
                "axes": {"ratio": ["3:1"]},
                "set": {
                    "data.source": "mqar",
                    "eval.sample_tokens": 0,
                    "train.sequence_length": 16,
                },
            },
            ("16",),
        ),
        (
            {"axes": {"train.seed": [0], "m": {"a": {"train.seed": 1}}}},
            ("train.seed", "'train.seed'", "'m'"),
        ),
        (
            {"axes": {"ratio": ["3:1"], "m": {"a": {"model.layer_types": ()}}}},
            ("model.layer_types", "'ratio'", "'m'"),
        ),
        (
            {
                "axes": {
                    "model.hidden_size": [64, 32],
                    "w": {"a": {"model.moe_intermediate_size": 64}},
                },
                "match": "parameters",
            },
            ("model.moe_intermediate_size", "'w'"),
        ),
        (
            {"axes": {"model.hidden_size": [32, 512]}, "match": "parameters"},
            ("hidden_size=512",),
        ),
        (
            {
                "axes": {"model.full_attention_placement": ["first", "last"]},
                "set": {"model.layer_types": ("full_attention",) * 4},
            },
            ("full_attention_placement=first", "full_attention_placement=last"),
        ),
        (
            {"axes": {"m": {"a": {"optimizer.learning_rate": 3e-3}, "b": {}}}},
            ("m=a", "m=b"),
        ),
        (
            {"axes": {"ratio": ["1:0", "7:1"]}},
            ("ratio=7-1", "7:1", "8", "model.num_hidden_layers = 4"),
        ),
        (
            {"axes": {"ratio": ["3:1"], "model.num_hidden_layers": [4, 6]}},
            ("ratio=3-1,num_hidden_layers=6", "layers = 6", "4", "8"),
        ),
        ({"axes": ["ratio"]}, ("axes = ['ratio']",)),
        ({"axes": {"ratio": ["3:1"]}, "set": 3}, ("set = 3",)),
        (
            {"axes": {"ratio": ["3:1"]}, "base": None},
            ("base = None", "'configs/tiny.py'"),
        ),
        ({"axes": {"ratio": ["3:1"]}, "x": []}, ("x = []",)),
        ({"axes": {0: [1]}}, ("0",)),
        ({"axes": {"m": {"a": {0: 1}}}}, ("0",)),
        ({"axes": {"a/../../x": {"b": {}}}}, ("'a/../../x'", "'/'")),
        ({"axes": {"a\nb": {"b": {}}}}, ()),
        (
            {"axes": {"m": {1: {"train.steps": 1}, "1": {"train.steps": 2}}}},
            ("'m'", "[1, '1']"),
        ),
        ({"axes": {"tokens": {"few": {"train.steps": 1}}}}, ("'tokens'",)),
        (
            {"axes": {"ratio": ["3:1"]}, "set": {"eval.sample_prompt": "a\0b"}},
            ("ratio=3-1", "eval.sample_prompt =", "NUL"),
        ),
    ],
)
def test_a_sweep_that_cannot_run_is_refused(tmp_path, record, names):
    with refused(*names):
        check_points_can_run(load_sweep(sweep_file(tmp_path, {"base": "configs/tiny.py"} | record)))


@pytest.mark.parametrize(
    ("record", "names"),
    [
        (
            {"axes": {"train.learning_rate": [1], "ratio": ["3:1"]}, "set": {"train.stps": 3}},
            ["(2)", "axis 'train.learning_rate'", "as train.stps"],
        ),
        (
            {"axes": {"ratio": ["3:1", "2:1"], "train.batch_size": [8, -1]}},
            ["(2)", "batch_size = -1", "ratio 2:1"],
        ),
        (
            {"axes": {"ratio": ["x:1"]}, "match": "flop", "x": "rato", "base": "configs/tny.py"},
            ["(4)", "ratio 'x:1'", "match = 'flop'", "x = 'rato'", "configs/tny.py"],
        ),
    ],
)
def test_every_mistake_of_a_sweep_is_named_once(tmp_path, record, names):
    with pytest.raises(UserError) as caught:
        load_sweep(sweep_file(tmp_path, {"base": "configs/tiny.py"} | record))
    assert all(str(caught.value).count(name) == 1 for name in names)


def test_the_command_line_replaces_the_file_s_settings(tmp_path):
    path = sweep_file(
        tmp_path,
        {
            "base": "configs/tiny.py",
            "set": {"train.steps": 3, "train.seed": 7},
            "axes": {
                "train.seed": [0, 1],
                "rate": {
                    name: {"optimizer.learning_rate": rate, "eval.rows": 8}
                    for name, rate in {"low": 1e-4, "high": 1e-2}.items()
                },
            },
            "match": "flops",
        },
    )

    def points(**changes):
        sweep = load_sweep(path, {name.replace("__", "."): v for name, v in changes.items()})
        settings = [
            (p.config.train.steps, p.config.train.seed, p.config.eval.rows) for p in sweep.points
        ]
        return settings, len(sweep.override_sentences)

    assert points() == ([(3, 0, 8), (3, 0, 8), (3, 1, 8), (3, 1, 8)], 0)
    assert points(train__steps=5) == ([(5, 0, 8), (5, 0, 8), (5, 1, 8), (5, 1, 8)], 1)
    # An axis of this setting keeps one value; the file's "set" had another, too.
    assert points(train__seed=2) == ([(3, 2, 8), (3, 2, 8)], 2)
    # A value of an axis that gives several settings loses this one alone.
    assert points(eval__rows=4) == ([(3, 0, 4), (3, 0, 4), (3, 1, 4), (3, 1, 4)], 1)
    with refused("rate=low", "rate=high"):
        points(optimizer__learning_rate=1e-3)
    with refused("moe_intermediate_size", "--set", "match"):
        load_sweep(path, {"model.moe_intermediate_size": 64})


@pytest.mark.parametrize(
    "line, message",
    [
        ("assert 1 > 2", "AssertionError"),
        ("raise RuntimeError('no\\nmore')", "RuntimeError: no more"),
        ("1 / 0", "division by zero"),
    ],
)
@pytest.mark.parametrize("file, function", [("sweep file", "get_sweep"), ("base", "get_config")])
def test_whatever_a_file_raises_is_one_line(tmp_path, file, function, line, message):
    broken = tmp_path / "broken.py"
    broken.write_text(f"def {function}():\n    {line}\n")
    path = (
        broken
        if file == "sweep file"
        else sweep_file(tmp_path, {"base": str(broken), "axes": {"train.seed": [0]}})
    )
    with refused("broken.py, line 2"):
        load_sweep(path)


def test_the_folder_of_another_sweep_is_refused(tmp_path):
    def load(seeds):
        return load_sweep(
            sweep_file(
                tmp_path,
                {
                    "base": "configs/tiny.py",
                    "set": {"train.steps": len(seeds)},
                    "axes": {"train.seed": seeds},
                },
            )
        )

    runner.create_or_check_sweep_folder(load([0, 1]), tmp_path / "w")
    runner.create_or_check_sweep_folder(load([0, 1]), tmp_path / "w")
    with refused("seed=2"):
        runner.create_or_check_sweep_folder(load([0, 1, 2]), tmp_path / "w")
    with refused("seed=0", "train.steps = 2", "9"):
        load([0, 1])
        runner.create_or_check_sweep_folder(
            load_sweep(tmp_path / "sweep.py", {"train.steps": 9}), tmp_path / "w"
        )

    base = tmp_path / "base.py"
    for width in (64, 32):
        base.write_text(
            Path("configs/tiny.py")
            .read_text()
            .replace("hidden_size = 128", f"hidden_size = {width}", 1)
        )
        sweep = load_sweep(sweep_file(tmp_path, {"base": str(base), "axes": {"train.seed": [0]}}))
        if width == 64:
            runner.create_or_check_sweep_folder(sweep, tmp_path / "v")
    with refused("seed=0", "model.hidden_size = 64", "32"):
        runner.create_or_check_sweep_folder(
            sweep, tmp_path / "v"
        )  # of the same overrides, on a base that was edited
    recorded = tmp_path / "v" / "sweep.json"
    now = recorded.read_text()
    recorded.write_text(now.replace('"format": 3', '"format": 2'))
    with refused("sweep.json"):
        runner.create_or_check_sweep_folder(sweep, tmp_path / "v")
    recorded.write_text(now)
    for text in ("", "[]", '{"points": [3]}', recorded.read_text().replace('"config"', '"was"')):
        recorded.write_text(text)
        with refused("sweep.json"):
            runner.create_or_check_sweep_folder(sweep, tmp_path / "v")


@pytest.mark.slow
def test_a_killed_sweep_goes_on(tmp_path):
    """One real sweep: the runner is killed while its first point trains, another is at work
    meanwhile, then it finishes.
    """
    path = sweep_file(
        tmp_path,
        {
            "base": "configs/mqar.py",
            "set": NANO | dict.fromkeys(("train.steps", "eval.every", "checkpoint.every"), 300),
            "axes": {"train.seed": [0]},
        },
    )
    workdir = tmp_path / "w"
    start = [
        sys.executable,
        "-m",
        "qwen3next_jax",
        "sweep",
        str(path),
        f"--workdir={workdir}",
    ]
    metrics = workdir / "points" / "seed=0" / "metrics.jsonl"
    told = []
    here = runner.Runner(
        load_sweep(path), workdir, workers=1, retries=0, log=told.append, on_point_end=told.append
    )
    first = subprocess.Popen(start, stdout=subprocess.PIPE, text=True)
    _wait(lambda: metrics.exists() and '"train"' in metrics.read_text())
    with refused(workdir):
        here.run()
    assert not told
    first.kill()  # its point gets SIGTERM, saves and ends
    first.wait()
    _wait(lambda: subprocess.run(["flock", "-n", str(workdir / "lock"), "true"]).returncode == 0)
    before = metrics.read_text()
    assert '"checkpoint"' in before
    assert not is_done(metrics.parent, load_sweep(path).points[0].config.train.steps, ())

    third = subprocess.run(start, capture_output=True, text=True)
    assert third.returncode == 0, third.stderr
    assert "seed=0: done" in third.stdout, third.stderr
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "train"] == list(range(1, 301))
    assert "1 of 1 points done" in (workdir / "report.html").read_text()
    assert json.loads((workdir / "results.json").read_text())["points"][0]["steps"] == 300
    assert here.run() == 0
    assert any("1 of 1" in str(line) for line in told)


def _runner(tmp_path, monkeypatch, script, seeds=(0,), retries=2):
    """A runner whose points are `script` instead of train.py; → it, what it told, what it gave
    `after` last.
    """
    sweep = load_sweep(
        sweep_file(
            tmp_path, {"base": "configs/mqar.py", "set": NANO, "axes": {"train.seed": list(seeds)}}
        )
    )
    (tmp_path / "train.py").write_text(f"import os, pathlib, signal, sys, time\n{script}\n")
    monkeypatch.setattr(runner, "TRAIN", tmp_path / "train.py")
    monkeypatch.setattr(runner, "_POLL", 0.01)
    runner.create_or_check_sweep_folder(sweep, tmp_path / "w")
    told, after = [], []
    found = runner.Runner(
        sweep,
        tmp_path / "w",
        workers=1,
        retries=retries,
        log=told.append,
        on_point_end=lambda failed: after.append(dict(failed)),
    )
    return found, told, after


@pytest.mark.parametrize(
    "code, starts",
    [
        (ExitCode.CRASHED, 3),
        (ExitCode.HANG, 3),
        (ExitCode.USER_ERROR, 1),
        (ExitCode.DIVERGED, 1),
        (ExitCode.NOT_SAVED, 1),
        (-signal.SIGKILL, 3),
    ],
)
def test_only_what_another_start_may_mend_is_started_again(tmp_path, monkeypatch, code, starts):
    r, told, after = _runner(
        tmp_path,
        monkeypatch,
        "print('error: loss is NaN', flush=True); "
        + (f"sys.exit({int(code)})" if code > 0 else f"os.kill(os.getpid(), {-code})"),
    )
    assert r.run() == 1
    assert r.starts == {"seed=0": starts}
    assert f"exit code {int(code)}" in told[-1]
    assert after[-1] == {"seed=0": "error: loss is NaN"}
    results = [read_result(p, tmp_path / "none", after[-1].get(p.name, "")) for p in r.sweep.points]
    page = render_report(r.sweep, results, {}, "x")
    assert "<li>1 of 1 points failed" in page
    assert "<td>failed: error: loss is NaN</td>" in page
    assert "not done yet" not in page


def test_a_point_fails_for_what_its_last_start_said(tmp_path, monkeypatch):
    mark = tmp_path / "began"
    r, _, after = _runner(
        tmp_path,
        monkeypatch,
        f"""
mark = pathlib.Path({str(mark)!r})
print("out of memory" if mark.exists() else "error: the disk is away")
mark.touch()
sys.exit(1)""",
        retries=1,
    )
    assert r.run() == 1
    assert after[-1] == {"seed=0": "out of memory"}


def test_a_signal_reaches_a_starting_point(tmp_path, monkeypatch):
    r, told, _ = _runner(tmp_path, monkeypatch, "time.sleep(20)", seeds=(0, 1))

    def interrupted(*arguments, **options):
        process = popen(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(runner.subprocess, "Popen", interrupted)
    begun = time.monotonic()
    assert r.run() == ExitCode.INTERRUPTED
    assert time.monotonic() - begun < 15
    assert "seed=0: stopped" in told
    assert r.starts == {"seed=0": 1}


def test_a_second_runner_leaves_the_report_alone(tmp_path, monkeypatch):
    r, _, after = _runner(tmp_path, monkeypatch, "")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with open_sweep_folder(r.workdir).locked(), refused(r.workdir):
        r.run()
    assert not after
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def _wait(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_point_is_done_with_all_evaluations(tmp_path):
    sweep = load_sweep(
        sweep_file(
            tmp_path,
            {
                "base": "configs/mqar.py",
                "set": NANO | {"eval.suites": ("position", "mqar")},
                "axes": {"train.seed": [0]},
            },
        )
    )
    point, path = sweep.points[0], tmp_path / "metrics.jsonl"
    last = {"step": 4, "time": 0.0}
    figures = {
        "bits_per_byte": {"title": "bits", "unit": "bits", "a field of later versions": 1},
        "targets": {"title": "n", "unit": "count"},
    }
    for event, done in (
        ({"event": "heldout", "loss": 1.0, "accuracy": 0.5}, False),
        (
            {
                "event": "suite",
                "suite": "position",
                "loss": 1.0,
                "bits_per_byte": 2.0,
                "bits_per_byte/1-1": 3.0,
                "targets/1-1": 9,
                "figures": figures,
            },
            False,
        ),
        ({"event": "suite", "suite": "mqar", "accuracy/2 pairs": 0.25}, True),
    ):
        with path.open("a") as file:
            file.write(json.dumps(event | last) + "\n")
        assert is_done(tmp_path, point.config.train.steps, point.config.eval.suites) == done
    assert {
        name: value.value for name, value in read_result(point, tmp_path).final_metrics.items()
    } == {
        "heldout loss": 1.0,
        "heldout accuracy": 0.5,
        "position loss": 1.0,
        "position bits_per_byte": 2.0,
        "position bits_per_byte/1-1": 3.0,
        "mqar accuracy/2 pairs": 0.25,
    }


def _results(tmp_path, figures):
    """Results of {(ratio, seed): {figure: value}}."""
    sweep = load_sweep(
        sweep_file(
            tmp_path,
            {
                "base": "configs/tiny.py",
                "set": {"model.num_hidden_layers": 8},
                "axes": {
                    "ratio": sorted({r for r, _ in figures}),
                    "train.seed": sorted({s for _, s in figures}),
                },
            },
        )
    )
    return sweep, [
        PointResult(
            p,
            500,
            measured(figures[p.axis_values["ratio"], int(p.axis_values["train.seed"])]),
            100.0,
            1.0,
        )
        for p in sweep.points
    ]


def measured(values):
    """As a run that declared its figures records them."""
    declared = Heldout.metrics | {"accuracy": Metric("accuracy", "share", "higher", main=True)}
    return {
        name: pair_with_declarations({name.partition(" ")[2]: value}, declared)[0]
        for name, value in values.items()
    }


def test_findings_say_no_more_than_the_seeds_do(tmp_path):
    sweep, results = _results(
        tmp_path,
        {
            ("1:1", 0): {"heldout bits_per_byte": 2.0},
            ("1:1", 1): {"heldout bits_per_byte": 2.2},
            ("3:1", 0): {"heldout bits_per_byte": 1.9},
            ("3:1", 1): {"heldout bits_per_byte": 2.1},
            ("7:1", 0): {"heldout bits_per_byte": 2.5},
            ("7:1", 1): {"heldout bits_per_byte": 2.6},
        },
    )
    assert finding_sentences(sweep, results) == [
        "Heldout: bits per byte is lowest at ratio 3:1: 2 (1.9 to 2.1, 2 seeds). 1:1 (2.1) "
        "overlaps with it, seed by seed. Every run of 7:1 (2.55) is above every run of it."
    ]
    one = [r for r in results if r.point.axis_values["train.seed"] == "0"]
    assert finding_sentences(sweep, one)[0].endswith(
        "One seed only: differences of this size may be chance."
    )
    assert "different seeds" not in finding_sentences(sweep, results)[0]
    assert "different seeds" in finding_sentences(sweep, results[1:])[0]
    assert metric_along_x(sweep, results, "heldout bits_per_byte")[""]["1:1"].mean == pytest.approx(
        2.1
    )


def test_each_source_of_the_data_has_its_finding(tmp_path):
    """1:1 is best over all rows and for web, 3:1 for code."""
    values = {
        "1:1": {"": 2.0, "/web": 1.0, "/code": 4.0},
        "3:1": {"": 2.5, "/web": 2.0, "/code": 3.0},
    }
    sweep, results = _results(
        tmp_path,
        {
            (ratio, 0): {f"heldout bits_per_byte{source}": v for source, v in of_source.items()}
            | {"heldout mtp_acceptance/0": 0.5}
            for ratio, of_source in values.items()
        },
    )
    best = {
        line.partition(" is lowest at ratio ")[::2] for line in finding_sentences(sweep, results)
    }
    assert {(subject, ratio[:3]) for subject, ratio in best if ratio} == {
        ("Heldout: bits per byte", "1:1"),
        ("Heldout: bits per byte web", "1:1"),
        ("Heldout: bits per byte code", "3:1"),
    }
    page = render_report(sweep, results, {p.name: "" for p in sweep.points}, "ratio")
    points_table = page[page.index('id="points"') :]
    assert "bits per byte web" in points_table
    assert "drafts accepted t+2" in points_table


def test_points_with_different_texts_are_named(tmp_path):
    axes = {
        "train.sequence_length": [64, 128],
        "data.source": ["mqar", "copy"],
        "data.seed": [0, 1],
    }
    sweep = load_sweep(sweep_file(tmp_path, {"base": "configs/mqar.py", "axes": axes}))
    results = [PointResult(p, 9, measured({"heldout loss": 1.0}), 1.0, 1.0) for p in sweep.points]
    of_length, *_ = finding_sentences(sweep, results)
    assert "(train.sequence_length)" in of_length
    same = dataclasses.replace(sweep, x_axis="data.seed")
    assert not any("different" in sentence for sentence in finding_sentences(same, results))


def test_seeds_of_data_compare_pairwise(tmp_path):
    seeds = {name: {"train.seed": i, "data.seed": i} for i, name in enumerate("ab")}
    axes = {"optimizer.learning_rate": [1e-3, 2e-3], "seed": seeds}
    sweep = load_sweep(sweep_file(tmp_path, {"base": "configs/mqar.py", "axes": axes}))
    results = [PointResult(p, 9, measured({"heldout loss": 1.0}), 1.0, 1.0) for p in sweep.points]
    assert heldout_settings_along(sweep, results, "optimizer.learning_rate") == []


def test_a_subtitle_names_every_data_seed(tmp_path):
    sweep = load_sweep(
        sweep_file(tmp_path, {"base": "configs/tiny.py", "axes": {"data.seed": [3, 4]}})
    )
    results = [PointResult(point, 0, {}, math.nan, 0.0) for point in sweep.points]
    page = render_report(sweep, results, {}, "x")
    assert "data seed 3, 4" in page


def test_an_axis_cannot_have_a_columns_name(tmp_path):
    sweep, results = _results(tmp_path, {("1:1", 0): {}})
    commands = {point.name: "" for point in sweep.points}
    (head,) = csv.reader(io.StringIO(to_csv(sweep, results, commands).splitlines()[0]))
    assert {*head} - {*sweep.axes} == {*points._COLUMNS}


def test_lost_speeds_leave_json_readable(tmp_path):
    sweep, results = _results(tmp_path, {("1:1", 0): {"heldout loss": 1.0}})
    lost = [dataclasses.replace(result, tokens_per_second=math.nan) for result in results]
    text = to_json(sweep, lost, {point.name: "" for point in sweep.points}, [])
    assert json.loads(text, parse_constant=pytest.fail)["points"][0]["tokens_per_second"] is None
    _, row = csv.reader(io.StringIO(to_csv(sweep, lost, {p.name: "" for p in sweep.points})))
    assert "nan" not in row


def test_lost_steps_count_as_active_time(tmp_path):
    """A process trains for 10 s; the next one begins 100 s later, from the step at 4 s."""
    sweep, _ = _results(tmp_path, {("1:1", 0): {}})
    events = [
        {"event": "start", "time": 0.0},
        {"event": "train", "time": 4.0},
        {"event": "start", "time": 110.0, "previous_end": 10.0},
        {"event": "train", "time": 113.0},
    ]
    lines = (json.dumps(event | {"step": 1}) for event in events)
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_result(sweep.points[0], tmp_path).active_seconds == 10 + 3


def test_a_train_event_may_lack_its_loss(tmp_path):
    sweep, _ = _results(tmp_path, {("1:1", 0): {}})
    event = {"event": "train", "step": 1, "time": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(event))
    assert read_result(sweep.points[0], tmp_path).training_losses == ()


def test_an_unwritable_report_ends_no_sweep(tmp_path):
    path = sweep_file(
        tmp_path, {"base": "configs/mqar.py", "set": NANO, "axes": {"train.seed": [0]}}
    )
    workdir = tmp_path / "w"
    (workdir / "points" / "seed=0").mkdir(parents=True)
    (workdir / "report.html").mkdir()
    event = {"event": "heldout", "step": 4, "time": 1.0, "loss": 1.0}
    (workdir / "points" / "seed=0" / "metrics.jsonl").write_text(json.dumps(event))
    command = [sys.executable, "-m", "qwen3next_jax", "sweep", str(path), f"--workdir={workdir}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert f"{workdir}: the report" in done.stderr


def test_pareto_keeps_what_nothing_beats_in_both():
    points = [(0, 0.5), (1, 0.5), (1, 0.7), (2, 0.6), (3, 0.9)]
    assert pareto_front_indices(points, higher=True) == [0, 2, 4]
    assert pareto_front_indices(points, higher=False) == [0]


def test_report_and_table_hold_every_point_and_its_command(tmp_path):
    sweep, results = _results(
        tmp_path, {("1:1", 0): {"heldout accuracy": 0.5, "heldout loss": 1.0}, ("3:1", 0): {}}
    )
    commands = {p.name: runner.shell_command(sweep, p, tmp_path) for p in sweep.points}
    page = render_report(sweep, results, commands, "ratio")
    assert "1 of 2 points done" in page
    assert page.count("train.py --config=configs/tiny.py") == 2
    assert "<script src" not in page
    lines = to_csv(sweep, results, commands).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(
        "point,ratio,train.seed,steps,steps_done,heldout accuracy,heldout loss"
    )
    assert sweep_manifest(sweep)["points"][0]["overrides"] == {
        "model.num_hidden_layers": 8,
        "model.full_attention_interval": 2,
        "model.layer_types": [],
        "train.seed": 0,
    }


def test_no_cell_of_the_table_is_a_formula(tmp_path):
    sweep, results = _results(tmp_path, {("1:1", 0): {"heldout loss": -0.5, "@name": 1.0}})
    command = '=HYPERLINK("file:///")'
    head, row = csv.reader(io.StringIO(to_csv(sweep, results, {results[0].point.name: command})))
    cells = dict(zip(head, row, strict=True))
    assert cells["heldout loss"] == "-0.5"
    assert cells["'@name"] == "1.0"
    assert cells["command"] == f"'{command}"


@pytest.fixture
def two_tasks(tmp_path):
    """A sweep of ratio × task without a seed axis, where x is not the first axis; attention
    heads differ between the tasks.
    """
    sweep = load_sweep(
        sweep_file(
            tmp_path,
            {
                "base": "configs/tiny.py",
                "x": "ratio",
                "axes": {
                    "task": {"a": {"model.head_dim": 32}, "b": {"model.head_dim": 64}},
                    "ratio": ["0:1", "1:1", "3:1"],
                },
            },
        )
    )
    places = [f"position accuracy/{n}" for n in range(6)]
    return sweep, [
        PointResult(
            p,
            500,
            measured({"heldout accuracy": 0.1 * i} | dict.fromkeys(places, 0.5)),
            100.0 * (i + 1),
            1.0,
        )
        for i, p in enumerate(sweep.points)
    ]


def test_charts_keep_apart_what_other_axes_change(two_tasks, monkeypatch):
    sweep, results = two_tasks
    drawn = {}
    monkeypatch.setattr(
        "qwen3next_jax.sweeps.report.line_chart",
        lambda title, lines, **_: drawn.setdefault(title, lines) and "",
    )
    render_report(sweep, results, {}, "x")
    assert {line.label: list(line.y) for line in drawn["Tokens per second"]} == {
        "task a": [100, 200, 300],
        "task b": [400, 500, 600],
    }
    assert [line.label for line in drawn["Parameters"]] == ["task a", "task b"]
    assert [line.label for line in drawn["Recurrent state, bytes"]] == [""]  # the same for both
    for task, bytes_per_head in (("a", 32 * 4), ("b", 64 * 4)):
        lines = drawn[f"Heldout: accuracy (task {task}) against cache"]
        # Keys and values of 2 heads in 4, 2 and 1 attention layers.
        assert {line.label: list(line.x) for line in lines if line.dots} == {
            ratio: [layers * 2 * 2 * bytes_per_head]
            for ratio, layers in (("0:1", 4), ("1:1", 2), ("3:1", 1))
        }
    styles = [(line.gradient_position, line.dash_index) for line in drawn["Position: accuracy"]]
    assert len(set(styles)) == 12
    assert {shade for shade, _ in styles} == {0, 0.2, 0.4, 0.6, 0.8, 1}


def test_tables_follow_the_sweep_s_x_axis(two_tasks, tmp_path):
    sweep, results = two_tasks
    path = tmp_path / "results.json"
    path.write_text(to_json(sweep, results, {p.name: "" for p in sweep.points}, []))
    printed = subprocess.run(
        [sys.executable, "benchmarks/sweeps/sweep_tables.py", str(path), "heldout accuracy"],
        capture_output=True,
        text=True,
    )
    assert printed.stdout.splitlines()[1:6] == [
        "heldout accuracy",
        "",
        "| ratio | task a | task b |",
        "|---|---|---|",
        "| 0:1 | 0 | 0.3 |",
    ], printed.stderr


def test_a_point_leads_to_the_page_of_its_run(tmp_path):
    sweep = load_sweep(
        sweep_file(tmp_path, {"base": "configs/mqar.py", "axes": {"train.seed": [0, 1]}})
    )
    first, second = sweep.points
    folder = runner.point_folder(tmp_path, first)
    folder.mkdir(parents=True)
    (folder / "report.html").touch()
    losses = [{"event": "train", "step": s, "time": s, "loss": 3.0 / s} for s in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, losses)))
    results = [
        read_result(point, runner.point_folder(tmp_path, point)) for point in (first, second)
    ]
    page = render_report(sweep, results, {}, "x")
    assert [r.training_losses for r in results] == [((1, 3.0), (2, 1.5)), ()]
    (href,) = re.findall(r'href="(points/[^"]*)"', page)
    assert (tmp_path / urllib.parse.unquote(href)) == folder / "report.html"


def _ladder(tmp_path, faster=2.0, **record):
    """A sweep of two optimizers with made losses: Muon needs 1 / faster as many steps as AdamW."""
    axes = {
        "optimizer": {"adamw": {}, "muon": {"optimizer.name": "muon"}},
        "train.steps": [100, 300, 900],
        "train.seed": [0, 1],
    }
    sweep = load_sweep(
        sweep_file(tmp_path, {"base": "configs/tiny.py", "x": "optimizer", "axes": axes} | record)
    )
    results = []
    for point in sweep.points:
        config = point.config
        speed = faster if config.optimizer.name == "muon" else 1.0
        loss = 1.5 + (speed * config.train.steps) ** -0.3 + 1e-3 * (config.train.seed - 0.5)
        values = measured({"heldout bits_per_byte": loss})
        results.append(PointResult(point, config.train.steps, values, 100.0 / speed, 1.0))
    return sweep, results


@pytest.mark.parametrize("x", ["optimizer", "train.steps"])
def test_a_sweep_over_budgets_gives_the_speed_up(tmp_path, x):
    """Muon takes half the steps and FLOPs, and each step twice the time."""
    sweep, results = _ladder(tmp_path, x=x)
    (comparison,) = compare_arms(sweep, results)
    assert (comparison.arm_name, comparison.baseline_name) == ("muon", "adamw")
    for unit, factor in (("steps", 2.0), ("flops", 2.0), ("seconds", 1.0)):
        found = comparison.speed_ups_by_unit[unit]
        assert found.factor == pytest.approx(factor, rel=1e-3)
        assert found.seeds == (2, 2)
        assert found.low < factor < found.high


def test_the_page_and_results_have_the_speed_up(tmp_path):
    axes = {"optimizer.name": ["adamw", "muon"], "train.steps": [100, 300, 900]}
    sweep, results = _ladder(tmp_path, axes=axes, x="optimizer.name")
    write_report(sweep, results, {p.name: "" for p in sweep.points}, "x", tmp_path)
    assert 'id="effective-speed-up"' in (tmp_path / "report.html").read_text()
    (record,) = json.loads((tmp_path / "results.json").read_text())["speed_ups"]
    assert record["arm"] == "muon"
    assert record["steps"]["factor"] == pytest.approx(2, rel=1e-3)


def test_a_seed_without_every_budget_is_left_out(tmp_path):
    sweep, results = _ladder(tmp_path)
    results[0] = dataclasses.replace(results[0], final_metrics={})
    assert compare_arms(sweep, results)[0].speed_ups_by_unit["steps"].seeds == (1, 2)
    results[1] = dataclasses.replace(results[1], final_metrics={})
    assert "adamw" in compare_arms(sweep, results)[0].speed_ups_by_unit["steps"]


def test_a_speed_up_from_one_budget_is_refused(tmp_path):
    sweep, results = _ladder(
        tmp_path, axes={"optimizer.name": ["adamw", "muon"]}, x="optimizer.name"
    )
    with refused("name", "one budget", "flops"):
        compare_arms(sweep, results)
    assert "one budget" in render_report(sweep, results, {p.name: "" for p in sweep.points}, "x")


def test_arms_with_different_texts_are_refused(tmp_path):
    axes = {"train.sequence_length": [64, 128], "train.steps": [100, 300, 900]}
    sweep, results = _ladder(tmp_path, axes=axes, x="train.steps")
    with refused("sequence_length", "different text"):
        compare_arms(sweep, results)


def test_each_value_of_another_axis_is_compared_alone(tmp_path):
    axes = {
        "model.num_hidden_layers": [4, 8],
        "optimizer": {"adamw": {}, "muon": {"optimizer.name": "muon"}},
        "flops": [1e12, 3e12, 9e12],
    }
    sweep, results = _ladder(tmp_path, axes=axes)
    assert [(c.baseline_name, c.arm_name) for c in compare_arms(sweep, results)] == [
        (f"adamw (num_hidden_layers {n})", f"muon (num_hidden_layers {n})") for n in (4, 8)
    ]
