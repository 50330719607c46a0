"""A training run from its first start to its last step: checks, data, folder, state, hooks, loop,
end. `training.loop` takes the steps; what makes them a run that survives is assembled here.
"""

import math
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from qwen3next_jax.common.errors import ExitCode, warn
from qwen3next_jax.common.events import iterate_events, divergence_reason
from qwen3next_jax.common.rooms import has_room
from qwen3next_jax.config import Config
from qwen3next_jax.config.registry import resolve
from qwen3next_jax.data.pipeline import Data
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.model.block import partial_ablations
from qwen3next_jax.processes.distributed import (
    broadcast_from_process_0,
    check_shared_folder,
    is_process_0,
    process_0_first,
    run_on_all,
)
from qwen3next_jax.processes.watchdog import Signals, Watchdog
from qwen3next_jax.runs import branching, hooks, origin, preflight
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.display import Display, PreparationProgress, title
from qwen3next_jax.runs.folder import (
    Change,
    RunLock,
    move_aside,
    open_run,
    read_run,
    restart_has_begun,
    saved_steps,
    write_run_record,
)
from qwen3next_jax.runs.incidents import Halted, Incidents, write_dump
from qwen3next_jax.runs.memory import check_state_fits, reports_out_of_memory
from qwen3next_jax.runs.profiling import Profiler
from qwen3next_jax.runs.rewind import Rewinder
from qwen3next_jax.runs.start import prepare_start, start_state
from qwen3next_jax.runs.telemetry import MetricsFile, open_metrics, surroundings
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.training.guards import NON_FINITE
from qwen3next_jax.training.loop import (
    Metrics,
    Trainer,
    TrainStep,
    describe_hook_error,
    make_train_step,
    stop_at_hook_error,
)
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import (
    DataCursors,
    ResolvedStage,
    first_cursor,
    open_stages,
    place_cursors,
    recorded_cursors,
    stage_number,
)
from qwen3next_jax.training.state import State


def train(
    config: Config,
    workdir: pathlib.Path,
    restart: bool = False,
    *,
    devices: Sequence[Any] | None = None,
    make_step: Callable[[ResolvedRun, ResolvedStage], TrainStep] = make_train_step,
    add_hooks: Callable[[Trainer], None] | None = None,
) -> ExitCode:
    """Trains until `train.steps`, from the newest checkpoint in `workdir` or from the start.

    Args:
      restart: moves what is in `workdir` into a folder in it, and starts anew.
      devices: those of the run; None for all that JAX finds.
      make_step: makes the update step of a stage, in place of the loop's own.
      add_hooks: called with the trainer before the first step, to add hooks of your own
        (`Trainer.add_hook`).

    Raises:
      UserError: a mistake in what the user gave.
    """
    begun = time.time()
    restart = restart or restart_has_begun(workdir)

    # ---- Mesh
    mesh = make_mesh(config.parallel, devices)
    run = run_on_all(lambda: prepare_start(config, mesh, workdir, restart))
    run_on_all(lambda: check_state_fits(run.abstract_state))

    # ---- Data
    data = _open_data(run)
    tokenizer = data[0].tokenizer

    # ---- Folder
    lock = RunLock(workdir)
    opened = _open_folder(run, data, workdir, restart, lock)
    stage_ends = [stage.last_step for stage in run.stages]
    with lock, Checkpoints(workdir, run.config.checkpoint, stage_ends) as checkpoints:
        saved_step = checkpoints.newest_good_step() or 0
        if saved_step >= run.steps:
            return _end_of_finished_run(run, workdir, saved_step, tokenizer)
        checkpoints.begin(saved_step)
        check_shared_folder(checkpoints.directory, run.config.parallel.start_timeout)

        # ---- State
        start = _first_state(run, data, workdir, opened, checkpoints, saved_step)

        with (
            Display(
                _title(run, data, opened, start), run.stages, start.step, is_process_0()
            ) as display,
            open_metrics(run, workdir, start.step, display) as metrics,
            Signals(display.say) as signals,
            Watchdog(workdir, jax.process_index()) as watchdog,
            Profiler(run.config.profile, workdir, metrics.write) as profiler,
        ):
            metrics.start(start.step, begun, **surroundings(run.mesh))
            _record_start(workdir, opened, start, tokenizer, checkpoints, metrics, display)

            # ---- Hooks
            trainer = Trainer(run, data, start.cursors, make_step, _hook_error_policy(run, metrics))
            saving = hooks.CheckpointHook(checkpoints, metrics)
            incidents = Incidents(run.config.guards, run.model, start.cursors, metrics)
            evaluation = _add_hooks(
                trainer,
                metrics,
                tokenizer,
                required_hooks=(
                    hooks.WatchdogHook(watchdog, run.config.train),
                    hooks.StopHook(trainer, signals),
                    hooks.ProfilerHook(profiler),
                    hooks.IncidentsHook(incidents),
                    hooks.DisplayHook(display),
                ),
                add_hooks=add_hooks,
                saving=saving,
            )

            # ---- Loop
            rewinder = Rewinder(
                run, data, start.cursors, opened.parent, opened.files, checkpoints, metrics
            )
            try:
                step, state, last_metrics = _take_steps(
                    trainer, start.state, start.step, rewinder, watchdog
                )
            except Halted as halt:
                return _end_with_dump(trainer, start.cursors, halt, workdir, metrics)
            checkpoints.wait()
            saving.write_events()
            is_saved = broadcast_from_process_0(lambda: step in checkpoints.steps())
            trouble = ""
            if step == run.steps:
                trouble = _trouble_at_last_step(last_metrics, state, evaluation)
            if trouble:
                metrics.write("stop", step, reason=trouble, exit_code=int(ExitCode.DIVERGED))

    # ---- End
    if not is_saved:
        return _end(
            ExitCode.NOT_SAVED,
            f"step {step} could not be saved in {workdir} (see above): the same command goes on "
            "from the checkpoint before; make room first",
        )
    if step < run.steps:
        return _end(
            ExitCode.INTERRUPTED,
            f"Interrupted: saved after step {step} of {run.steps} in {workdir}. The same "
            "command goes on from there.",
        )
    heldout = evaluation.heldout_figure if evaluation else "not evaluated"
    done = f"Trained {step} steps: held-out {heldout}."
    return _end_at_last_step(run, workdir, step, trouble, done, tokenizer)


# ---- Data and folder


def _open_data(run: ResolvedRun) -> list[Data]:
    """The rows of every stage, the same ones on all processes."""
    with PreparationProgress() as progress:
        data = process_0_first(
            lambda: open_stages(
                run.stages, run.model.vocab_size, progress if is_process_0() else None
            )
        )
    fingerprints = " ".join(rows.fingerprint for rows in data)
    tokens = data[0].tokenizer.fingerprint
    run_on_all(lambda: None, {"data fingerprint": fingerprints, "tokenizer": tokens})
    return data


class _Opened(NamedTuple):
    """What is known of a run when its folder has been opened.

    Attributes:
      parent: the run that a new run begins with, if it begins with one.
      files: stamp of the files of the Hugging Face directory that it begins with, as this process
        sees them; "" where it begins with none.
      record: what run.json is to hold; {} where it stays as it is.
      changes: what has changed since the run was recorded.
    """

    parent: preflight.Parent | None
    files: str
    record: dict[str, Any]
    changes: Sequence[Change]


def _open_folder(
    run: ResolvedRun, data: Sequence[Data], workdir: pathlib.Path, restart: bool, lock: RunLock
) -> _Opened:
    """Takes the lock of the folder, moves an old run out of it where `restart` says so, and
    compares the run with the one that is recorded there. Process 0 does so for all.
    """
    config = run.config
    begins = broadcast_from_process_0(lambda: restart or not saved_steps(workdir))
    files = run_on_all(lambda: origin.stamp_of_files(config) if begins else "")

    def open_folder():
        if restart:
            move_aside(workdir)
        parent = preflight.find_parent(config, workdir)
        origin.check_recorded_files(workdir, files)
        source = origin.find_source(config, parent, files) if begins else {}
        fingerprints = [rows.fingerprint for rows in data]
        tokens = data[0].tokenizer.fingerprint
        return parent, *open_run(workdir, config, fingerprints, tokens, parent, source)

    parent, record, changes = broadcast_from_process_0(lambda: lock.held(open_folder))
    check_shared_folder(workdir, config.parallel.start_timeout)
    return _Opened(parent, files, record, changes)


# ---- State


class _Start(NamedTuple):
    """Where this process begins to train.

    Attributes:
      state: before its first step.
      step: steps of the run that are taken.
      cursors: where every stage reads the data.
      is_new: whether the run has no checkpoint of its own yet.
    """

    state: State
    step: int
    cursors: DataCursors
    is_new: bool

    @property
    def is_behind_parent(self) -> bool:
        """Whether a new run goes on behind the steps of its parent."""
        return self.is_new and self.step > 0


def _first_state(
    run: ResolvedRun,
    data: Sequence[Data],
    workdir: pathlib.Path,
    opened: _Opened,
    checkpoints: Checkpoints,
    saved_step: int,
) -> _Start:
    """The state from the checkpoint after `saved_step` steps, or, where that is 0, the one that
    the run begins with.
    """
    is_new = not saved_step

    def describe() -> str:
        if is_new:
            return branching.describe(run, data, opened.parent)
        return f"restoring step {saved_step}"

    description = broadcast_from_process_0(describe)
    if is_process_0():  # either can take minutes, and the display needs the state
        print(f"{workdir}: {description}", flush=True)
        for line in partial_ablations(run.model):
            print(line, flush=True)
    if is_new:
        state, cursor = start_state(run, data, opened.parent, opened.files)
    else:
        state = checkpoints.restore(saved_step, run.abstract_state)
        cursor = first_cursor(recorded_cursors(read_run(workdir), run.config.train.batch_size))
    # A branch with the whole state begins at the step of its parent.
    return _Start(state, int(state["step"]), place_cursors(run.stages, data, cursor), is_new)


def _title(run: ResolvedRun, data: Sequence[Data], opened: _Opened, start: _Start) -> str:
    begins_behind = opened.parent["path"] if start.is_behind_parent else ""
    return title(run, data[0].describe()["title"], start.step, begins_behind)


def _record_start(
    workdir: pathlib.Path,
    opened: _Opened,
    start: _Start,
    tokenizer: Tokenizer,
    checkpoints: Checkpoints,
    metrics: MetricsFile,
    display: Display,
) -> None:
    """Writes down what the run is, before its first step."""
    record, changes = opened.record, opened.changes
    if record:
        record = record | {"data": [cursor and cursor._asdict() for cursor in start.cursors]}
    broadcast_from_process_0(lambda: write_run_record(workdir, record, tokenizer, start.is_new))
    if start.is_behind_parent:  # from here on the branch does not need its parent
        checkpoints.save(start.step, start.state)
        checkpoints.wait()
    if changes:
        metrics.write("changed", start.step, changes=[[*change] for change in changes])
        display.say("\n".join(f"changed since the run before: {change}" for change in changes))


# ---- Loop


def _take_steps(
    trainer: Trainer, state: State, first_step: int, rewinder: Rewinder, watchdog: Watchdog
) -> tuple[int, State, Metrics]:
    """Trains to the last step, or until a hook stops the run, over every rewind. → as
    `Trainer.train`.

    Raises:
      Halted: the guards ended the run, and a rewind does not help.
    """
    while True:
        try:
            with reports_out_of_memory(lambda: trainer.stage):
                return trainer.train(state, first_step)
        except Halted as halt:
            watchdog.allow(
                trainer.run.config.train.compile_timeout, "a rewind or a dump", halt.step
            )
            rewound = rewinder.rewind(halt)
            if rewound is None:
                raise
            first_step, state = rewound


# ---- Hooks


def _add_hooks(
    trainer: Trainer,
    metrics: MetricsFile,
    tokenizer: Tokenizer,
    required_hooks: Sequence[hooks.Hook],
    add_hooks: Callable[[Trainer], None] | None,
    saving: hooks.CheckpointHook,
) -> hooks.EvaluationHook | None:
    """Registers everything that a run does besides its steps. → the hook that evaluates, unless
    `evals` is not installed.

    Hooks are called in this order: what is saved has been measured before.
    """
    run, config = trainer.run, trainer.run.config
    save_every = config.checkpoint.every
    for hook in required_hooks:
        trainer.add_hook(hook, every=0, required=True)
    trainer.add_hook(
        hooks.MetricsHook(trainer, metrics),
        every=(config.train.log_every, save_every),
        at_stage_end=True,
        at_stop=True,
        required=True,
    )
    if every := config.telemetry.diagnostics_every:
        trainer.add_hook(
            hooks.DiagnosticsHook(run, metrics), every=every, name="telemetry.diagnostics_every"
        )
    evaluation = None
    if has_room("evals"):
        evaluation = hooks.EvaluationHook(trainer, metrics, config.eval, tokenizer)
        trainer.add_hook(evaluation, every=config.eval.every, at_stage_end=True, name="eval.every")
    if config.eval.sample_tokens and has_room("inference"):
        trainer.add_hook(
            hooks.SampleHook(run, metrics, config.eval, tokenizer),
            every=config.eval.every,
            at_stage_end=True,
            name="eval.sample_tokens",
        )
    for name in config.train.hooks:
        resolve({}, name, "train.hooks")(trainer)
    if add_hooks:
        add_hooks(trainer)
    trainer.add_hook(saving, every=save_every, at_stage_end=True, at_stop=True, required=True)
    return evaluation


def _hook_error_policy(
    run: ResolvedRun, metrics: MetricsFile
) -> Callable[[str, int, Exception], None]:
    """What to do about an error in a hook, as `train.on_hook_error` says."""
    if run.config.train.on_hook_error == "stop":
        return stop_at_hook_error

    def go_on(name: str, step: int, error: Exception) -> None:
        text = describe_hook_error(name, step, error)
        warn(text)
        metrics.write("hook_failed", step, hook=name, reason=text)

    return go_on


# ---- End


def _end_of_finished_run(
    run: ResolvedRun, workdir: pathlib.Path, step: int, tokenizer: Tokenizer
) -> ExitCode:
    """Ends a start that finds the run at its last step or behind it; it writes nothing."""
    trouble = broadcast_from_process_0(lambda: _trouble_on_record(workdir, step))
    done = f"{workdir}: already trained to step {step} of {run.steps}."
    return _end_at_last_step(run, workdir, step, trouble, done, tokenizer)


def _trouble_on_record(workdir: pathlib.Path, step: int) -> str:
    """Why the run that reached `step`, its last, is no good; "" where nothing is wrong."""
    return divergence_reason(
        (event for _, event in iterate_events(workdir / "metrics.jsonl")), step
    )


def _trouble_at_last_step(
    metrics: Metrics, state: State, evaluation: hooks.EvaluationHook | None
) -> str:
    """Whether the run diverged when the guards had too few steps left to end it. `metrics` and
    `state` are those of the last step.
    """
    if int(metrics["flags"]) & NON_FINITE:
        return (
            f"the last {int(state['guards']['skipped_in_a_row'])} updates were skipped, as "
            "loss or gradient were not finite"
        )
    if evaluation and not math.isfinite(evaluation.heldout_loss):
        return f"the held-out loss is {evaluation.heldout_loss}"
    return ""


def _end_with_dump(
    trainer: Trainer, cursors, halt: Halted, workdir: pathlib.Path, metrics: MetricsFile
) -> ExitCode:
    """Ends a halted run with a dump of what the step met."""
    number = stage_number(cursors, halt.step)
    index = cursors[number].batch(halt.step, int(halt.state["guards"]["data_offset"]))
    folder, documents = write_dump(workdir, trainer.run.config, trainer.data, index, halt)
    metrics.write(
        "stop",
        halt.step,
        reason=halt.reason,
        exit_code=int(ExitCode.DIVERGED),
        dump=str(folder),
        documents=documents,
    )
    names = sorted({name for row in documents for name in row})
    return _end(
        ExitCode.DIVERGED,
        f"stopped at step {halt.step}: {halt.reason}. Its batch holds {', '.join(names[:8])}"
        f"{', …' * (len(names) > 8)}. Saved for a look: uv run qwen3next replay "
        f"{shlex.quote(str(folder))}. {_advice(trainer.run)}, or guards.on_spike",
    )


def _end_at_last_step(
    run: ResolvedRun,
    workdir: pathlib.Path,
    step: int,
    trouble: str,
    done: str,
    tokenizer: Tokenizer,
) -> ExitCode:
    """Ends a run that has reached its last step: badly where there is `trouble`, else with what
    is `done` and what comes next.
    """
    if trouble:
        return _end(
            ExitCode.DIVERGED,
            f"{workdir}: diverged by step {step}, its last: {trouble}. {_advice(run)}",
        )
    folder = shlex.quote(str(workdir))
    generate = (
        f", or uv run qwen3next generate --model={folder} "
        f"--prompt={shlex.quote(run.config.eval.sample_prompt)}"
    )
    return _end(
        ExitCode.DONE,
        f"{done} Checkpoints and metrics.jsonl are in {workdir}; next: uv run eval.py "
        f"--workdir={folder}" + generate * tokenizer.reads_text,
    )


def _advice(run: ResolvedRun) -> str:
    return (
        f"A lower optimizer.learning_rate (now {run.config.optimizer.learning_rate}) in a new "
        "--workdir may help"
    )


def _end(code: ExitCode, text: str) -> ExitCode:
    """→ `code`, after `text` on the terminal."""
    if is_process_0():
        good = code in (ExitCode.DONE, ExitCode.INTERRUPTED)
        print(text if good else f"error: {text}", file=sys.stdout if good else sys.stderr)
    return code
