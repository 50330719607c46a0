"""A run from end to end, as it is watched: diagnostics, profile, TensorBoard, report, and what a
resume adds to them.
"""

import json
import shutil

import numpy as np
import pytest

from qwen3next_jax.common.events import read_events
from qwen3next_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    ProfileConfig,
    TelemetryConfig,
    TrainConfig,
)
from tests.corpora import write_texts
from tests.in_process import train

# The same program as there, so that one of the two test files finds it compiled.
from tests.runs.test_training import MODEL


def _config(folder, **changes) -> Config:
    return Config(
        name="watched",
        model=MODEL,
        data=DataConfig(
            path=f"{folder}/*.txt", heldout_fraction=0.2, prepared_dir=str(folder / "prepared")
        ),
        train=TrainConfig(steps=20, batch_size=4, sequence_length=64, log_every=5),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        checkpoint=CheckpointConfig(every=10),
        eval=EvalConfig(every=20, rows=4, sample_tokens=0, suites=("sinks",), suite_rows=4),
        **changes,
    )


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder of the texts, workdir of a run of 20 steps, its events, those after it was resumed
    at step 10).
    """
    folder = tmp_path_factory.mktemp("watched")
    write_texts(folder, 40)
    workdir = folder / "run"
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    telemetry = TelemetryConfig(diagnostics_every=10, tensorboard=True)
    assert (
        train(
            _config(folder, telemetry=telemetry, profile=ProfileConfig("4:6", memory=True)), workdir
        )
        == 0
    )
    before = read_events(workdir / "metrics.jsonl")
    shutil.rmtree(workdir / "checkpoints" / "20")
    assert train(_config(folder, telemetry=telemetry, profile=ProfileConfig("3:12")), workdir) == 0
    return workdir, before, read_events(workdir / "metrics.jsonl")


def test_every_event_is_there(run):
    _, events, _ = run
    steps = {}
    for event in events:
        steps.setdefault(event["event"], []).append(event["step"])
    assert steps == {
        "start": [0],
        "operators": [0],
        "profile": [5],
        "train": [5, 10, 15, 20],
        "diagnostics": [10, 20],
        "heldout": [20],
        "suite": [20],
        "checkpoint": [10, 20],
    }
    (sinks,) = (e for e in events if e["event"] == "suite")
    assert 0 < sinks["first_token_share/layer 1"] < 1 < sinks["activation_ratio"]
    start, record = events[0], next(e for e in events if e["event"] == "train" and e["step"] == 20)
    assert start["previous_end"] is None
    assert start["hosts"] == 1
    assert start["device_kind"] == "cpu"
    assert record["steps"] == 5
    assert record["mfu"] is None
    assert record["memory_bytes"] > 1e8
    assert 0 <= record["data_wait"] <= 1
    assert record["tokens_per_second"] == pytest.approx(5 * 4 * 64 / record["seconds"])
    diagnostics = [e for e in events if e["event"] == "diagnostics"][-1]
    # one layer of the two has experts, four
    assert np.shape(diagnostics["expert_load"]) == (1, 4)
    assert np.mean(diagnostics["expert_load"]) == pytest.approx(1, abs=0.01)
    assert set(diagnostics) > {
        "first_token_share",
        "gate_mean",
        "half_life",
        "beta",
        "state_norm",
        "activation_ratio",
        "router_entropy",
        "router_z",
        "load_cv",
        "load_max_violation",
        "dead_experts",
        "grad_norm",
        "param_norm",
        "norm_weight_max",
        "groups",
    }
    norms = [
        *diagnostics["grad_norm"],
        *(group["grad_norm"] for group in diagnostics["groups"].values()),
    ]
    assert np.sqrt(np.sum(np.square(norms))) == pytest.approx(record["grad_norm"], rel=1e-3)


def test_a_resumed_run_says_what_was_lost_and_repeats_the_rest_exactly(run):
    _, before, after = run
    start = [e for e in after if e["event"] == "start"][1]
    assert (start["first_step"], start["lost_steps"]) == (10, 10)
    assert start["previous_end"] == before[-1]["time"]

    def curve(events, kind, names):
        return [[e["step"], *(e[name] for name in names)] for e in events if e["event"] == kind]

    for kind, names in (
        ("train", ("loss", "grad_norm")),
        ("heldout", ("loss",)),
        ("diagnostics", ("activation_max", "grad_norm", "expert_load")),
    ):
        assert curve(after, kind, names) == curve(before, kind, names)


def test_traces_are_written_in_new_and_in_resumed_runs(run):
    workdir, _, after = run
    # 11: the range began before the resumed step
    assert [e["step"] for e in after if e["event"] == "profile"] == [5, 11]
    assert len(list((workdir / "profile").rglob("*.xplane.pb"))) == 2
    assert (workdir / "profile" / "memory_5_0.prof").stat().st_size > 0


def test_the_report_and_tensorboard_are_there(run):
    workdir, _, _ = run
    page = (workdir / "report.html").read_text()
    assert "from step 10; 10 steps taken again" in page
    assert "Decay half-life by layer" in page
    assert "nothing recorded" not in page
    assert "sinks: attention on the first token" in page
    assert len(list((workdir / "tensorboard").iterdir())) == 2
    assert not (workdir / "report.tmp").exists()
    assert json.loads((workdir / "run.json").read_text())["config"]["name"] == "watched"
