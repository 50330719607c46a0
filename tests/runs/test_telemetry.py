"""The record of a run: which events a resumed run keeps, and that terminal, TensorBoard and Weights
& Biases show the recorded numbers.
"""

import io
import re
import sys
import time
import types

import pytest
from rich.console import Console

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.events import read_events
from qwen3next_jax.common.metrics import evaluation_event_fields
from qwen3next_jax.config import Config, ProfileConfig, TrainConfig
from qwen3next_jax.evals.heldout import Heldout
from qwen3next_jax.runs import display as display_module
from qwen3next_jax.runs.display import Display
from qwen3next_jax.runs.store.local_events import LocalEvents
from qwen3next_jax.runs.telemetry import (
    MetricsFile,
    TensorBoard,
    WeightsAndBiases,
    scalars_of_event,
)
from qwen3next_jax.training.stages import resolve_stages

TRAIN = {
    "event": "train",
    "step": 120,
    "time": 1.0,
    "loss": 2.0123,
    "bits_per_byte": 2.9031,
    "mtp_loss/0": 2.3,
    "mtp_loss/1": "nan",
    "balance_loss": 1.02,
    "busiest_expert": 2.5,
    "idle_experts": 0,
    "grad_norm": 0.871,
    "learning_rate": 3e-3,
    "tokens_seen": 245_760,
    "tokens_per_second": 4567.8,
    "steps": 10,
    "seconds": 4.48,
    "data_wait": 0.01,
    "model_flops_per_second": 4.3e10,
    "mfu": None,
    "memory_bytes": 2_345_678_901,
    "memory_limit": None,
}
_SLOW = "experts run without kernels: expect a step several times as long"
OPERATORS = {
    "event": "operators",
    "step": 0,
    "operators": [
        dict(
            zip(("operator", "implementation", "why", "consequence"), entry), kernels=False, call=""
        )
        for entry in (
            ("gated_delta_rule", "pallas_gpu", "passed", ""),
            ("routed_experts", "xla", "the call fails", _SLOW),
            ("grouped_matmul", "blocked", "the call fails", _SLOW),
        )
    ],
}
HELDOUT = {
    "event": "heldout",
    "step": 125,
    "time": 2.0,
    **evaluation_event_fields(
        {"loss": 1.9, "bits_per_byte": 2.741, "mtp_acceptance/0": 0.75}, Heldout.metrics
    ),
}


def test_a_resumed_run_keeps_what_is_true_and_drops_what_comes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(LocalEvents(path), 0) as metrics:
        metrics.write_start(0, start_time=100.0, devices=1)
        for step in (10, 20, 30):
            metrics.write(
                "train",
                step,
                time=100.0 + step,
                loss=float("nan") if step == 20 else 1.0,
                parts=[float("inf"), None],
            )
        metrics.write("skip", 25, time=131.0)
        metrics.write("stop", 30, time=132.0, reason="hang")
    with path.open("a") as file:
        file.write('{"event": "train", "st')  # torn by a kill
    with MetricsFile(LocalEvents(path), 20) as metrics:
        metrics.write_start(20, start_time=200.0)
        metrics.write("train", 40, time=240.0)
        metrics.remove_events_after(30)
        metrics.write("train", 35, time=245.0)
    events = read_events(path)
    assert [(e["event"], e["step"]) for e in events] == [
        ("start", 0),
        ("train", 10),
        ("train", 20),
        ("stop", 30),
        ("start", 20),
        ("train", 35),
    ]
    assert events[4] | {"time": 200.0, "previous_end": 132.0, "lost_steps": 10} == events[4]
    assert events[2]["loss"] == "nan"
    assert events[2]["parts"] == ["inf", None]


def stages_of(steps):
    train = TrainConfig(steps=steps, batch_size=8, sequence_length=256)
    return resolve_stages(Config(train=train))


def test_other_processes_write_and_show_nothing(tmp_path, capsys):
    with (
        MetricsFile(None, 0, [lambda event: pytest.fail("process 1 shows an event")]) as metrics,
        Display("title", stages_of(10), 0, visible=False) as display,
    ):
        metrics.write_start(0, start_time=1.0)
        metrics.write("train", 1)
        metrics.remove_events_after(0)
        display(TRAIN)
    assert capsys.readouterr().out == ""


def test_a_long_compilation_is_announced_before_xla_warns_about_it(monkeypatch, capsys):
    # the message comes 10 s earlier
    monkeypatch.setattr(display_module, "XLA_WARNING_SECONDS", 10.05)
    with Display("title", stages_of(10), 0) as display:
        time.sleep(0.3)
    assert "nothing is wrong" in capsys.readouterr().out
    with Display("title", stages_of(10), 0) as display:
        display.advance_to(0)  # the first step was dispatched, so it is compiled
        time.sleep(0.3)
    assert "nothing is wrong" not in capsys.readouterr().out


def _screen(width: int) -> str:
    """Returns the text of the live display on a terminal of this width, after some events."""
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=50, color_system=None
    )
    display = Display(
        "tiny: 2,652,024 parameters on cpu · 681 documents, 11,524,470 tokens · new run",
        stages_of(500),
        0,
        console=console,
    )
    for event in (
        TRAIN,
        HELDOUT,
        OPERATORS,
        {"event": "checkpoint", "step": 125},
        {"event": "skip", "step": 121, "reason": "gradient not finite", "skipped": 3},
        {"event": "sample", "step": 125, "text": "def f(x):\n    return [bold]x[/]\n"},
    ):
        display(event)
    console.print(display.panel())
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_the_live_display_shows_everything_at_any_width(width):
    screen = _screen(width)
    lines = screen.splitlines()
    assert max(map(len, lines)) <= width
    for shown in (
        "loss 2.0123",
        "bits/byte 2.9031",
        "mtp loss t+2 2.3000",
        "mtp loss t+3 nan",
        "balance 1.020",
        "busiest expert 2.50 × fair share",
        "grad norm 0.871",
        "lr 3.00e-03",
        "tokens 246 k",
        "tokens/s 4,568",
        "model FLOP/s 43 G",
        "MFU –",
        "left 0:02:50",
        "memory 2.35 GB",
        "data wait 1%",
        "checkpoint step 125",
        "skipped 3",
        "step 121  update skipped: gradient not finite",
        "expect a step several times as long",
        "gated_delta_rule pallas_gpu: passed",
        "heldout  bits per byte 2.7410  drafts accepted t+2 75.0%",
        "return [bold]x[/]",
    ):
        assert shown in screen, shown


def test_the_live_panel_leaves_room_for_the_terminals_ctrl_c():
    """Which writes ^C behind the last line of the panel, perhaps twice."""
    console = Console(width=80, force_terminal=True, file=io.StringIO())
    with Display("title", stages_of(500), 0, console=console):
        pass
    borders = re.findall("╰─*╯", console.file.getvalue())
    assert {len(border) for border in borders} == {80 - len("^C^C")}


def test_without_a_terminal_the_display_prints_plain_lines(capsys):
    with Display("title", stages_of(500), 0) as display:
        for event in (
            OPERATORS,
            TRAIN | {"mfu": 0.401},
            HELDOUT,
            {"event": "rewind", "step": 100, "reason": "spike"},
            {
                "event": "suite",
                "step": 125,
                "suite": "not declared",
                "new_thing/here": 2,
                "time": 1.0,
            },
        ):
            display(event)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:5] == [
        "gated_delta_rule pallas_gpu: passed",
        "routed_experts xla, grouped_matmul blocked: the call fails",
        "warning: experts run without kernels: expect a step several times as long (the call "
        "fails)",
    ]
    del lines[2:5]
    assert len(lines) == 7
    assert "compil" in lines[1]
    assert "compil" in lines[2]
    lines = [lines[0], *lines[3:]]
    assert lines[0] == "title"
    assert lines[3] == "step 100  rewound: spike"
    assert lines[4] == "step 125  not declared  new thing here 2"
    assert lines[1].startswith("step 120/500  loss 2.0123  bits/byte 2.903")
    assert "MFU 40.1%" in lines[1]


def test_what_a_run_waits_for_is_said_once_in_lines_and_each_time_in_the_panel(capsys):
    with Display("title", stages_of(500), 0) as display:
        display.advance_to(1)
        for _ in range(2):
            with display.show_activity("evaluating nothing"):
                pass
    assert capsys.readouterr().out.count("evaluating nothing") == 1
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    display = Display("title", stages_of(500), 0, console=console)
    for _ in range(2):
        with display.show_activity("evaluating nothing"):
            console.print(display.panel())
        console.print(display.panel())
    assert console.file.getvalue().count("evaluating nothing") == 2


def test_a_resumed_run_shows_its_checkpoint_and_no_time_left_of_a_compiled_step():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    display = Display("title", stages_of(500), 119, console=console)
    display(TRAIN)
    console.print(display.panel())
    display(TRAIN | {"step": 121})
    console.print(display.panel())
    shown = console.file.getvalue()
    assert shown.count("checkpoint step 119") == 2
    assert shown.count("left –") == shown.count("left 0:02:50") == 1


def test_tensorboard_holds_every_number(tmp_path):
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    from tensorboardX.proto.event_pb2 import Event

    board = TensorBoard(tmp_path, 0)
    events = [
        TRAIN,
        {"event": "sample", "step": 120, "time": 1.0, "text": "def f():"},
        {
            "event": "diagnostics",
            "step": 120,
            "time": 1.0,
            "beta": [0.5, None, 0.25],
            "expert_load": [[1.0, 1.0]],
        },
    ]
    for event in events:
        board(event)
    board.close()
    data, found = next((tmp_path / "tensorboard").iterdir()).read_bytes(), {}
    while data:
        length = int.from_bytes(data[:8], "little")
        for value in Event.FromString(data[12 : 12 + length]).summary.value:
            found[value.tag] = value.simple_value
        data = data[16 + length :]
    assert found["train/loss"] == pytest.approx(2.0123)
    assert found["train/mtp_loss/0"] == pytest.approx(2.3)
    assert found["diagnostics/beta/layer_00"] == 0.5
    assert found["diagnostics/beta/layer_02"] == 0.25
    assert "diagnostics/beta/layer_01" not in found
    assert "train/mtp_loss/1" not in found
    assert any(tag.startswith("sample") for tag in found)


def test_a_resumed_run_continues_its_weights_and_biases_run(tmp_path, monkeypatch):
    class Run(list):
        def log(self, values):
            self.append(values)

        def define_metric(self, name, step_metric):
            self.step = (name, step_metric)

        def finish(self):
            self.finished = True

    starts, run = [], Run()
    monkeypatch.setitem(
        sys.modules,
        "wandb",
        types.SimpleNamespace(init=lambda **options: starts.append(options) or run),
    )
    page = ("study", "watched", {"telemetry": {"wandb": "study"}}, tmp_path)
    for _ in range(2):
        with MetricsFile(
            LocalEvents(tmp_path / "metrics.jsonl"), 0, [WeightsAndBiases(*page)]
        ) as metrics:
            metrics.write("train", 7, loss=1.5)
    assert starts[0] == starts[1]
    assert starts[0]["project"] == "study"
    assert starts[0]["resume"] == "allow"
    assert starts[0]["config"]["telemetry"]["wandb"] == "study"
    assert run.finished
    assert run.step == ("*", "step")
    assert list(run) == [{"train/loss": 1.5, "step": 7}] * 2


def test_scalars_are_the_numbers_of_an_event():
    assert scalars_of_event(
        {
            "event": "stop",
            "step": 1,
            "time": 1.0,
            "reason": "hang",
            "code": 3,
            "ok": True,
            "x": None,
        }
    ) == {"stop/code": 3}


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "10"},
        {"steps": "13:10"},
        {"steps": "0:3"},
        {"steps": "a:b"},
        {"steps": ":3"},
        {"memory": True},
    ],
)
def test_profile_ranges_are_checked(change):
    with pytest.raises(UserError, match="profile."):
        ProfileConfig(**change)
    assert list(ProfileConfig(steps="10:13").traced_steps) == [10, 11, 12]
    assert not ProfileConfig().traced_steps
