"""A training run from start to end: mesh, data, folder, state, hooks, loop, exit code.

`training.loop` takes the training steps. This module adds the parts that let a run resume and that
protect it from faults: the folder, checkpoints, records, signals, the watchdog and rewinds.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from qwen3next_jax.common.errors import ExitCode, UserError, escape_control, warn
from qwen3next_jax.common.events import iterate_events
from qwen3next_jax.common.installation import unused_gpu
from qwen3next_jax.common.subpackages import has_subpackage
from qwen3next_jax.config import Config
from qwen3next_jax.config.registry import resolve
from qwen3next_jax.data.pipeline import Data, TextData
from qwen3next_jax.data.progress import PreparationProgress
from qwen3next_jax.data.readers import describe_bad_records
from qwen3next_jax.processes.distributed import (
    broadcast_from_process_0,
    check_shared_folder,
    is_process_0,
    process_0_first,
    run_on_all,
)
from qwen3next_jax.processes.watchdog import SignalHandler, Watchdog
from qwen3next_jax.runs import hooks
from qwen3next_jax.runs.begin import lock_folder, make_record
from qwen3next_jax.runs.checks import resolve_start
from qwen3next_jax.runs.display import Display, title
from qwen3next_jax.runs.endings import (
    divergence_at_last_step,
    end_at_last_step,
    end_before_last_step,
    end_of_finished_run,
    end_with_dump,
)
from qwen3next_jax.runs.first_state import describe_first_state, first_state
from qwen3next_jax.runs.guard_flags import GuardFlags, Halted
from qwen3next_jax.runs.memory import check_state_fits, reports_out_of_memory
from qwen3next_jax.runs.notices import describe_notices
from qwen3next_jax.runs.profiling import Profiler
from qwen3next_jax.runs.rewind import Rewinder
from qwen3next_jax.runs.start import Start
from qwen3next_jax.runs.store import open_store
from qwen3next_jax.runs.store.checkpoints import CheckpointWriter
from qwen3next_jax.runs.store.store import RunStore
from qwen3next_jax.runs.telemetry import MetricsFile, describe_environment, open_metrics
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.training.hooks import HOOK_ADVICE, Metrics
from qwen3next_jax.training.loop import Trainer, TrainStep, make_train_step
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import (
    DataCursors,
    ResolvedStage,
    describe_epochs,
    epoch_by_stream,
    epochs_warning,
    first_cursor,
    open_data_of_stages,
    place_cursors,
    reading_by_source,
    resolve_stages,
    stage_at,
)
from qwen3next_jax.training.state import State

# names of hooks, as users see them where one fails: the settings that turn them on
EVALUATION, SAMPLE = "eval.every", "eval.sample_tokens"


def train(
    start: Start,
    *,
    devices: Sequence[Any] | None = None,
    make_step: Callable[[ResolvedRun, ResolvedStage], TrainStep] = make_train_step,
    add_hooks: Callable[[Trainer], None] | None = None,
) -> ExitCode:
    """Trains to step `train.steps`. Begins with the newest valid checkpoint of the run, if there is
    one. If there are several processes, all must call this function.

    Args:
      start: the decision about the start, from `runs.start.prepare_start`.
      devices: the devices of the run; None: all that JAX finds.
      make_step: function that makes the update step of a stage.
      add_hooks: function that gets the trainer before the first step and can add hooks
        (`Trainer.add_hook`).

    Returns:
      The exit code of the process.

    Raises:
      UserError: a setting, a file or a folder is wrong.
    """
    start_time = time.time()

    # ---- Mesh
    mesh = make_mesh(start.config.parallel, devices)
    run = run_on_all(lambda: resolve_start(start, mesh))
    run_on_all(lambda: check_state_fits(run.abstract_state))

    # ---- Data
    data = _open_data(run)

    # ---- Folder
    store = open_store(start.workdir, run.config.checkpoint.patience, is_owner=is_process_0())
    with lock_folder(start, data, store) as start, _open_checkpoints(run, store) as checkpoints:
        saved_step = checkpoints.newest_good_step() or 0
        missed = _missing_evaluations(run, start, saved_step)
        if saved_step > run.steps or (saved_step == run.steps and not missed):
            return end_of_finished_run(run, store.workdir, saved_step, data[0].tokenizer)
        checkpoints.begin(saved_step)
        check_shared_folder(checkpoints.directory, run.config.parallel.start_timeout)

        # ---- State
        first = _load_state(run, data, start, checkpoints, saved_step)
        with _observe(run, store, data, start, first, missed) as observers:
            display, metrics, watchdog = observers.display, observers.metrics, observers.watchdog
            checkpoints.before_manifest = metrics.flush
            metrics.add_listener(checkpoints.hear)
            metrics.start(
                first.step,
                start_time,
                bad_records=_bad_records(data),
                **describe_environment(mesh),
            )
            # A run.json without this event would look like a run whose metrics were lost.
            metrics.flush()
            _record_start(run, data, start, first, store, checkpoints, metrics, display)

            # ---- Hooks
            errors = hooks.HookErrors(run.config.train.on_hook_error == "stop", metrics)
            trainer = Trainer(run, data, first.cursors, make_step, errors.add)
            saving = hooks.CheckpointHook(checkpoints, metrics, run.steps, display.during)
            evaluation = _add_hooks(
                trainer, data, first, store, observers, errors, saving, add_hooks
            )

            # ---- Loop
            rewinder = Rewinder(run, data, first.cursors, start, checkpoints, metrics)
            if missed:
                watchdog.set_time_limit(
                    run.config.train.compile_timeout, "an evaluation", first.step
                )
                with reports_out_of_memory(lambda: stage_at(run.stages, first.step)):
                    trainer.call_missed_hooks(first.step, first.state)
            try:
                step, state, last_metrics = _take_steps(trainer, first, rewinder, watchdog)
            except Halted as halt:
                errors.tell_all()
                return end_with_dump(trainer, first.cursors, halt, store, metrics)
            checkpoints.wait()
            saving.write_events()
            errors.tell_all()
            is_saved = broadcast_from_process_0(lambda: step in checkpoints.steps())
            best = checkpoints.best_step()
            divergence = ""
            if step == run.steps:
                divergence = divergence_at_last_step(last_metrics, state, evaluation)
            if divergence:
                metrics.write("stop", step, reason=divergence, exit_code=int(ExitCode.DIVERGED))

    # ---- End
    if errors.fatal and is_saved:
        again = "continues from there" if step < run.steps else "repeats a failed evaluation"
        raise UserError(
            f"{errors.fatal}: saved after step {step}. The same command {again}: {HOOK_ADVICE}",
            errors.fatal.exit_code,
        )
    if not is_saved or step < run.steps:
        return end_before_last_step(run, store.workdir, step, is_saved)
    heldout = evaluation.heldout_text if evaluation else "not evaluated"
    summary = f"Trained {step} steps: held-out {heldout}."
    if run.config.checkpoint.keep_best and best is not None:
        summary += f" Of the checkpoints, step {best} has the lowest held-out loss (--step=best)."
    return end_at_last_step(run, store.workdir, step, divergence, summary, data[0].tokenizer)


# ---- Data and folder


def _open_data(run: ResolvedRun) -> list[Data]:
    """Opens the data of every stage, and checks that all processes have the same data.

    Raises:
      UserError: the data cannot be opened, or differ between processes.
    """
    with PreparationProgress() as progress:
        data = process_0_first(
            lambda: open_data_of_stages(
                run.stages, run.model.vocab_size, progress if is_process_0() else None
            )
        )
    fingerprints = " ".join(rows.fingerprint for rows in data)
    tokens = data[0].tokenizer.fingerprint
    run_on_all(lambda: None, {"data fingerprint": fingerprints, "tokenizer": tokens})
    return data


def _open_checkpoints(run: ResolvedRun, store: RunStore) -> CheckpointWriter:
    stage_ends = [stage.last_step for stage in run.stages]
    return store.open_checkpoints(run.config.checkpoint, stage_ends, run.groups.frozen_paths)


def _missing_evaluations(run: ResolvedRun, start: Start, step: int) -> list[str]:
    """Returns the kinds of events that evaluations and samples write, if they were due after
    `step`, the newest checkpoint, and the record does not hold all of them. A run that is asked to
    stop saves before it evaluates, and may be killed in between. An evaluation that ended the run
    with an error is missing too, unless errors in hooks no longer end the run.

    If the start changes what is evaluated, or evaluates after other steps, nothing is missing: the
    run was to evaluate something else.
    """

    def find() -> list[str]:
        events = iterate_events(start.workdir / "metrics.jsonl")
        of_step = [event for _, event in events if event["step"] == step]
        recorded = {hooks.event_name(event) for event in of_step}
        failed = {event["hook"] for event in of_step if event["event"] == "hook_failed"}
        continues_without = run.config.train.on_hook_error == "continue"
        if continues_without and failed & {EVALUATION, SAMPLE}:
            return []
        # A run that begins with the state of another has a checkpoint, but did not take this step.
        expected = hooks.evaluation_events(run)
        if "train" not in recorded or expected <= recorded:
            return []
        return sorted({name.partition(" ")[0] for name in expected})

    if not step or any(change.name.startswith("config.eval") for change in start.changes):
        return []
    recorded = start.facts.folder.record.read_config(start.workdir)
    if not all(_evaluates_after(step, config) for config in (recorded, run.config)):
        return []
    return broadcast_from_process_0(find)


def _evaluates_after(step: int, config: Config) -> bool:
    """Whether a run with these settings evaluates after `step`."""
    every, ends_stage = config.eval.every, any(step == s.last_step for s in resolve_stages(config))
    return ends_stage or step % every == 0


# ---- State


class _FirstState(NamedTuple):
    """The state with which this process begins to train.

    Attributes:
      state: the train state before the first step.
      step: number of steps of the run that are already taken.
      cursors: for every stage, the place in the training data at which the stage begins to read.
      is_new: whether the run has no checkpoint yet.
    """

    state: State
    step: int
    cursors: DataCursors
    is_new: bool

    @property
    def continues_parent(self) -> bool:
        """Whether this is a new run that begins at the step of its parent."""
        return self.is_new and self.step > 0


def _load_state(
    run: ResolvedRun,
    data: Sequence[Data],
    start: Start,
    checkpoints: CheckpointWriter,
    saved_step: int,
) -> _FirstState:
    """Loads the checkpoint after `saved_step` steps, or makes the first state if `saved_step` is 0.

    Raises:
      UserError: the checkpoint, or the model in `train.init_from`, cannot be loaded.
    """
    is_new = not saved_step
    if is_process_0():  # loading can take minutes, and the display starts after it
        text = f"restoring step {saved_step}"
        if is_new:
            text = describe_first_state(run, data, start)
        print(escape_control(f"{start.workdir}: {text}"), flush=True)
        for line in describe_notices(run, start):
            print(line, flush=True)
        if line := unused_gpu(os.environ, jax.default_backend()):
            warn(line)
    if is_new:
        state, cursor = first_state(run, data, start)
    else:
        state = checkpoints.restore(saved_step, run.abstract_state)
        cursor = first_cursor(start.facts.folder.record.data)
    # A run with the whole state of its parent begins at the step of the parent.
    return _FirstState(state, int(state["step"]), place_cursors(run.stages, data, cursor), is_new)


class _Observers(NamedTuple):
    """What watches and shows the run while it trains."""

    display: Display
    metrics: MetricsFile
    signals: SignalHandler
    watchdog: Watchdog
    profiler: Profiler


@contextlib.contextmanager
def _observe(
    run: ResolvedRun,
    store: RunStore,
    data: Sequence[Data],
    start: Start,
    first: _FirstState,
    missed: Sequence[str],
) -> Iterator[_Observers]:
    """Opens the observers of the run, and closes them at the end of the `with` block.

    Args:
      missed: kinds of events that are written again (`_missing_evaluations`).
    """
    parent = start.parent.path if first.continues_parent else ""
    read = reading_by_source(
        first.cursors[-1].rows_read_by_stream(run.steps), epoch_by_stream(data)
    )
    if is_process_0() and (line := epochs_warning(read)):
        warn(line)
    epochs = describe_epochs(read, run.steps)
    corpus = ", ".join(filter(None, (data[0].describe()["title"], epochs)))
    shown = title(run, corpus, first.step, parent)
    with (
        Display(shown, run.stages, first.step, is_process_0()) as display,
        open_metrics(run, store, first.step, display, missed) as metrics,
        SignalHandler(display.say) as signals,
        Watchdog(functools.partial(store.write_stacks, jax.process_index())) as watchdog,
        Profiler(run.config.profile, store.workdir, metrics.write) as profiler,
    ):
        yield _Observers(display, metrics, signals, watchdog, profiler)


def _bad_records(data: Sequence[Data]) -> list[list]:
    """Returns [glob, number of bad records, description] for each glob that has bad records, over
    the data of all stages.
    """
    found = {}
    for stage in data:
        for source in stage.describe()["sources"] if isinstance(stage, TextData) else ():
            if counts := source["bad_records"]:
                summary = describe_bad_records(counts, source["bad_places"])
                found[source["source"]] = [source["source"], sum(counts.values()), summary]
    return list(found.values())


def _record_start(
    run: ResolvedRun,
    data: Sequence[Data],
    start: Start,
    first: _FirstState,
    store: RunStore,
    checkpoints: CheckpointWriter,
    metrics: MetricsFile,
    display: Display,
) -> None:
    """Writes run.json and the changes since the last start, before the first step."""
    tokenizer = data[0].tokenizer

    def write() -> None:
        record = make_record(start, run, first.cursors, tokenizer.fingerprint)
        store.write_run_and_tokenizer(record, tokenizer, first.is_new)

    broadcast_from_process_0(write)
    checkpoints.set_run()
    if first.continues_parent:  # with this checkpoint the run no longer needs its parent
        checkpoints.save(first.step, first.state)
        checkpoints.wait()
    if start.changes:
        metrics.write("changed", first.step, changes=[[*change] for change in start.changes])
        lines = (f"changed since the run before: {change}" for change in start.changes)
        display.say("\n".join(lines))


# ---- Loop


def _take_steps(
    trainer: Trainer, first: _FirstState, rewinder: Rewinder, watchdog: Watchdog
) -> tuple[int, State, Metrics]:
    """Trains to the last step, or until a hook stops the run. Rewinds after a spike, and continues.

    Returns:
      The last step, its state and its metrics, as `Trainer.train` returns them.

    Raises:
      Halted: the guards ended the run, and no rewind is left.
    """
    steps_before, state = first.step, first.state
    while True:
        try:
            with reports_out_of_memory(lambda: trainer.stage):
                return trainer.train(state, steps_before)
        except Halted as halt:
            watchdog.set_time_limit(
                trainer.run.config.train.compile_timeout, "a rewind or a dump", halt.step
            )
            rewound = rewinder.rewind(halt)
            if rewound is None:
                raise
            steps_before, state = rewound


# ---- Hooks


def _add_hooks(
    trainer: Trainer,
    data: Sequence[Data],
    first: _FirstState,
    store: RunStore,
    observers: _Observers,
    errors: hooks.HookErrors,
    saving: hooks.CheckpointHook,
    add_hooks: Callable[[Trainer], None] | None,
) -> hooks.EvaluationHook | None:
    """Adds all hooks to the trainer. They are called in this order; `saving` is the last, so the
    metrics of a step are written before its checkpoint. Only at a stop do evaluations and samples
    follow it: they may take longer than the process is given.

    Args:
      errors: stops the run after an error in a hook.
      saving: the hook that saves checkpoints.
      add_hooks: adds the caller's hooks; None: there are none.

    Returns:
      The hook that evaluates; None if `evals` is not installed.
    """
    run, config = trainer.run, trainer.run.config
    display, metrics, tokenizer = observers.display, observers.metrics, data[0].tokenizer
    flags = GuardFlags(config.guards, run.model, first.cursors, metrics)
    for hook in (  # their methods are called around every step; their errors end the run
        hooks.WatchdogHook(observers.watchdog, config.train),
        hooks.StopHook(trainer, lambda: observers.signals.caught or errors.asks_to_stop()),
        hooks.ProfilerHook(observers.profiler),
        hooks.GuardFlagsHook(flags),
        hooks.OperatorsHook(store, metrics),
        hooks.DisplayHook(display),
    ):
        trainer.add_hook(hook, every=0, required=True)
    save_every = config.checkpoint.every
    trainer.add_hook(
        hooks.MetricsHook(trainer, metrics, epoch_by_stream(data)),
        every=(config.train.log_every, save_every),
        at_stage_end=True,
        at_stop=True,
        required=True,
    )
    if every := config.telemetry.diagnostics_every:
        trainer.add_hook(
            hooks.DiagnosticsHook(run, metrics, display.during),
            every=every,
            at_stage_end=True,
            name="telemetry.diagnostics_every",
        )
    evaluation = None
    if has_subpackage("evals"):
        evaluation = hooks.EvaluationHook(trainer, metrics, config.eval, tokenizer, display.during)
        trainer.add_hook(
            evaluation,
            every=config.eval.every,
            at_stage_end=True,
            last_at_stop=True,
            name=EVALUATION,
        )
    if config.eval.sample_tokens and has_subpackage("inference"):
        trainer.add_hook(
            hooks.SampleHook(run, metrics, config.eval, data[0], display.during),
            every=config.eval.every,
            at_stage_end=True,
            last_at_stop=True,
            name=SAMPLE,
        )
    for name in config.train.hooks:
        resolve({}, name, "train.hooks")(trainer)
    if add_hooks:
        add_hooks(trainer)
    for hook in (errors, saving):
        trainer.add_hook(hook, every=save_every, at_stage_end=True, at_stop=True, required=True)
    return evaluation
