"""The hooks of a run: the actions that it takes besides its training steps. `runs.train` adds them
to `training.loop.Trainer`. Each hook is one class and uses no other hook.
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
from qwen3next_jax.data.pipeline import Data, Epoch
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
    hook_exit_code,
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

# Metrics of the train step that a "train" event leaves out, because they are arrays or, in "flags",
# bits.
NOT_LOGGED = ("expert_load", "grad_norms", "flags")
# Metrics that are means over the targets of a batch; depths of MTP have a number behind the name.
OF_TARGETS = ("loss", "top1", "mtp_loss", "mtp_top1", "total_loss")
# Says what the run does while the block runs: `Display.during`.
During = Callable[..., AbstractContextManager[None]]


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

    def step_ended(self, step: int, metrics: Metrics, state: State) -> None:
        if step == self._step:  # no later step has begun, so hooks are called next
            self._watchdog.set_time_limit(
                self._config.compile_timeout, "an evaluation or a save", step
            )


class HookErrors(Hook):
    """What happens after an error in a hook that training does not need (`train.on_hook_error`):
    the run ends after the next step, which it saves; or it continues without the hook.

    Such a hook may fail on one process alone. As a hook, this class tells all processes of the
    errors that each of them had; the run calls it before each save, and at its end.

    Attributes:
      fatal: the error with which all processes of the run end; None: there is none.
    """

    def __init__(self, ends_run: bool, metrics: MetricsFile):
        """Makes the hook. `ends_run`: whether the run ends after an error."""
        self._ends_run = ends_run
        self._metrics = metrics
        self._untold: list[dict[str, Any]] = []
        self.fatal: UserError | None = None

    def add(self, name: str, step: int, error: Exception) -> None:
        """Handles an error. It has the arguments of `Trainer`'s `on_hook_error`."""
        reason = describe_hook_error(name, step, error)
        if jax.process_count() > 1:
            reason += f" (process {jax.process_index()} on {socket.gethostname()})"
        code = int(hook_exit_code(error))
        self._untold.append({"hook": name, "step": step, "reason": reason, "exit_code": code})
        self._metrics.write("hook_failed", step, hook=name, reason=reason)  # and shows it
        if not is_process_0():
            warn(reason)

    def asks_to_stop(self) -> bool:
        """Whether this process knows of an error with which the run is to end."""
        return self._ends_run and bool(self._untold or self.fatal)

    def __call__(self, info: StepInfo) -> None:
        self.tell_all()

    def tell_all(self) -> None:
        """Tells all processes of the errors since the last call. All processes call it together."""
        told, self._untold = gather_from_all(self._untold), []
        for error in itertools.chain(*told[1:]):  # process 0 has written its own, and alone writes
            self._metrics.write(
                "hook_failed", error["step"], hook=error["hook"], reason=error["reason"]
            )
        first = next(itertools.chain(*told), None)
        if first and self._ends_run and not self.fatal:
            self.fatal = UserError(first["reason"], ExitCode(first["exit_code"]))


class StopHook(Hook):
    """Stops all processes after the same step when one of them asks for it."""

    def __init__(self, trainer: Trainer, asks: Callable[[], bool]):
        """Makes the hook. `asks`: whether this process is to stop, such as after a signal. It also
        is if one of its hooks has called `Trainer.stop`.
        """
        self._trainer = trainer
        self._asks = asks
        self._votes = StopVote()

    def before_step(self, step: int, pending: Metrics) -> None:
        # A process is asked once per step; what comes later counts for the next step.
        self._vote = self._votes.cast(self._asks() or self._trainer.wants_to_stop)

    def after_dispatch(self, step: int, pending: Metrics) -> None:
        if self._vote:
            self._trainer.stop(agreed=True)


class ProfilerHook(Hook):
    """Starts and stops the profiler around the steps that it traces."""

    def __init__(self, profiler: Profiler):
        self._profiler = profiler

    def before_step(self, step: int, pending: Metrics) -> None:
        self._profiler.before(step, pending)

    def after_dispatch(self, step: int, pending: Metrics) -> None:
        self._profiler.after(step, pending)


class GuardFlagsHook(Hook):
    """Passes the metrics of every step, which include the guards' flags, to `GuardFlags`."""

    def __init__(self, flags: GuardFlags):
        self._flags = flags

    def step_ended(self, step: int, metrics: Metrics, state: State) -> None:
        self._flags.check(step, metrics, state)


class DisplayHook(Hook):
    """Tells the display the number of each step that has ended."""

    def __init__(self, display: Display):
        self._display = display

    def step_ended(self, step: int, metrics: Metrics, state: State) -> None:
        self._display.step(step)


class OperatorsHook(Hook):
    """When a step has been traced, writes which implementation runs each operator, for all stages
    since the start: as an "operators" event and into run.json.
    """

    def __init__(self, store: RunStore, metrics: MetricsFile):
        self._store = store
        self._metrics = metrics
        self._operators: dict[tuple[str, ...], dict[str, Any]] = {}

    def step_traced(self, step: int, decisions: Sequence[Decision]) -> None:
        number = len(self._operators)
        for decision in decisions:
            why = f"the call {decision.refusal}" if decision.refusal else decision.reason
            entry = {
                "operator": decision.operator,
                "implementation": decision.implementation,
                "kernels": decision.is_kernel,
                "why": why,
                "consequence": decision.consequence,
                "call": decision.call,
            }
            self._operators.setdefault((decision.operator, decision.implementation, why), entry)
        if len(self._operators) == number:
            return
        operators = tuple(self._operators.values())
        self._metrics.write("operators", step - 1, operators=list(operators))
        broadcast_from_process_0(lambda: self._store.add_to_run(operators=operators))


class MetricsHook(Hook):
    """Writes a "stage" event when a stage begins, and a "train" event with the metrics of a step
    whenever it is called.
    """

    def __init__(self, trainer: Trainer, metrics: MetricsFile, epochs: Mapping[str, Epoch]):
        """Makes the hook. `epochs`: name of a stream of the data → one epoch of it."""
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
                **_mix(self._trainer.data),
            )

    def __call__(self, info: StepInfo) -> None:
        metrics = jax.device_get(info.metrics)
        record = {name: float(value) for name, value in metrics.items() if name not in NOT_LOGGED}
        if int(metrics["flags"]) & NO_TARGETS:
            record |= {name: None for name in record if name.partition("/")[0] in OF_TARGETS}
        load = metrics.get("expert_load")
        if load is not None:
            record["busiest_expert"] = float(np.max(load))
            record["idle_experts"] = int(np.sum(load == 0))
        steps, seconds, waited = self._trainer.clock.lap(info.step)
        record |= self._throughput.measure(info.step, record["loss"], steps, seconds, waited)
        rows = self._cursor.rows_read_by_stream(info.step, int(info.state["guards"]["data_offset"]))
        record |= reading_fields(reading_by_source(rows, self._epochs))
        self._metrics.write("train", info.step, **record)


def _mix(data: Data) -> dict[str, dict[str, float]]:
    """Returns {"mix": {source: its share of the rows}} of data of several sources; else {}."""
    if len(data.stream_weights) < 2:
        return {}
    total = sum(data.stream_weights.values())
    return {
        "mix": {
            data.stream_epochs[name].source: w / total for name, w in data.stream_weights.items()
        }
    }


def reading_fields(read: Mapping[str, SourceReading]) -> dict[str, float]:
    """Returns the fields of a "train" event that say how much of its sources a run has read:
    "epochs" of one source; "epochs/SOURCE" and "tokens/SOURCE" of several.
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

    def __init__(self, run: ResolvedRun, metrics: MetricsFile, during: During):
        self._run = run
        self._metrics = metrics
        self._during = during

    def stage_begins(self, step: int, stage: ResolvedStage, cursor: DataCursor) -> None:
        run = self._run
        self._measure = make_diagnostics_step(
            run.model, run.graphdef, stage.micro_batches, run.compute_mesh
        )

    def __call__(self, info: StepInfo) -> None:
        with self._during("measuring the layers"):
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


def evaluation_events(run: ResolvedRun) -> set[str]:
    """Returns the names (`event_name`) of the events that `EvaluationHook` and `SampleHook` write
    when they are due.
    """
    names = set()
    if has_subpackage("evals"):
        names |= {"heldout", *(f"suite {name}" for name in run.config.eval.suites)}
        if run.config.train.ema:
            names.add("heldout_average")
    if run.config.eval.sample_tokens and has_subpackage("inference"):
        names.add("sample")
    return names


def event_name(event: Mapping[str, Any]) -> str:
    """Returns the kind of an event; of an event of an evaluation in `eval.suites` also its name."""
    kind = event["event"]
    return f"suite {event.get('suite')}" if kind == "suite" else kind


_NOT_EVALUATED = "not evaluated"


class EvaluationHook:
    """Runs the held-out evaluation, also on the average of the parameters (`train.ema`) if the run
    has it, and the evaluations in `eval.suites`, and writes an event with
    the results of each.

    Attributes:
      heldout_text: name and value of the main metric of the newest held-out evaluation, as text;
        "not evaluated" before the first one, and where the newest one failed.
      heldout_loss: loss of the newest held-out evaluation, in nats per token; 0 likewise.
    """

    def __init__(
        self,
        trainer: Trainer,
        metrics: MetricsFile,
        config: EvalConfig,
        tokenizer: Tokenizer,
        during: During,
    ):
        from qwen3next_jax.evals import evaluation

        self._metrics = metrics
        self._during = during
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
        from qwen3next_jax.common.metrics import event_fields, main_values, to_metric_values

        params = info.state["params"]
        self.heldout_text, self.heldout_loss = _NOT_EVALUATED, 0.0  # if this evaluation fails
        with self._during("evaluating on held-out text"):
            values = self._heldout.run(params)
        self.heldout_loss = values.get("loss", 0.0)
        main = main_values(to_metric_values(values, self._heldout.metrics))[:1]
        self.heldout_text = "".join(f"{value.label} {value}" for value in main)
        self._metrics.write("heldout", info.step, **event_fields(values, self._heldout.metrics))
        if "ema" in info.state:
            with self._during("evaluating the average of the parameters"):
                values = self._heldout.run(averaged_params(params, info.state["ema"]))
            fields = event_fields(values, self._heldout.metrics)
            self._metrics.write("heldout_average", info.step, **fields)
        for name, suite in self._suites.items():
            with self._during(f"evaluating {name}"):
                measured = event_fields(suite.run(params), suite.metrics)
            self._metrics.write("suite", info.step, suite=name, **measured)


def sample_prompt(config: EvalConfig, data: Data, longest: int) -> tuple[str, np.ndarray]:
    """Returns the prompt of samples, as text and as tokens [n]: `eval.sample_prompt`. In place of
    the default, data of conversations have the first turn of a held-out row: the tokens before the
    first answer, at most the last `longest`.
    """
    rows = range(min(data.heldout_rows, _ROWS_FOR_A_PROMPT))
    if config.sample_prompt == EvalConfig.sample_prompt and "loss_weights" in data.array_dtypes:
        for row in map(data.heldout_row, rows):
            answers = np.flatnonzero(row["loss_weights"] > 0)
            if len(answers) and answers[0]:  # in a row of texts all tokens count
                turn = row["tokens"][: answers[0]][-longest:]
                return data.tokenizer.decode(turn), turn
    return config.sample_prompt, data.tokenizer.encode(config.sample_prompt)


_ROWS_FOR_A_PROMPT = 64


class SampleHook:
    """Generates a continuation of `sample_prompt` and writes a "sample" event."""

    def __init__(
        self,
        run: ResolvedRun,
        metrics: MetricsFile,
        config: EvalConfig,
        data: Data,
        during: During,
    ):
        self._during = during
        self._run = run
        self._metrics = metrics
        self._sample_tokens = config.sample_tokens
        self._tokenizer = data.tokenizer
        longest = max(run.model.context_length - config.sample_tokens, 1)
        self._prompt, self._prompt_tokens = sample_prompt(config, data, longest)

    def __call__(self, info: StepInfo) -> None:
        from qwen3next_jax.inference.decode import generate_to_end

        with self._during("generating a sample"):
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
    """Saves the state, and writes the events of earlier saves."""

    def __init__(
        self, checkpoints: CheckpointWriter, metrics: MetricsFile, last_step: int, during: During
    ):
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._last_step = last_step
        self._during = during

    def step_ended(self, step: int, metrics: Metrics, state: State) -> None:
        self.write_events()

    def __call__(self, info: StepInfo) -> None:
        # The state of the last step is always saved.
        is_last = info.stopping or info.step == self._last_step
        with self._during("saving a checkpoint", compiles=False):
            self._checkpoints.save(info.step, info.state, may_skip=not is_last)
            if info.stopping:  # the hooks after this one may take longer than the process is given
                self._checkpoints.wait()

    def write_events(self) -> None:
        """Writes the events of the saves that have ended since the last call."""
        for event, step, values in self._checkpoints.events():
            self._metrics.write(event, step, **values)
