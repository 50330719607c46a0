"""Hooks of a user's own: when they are called, what they see, and what happens when one fails."""

import pytest

from qwen3next_jax.common.errors import ExitCode, UserError
from qwen3next_jax.common.events import read_events
from tests.in_process import train
from tests.runs.test_branching import with_
from tests.runs.test_stages import DENSE, Stage


def with_train(**changes):
    """Six steps in two stages."""
    return with_(
        train={"steps": 6, "stages": (Stage(3), Stage(3, schedule="linear")), **changes},
        model=DENSE,
        checkpoint={"every": 4},
    )


def test_a_hook_is_called_when_it_is_due_with_what_the_step_gave(tmp_path):
    seen = []

    def add(trainer):
        for name, when in (
            ("every 2", {"every": 2}),
            ("2 and 3", {"every": (2, 3)}),
            ("ends", {"every": 0, "at_stage_end": True}),
        ):
            trainer.add_hook(lambda info, name=name: seen.append((name, info)), **when)

    assert train(with_train(), tmp_path, add_hooks=add) == 0
    steps = {name: [i.step for n, i in seen if n == name] for name, _ in seen}
    assert steps == {"every 2": [2, 4, 6], "2 and 3": [2, 3, 4, 6], "ends": [3, 6]}
    losses = {
        e["step"]: e["loss"]
        for e in read_events(tmp_path / "metrics.jsonl")
        if e["event"] == "train"
    }
    for _, info in seen:
        assert float(info.metrics["loss"]) == losses[info.step]
        assert info.stage.last_step == (3 if info.step <= 3 else 6)


FAILING = """
def add(trainer):
    def fail(info):
        raise KeyError("nothing there")
    trainer.add_hook(fail, every=2, name="my hook")
"""


def test_a_hook_that_fails_ends_the_run_or_is_passed_over_by_a_setting(
    tmp_path, monkeypatch, capsys
):
    """The run with the failing hook is bitwise the run without it."""
    (tmp_path / "failing_hooks.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="my hook.*step 2.*KeyError.*line 4.*on_hook_error") as told:
        train(with_train(hooks=("failing_hooks:add",)), tmp_path / "stops")
    assert told.value.exit_code == ExitCode.CRASHED and "\n" not in str(told.value)

    assert train(with_train(), tmp_path / "alone") == 0
    going_on = with_train(hooks=("failing_hooks:add",), on_hook_error="continue")
    assert train(going_on, tmp_path / "goes on") == 0
    assert capsys.readouterr().err.count("my hook") == 3
    events = {name: read_events(tmp_path / name / "metrics.jsonl") for name in ("alone", "goes on")}
    failed = [e["step"] for e in events["goes on"] if e["event"] == "hook_failed"]
    assert failed == [2, 4, 6]
    curves = [
        [(e["step"], e["loss"], e["grad_norm"]) for e in found if e["event"] == "train"]
        for found in events.values()
    ]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("name", ["hooks", "no_such_module:add", "sys:no_such_name"])
def test_a_hook_that_cannot_be_found_is_one_line(tmp_path, name):
    with pytest.raises(UserError, match="train.hooks") as told:
        train(with_train(hooks=(name,)), tmp_path)
    assert "\n" not in str(told.value)
