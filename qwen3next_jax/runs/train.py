"""A training run from its first start to its last step: checks, data, folder, state, hooks, loop,
end. `training.loop` takes the steps; what makes them a run that survives is assembled here.
"""

import math
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from qwen3next_jax.common.errors import ExitCode, warn
from qwen3next_jax.common.events import each_event, ended_badly
from qwen3next_jax.common.rooms import has_room
from qwen3next_jax.config import Config, to_dict
from qwen3next_jax.config.registry import resolve
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
from qwen3next_jax.runs import branching, hooks, preflight
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.display import Display, PreparationProgress, title
from qwen3next_jax.runs.folder import (
    RunLock,
    move_aside,
    open_run,
    read_run,
    restart_has_begun,
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
    leader = is_process_0()  # the process that records and shows the run

    # ---- Mesh
    mesh = make_mesh(config.parallel, devices)
    run = run_on_all(lambda: prepare_start(config, mesh, workdir, restart))
    config = run.config  # with the tokenizer that the run really has
    run_on_all(lambda: check_state_fits(run.abstract_state))

    # ---- Data
    with PreparationProgress() as progress:
        data = process_0_first(
            lambda: open_stages(run.stages, run.model.vocab_size, progress if leader else None)
        )
    tokenizer = data[0].tokenizer
    fingerprints = [rows.fingerprint for rows in data]
    run_on_all(
        lambda: None,
        {"data fingerprint": " ".join(fingerprints), "tokenizer": tokenizer.fingerprint},
    )

    # ---- Folder
    lock = RunLock(workdir)

    def open_folder():
        if restart:
            move_aside(workdir)
        parent = preflight.find_parent(config, workdir)
        return parent, *open_run(workdir, config, fingerprints, tokenizer.fingerprint, parent)

    parent, description, changes = broadcast_from_process_0(lambda: lock.held(open_folder))
    check_shared_folder(workdir, config.parallel.start_timeout)
    stage_ends = [stage.last_step for stage in run.stages]
    with lock, Checkpoints(workdir, config.checkpoint, stage_ends) as checkpoints:
        first_step = checkpoints.newest_good_step() or 0
        if first_step >= run.steps:
            trouble = broadcast_from_process_0(lambda: _trouble_on_record(workdir, first_step))
            done = f"{workdir}: already trained to step {first_step} of {run.steps}."
            return _end_at_last_step(run, workdir, first_step, trouble, done, tokenizer)
        checkpoints.begin(first_step)
        check_shared_folder(checkpoints.directory, config.parallel.start_timeout)

        # ---- State
        is_new = not first_step
        if leader:  # either can take minutes, and the display needs the state
            what = (
                branching.describe(run, data, parent) if is_new else f"restoring step {first_step}"
            )
            print(f"{workdir}: {what}", flush=True)
            for line in partial_ablations(run.model):
                print(line, flush=True)
        if is_new:
            state, cursor = start_state(run, data, parent)
        else:
            state = checkpoints.restore(first_step, run.abstract_state)
            cursor = first_cursor(recorded_cursors(read_run(workdir), config.train.batch_size))
        first_step = int(state["step"])  # a branch with the whole state begins at its parent's
        cursors = place_cursors(run.stages, data, cursor)
        if description:
            description["data"] = [cursor and cursor._asdict() for cursor in cursors]

        # ---- Hooks
        begins_in_branch = is_new and first_step
        headline = title(
            run,
            data[0].describe()["title"],
            first_step,
            parent["path"] if begins_in_branch else "",
        )
        with (
            Display(headline, run.stages, first_step, leader) as display,
            open_metrics(run, workdir, first_step, display) as metrics,
            Signals(display.say) as signals,
            Watchdog(workdir, jax.process_index()) as watchdog,
            Profiler(config.profile, workdir, metrics.write) as profiler,
        ):
            metrics.start(first_step, begun, **surroundings(run.mesh))
            broadcast_from_process_0(
                lambda: write_run_record(workdir, description, tokenizer, is_new)
            )
            if begins_in_branch:  # from here on the branch does not need its parent
                checkpoints.save(first_step, state)
                checkpoints.wait()
            if changes:
                metrics.write("changed", first_step, changes=[[*change] for change in changes])
                display.say(
                    "\n".join(f"changed since the run before: {change}" for change in changes)
                )
            trainer = Trainer(run, data, cursors, make_step, _hook_error_policy(run, metrics))
            saving = hooks.CheckpointHook(checkpoints, metrics)
            evaluation = _add_hooks(
                trainer,
                metrics,
                tokenizer,
                required_hooks=(
                    hooks.WatchdogHook(watchdog, config.train),
                    hooks.StopHook(trainer, signals),
                    hooks.ProfilerHook(profiler),
                    hooks.IncidentsHook(Incidents(config.guards, metrics)),
                    hooks.DisplayHook(display),
                ),
                add_hooks=add_hooks,
                saving=saving,
            )

            # ---- Loop
            rewinder = Rewinder(run, data, cursors, parent, checkpoints, metrics)
            while True:
                try:
                    with reports_out_of_memory(lambda: trainer.stage):
                        step, state, last_metrics = trainer.train(state, first_step)
                    break
                except Halted as halt:
                    watchdog.allow(config.train.compile_timeout, "a rewind or a dump", halt.step)
                    rewound = rewinder.rewind(halt)
                    if rewound is None:
                        return _end_with_dump(trainer, cursors, halt, workdir, metrics)
                    first_step, state = rewound
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


def _trouble_on_record(workdir: pathlib.Path, step: int) -> str:
    """Why the run that reached `step`, its last, is no good; "" where nothing is wrong."""
    return ended_badly((event for _, event in each_event(workdir / "metrics.jsonl")), step)


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
    config = trainer.run.config
    folder, documents = write_dump(workdir, to_dict(config), trainer.data, index, halt)
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
