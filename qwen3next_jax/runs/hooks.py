"""The hooks of a run: what a run does besides its training steps, such as evaluations and saves.
`runs.train` adds the hooks to `training.loop.Trainer`. Each hook is one class and uses no other
hook.
"""

import itertools
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from flax import nnx

from qwen3next_jax.common.errors import ExitCode, UserError, warn
from qwen3next_jax.common.subpackages import has_subpackage
from qwen3next_jax.config import EvalConfig, TrainConfig
from qwen3next_jax.data.pipeline import DataSource, Epoch
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.processes.distributed import (
    StopVote,
    broadcast_from_process_0,
    gather_from_all,
    is_process_0,
)
from qwen3next_jax.processes.watchdog import Watchdog
from qwen3next_jax.runs.checks import SAMPLE_TEMPERATURE
from qwen3next_jax.runs.display import Display
from qwen3next_jax.runs.guard_flags import GuardFlags
from qwen3next_jax.runs.profiling import Profiler
from qwen3next_jax.runs.store.checkpoints import CheckpointWriter
from qwen3next_jax.runs.store.store import RunStore
from qwen3next_jax.runs.telemetry import MetricsFile, Throughput
from qwen3next_jax.training.average import averaged_params
from qwen3next_jax.training.diagnostics import diagnostics_event_fields, make_diagnostics_step
from qwen3next_jax.training.guards import NO_TARGETS
from qwen3next_jax.training.hooks import (
    Decision,
    Hook,
    Metrics,
    StepInfo,
    describe_hook_error,
    exit_code_of_hook_error,
)
from qwen3next_jax.training.loop import Trainer
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import (
    DataCursor,
    ResolvedStage,
    SourceReading,
    reading_by_source,
)
from qwen3next_jax.training.state import State

# Metrics of the train step that a "train" event leaves out: arrays, and "flags", whose bits are
# flags.
UNLOGGED_METRICS = ("expert_load", "grad_norms", "flags")
# Metrics that are means over the targets of a batch. The metrics of MTP are mtp_loss/DEPTH and
# mtp_top1/DEPTH.
TARGET_MEAN_METRICS = ("loss", "top1", "mtp_loss", "mtp_top1", "total_loss")
# The type of `Display.show_activity`, which shows what the run does while a `with` block runs.
ShowActivity = Callable[..., AbstractContextManager[None]]


class WatchdogHook(Hook):
    """Sets the watchdog's time limit before each step, and again before the hooks that run after
    the step, such as evaluations.
    """

    def __init__(self, watchdog: Watchdog, config: TrainConfig):
        self._watchdog = watchdog
        self._config = config
        self._compiles = False
        self._step = 0

    def stage_begins(self, step: int, stage: ResolvedStage, cursor: DataCursor) -> None:
        self._compiles = True

    def before_batch(self, step: int) -> None:
        limit = self._config.compile_timeout if self._compiles else self._config.step_timeout
        self._watchdog.set_time_limit(limit, "a step", step)
        self._compiles = False
        self._step = step

    def step_ended(self, step: int, metrics: Metrics, newest_state: State) -> None:
        if step == self._step:  # no later step has begun, so hooks are called next
            self._watchdog.set_time_limit(
                self._config.compile_timeout, "an evaluation or a save", step
            )


class HookErrors(Hook):
    """Collects the errors in hooks that training does not need. After an error in a hook, the run
    saves and ends after the next step, or continues (`train.on_hook_error`).

    A hook may fail on one process alone. So `HookErrors` is itself a hook: before each save and at
    the end of the run, every process sends its errors to all processes.

    Attributes:
      fatal: the error with which all processes of the run end; None if there is no such error.
    """

    def __init__(self, ends_run: bool, metrics: MetricsFile):
        """Makes the hook. `ends_run`: whether an error in a hook ends the run."""
        self._ends_run = ends_run
        self._metrics = metrics
        self._untold: list[dict[str, Any]] = []
        self.fatal: UserError | None = None

    def add(self, name: str, step: int, error: Exception) -> None:
        """Records an error in a hook. `Trainer` calls this method as its `on_hook_error`."""
        reason = describe_hook_error(name, step, error)
        if jax.process_count() > 1:
            reason += f" (process {jax.process_index()} on {socket.gethostname()})"
        code = int(exit_code_of_hook_error(error))
        self._untold.append({"hook": name, "step": step, "reason": reason, "exit_code": code})
        self._metrics.write("hook_failed", step, hook=name, reason=reason)  # and shows it
        if not is_process_0():
            warn(reason)

    def asks_to_stop(self) -> bool:
        """Whether this process knows of an error in a hook that must end the run."""
        return self._ends_run and bool(self._untold or self.fatal)

    def __call__(self, info: StepInfo) -> None:
        self.share_errors()

    def share_errors(self) -> None:
        """Sends the errors in this process's hooks since the last call to all processes, which must
        all call this method together.
        """
        told, self._untold = gather_from_all(self._untold), []
        for error in itertools.chain(*told[1:]):  # process 0 has written its own, and alone writes
            self._metrics.write(
                "hook_failed", error["step"], hook=error["hook"], reason=error["reason"]
            )
        first = next(itertools.chain(*told), None)
        if first and self._ends_run and not self.fatal:
            self.fatal = UserError(first["reason"], ExitCode(first["exit_code"]))


class StopHook(Hook):
    """Stops all processes of a run after the same step when one of them asks to stop."""

    def __init__(self, trainer: Trainer, asks_to_stop: Callable[[], bool]):
        """Makes the hook. `asks_to_stop`: function that says whether this process asks to stop, for
        example after a signal. A process also asks to stop if one of its hooks has called
        `Trainer.stop`.
        """
        self._trainer = trainer
        self._asks_to_stop = asks_to_stop
        self._votes = StopVote()

    def before_step(self, step: int, pending: Metrics) -> None:
        # A process is asked once per step; what comes later counts for the next step.
        self._vote = self._votes.cast(self._asks_to_stop() or self._trainer.wants_to_stop)

    def after_dispatch(self, step: int, pending: Metrics) -> None:
        if self._vote:
            self._trainer.stop(agreed=True)


class ProfilerHook(Hook):
    """Starts the profiler before the first step to trace, and stops it after the last."""

    def __init__(self, profiler: Profiler):
        self._profiler = profiler

    def before_step(self, step: int, pending: Metrics) -> None:
        self._profiler.before_step(step, pending)

    def after_dispatch(self, step: int, pending: Metrics) -> None:
        self._profiler.after_dispatch(step, pending)


class GuardFlagsHook(Hook):
    """Passes the metrics of every step, which include the guards' flags, to `GuardFlags`."""

    def __init__(self, flags: GuardFlags):
        self._flags = flags

    def step_ended(self, step: int, metrics: Metrics, newest_state: State) -> None:
        self._flags.check(step, metrics, newest_state)


class DisplayHook(Hook):
    """Tells the display the number of each step that has ended."""

    def __init__(self, display: Display):
        self._display = display

    def step_ended(self, step: int, metrics: Metrics, newest_state: State) -> None:
        self._display.advance_to(step)


class OperatorChoicesHook(Hook):
    """Writes which implementation runs each operator of the model, as an "operators" event and into
    run.json, whenever the step of a new stage uses implementations that no earlier stage has used.
    """

    def __init__(self, store: RunStore, metrics: MetricsFile):
        self._store = store
        self._metrics = metrics
        self._operators: dict[tuple[str, ...], dict[str, Any]] = {}

    def step_traced(self, step: int, decisions: Sequence[Decision]) -> None:
        number = len(self._operators)
        for decision in decisions:
            why = (
                f"the call {decision.why_no_kernels}"
                if decision.why_no_kernels
                else decision.why_chosen
            )
            entry = {
                "operator": decision.operator,
                "implementation": decision.implementation,
                "kernels": decision.is_kernel,
                "why": why,
                "consequence": decision.slowness_warning,
                "call": decision.shapes_and_dtypes,
            }
            self._operators.setdefault((decision.operator, decision.implementation, why), entry)
        if len(self._operators) == number:
            return
        operators = tuple(self._operators.values())
        self._metrics.write("operators", step - 1, operators=list(operators))
        broadcast_from_process_0(lambda: self._store.update_run_json(operators=operators))


class MetricsHook(Hook):
    """Writes a "stage" event when a stage begins, and a "train" event with the metrics of a step
    whenever the trainer calls this hook.
    """

    def __init__(self, trainer: Trainer, metrics: MetricsFile, epochs: Mapping[str, Epoch]):
        """Makes the hook. `epochs`: name of a stream of the data → one epoch of this stream."""
        self._trainer = trainer
        self._metrics = metrics
        self._epochs = epochs

    def stage_begins(self, step: int, stage: ResolvedStage, cursor: DataCursor) -> None:
        self._cursor = cursor
        bits_per_nat = self._trainer.data.describe()["bits_per_nat"]
        self._throughput = Throughput(self._trainer.run, stage, bits_per_nat)
        if stage.name and step == cursor.step + 1:
            self._metrics.write(
                "stage",
                step,
                stage=stage.name,
                steps=stage.steps,
                batch_size=stage.batch_size,
                sequence_length=stage.sequence_length,
                **_source_shares(self._trainer.data),
            )

    def __call__(self, info: StepInfo) -> None:
        metrics = jax.device_get(info.metrics)
        record = {
            name: float(value) for name, value in metrics.items() if name not in UNLOGGED_METRICS
        }
        if int(metrics["flags"]) & NO_TARGETS:
            record |= {
                name: None for name in record if name.partition("/")[0] in TARGET_MEAN_METRICS
            }
        load = metrics.get("expert_load")
        if load is not None:
            record["busiest_expert"] = float(np.max(load))
            record["idle_experts"] = int(np.sum(load == 0))
        steps, seconds, waited = self._trainer.clock.lap(info.step)
        record |= self._throughput.train_event_fields(
            info.step, record["loss"], steps, seconds, waited
        )
        rows = self._cursor.rows_read_by_stream(info.step, int(info.state["guards"]["data_offset"]))
        record |= source_reading_fields(reading_by_source(rows, self._epochs))
        self._metrics.write("train", info.step, **record)


def _source_shares(data: DataSource) -> dict[str, dict[str, float]]:
    """Returns {"mix": {source: its share of the rows}}; {} if the data have only one source."""
    if len(data.stream_weights) < 2:
        return {}
    total = sum(data.stream_weights.values())
    return {
        "mix": {
            data.stream_epochs[name].source: w / total for name, w in data.stream_weights.items()
        }
    }


def source_reading_fields(read: Mapping[str, SourceReading]) -> dict[str, float]:
    """Returns the fields of a "train" event that say how much of each data source the run has read:
    "epochs" if there is one source, "epochs/SOURCE" and "tokens/SOURCE" if there are several.
    """
    if len(read) == 1:
        (only,) = read.values()
        return {"epochs": only.epochs}
    fields = {f"epochs/{name}": source.epochs for name, source in read.items()}
    return fields | {f"tokens/{name}": round(source.tokens_read) for name, source in read.items()}


class DiagnosticsHook(Hook):
    """Measures diagnostics of every layer in an extra forward pass, and writes a "diagnostics"
    event.
    """

    def __init__(self, run: ResolvedRun, metrics: MetricsFile, show_activity: ShowActivity):
        self._run = run
        self._metrics = metrics
        self._show_activity = show_activity

    def stage_begins(self, step: int, stage: ResolvedStage, cursor: DataCursor) -> None:
        run = self._run
        self._measure = make_diagnostics_step(
            run.model, run.graphdef, stage.micro_batches, run.compute_mesh
        )

    def __call__(self, info: StepInfo) -> None:
        with self._show_activity("measuring the layers"):
            measured, grad_norms, expert_load = jax.device_get(
                (
                    self._measure(info.state["params"], info.batch),
                    info.metrics["grad_norms"],
                    info.metrics.get("expert_load"),
                )
            )
        self._metrics.write(
            "diagnostics", info.step, **diagnostics_event_fields(measured, grad_norms, expert_load)
        )


def evaluation_event_kinds(run: ResolvedRun) -> set[str]:
    """Returns the kinds of events that `EvaluationHook` and `SampleHook` write each time they are
    called. The kind of an event of `eval.suites` is "suite NAME" (see `event_kind_with_suite`).
    """
    names = set()
    if has_subpackage("evals"):
        names |= {"heldout", *(f"suite {name}" for name in run.config.eval.suites)}
        if run.config.train.ema:
            names.add("heldout_average")
    if run.config.eval.sample_tokens and has_subpackage("inference"):
        names.add("sample")
    return names


def event_kind_with_suite(event: Mapping[str, Any]) -> str:
    """Returns the kind of an event; "suite NAME" if the event is about the evaluation NAME in
    `eval.suites`.
    """
    kind = event["event"]
    return f"suite {event.get('suite')}" if kind == "suite" else kind


_NOT_EVALUATED = "not evaluated"


class EvaluationHook:
    """Runs the held-out evaluation and the evaluations in `eval.suites`, and writes an event with
    the results of each. If the run has an average of the parameters (`train.ema`), the held-out
    evaluation also runs on the average.

    Attributes:
      heldout_text: name and value of the main metric of the newest held-out evaluation, as text;
        "not evaluated" before the first evaluation, or if the newest one failed.
      heldout_loss: loss of the newest held-out evaluation, in nats per token; 0 before the first
        evaluation, or if the newest one failed.
    """

    def __init__(
        self,
        trainer: Trainer,
        metrics: MetricsFile,
        config: EvalConfig,
        tokenizer: Tokenizer,
        show_activity: ShowActivity,
    ):
        from qwen3next_jax.evals import evaluation

        self._metrics = metrics
        self._show_activity = show_activity
        self.heldout_text = _NOT_EVALUATED
        self.heldout_loss = 0.0
        run = trainer.run

        def eval_context(options: evaluation.EvalOptions) -> evaluation.EvalContext:
            return evaluation.EvalContext(
                run.model, run.graphdef, tokenizer, lambda: trainer.data, options, run.compute_mesh
            )

        heldout = eval_context(evaluation.EvalOptions(config.rows))
        self._heldout = evaluation.make_evaluations(("heldout",), heldout)["heldout"]
        self._suites = evaluation.make_evaluations(
            config.suites, eval_context(evaluation.options_from_config(config))
        )

    def __call__(self, info: StepInfo) -> None:
        from qwen3next_jax.common.metrics import (
            evaluation_event_fields,
            pair_with_declarations,
            values_of_main_metrics,
        )

        params = info.state["params"]
        self.heldout_text, self.heldout_loss = _NOT_EVALUATED, 0.0  # if this evaluation fails
        with self._show_activity("evaluating on held-out text"):
            values = self._heldout.run(params)
        self.heldout_loss = values.get("loss", 0.0)
        main = values_of_main_metrics(pair_with_declarations(values, self._heldout.metrics))[:1]
        self.heldout_text = "".join(f"{value.title_and_condition} {value}" for value in main)
        self._metrics.write(
            "heldout", info.step, **evaluation_event_fields(values, self._heldout.metrics)
        )
        if "ema" in info.state:
            with self._show_activity("evaluating the average of the parameters"):
                values = self._heldout.run(averaged_params(params, info.state["ema"]))
            fields = evaluation_event_fields(values, self._heldout.metrics)
            self._metrics.write("heldout_average", info.step, **fields)
        for name, suite in self._suites.items():
            with self._show_activity(f"evaluating {name}"):
                measured = evaluation_event_fields(suite.run(params), suite.metrics)
            self._metrics.write("suite", info.step, suite=name, **measured)


def choose_sample_prompt(
    config: EvalConfig, data: DataSource, longest: int
) -> tuple[str, np.ndarray]:
    """Returns (the prompt of samples as text, the prompt as tokens [n]). The prompt is
    `eval.sample_prompt`. But if `eval.sample_prompt` has its default and the data are
    conversations, the prompt comes from a held-out row: it is the last `longest` tokens before the
    first answer, or all tokens before it if there are fewer.
    """
    row_numbers = range(min(data.heldout_rows, _HELDOUT_ROWS_SEARCHED))
    if config.sample_prompt == EvalConfig.sample_prompt and "loss_weights" in data.array_dtypes:
        for row in map(data.heldout_row, row_numbers):
            answers = np.flatnonzero(row["loss_weights"] > 0)
            if len(answers) and answers[0]:  # in a row of texts all tokens count
                turn = row["tokens"][: answers[0]][-longest:]
                return data.tokenizer.decode(turn), turn
    return config.sample_prompt, data.tokenizer.encode(config.sample_prompt)


_HELDOUT_ROWS_SEARCHED = 64


class SampleHook:
    """Generates a continuation of the sample prompt and writes it as a "sample" event."""

    def __init__(
        self,
        run: ResolvedRun,
        metrics: MetricsFile,
        config: EvalConfig,
        data: DataSource,
        show_activity: ShowActivity,
    ):
        self._show_activity = show_activity
        self._run = run
        self._metrics = metrics
        self._sample_tokens = config.sample_tokens
        self._tokenizer = data.tokenizer
        longest = max(run.model.context_length - config.sample_tokens, 1)
        self._prompt, self._prompt_tokens = choose_sample_prompt(config, data, longest)

    def __call__(self, info: StepInfo) -> None:
        from qwen3next_jax.inference.decode import generate_to_end

        with self._show_activity("generating a sample"):
            new = generate_to_end(
                nnx.merge(self._run.graphdef, info.state["params"]),
                [self._prompt_tokens],
                max_new_tokens=self._sample_tokens,
                temperature=SAMPLE_TEMPERATURE,
                stop_ids=[id for id in (self._tokenizer.eos_id,) if id >= 0],
                mesh=self._run.compute_mesh,
            )[0]
        text = self._prompt + self._tokenizer.decode(new)
        self._metrics.write("sample", info.step, text=text)


class CheckpointHook(Hook):
    """Saves the train state, and writes the events of earlier saves to metrics.jsonl."""

    def __init__(
        self,
        checkpoints: CheckpointWriter,
        metrics: MetricsFile,
        last_step: int,
        show_activity: ShowActivity,
    ):
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._last_step = last_step
        self._show_activity = show_activity

    def step_ended(self, step: int, metrics: Metrics, newest_state: State) -> None:
        self.write_save_events()

    def __call__(self, info: StepInfo) -> None:
        # The state of the last step is always saved.
        is_last = info.stopping or info.step == self._last_step
        with self._show_activity("saving a checkpoint", compiles=False):
            self._checkpoints.save(info.step, info.state, may_skip=not is_last)
            if info.stopping:  # the hooks after this one may take longer than the process is given
                self._checkpoints.wait()

    def write_save_events(self) -> None:
        """Writes the events of the saves that have ended since the last call."""
        for event, step, values in self._checkpoints.take_events():
            self._metrics.write(event, step, **values)
