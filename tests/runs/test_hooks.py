"""Hooks of a user's own: when they are called, what they see, and what happens when one fails."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from qwen3next_jax.common.errors import RESTARTED, ExitCode, UserError
from qwen3next_jax.common.events import read_events
from qwen3next_jax.config import EvalConfig, Stage
from qwen3next_jax.data.tokens import load_tokenizer
from qwen3next_jax.runs import hooks
from qwen3next_jax.runs.folder import saved_steps
from qwen3next_jax.runs.hooks import choose_sample_prompt
from qwen3next_jax.runs.telemetry import MetricsFile
from qwen3next_jax.training import loop
from qwen3next_jax.training.hooks import Hook, exit_code_of_hook_error
from qwen3next_jax.training.loop import Trainer
from qwen3next_jax.training.stages import DataCursor, open_data_of_stages, start_data_at_cursors
from tests.in_process import resolved, shared_step, train
from tests.runs.test_branching import with_


def with_train(**changes):
    """Six steps in two stages."""
    return with_(
        train={"steps": 6, "stages": (Stage(3), Stage(3)), **changes},
        checkpoint={"every": 4},
        eval={"suites": ("mqar",), "suite_rows": 2, "suite_lengths": (32,), "suite_pairs": (4,)},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, and what its hooks saw: (when a hook is due, `StepInfo`)."""
    seen = []

    def add(trainer):
        for name, when in (
            ("every 2", {"every": 2}),
            ("2 and 3", {"every": (2, 3)}),
            ("ends", {"every": 0, "at_stage_end": True}),
        ):
            trainer.add_hook(lambda info, name=name: seen.append((name, info)), **when)

    folder = tmp_path_factory.mktemp("run")
    assert train(with_train(), folder, add_hooks=add) == 0
    return folder, seen


def measured(folder):
    """What a run recorded of its steps and evaluations, without times and speeds."""
    names = ("event", "step", "loss", "grad_norm", "accuracy")
    events = read_events(folder / "metrics.jsonl")
    return [
        {name: event[name] for name in names if name in event}
        for event in events
        if event["event"] in ("train", "heldout", "suite")
    ]


def test_a_hook_is_called_when_it_is_due_with_what_the_step_gave(run):
    folder, seen = run
    steps = {name: [i.step for n, i in seen if n == name] for name, _ in seen}
    assert steps == {"every 2": [2, 4, 6], "2 and 3": [2, 3, 4, 6], "ends": [3, 6]}
    losses = {e["step"]: e["loss"] for e in measured(folder) if e["event"] == "train"}
    (fields,) = {
        frozenset(e) for e in read_events(folder / "metrics.jsonl") if e["event"] == "train"
    }
    for _, info in seen:
        scalars = {name for name, value in info.metrics.items() if getattr(value, "ndim", 1) == 0}
        assert {"loss", "grad_norm", "learning_rate"} <= scalars - {"flags"} <= fields
        assert info.state.keys() >= {"params", "opt_state", "step", "guards"}
        assert float(info.metrics["loss"]) == losses[info.step]
        assert info.stage.last_step == (3 if info.step <= 3 else 6)


def test_a_chat_run_samples_the_first_turn_of_its_data():
    """The second held-out row: the first holds a text, all of whose tokens count."""
    tokenizer, row = load_tokenizer("bytes"), np.frombuffer(b"user: Lima? bot: Yes", np.uint8)
    is_answer = np.arange(len(row)) >= len("user: Lima? bot: ")
    rows = [{"tokens": row, "loss_weights": weights} for weights in (row > 0, is_answer)]
    data = SimpleNamespace(
        heldout_rows=2,
        array_dtypes=("tokens", "loss_weights"),
        heldout_row=rows.__getitem__,
        tokenizer=tokenizer,
    )
    assert choose_sample_prompt(EvalConfig(), data, 99)[0] == "user: Lima? bot: "
    assert tokenizer.decode(choose_sample_prompt(EvalConfig(), data, 5)[1]) == "bot: "
    assert choose_sample_prompt(EvalConfig(sample_prompt="mine"), data, 99)[0] == "mine"
    data.array_dtypes = ("tokens",)
    assert choose_sample_prompt(EvalConfig(), data, 99)[0] == EvalConfig.sample_prompt


FAILING = """
import json
def add(trainer):
    def fail(info):
        json.loads("nothing there")
    trainer.add_hook(fail, every=2, name="my hook")
"""


class Killed(BaseException):
    """Stands for a SIGKILL."""


def test_a_stop_when_a_due_step_has_ended_is_saved(tmp_path):
    """A hook is due after the step, so the loop has asked which hooks are due before the stop."""

    def stop(trainer):
        class Stop(Hook):
            def step_ended(self, step, metrics, newest_state):
                if step == 2:
                    trainer.stop()

        trainer.add_hook(Stop(), every=0)
        trainer.add_hook(lambda info: None, every=2, name="due")

    train(with_train(), tmp_path, add_hooks=stop)
    assert max(saved_steps(tmp_path)) == 2


def test_a_stopped_run_saves_first_and_what_it_then_could_not_evaluate_follows(
    run, tmp_path, monkeypatch
):
    """The run is asked to stop in the last step of a stage and in its own last step, and killed
    between the two evaluations that are due there. Its record is that of the undisturbed run.
    """

    def stop_at(last, trainer):
        class Stop(Hook):
            def after_dispatch(self, step, pending):
                if step == last:
                    trainer.stop()

        def write(self, event, step, **values):
            if event == "suite" and step == last:
                assert (tmp_path / "checkpoints" / str(step) / "manifest.json").exists()
                raise Killed
            written(self, event, step, **values)

        trainer.add_hook(Stop(), every=0)
        monkeypatch.setattr(MetricsFile, "write", write)

    written = MetricsFile.write
    for last in (3, 6):
        with pytest.raises(Killed):
            train(with_train(), tmp_path, add_hooks=functools.partial(stop_at, last))
        assert measured(tmp_path)[-1]["event"] == "heldout"
    monkeypatch.setattr(MetricsFile, "write", written)
    assert train(with_train(), tmp_path) == 0
    assert measured(tmp_path) == measured(run[0])
    assert measured(run[0])[-1]["event"] == "suite"


def test_a_failing_hook_ends_the_run_with_a_save(run, tmp_path, monkeypatch):
    (tmp_path / "failing_hooks.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    said = "my hook.*step 2.*JSONDecodeError.*failing_hooks.py, line 5.*on_hook_error"
    with pytest.raises(UserError, match=said) as told:
        train(with_train(hooks=("failing_hooks:add",)), tmp_path / "run")
    assert told.value.exit_code == ExitCode.HOOK_FAILED not in RESTARTED
    assert saved_steps(tmp_path / "run") == [3]
    assert train(with_train(), tmp_path / "run") == 0
    assert measured(tmp_path / "run") == measured(run[0])


def test_an_error_on_another_process_ends_the_run_too(run, tmp_path, monkeypatch):
    """Process 1 has told of it before the first save."""
    told = {"hook": "theirs", "step": 3, "reason": "it failed", "exit_code": ExitCode.HOOK_FAILED}
    theirs = iter([[told]])
    monkeypatch.setattr(hooks, "gather_from_all", lambda ours: [ours, next(theirs, [])])
    with pytest.raises(UserError, match="it failed: saved after step 4") as raised:
        train(with_train(), tmp_path)
    assert raised.value.exit_code == ExitCode.HOOK_FAILED
    events = read_events(tmp_path / "metrics.jsonl")
    assert [e["hook"] for e in events if e["event"] == "hook_failed"] == ["theirs"]


def trainer_of(config):
    """A trainer without hooks, and the first state."""
    run = resolved(config)
    data = open_data_of_stages(run.stages, run.model.vocab_size)
    first = DataCursor(data[0].fingerprint, data[0].batch_size)
    trainer = Trainer(run, data, start_data_at_cursors(run.stages, data, first), shared_step)
    return trainer, run.init_state()


def test_a_stop_by_one_of_several_processes_waits_for_the_vote(monkeypatch):
    """The others begin the next step before they are told."""
    trainer, state = trainer_of(with_train())
    trainer.add_hook(hooks.StopHook(trainer, lambda: False), every=0, required=True)
    trainer.add_hook(lambda info: trainer.stop(), every=2)
    several = SimpleNamespace(**vars(jax) | {"process_count": lambda: 2})
    monkeypatch.setattr(loop, "jax", several)
    assert trainer.train(state)[0] == 3


def test_a_stop_before_the_next_step_is_not_forgotten():
    trainer, state = trainer_of(with_train())
    trainer.add_hook(lambda info: trainer.stop(), every=2, last_at_stop=True)
    step, state, _ = trainer.train(state)
    trainer.call_missed_hooks(step, state)
    assert (step, trainer.train(state, step)[0]) == (2, 3)


@pytest.mark.parametrize(
    ("code", "ends_with"),
    [(ExitCode.USER_ERROR, ExitCode.HOOK_FAILED), (ExitCode.STORAGE, ExitCode.STORAGE)],
)
def test_a_mistake_in_a_hook_is_a_failed_hook(code, ends_with):
    assert exit_code_of_hook_error(UserError("", code)) == ends_with
    assert exit_code_of_hook_error(KeyError()) == ExitCode.HOOK_FAILED


def test_a_hook_that_stops_the_run_has_it_saved(tmp_path):
    stopping = []

    def add(trainer):
        trainer.add_hook(lambda info: trainer.stop(), every=2)
        trainer.add_hook(lambda info: stopping.append(info.stopping), every=2)

    assert train(with_train(), tmp_path, add_hooks=add) == ExitCode.INTERRUPTED
    assert saved_steps(tmp_path) == [2]
    assert stopping == [True]


def test_a_hook_that_fails_is_passed_over_by_a_setting(run, tmp_path, monkeypatch, capsys):
    """The run with the failing hook is bitwise the run without it."""
    (tmp_path / "failing_hooks.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    going_on = with_train(hooks=("failing_hooks:add",), on_hook_error="continue")
    assert train(going_on, tmp_path / "goes on") == 0
    assert "".join(capsys.readouterr()).count("my hook") == 3  # once for each time
    events = read_events(tmp_path / "goes on" / "metrics.jsonl")
    assert [e["step"] for e in events if e["event"] == "hook_failed"] == [2, 4, 6]
    assert measured(tmp_path / "goes on") == measured(run[0])


def test_an_evaluation_that_failed_after_the_last_step_is_repeated(run, tmp_path, monkeypatch):
    """By the same command, also with another train.log_every; not by one that goes on without."""

    def fail(self, info):
        if info.step == 6:
            raise KeyError("no evaluation")
        evaluate(self, info)

    def run_out_of_memory(self, info):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes")

    evaluate = hooks.EvaluationHook.__call__
    monkeypatch.setattr(hooks.EvaluationHook, "__call__", fail)
    with pytest.raises(UserError, match="eval.every.*saved after step 6"):
        train(with_train(), tmp_path)
    monkeypatch.setattr(hooks.EvaluationHook, "__call__", run_out_of_memory)
    with pytest.raises(UserError, match="out of memory .*7 bytes.* train.batch_size"):
        train(with_train(), tmp_path)
    monkeypatch.setattr(hooks.EvaluationHook, "__call__", evaluate)
    assert train(with_train(on_hook_error="continue"), tmp_path) == ExitCode.DONE
    assert measured(tmp_path)[-1]["event"] == "train"
    assert train(with_train(log_every=2), tmp_path) == ExitCode.DONE
    assert measured(tmp_path) == measured(run[0])


@pytest.mark.parametrize("name", ["hooks", "no_such_module:add", "sys:no_such_name"])
def test_a_hook_that_cannot_be_found_is_one_line(tmp_path, name):
    with pytest.raises(UserError, match="train.hooks") as told:
        train(with_train(hooks=(name,)), tmp_path)
    assert "\n" not in str(told.value)
