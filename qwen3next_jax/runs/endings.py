"""How a run ends: the last lines on the terminal, and the exit code of the process."""

import dataclasses
import math
import pathlib
import shlex
import sys

from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.common.events import divergence_reason, iterate_events
from qwen3next_jax.common.installation import command_line_start
from qwen3next_jax.config.registry import trust_flags_text
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.processes.distributed import broadcast_from_process_0, is_process_0
from qwen3next_jax.runs.guard_flags import RunHalted, write_dump
from qwen3next_jax.runs.hooks import EvaluationHook
from qwen3next_jax.runs.store.store import RunStore
from qwen3next_jax.runs.telemetry import MetricsFile
from qwen3next_jax.training.guards import NON_FINITE
from qwen3next_jax.training.loop import Metrics, Trainer
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import DataCursors, stage_index_of_step
from qwen3next_jax.training.state import State


def report_already_finished(
    run: ResolvedRun, workdir: pathlib.Path, step: int, tokenizer: Tokenizer
) -> ExitCode:
    """Prints that the run had taken its last step before this process began, and returns the exit
    code. Writes no file.
    """
    divergence = broadcast_from_process_0(lambda: _recorded_divergence_reason(workdir, step))
    beyond = "its last" if step == run.steps else f"beyond train.steps = {run.steps}"
    summary = f"{workdir}: already trained to step {step}, {beyond}."
    return report_finished_run(run, workdir, step, divergence, summary, tokenizer)


def _recorded_divergence_reason(workdir: pathlib.Path, step: int) -> str:
    """Returns the reason why the run diverged, if metrics.jsonl says that it diverged at its last
    step, `step`; "" if not.
    """
    return divergence_reason(
        (event for _, event in iterate_events(workdir / "metrics.jsonl")), step
    )


def last_step_divergence_reason(
    metrics: Metrics, state: State, evaluation: EvaluationHook | None
) -> str:
    """Returns the reason why the run diverged, if it diverged so late that the guards could not end
    it before its last step; "" if it did not diverge.

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


def dump_and_report_halt(
    trainer: Trainer,
    cursors: DataCursors,
    halt: RunHalted,
    store: RunStore,
    metrics: MetricsFile,
) -> ExitCode:
    """Writes a dump of the inputs of the step at which the guards halted the run, and a "stop"
    event. Prints the reason of the halt, and returns the exit code.
    """
    stage_index = stage_index_of_step(cursors, halt.step)
    index = cursors[stage_index].batch_index(halt.step, int(halt.state["guards"]["data_offset"]))
    folder, documents = write_dump(store, trainer.run.config, trainer.data, index, halt)
    metrics.write(
        "stop",
        halt.step,
        reason=halt.reason,
        exit_code=int(ExitCode.DIVERGED),
        dump=str(folder),
        documents=documents,
    )
    names = sorted({name for row in documents for name in row})
    return _print_end(
        ExitCode.DIVERGED,
        f"stopped at step {halt.step}: {halt.reason}. Its batch holds {', '.join(names[:8])}"
        f"{', …' * (len(names) > 8)}. To run the step again: "
        f"{command_line_start('replay')} {shlex.quote(str(folder))}. "
        f"{_learning_rate_advice(trainer.run)}, or guards.on_spike",
    )


def report_early_end(
    run: ResolvedRun, workdir: pathlib.Path, step: int, is_saved: bool
) -> ExitCode:
    """Prints that a signal or a hook stopped the run after `step`, or that its last save failed,
    and returns the exit code.
    """
    if not is_saved:
        return _print_end(
            ExitCode.NOT_SAVED,
            f"step {step} could not be saved in {workdir} (see above): make room; the same command "
            "then resumes from the previous checkpoint",
        )
    return _print_end(
        ExitCode.INTERRUPTED,
        f"Interrupted: saved after step {step} of {run.steps} in {workdir}. The same command "
        "resumes from there.",
    )


def report_finished_run(
    run: ResolvedRun,
    workdir: pathlib.Path,
    step: int,
    divergence: str,
    summary: str,
    tokenizer: Tokenizer,
) -> ExitCode:
    """Prints that the run has taken its last step, with the commands that use the trained model,
    and returns the exit code.

    Args:
      divergence: why the run diverged; "" if it did not.
      summary: the first sentence of the message of a run that did not diverge.
    """
    if divergence:
        return _print_end(
            ExitCode.DIVERGED,
            f"{workdir}: diverged by step {step}, its last: {divergence}. "
            f"{_learning_rate_advice(run)}",
        )
    folder = shlex.quote(str(workdir))
    folder += trust_flags_text(dataclasses.asdict(run.config))
    next_commands = [f"{command_line_start('eval')} --workdir={folder}"]
    if tokenizer.reads_text:
        what = f"--prompt={shlex.quote(run.config.eval.sample_prompt)}"
        if any(source.messages_field for source in run.config.data.sources):
            what = "--chat"
        next_commands.append(f"{command_line_start('generate')} --model={folder} {what}")
    return _print_end(
        ExitCode.DONE,
        f"{summary} Checkpoints and metrics.jsonl are in {workdir}; next: "
        + ", or ".join(next_commands),
    )


def _learning_rate_advice(run: ResolvedRun) -> str:
    return (
        f"A lower optimizer.learning_rate (now {run.config.optimizer.learning_rate}) in a new "
        "--workdir may help"
    )


def _print_end(code: ExitCode, text: str) -> ExitCode:
    """Prints `text` on process 0, and returns `code`."""
    if is_process_0():
        is_success = code in (ExitCode.DONE, ExitCode.INTERRUPTED)
        line = text if is_success else f"error: {text}"
        print(line, file=sys.stdout if is_success else sys.stderr)
    return code
