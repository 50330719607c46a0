"""A training run from start to end: mesh, data, folder, state, hooks, loop, exit code.

`training.loop` takes the training steps. This module adds to the steps what lets a run resume and
what protects a run from faults: the folder, checkpoints, run.json and metrics.jsonl, signals, the
watchdog, and rewinds.
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
from qwen3next_jax.common.installation import unused_gpu_message
from qwen3next_jax.common.subpackages import has_subpackage
from qwen3next_jax.config import Config
from qwen3next_jax.config.registry import resolve
from qwen3next_jax.data.pipeline import DataSource, TextData
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
from qwen3next_jax.runs.checks import check_and_resolve_run
from qwen3next_jax.runs.display import Display, display_title
from qwen3next_jax.runs.endings import (
    dump_and_report_halt,
    last_step_divergence_reason,
    report_already_finished,
    report_early_end,
    report_finished_run,
)
from qwen3next_jax.runs.first_state import describe_first_state, make_first_state
from qwen3next_jax.runs.guard_flags import GuardFlags, RunHalted
from qwen3next_jax.runs.lock_and_record import lock_folder, make_record
from qwen3next_jax.runs.memory import check_state_fits, reports_out_of_memory
from qwen3next_jax.runs.notices import surprising_settings
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
    cursor_of_first_step,
    describe_epochs,
    epoch_by_stream,
    epochs_warning,
    open_data_of_stages,
    reading_by_source,
    resolve_stages,
    stage_at,
    start_data_at_cursors,
)
from qwen3next_jax.training.state import State

# The names of these two hooks in error messages: the settings that turn the hooks on.
EVALUATION_HOOK_NAME, SAMPLE_HOOK_NAME = "eval.every", "eval.sample_tokens"


def train(
    start: Start,
    *,
    devices: Sequence[Any] | None = None,
    make_step: Callable[[ResolvedRun, ResolvedStage], TrainStep] = make_train_step,
    add_hooks: Callable[[Trainer], None] | None = None,
) -> ExitCode:
    """Trains a run to step `train.steps`. If the run has valid checkpoints, resumes from the
    newest. If the run has several processes, all must call this function.

    Args:
      start: the decision about the start, from `runs.start.prepare_start`.
      devices: the devices of the run; None: all devices that JAX finds.
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
    run = run_on_all(lambda: check_and_resolve_run(start, mesh))
    run_on_all(lambda: check_state_fits(run.abstract_state))

    # ---- Data
    data = _open_data(run)

    # ---- Folder
    store = open_store(start.workdir, run.config.checkpoint.patience, is_owner=is_process_0())
    with lock_folder(start, data, store) as start, _open_checkpoints(run, store) as checkpoints:
        saved_step = checkpoints.newest_valid_step() or 0
        missed = _missing_evaluation_kinds(run, start, saved_step)
        if saved_step > run.steps or (saved_step == run.steps and not missed):
            return report_already_finished(run, store.workdir, saved_step, data[0].tokenizer)
        checkpoints.prepare_folder(saved_step)
        check_shared_folder(checkpoints.directory, run.config.parallel.start_timeout)

        # ---- State
        loaded = _load_or_make_state(run, data, start, checkpoints, saved_step)
        with _open_observers(run, store, data, start, loaded, missed) as observers:
            display, metrics, watchdog = observers.display, observers.metrics, observers.watchdog
            checkpoints.before_manifest = metrics.flush
            metrics.add_listener(checkpoints.note_heldout_loss)
            metrics.write_start(
                loaded.steps_before,
                start_time,
                bad_records=_bad_records_by_glob(data),
                **describe_environment(mesh),
            )
            # A run.json without this event would look like a run whose metrics were lost.
            metrics.flush()
            _write_run_json_and_changes(
                run, data, start, loaded, store, checkpoints, metrics, display
            )

            # ---- Hooks
            errors = hooks.HookErrors(run.config.train.on_hook_error == "stop", metrics)
            trainer = Trainer(run, data, loaded.cursors, make_step, errors.add)
            saving = hooks.CheckpointHook(checkpoints, metrics, run.steps, display.show_activity)
            evaluation = _add_hooks(
                trainer, data, loaded, store, observers, errors, saving, add_hooks
            )

            # ---- Loop
            rewinder = Rewinder(run, data, loaded.cursors, start, checkpoints, metrics)
            if missed:
                watchdog.set_time_limit(
                    run.config.train.compile_timeout, "an evaluation", loaded.steps_before
                )
                with reports_out_of_memory(lambda: stage_at(run.stages, loaded.steps_before)):
                    trainer.call_missed_hooks(loaded.steps_before, loaded.state)
            try:
                step, state, last_metrics = _train_with_rewinds(trainer, loaded, rewinder, watchdog)
            except RunHalted as halt:
                errors.share_errors()
                return dump_and_report_halt(trainer, loaded.cursors, halt, store, metrics)
            checkpoints.wait()
            saving.write_save_events()
            errors.share_errors()
            is_saved = broadcast_from_process_0(lambda: step in checkpoints.steps())
            best = checkpoints.best_step()
            divergence = ""
            if step == run.steps:
                divergence = last_step_divergence_reason(last_metrics, state, evaluation)
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
        return report_early_end(run, store.workdir, step, is_saved)
    heldout = evaluation.heldout_text if evaluation else "not evaluated"
    summary = f"Trained {step} steps: held-out {heldout}."
    if run.config.checkpoint.keep_best and best is not None:
        summary += f" Of the checkpoints, step {best} has the lowest held-out loss (--step=best)."
    return report_finished_run(run, store.workdir, step, divergence, summary, data[0].tokenizer)


# ---- Data and folder


def _open_data(run: ResolvedRun) -> list[DataSource]:
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


def _missing_evaluation_kinds(run: ResolvedRun, start: Start, step: int) -> list[str]:
    """Returns the kinds of events that evaluations and samples should have written after `step`,
    the step of the newest checkpoint. Returns [] if metrics.jsonl has all events that were due
    after `step`, or if none were due.

    Events of evaluations can be missing for two reasons. First, a run that is asked to stop saves
    before it evaluates, and may be killed between the save and the evaluation. Second, an
    evaluation may have ended the run with an error; its events count as missing, unless the
    settings now say that errors in hooks do not end the run.

    If this start changes the settings `eval`, no events count as missing, because the earlier
    process was not to evaluate with the new settings.

    Args:
      step: the step of the newest checkpoint; 0 if there is none.
    """

    def find_missing_kinds() -> list[str]:
        events = iterate_events(start.workdir / "metrics.jsonl")
        step_events = [event for _, event in events if event["step"] == step]
        recorded = {hooks.event_kind_with_suite(event) for event in step_events}
        failed = {event["hook"] for event in step_events if event["event"] == "hook_failed"}
        continues_without = run.config.train.on_hook_error == "continue"
        if continues_without and failed & {EVALUATION_HOOK_NAME, SAMPLE_HOOK_NAME}:
            return []
        # A run that begins with the state of another has a checkpoint, but did not take this step.
        expected = hooks.evaluation_event_kinds(run)
        if "train" not in recorded or expected <= recorded:
            return []
        return sorted({name.partition(" ")[0] for name in expected})

    if not step or any(change.name.startswith("config.eval") for change in start.changes):
        return []
    recorded = start.facts.folder.record.read_config(start.workdir)
    if not all(_evaluates_after(step, config) for config in (recorded, run.config)):
        return []
    return broadcast_from_process_0(find_missing_kinds)


def _evaluates_after(step: int, config: Config) -> bool:
    """Whether a run with the settings `config` evaluates after `step`."""
    every, ends_stage = config.eval.every, any(step == s.last_step for s in resolve_stages(config))
    return ends_stage or step % every == 0


# ---- State


class _LoadedState(NamedTuple):
    """The train state with which this process begins: restored from a checkpoint of the run, or, in
    a new run, its first state.

    Attributes:
      state: the train state before the first step of this process.
      steps_before: the number of steps of the run that are already taken.
      cursors: for every stage, the place in the training data at which the stage begins to read.
      is_new_run: whether the run has no checkpoint yet.
    """

    state: State
    steps_before: int
    cursors: DataCursors
    is_new_run: bool

    @property
    def continues_parent(self) -> bool:
        """Whether this is a new run that begins at the step of its parent."""
        return self.is_new_run and self.steps_before > 0


def _load_or_make_state(
    run: ResolvedRun,
    data: Sequence[DataSource],
    start: Start,
    checkpoints: CheckpointWriter,
    saved_step: int,
) -> _LoadedState:
    """Loads the checkpoint of `saved_step`, or makes the first state of the run if `saved_step` is
    0.

    Raises:
      UserError: the checkpoint, or the model in `train.init_from`, cannot be loaded.
    """
    is_new = not saved_step
    if is_process_0():  # loading can take minutes, and the display starts after it
        text = f"restoring step {saved_step}"
        if is_new:
            text = describe_first_state(run, data, start)
        print(escape_control(f"{start.workdir}: {text}"), flush=True)
        for line in surprising_settings(run, start):
            print(line, flush=True)
        if line := unused_gpu_message(os.environ, jax.default_backend()):
            warn(line)
    if is_new:
        state, cursor = make_first_state(run, data, start)
    else:
        state = checkpoints.restore(saved_step, run.abstract_state)
        cursor = cursor_of_first_step(start.facts.folder.record.data)
    # A run with the whole state of its parent begins at the step of the parent.
    return _LoadedState(
        state, int(state["step"]), start_data_at_cursors(run.stages, data, cursor), is_new
    )


class _Observers(NamedTuple):
    """The objects that record, show and watch a run while it trains."""

    display: Display
    metrics: MetricsFile
    signals: SignalHandler
    watchdog: Watchdog
    profiler: Profiler


@contextlib.contextmanager
def _open_observers(
    run: ResolvedRun,
    store: RunStore,
    data: Sequence[DataSource],
    start: Start,
    loaded: _LoadedState,
    missed: Sequence[str],
) -> Iterator[_Observers]:
    """Opens the observers of the run, and closes them at the end of the `with` block.

    Args:
      missed: the kinds of events that this process writes again, because an earlier process did
        not write all of them (`_missing_evaluation_kinds`).
    """
    parent = start.parent.path if loaded.continues_parent else ""
    read = reading_by_source(
        loaded.cursors[-1].rows_read_by_stream(run.steps), epoch_by_stream(data)
    )
    if is_process_0() and (line := epochs_warning(read)):
        warn(line)
    epochs = describe_epochs(read, run.steps)
    corpus = ", ".join(filter(None, (data[0].describe()["title"], epochs)))
    shown = display_title(run, corpus, loaded.steps_before, parent)
    with (
        Display(shown, run.stages, loaded.steps_before, is_process_0()) as display,
        open_metrics(run, store, loaded.steps_before, display, missed) as metrics,
        SignalHandler(display.say) as signals,
        Watchdog(functools.partial(store.write_thread_stacks, jax.process_index())) as watchdog,
        Profiler(run.config.profile, store.workdir, metrics.write) as profiler,
    ):
        yield _Observers(display, metrics, signals, watchdog, profiler)


def _bad_records_by_glob(data: Sequence[DataSource]) -> list[list]:
    """Returns [glob, number of bad records, description] for each glob of data files that has bad
    records, over all stages.
    """
    found = {}
    for stage in data:
        for source in stage.describe()["sources"] if isinstance(stage, TextData) else ():
            if counts := source["bad_records"]:
                summary = describe_bad_records(counts, source["bad_places"])
                found[source["source"]] = [source["source"], sum(counts.values()), summary]
    return list(found.values())


def _write_run_json_and_changes(
    run: ResolvedRun,
    data: Sequence[DataSource],
    start: Start,
    loaded: _LoadedState,
    store: RunStore,
    checkpoints: CheckpointWriter,
    metrics: MetricsFile,
    display: Display,
) -> None:
    """Writes run.json, and the event "changed" if settings or devices have changed since the last
    start.
    """
    tokenizer = data[0].tokenizer

    def write() -> None:
        record = make_record(start, run, loaded.cursors, tokenizer.fingerprint)
        store.write_run_json_and_tokenizer(record, tokenizer, loaded.is_new_run)

    broadcast_from_process_0(write)
    checkpoints.read_run_id()
    if loaded.continues_parent:  # with this checkpoint the run no longer needs its parent
        checkpoints.save(loaded.steps_before, loaded.state)
        checkpoints.wait()
    if start.changes:
        metrics.write(
            "changed", loaded.steps_before, changes=[[*change] for change in start.changes]
        )
        lines = (f"changed since the run before: {change}" for change in start.changes)
        display.say("\n".join(lines))


# ---- Loop


def _train_with_rewinds(
    trainer: Trainer, loaded: _LoadedState, rewinder: Rewinder, watchdog: Watchdog
) -> tuple[int, State, Metrics]:
    """Trains to the last step, or until a hook stops the run. After a loss spike, rewinds the run
    and continues.

    Returns:
      (the last step, the train state after it, its metrics), as `Trainer.train` returns them.

    Raises:
      RunHalted: the guards ended the run, and the run may not rewind (again).
    """
    steps_before, state = loaded.steps_before, loaded.state
    while True:
        try:
            with reports_out_of_memory(lambda: trainer.stage):
                return trainer.train(state, steps_before)
        except RunHalted as halt:
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
    data: Sequence[DataSource],
    loaded: _LoadedState,
    store: RunStore,
    observers: _Observers,
    errors: hooks.HookErrors,
    saving: hooks.CheckpointHook,
    add_hooks: Callable[[Trainer], None] | None,
) -> hooks.EvaluationHook | None:
    """Adds all hooks to the trainer. The trainer calls hooks in the order in which they are added.
    The hook `saving` is the last, so the run writes the metrics of a step before the checkpoint of
    this step. When the run is stopped, evaluations and samples come after `saving`, because they
    may take longer than the time that the process has left.

    Args:
      errors: the hook that stops the run after an error in another hook.
      saving: the hook that saves checkpoints.
      add_hooks: adds the caller's hooks; None: there are none.

    Returns:
      The hook that evaluates; None if `evals` is not installed.
    """
    run, config = trainer.run, trainer.run.config
    display, metrics, tokenizer = observers.display, observers.metrics, data[0].tokenizer
    flags = GuardFlags(config.guards, run.model, loaded.cursors, metrics)
    for hook in (  # their methods are called around every step; their errors end the run
        hooks.WatchdogHook(observers.watchdog, config.train),
        hooks.StopHook(trainer, lambda: observers.signals.caught or errors.asks_to_stop()),
        hooks.ProfilerHook(observers.profiler),
        hooks.GuardFlagsHook(flags),
        hooks.OperatorChoicesHook(store, metrics),
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
            hooks.DiagnosticsHook(run, metrics, display.show_activity),
            every=every,
            at_stage_end=True,
            name="telemetry.diagnostics_every",
        )
    evaluation = None
    if has_subpackage("evals"):
        evaluation = hooks.EvaluationHook(
            trainer, metrics, config.eval, tokenizer, display.show_activity
        )
        trainer.add_hook(
            evaluation,
            every=config.eval.every,
            at_stage_end=True,
            last_at_stop=True,
            name=EVALUATION_HOOK_NAME,
        )
    if config.eval.sample_tokens and has_subpackage("inference"):
        trainer.add_hook(
            hooks.SampleHook(run, metrics, config.eval, data[0], display.show_activity),
            every=config.eval.every,
            at_stage_end=True,
            last_at_stop=True,
            name=SAMPLE_HOOK_NAME,
        )
    for name in config.train.hooks:
        resolve({}, name, "train.hooks")(trainer)
    if add_hooks:
        add_hooks(trainer)
    for hook in (errors, saving):
        trainer.add_hook(hook, every=save_every, at_stage_end=True, at_stop=True, required=True)
    return evaluation
