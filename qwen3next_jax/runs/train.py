"""A training run from start to end: checks, data, folder, state, hooks, loop, exit code.

`training.loop` takes the training steps. This module adds the parts that let a run resume and that
protect it from faults: the folder, checkpoints, records, signals, the watchdog and rewinds.
"""

import dataclasses
import math
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from qwen3next_jax.common.errors import ExitCode, escape_control, warn
from qwen3next_jax.common.events import divergence_reason, iterate_events
from qwen3next_jax.common.installation import shell_command, unused_gpu
from qwen3next_jax.common.object_stores import set_fsspec_patience
from qwen3next_jax.common.rooms import has_room
from qwen3next_jax.common.storage import BucketPath, with_patience
from qwen3next_jax.config import Config
from qwen3next_jax.config.registry import resolve, trust_flags
from qwen3next_jax.data.pipeline import Data, Epoch, TextData
from qwen3next_jax.data.progress import PreparationProgress
from qwen3next_jax.data.readers import bad_summary
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.model.layer_properties import partial_ablations
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
from qwen3next_jax.runs.display import Display, title
from qwen3next_jax.runs.folder import (
    Change,
    RunLock,
    complete_steps,
    is_restart_unfinished,
    move_aside,
    open_run,
    read_run,
    run_id,
    write_run_record,
)
from qwen3next_jax.runs.incidents import Halted, Incidents, write_dump
from qwen3next_jax.runs.lease import Lease, open_lock
from qwen3next_jax.runs.memory import check_state_fits, reports_out_of_memory
from qwen3next_jax.runs.profiling import Profiler
from qwen3next_jax.runs.rewind import Rewinder
from qwen3next_jax.runs.start import prepare_start, start_state
from qwen3next_jax.runs.telemetry import MetricsFile, describe_environment, open_metrics
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
    describe_epochs,
    epochs_of_stages,
    first_cursor,
    open_stages,
    place_cursors,
    recorded_cursors,
    sources_read,
    stage_number,
    warn_of_epochs,
)
from qwen3next_jax.training.state import State

# names of hooks, as users see them where one fails: the settings that turn them on
EVALUATION, SAMPLE = "eval.every", "eval.sample_tokens"


def train(
    config: Config,
    workdir: pathlib.Path,
    restart: bool = False,
    *,
    devices: Sequence[Any] | None = None,
    make_step: Callable[[ResolvedRun, ResolvedStage], TrainStep] = make_train_step,
    add_hooks: Callable[[Trainer], None] | None = None,
) -> ExitCode:
    """Trains to step `train.steps`. Begins with the newest valid checkpoint in `workdir`, if there
    is one.

    Args:
      config: the configuration of the run.
      workdir: the folder of the run.
      restart: whether the run starts anew; if so, the old files are moved to `workdir`/before-TIME.
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
    workdir = with_patience(workdir, config.checkpoint.patience)
    restart = restart or is_restart_unfinished(workdir)

    # ---- Mesh
    mesh = make_mesh(config.parallel, devices)
    run = run_on_all(lambda: prepare_start(config, mesh, workdir, restart))
    run_on_all(lambda: check_state_fits(run.abstract_state))

    # ---- Data
    data = _open_data(run)
    tokenizer = data[0].tokenizer

    # ---- Folder
    patience = config.checkpoint.patience
    if isinstance(workdir, BucketPath):
        set_fsspec_patience(patience)
    lock = open_lock(workdir, patience, is_process_0())
    opened = _open_folder(run, data, workdir, restart, lock)
    with lock, _open_checkpoints(workdir, run, lock) as checkpoints:
        saved_step = checkpoints.newest_good_step() or 0
        missing = _missing_evaluations(run, workdir, opened.changes, saved_step)
        if saved_step > run.steps or (saved_step == run.steps and not missing):
            return _end_of_finished_run(run, workdir, saved_step, tokenizer)
        checkpoints.begin(saved_step)
        check_shared_folder(checkpoints.directory, run.config.parallel.start_timeout)

        # ---- State
        start = _first_state(run, data, workdir, opened, checkpoints, saved_step)

        with (
            Display(
                _title(run, data, opened, start), run.stages, start.step, is_process_0()
            ) as display,
            open_metrics(run, workdir, start.step, display, lock, missing) as metrics,
            Signals(display.say) as signals,
            Watchdog(workdir, jax.process_index()) as watchdog,
            Profiler(run.config.profile, workdir, metrics.write) as profiler,
        ):
            if isinstance(workdir, BucketPath):
                checkpoints.before_manifest = metrics.flush
            metrics.start(
                start.step,
                start_time,
                bad_records=_bad_records(data),
                **describe_environment(run.mesh),
            )
            # A run.json without this event would look like a run whose metrics were lost.
            metrics.flush()
            _record_start(workdir, opened, start, tokenizer, checkpoints, metrics, display)

            # ---- Hooks
            trainer = Trainer(run, data, start.cursors, make_step, _hook_error_policy(run, metrics))
            saving = hooks.CheckpointHook(checkpoints, metrics, run.steps, display.during)
            incidents = Incidents(run.config.guards, run.model, start.cursors, metrics)
            evaluation = _add_hooks(
                trainer,
                metrics,
                tokenizer,
                display,
                required_hooks=(
                    hooks.WatchdogHook(watchdog, run.config.train),
                    hooks.StopHook(trainer, signals),
                    hooks.ProfilerHook(profiler),
                    hooks.IncidentsHook(incidents),
                    hooks.OperatorsHook(workdir, metrics),
                    hooks.DisplayHook(display),
                ),
                epochs=epochs_of_stages(data),
                add_hooks=add_hooks,
                saving=saving,
            )

            # ---- Loop
            rewinder = Rewinder(
                run, data, start.cursors, opened.parent, opened.files, checkpoints, metrics
            )
            if missing:
                watchdog.allow(run.config.train.compile_timeout, "an evaluation", start.step)
                trainer.call_missed_hooks(start.step, start.state)
            try:
                step, state, last_metrics = _take_steps(
                    trainer, start.state, start.step, rewinder, watchdog
                )
            except Halted as halt:
                return _end_with_dump(trainer, start.cursors, halt, workdir, metrics)
            checkpoints.wait()
            saving.write_events()
            is_saved = broadcast_from_process_0(lambda: step in checkpoints.steps())
            divergence = ""
            if step == run.steps:
                divergence = _divergence_at_last_step(last_metrics, state, evaluation)
            if divergence:
                metrics.write("stop", step, reason=divergence, exit_code=int(ExitCode.DIVERGED))

    # ---- End
    if not is_saved or step < run.steps:
        return _end_before_last_step(run, workdir, step, is_saved)
    heldout = evaluation.heldout_text if evaluation else "not evaluated"
    summary = f"Trained {step} steps: held-out {heldout}."
    return _end_at_last_step(run, workdir, step, divergence, summary, tokenizer)


# ---- Data and folder


def _open_data(run: ResolvedRun) -> list[Data]:
    """Opens the data of every stage, and checks that all processes have the same data.

    Raises:
      UserError: the data cannot be opened, or differ between processes.
    """
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


class _OpenedFolder(NamedTuple):
    """The folder of a run, locked and compared with its record.

    Attributes:
      parent: the record of the run with which a new run begins; None if there is none.
      files: `stamp_hf` of the Hugging Face directory with which a new run begins, as this process
        sees the directory; "" if there is none.
      record: the new content of run.json; {} if it does not change.
      changes: the changes of settings, code and devices since the last start.
    """

    parent: preflight.Parent | None
    files: str
    record: dict[str, Any]
    changes: Sequence[Change]


def _open_folder(
    run: ResolvedRun,
    data: Sequence[Data],
    workdir: pathlib.Path | BucketPath,
    restart: bool,
    lock: RunLock | Lease,
) -> _OpenedFolder:
    """Locks the folder, moves an old run to before-TIME if `restart` is true, and compares the run
    with run.json. Process 0 does this for all processes.

    Raises:
      UserError: another process trains in the folder, or it has the files of another run.
    """
    config = run.config
    is_new = broadcast_from_process_0(lambda: restart or not complete_steps(workdir))
    files = run_on_all(lambda: origin.stamp_init_from(config.train.init_from) if is_new else "")

    def open_folder():
        if restart:
            move_aside(workdir)
        parent = preflight.find_parent(config.train, config.optimizer, workdir)
        origin.check_recorded_files(workdir, files)
        source = origin.find_source(config.train.init_from, parent, files) if is_new else {}
        fingerprints = [rows.fingerprint for rows in data]
        tokens = data[0].tokenizer.fingerprint
        return parent, *open_run(workdir, config, fingerprints, tokens, parent, source)

    parent, record, changes = broadcast_from_process_0(lambda: lock.run_locked(open_folder))
    check_shared_folder(workdir, config.parallel.start_timeout)
    return _OpenedFolder(parent, files, record, changes)


def _open_checkpoints(
    workdir: pathlib.Path | BucketPath, run: ResolvedRun, lock: RunLock | Lease
) -> Checkpoints:
    stage_ends = [stage.last_step for stage in run.stages]
    if isinstance(workdir, BucketPath):
        from qwen3next_jax.runs.bucket_checkpoints import BucketCheckpoints

        return BucketCheckpoints(workdir, run.config.checkpoint, stage_ends, lock)
    return Checkpoints(workdir, run.config.checkpoint, stage_ends, run.assignment.frozen_paths)


def _missing_evaluations(
    run: ResolvedRun, workdir: pathlib.Path, changes: Sequence[Change], step: int
) -> list[str]:
    """Returns the kinds of events that evaluations and samples write, if they were due after
    `step`, the newest checkpoint, and the record does not hold all of them. A run that is asked to
    stop saves before it evaluates, and may be killed in between.

    Args:
      changes: the changes since the last start. If they are about what is evaluated when, nothing
        is missing: the run was to evaluate something else.
    """

    def find() -> list[str]:
        events = iterate_events(workdir / "metrics.jsonl")
        of_step = [event for _, event in events if event["step"] == step]
        recorded = {hooks.event_name(event) for event in of_step}
        failed = {event["hook"] for event in of_step if event["event"] == "hook_failed"}
        # A run that begins with the state of another has a checkpoint, but did not take this step.
        expected = hooks.evaluation_events(run)
        if "train" not in recorded or failed & {EVALUATION, SAMPLE} or expected <= recorded:
            return []
        return sorted({name.partition(" ")[0] for name in expected})

    # On other processes than process 0 a change is a list, as JSON has it.
    if any(name.startswith(("config.eval", "config.train")) for name, *_ in changes):
        return []
    every, ends_stage = run.config.eval.every, any(step == s.last_step for s in run.stages)
    if not step or not (ends_stage or every and step % every == 0):
        return []
    return broadcast_from_process_0(find)


# ---- State


class _Start(NamedTuple):
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


def _first_state(
    run: ResolvedRun,
    data: Sequence[Data],
    workdir: pathlib.Path,
    opened: _OpenedFolder,
    checkpoints: Checkpoints,
    saved_step: int,
) -> _Start:
    """Loads the checkpoint after `saved_step` steps, or makes the first state if `saved_step` is 0.

    Raises:
      UserError: the checkpoint, or the model in `train.init_from`, cannot be loaded.
    """
    is_new = not saved_step

    def describe() -> str:
        if is_new:
            return branching.describe(run, data, opened.parent)
        return f"restoring step {saved_step}"

    description = broadcast_from_process_0(describe)
    if is_process_0():  # loading can take minutes, and the display starts after it
        print(escape_control(f"{workdir}: {description}"), flush=True)
        for line in (*partial_ablations(run.model), *run.assignment.lines):
            print(line, flush=True)
        if line := unused_gpu(os.environ, jax.default_backend()):
            warn(line)
    if is_new:
        state, cursor = start_state(run, data, opened.parent, opened.files)
    else:
        state = checkpoints.restore(saved_step, run.abstract_state)
        cursor = first_cursor(recorded_cursors(read_run(workdir)))
    # A branch with the whole state begins at the step of its parent.
    return _Start(state, int(state["step"]), place_cursors(run.stages, data, cursor), is_new)


def _title(run: ResolvedRun, data: Sequence[Data], opened: _OpenedFolder, start: _Start) -> str:
    parent = opened.parent["path"] if start.continues_parent else ""
    read = sources_read(start.cursors[-1].rows_read(run.steps), epochs_of_stages(data))
    if is_process_0() and (line := warn_of_epochs(read)):
        warn(line)
    corpus = ", ".join(
        filter(None, (data[0].describe()["title"], describe_epochs(read, run.steps)))
    )
    return title(run, corpus, start.step, parent)


def _bad_records(data: Sequence[Data]) -> list[list]:
    """Returns [glob, number of bad records, description] for each glob that has bad records, over
    the data of all stages.
    """
    found = {}
    for stage in data:
        for source in stage.describe()["sources"] if isinstance(stage, TextData) else ():
            if counts := source["bad_records"]:
                summary = bad_summary(counts, source["bad_places"])
                found[source["source"]] = [source["source"], sum(counts.values()), summary]
    return list(found.values())


def _record_start(
    workdir: pathlib.Path,
    opened: _OpenedFolder,
    start: _Start,
    tokenizer: Tokenizer,
    checkpoints: Checkpoints,
    metrics: MetricsFile,
    display: Display,
) -> None:
    """Writes run.json and the changes since the last start, before the first step."""
    record, changes = opened.record, opened.changes
    if record:
        record = record | {"data": [cursor and cursor._asdict() for cursor in start.cursors]}
    broadcast_from_process_0(lambda: write_run_record(workdir, record, tokenizer, start.is_new))
    if isinstance(workdir, BucketPath):
        checkpoints.set_run(broadcast_from_process_0(lambda: run_id(workdir)) or "")
    if start.continues_parent:  # with this checkpoint the branch no longer needs its parent
        checkpoints.save(start.step, start.state)
        checkpoints.wait()
    if changes:
        metrics.write("changed", start.step, changes=[[*change] for change in changes])
        display.say("\n".join(f"changed since the run before: {change}" for change in changes))


# ---- Loop


def _take_steps(
    trainer: Trainer, state: State, steps_before: int, rewinder: Rewinder, watchdog: Watchdog
) -> tuple[int, State, Metrics]:
    """Trains to the last step, or until a hook stops the run. Rewinds after a spike, and continues.

    Returns:
      The last step, its state and its metrics, as `Trainer.train` returns them.

    Raises:
      Halted: the guards ended the run, and no rewind is left.
    """
    while True:
        try:
            with reports_out_of_memory(lambda: trainer.stage):
                return trainer.train(state, steps_before)
        except Halted as halt:
            watchdog.allow(
                trainer.run.config.train.compile_timeout, "a rewind or a dump", halt.step
            )
            rewound = rewinder.rewind(halt)
            if rewound is None:
                raise
            steps_before, state = rewound


# ---- Hooks


def _add_hooks(
    trainer: Trainer,
    metrics: MetricsFile,
    tokenizer: Tokenizer,
    display: Display,
    required_hooks: Sequence[hooks.Hook],
    epochs: Mapping[str, Epoch],
    add_hooks: Callable[[Trainer], None] | None,
    saving: hooks.CheckpointHook,
) -> hooks.EvaluationHook | None:
    """Adds all hooks to the trainer. They are called in this order; `saving` is the last, so the
    metrics of a step are written before its checkpoint. Only at a stop do evaluations and samples
    follow it: they may take longer than the process is given.

    Args:
      display: shows what the run waits for while a hook works.
      required_hooks: hooks that are called after every step and whose errors end the run.
      epochs: name of a stream of the data → one epoch of it.
      add_hooks: adds the caller's hooks; None: there are none.
      saving: the hook that saves checkpoints.

    Returns:
      The hook that evaluates; None if `evals` is not installed.
    """
    run, config = trainer.run, trainer.run.config
    save_every = config.checkpoint.every
    for hook in required_hooks:
        trainer.add_hook(hook, every=0, required=True)
    trainer.add_hook(
        hooks.MetricsHook(trainer, metrics, epochs),
        every=(config.train.log_every, save_every),
        at_stage_end=True,
        at_stop=True,
        required=True,
    )
    if every := config.telemetry.diagnostics_every:
        trainer.add_hook(
            hooks.DiagnosticsHook(run, metrics, display.during),
            every=every,
            name="telemetry.diagnostics_every",
        )
    evaluation = None
    if has_room("evals"):
        evaluation = hooks.EvaluationHook(trainer, metrics, config.eval, tokenizer, display.during)
        trainer.add_hook(
            evaluation,
            every=config.eval.every,
            at_stage_end=True,
            after_stop=True,
            name=EVALUATION,
        )
    if config.eval.sample_tokens and has_room("inference"):
        trainer.add_hook(
            hooks.SampleHook(run, metrics, config.eval, tokenizer, display.during),
            every=config.eval.every,
            at_stage_end=True,
            after_stop=True,
            name=SAMPLE,
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
    """Returns the function that handles an error in a hook, according to `train.on_hook_error`."""
    if run.config.train.on_hook_error == "stop":
        return stop_at_hook_error

    def record_and_continue(name: str, step: int, error: Exception) -> None:
        text = describe_hook_error(name, step, error)
        warn(text)
        metrics.write("hook_failed", step, hook=name, reason=text)

    return record_and_continue


# ---- End


def _end_of_finished_run(
    run: ResolvedRun, workdir: pathlib.Path, step: int, tokenizer: Tokenizer
) -> ExitCode:
    """Prints the end of a run that had taken its last step before this process began, and returns
    the exit code. Writes no file.
    """
    divergence = broadcast_from_process_0(lambda: _recorded_divergence(workdir, step))
    summary = f"{workdir}: already trained to step {step} of {run.steps}."
    return _end_at_last_step(run, workdir, step, divergence, summary, tokenizer)


def _recorded_divergence(workdir: pathlib.Path, step: int) -> str:
    """Returns the reason in metrics.jsonl why the run ended as diverged after its last step,
    `step`; "" if it did not diverge.
    """
    return divergence_reason(
        (event for _, event in iterate_events(workdir / "metrics.jsonl")), step
    )


def _divergence_at_last_step(
    metrics: Metrics, state: State, evaluation: hooks.EvaluationHook | None
) -> str:
    """Returns the reason why the run diverged in its last steps, if these were too few for the
    guards to end the run; "" if it did not diverge.

    Args:
      metrics: the metrics of the last step; {} if an earlier process has taken it.
      state: the train state after the last step.
      evaluation: the hook that evaluated the last step; None if nothing is evaluated.
    """
    if metrics and int(metrics["flags"]) & NON_FINITE:
        return (
            f"the last {int(state['guards']['skipped_in_a_row'])} updates were skipped, because "
            "the loss or the gradient was not finite"
        )
    if evaluation and not math.isfinite(evaluation.heldout_loss):
        return f"the held-out loss is {evaluation.heldout_loss}"
    return ""


def _end_with_dump(
    trainer: Trainer,
    cursors: DataCursors,
    halt: Halted,
    workdir: pathlib.Path,
    metrics: MetricsFile,
) -> ExitCode:
    """Writes a dump of the inputs of the step at which the guards halted the run, and a "stop"
    event; prints the reason, and returns the exit code.
    """
    stage_index = stage_number(cursors, halt.step)
    index = cursors[stage_index].batch(halt.step, int(halt.state["guards"]["data_offset"]))
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
        f"{', …' * (len(names) > 8)}. To run the step again: "
        f"{shell_command('replay')} {shlex.quote(str(folder))}. {_advice(trainer.run)}, or "
        "guards.on_spike",
    )


def _end_before_last_step(
    run: ResolvedRun, workdir: pathlib.Path, step: int, is_saved: bool
) -> ExitCode:
    """Prints the end of a run that a signal stopped after `step`, or whose last save failed, and
    returns the exit code.
    """
    if not is_saved:
        return _end(
            ExitCode.NOT_SAVED,
            f"step {step} could not be saved in {workdir} (see above): make room; the same command "
            "then resumes from the previous checkpoint",
        )
    return _end(
        ExitCode.INTERRUPTED,
        f"Interrupted: saved after step {step} of {run.steps} in {workdir}. The same command "
        "resumes from there.",
    )


def _end_at_last_step(
    run: ResolvedRun,
    workdir: pathlib.Path,
    step: int,
    divergence: str,
    summary: str,
    tokenizer: Tokenizer,
) -> ExitCode:
    """Prints the end of a run that has taken its last step, and returns the exit code.

    Args:
      divergence: why the run diverged; "" if it did not.
      summary: the first sentence of the message of a run that did not diverge.
    """
    if divergence:
        return _end(
            ExitCode.DIVERGED,
            f"{workdir}: diverged by step {step}, its last: {divergence}. {_advice(run)}",
        )
    folder = shlex.quote(str(workdir))
    folder += trust_flags(dataclasses.asdict(run.config))
    generate = (
        f", or {shell_command('generate')} --model={folder} "
        f"--prompt={shlex.quote(run.config.eval.sample_prompt)}"
    )
    return _end(
        ExitCode.DONE,
        f"{summary} Checkpoints and metrics.jsonl are in {workdir}; next: "
        f"{shell_command('eval')} --workdir={folder}" + generate * tokenizer.reads_text,
    )


def _advice(run: ResolvedRun) -> str:
    return (
        f"A lower optimizer.learning_rate (now {run.config.optimizer.learning_rate}) in a new "
        "--workdir may help"
    )


def _end(code: ExitCode, text: str) -> ExitCode:
    """Prints `text` on process 0, and returns `code`."""
    if is_process_0():
        is_success = code in (ExitCode.DONE, ExitCode.INTERRUPTED)
        line = text if is_success else f"error: {text}"
        print(line, file=sys.stdout if is_success else sys.stderr)
    return code
