"""The training loop: batches, the update step, hooks. Read this file to follow one batch from
file to loss.

    mesh     `sharding.mesh.make_mesh` arranges the devices as a grid with named axes.
    data     `data.preparation` packs documents into rows of tokens; `data.pipeline.Data` gives
             row i of the endless training stream. Batch n of a stage holds B consecutive rows, from
             the stage's row n·B on. `stages.DataCursor` says with which row the stage begins.
    model    `model.Qwen3Next` is the model. Its parameters are the entry "params" of the train
             state (see `state`).
    step     `make_train_step`, below, makes the function (state, batch) → (state, metrics). It is
             compiled once per stage.
    loop     `Trainer.train`, below, repeats: read the next batch, do the step, call the hooks.

`resolve.resolve_run` resolves the configuration for a mesh once; the functions here read what they
need from its result, a `ResolvedRun`. Everything that a run does besides its steps (evaluation,
samples, checkpoints, diagnostics, metrics, display, profiler, watchdog) is a hook. `runs.train`
registers the hooks; this file names none of them.

Letters: B batch, T time.
"""

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from qwen3next_jax.common.errors import ExitCode, UserError, error_message
from qwen3next_jax.data.pipeline import Data
from qwen3next_jax.model.multi_token_prediction import target_weights
from qwen3next_jax.ops.implementations import Decision, trace_and_record
from qwen3next_jax.sharding.batch_layout import BatchLayout
from qwen3next_jax.sharding.compiler_options import compiler_options
from qwen3next_jax.training import guards
from qwen3next_jax.training.average import update_average
from qwen3next_jax.training.diagnostics import norms_by_layer
from qwen3next_jax.training.gradients import Batch, make_gradients
from qwen3next_jax.training.indexer import keep_indexers
from qwen3next_jax.training.loss import total_loss
from qwen3next_jax.training.optimizer import learning_rate_schedule, make_optimizer
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.router_bias import balance_by_quantile, update_router_bias
from qwen3next_jax.training.stages import (
    DataCursor,
    DataCursors,
    ResolvedStage,
    offset_in_next_stage,
    stage_number,
)
from qwen3next_jax.training.state import State, join_opt_state, split_opt_state

Metrics = dict[str, Any]
TrainStep = Callable[[State, Batch], tuple[State, Metrics]]

# ---- Step


def make_train_step(
    run: ResolvedRun, stage: ResolvedStage, loss: Callable = total_loss
) -> TrainStep:
    """Makes the jitted update step of `stage`.

    Args:
      run: the model, the mesh, and the settings of the run.
      stage: the settings of the stage.
      loss: a function with the arguments and results of `loss.total_loss`.

    Returns:
      A function train_step(state, batch) → (new state, metrics), which donates `state`:
        state: the train state (see the file `state`), with the shardings of
          `run.abstract_state`.
        batch: "tokens" and "segment_ids", int32 [B, T], with `run.batch_sharding`; from some
          sources of data also "target_mask", bool [B, T], "loss_weights", float32 [B, T], or
          "expert_ids", int16 [B, T, layers, A] (see `loss.total_loss`).
        metrics: the parts of the loss (`loss.total_loss`), the metrics of the guards
          (`guards.check`), learning_rate, tokens and grad_norm (before clipping), all scalars;
          target_share, the share of tokens that the loss counts, if the batch has loss_weights;
          indexer_loss_weight, if an indexer is trained;
          expert_load [layers with experts, experts]; grad_norms (`norms_by_layer` of the gradients
          before clipping).
    """
    gradients = make_gradients(run, stage, loss)
    schedule = learning_rate_schedule(stage.optimizer, stage.train.steps, stage.schedule_start)
    assignment = run.assignment
    optimizer = make_optimizer(
        stage.optimizer,
        assignment.parameters,
        schedule,
        run.compute_mesh,
        assignment.learning_rate_factors,
        assignment.weight_decays,
    )
    guard_config = run.config.guards
    shares_updates = run.update_shardings != run.main_shardings

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        # Compute the gradients of the whole batch, one micro-batch after another.
        grads, loss_parts, counts, row_grads = gradients(state["params"], batch)
        grad_norm = optax.tree.norm((grads, {n: g.rows for n, g in row_grads.items()}))

        # The guards decide whether the update is skipped.
        skip, guard_state, guard_metrics = guards.check(
            guard_config,
            state["guards"],
            loss_parts["total_loss"],
            grad_norm,
            counts.has_targets,
        )

        # The main optimizer applies clipping, its direction, weight decay and the learning rate.
        before = assignment.main(state["params"])
        old_opt_state, tables_state = split_opt_state(state["opt_state"], assignment)
        updates, opt_state = optimizer.update(grads, old_opt_state, before)
        if shares_updates:  # each slice computes a part of the updates; then all get all parts
            updates = jax.lax.with_sharding_constraint(updates, run.update_shardings)
            updates = jax.lax.with_sharding_constraint(updates, run.main_shardings)
        after = optax.apply_updates(before, updates)
        after = balance_routers(state["params"], after, loss_parts)
        if stage.train.indexer_training == "frozen":
            after = keep_indexers(run.model, before, after)
        after = assignment.keep_frozen_parts(before, after)
        # The optimizer, and so the schedule, counts only the steps that were not skipped.
        learning_rate = schedule(state["step"] - state["guards"]["skipped"])
        opt_state, after = guards.keep_if(skip, (old_opt_state, before), (opt_state, after))

        tables = {}
        if assignment.tables:  # lazy AdamW updates the rows of its tables that the batch uses
            from qwen3next_jax.training import lazy_rows

            tables, tables_state = lazy_rows.update(
                run.model,
                stage.optimizer,
                assignment.tables,
                assignment.of_tables(state["params"]),
                tables_state,
                row_grads,
                learning_rate,
                skip,
                run.compute_mesh,
            )

        metrics = loss_parts | guard_metrics
        metrics |= {
            "grad_norm": grad_norm,
            "grad_norms": norms_by_layer(run.model, assignment.with_zeros(state["params"], grads)),
            "tokens": counts.tokens,
            "learning_rate": learning_rate,
        }
        if "loss_weights" in batch:
            metrics["target_share"] = (target_weights(batch, 1) > 0).sum() / counts.tokens
        if "indexer_loss" in loss_parts:
            metrics["indexer_loss_weight"] = stage.train.indexer_loss_weight
        new_state = {
            "params": assignment.replace(state["params"], after, tables),
            "opt_state": join_opt_state(opt_state, tables_state, assignment),
            "step": state["step"] + 1,
            "guards": guard_state,
        }
        if stage.train.ema:
            new_state["ema"] = update_average(
                state["ema"], stage.train.ema, new_state["params"], skip
            )
        return new_state, metrics

    def balance_routers(params: dict, after: dict, loss_parts: dict) -> dict:
        """Returns the arrays of the main optimizer `after` its update with the routers' biases
        changed as the load of the experts asks for. `params`: all parameters before the update.
        """
        params = assignment.replace(params, after)
        if stage.train.router_bias_update == "quantile":
            params = balance_by_quantile(run.model, params, loss_parts.pop("required_bias"))
        else:
            params = update_router_bias(
                run.model, params, loss_parts.get("expert_load"), stage.train.router_bias_rate
            )
        return assignment.main(params)

    replicated = NamedSharding(run.mesh, PartitionSpec())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(run.state_shardings, run.batch_sharding),
        out_shardings=(run.state_shardings, replicated),
        compiler_options=compiler_options(run.config.parallel, run.mesh) or None,
    )


# ---- Hooks


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What a hook is told about a step. Hooks are called with it when the step has ended.

    Attributes:
      step: the number of steps of the run so far, including this one.
      stage: the stage that the step belongs to.
      state: the train state after the step. The next step donates it, so a hook has to copy the
        values that it needs later.
      batch: the batch of the step.
      metrics: the step's metrics (see `make_train_step`), on the devices.
      ends_stage: whether this is the last step of the stage.
      stopping: whether the run ends after this step because `Trainer.stop` was called.
    """

    step: int
    stage: ResolvedStage
    state: State
    batch: Batch
    metrics: Metrics
    ends_stage: bool
    stopping: bool


class Hook:
    """Base class for what a run does besides its steps. A subclass overrides the methods for the
    moments at which it acts. A plain function of a `StepInfo` is a hook as well.
    """

    def __call__(self, info: StepInfo) -> None:
        """Called after each step for which the hook is due (see `Trainer.add_hook`), when the step
        has ended. The run's clock is paused, so that the hook does not count as training time.
        """

    def stage_begins(self, step: int, stage: ResolvedStage, cursor: DataCursor) -> None:
        """Called before `step`, which is the first step of a stage, or the first step after a start
        or a rewind. `step` may take longer than others, because its function may have to be
        compiled.
        """

    def before_batch(self, step: int) -> None:
        """Called before the batch of `step` is read."""

    def before_step(self, step: int, pending: Metrics) -> None:
        """Called before `step`, after its batch was read. `pending` holds the metrics of the step
        before it, whose arrays the devices may still be computing; {} before the first step after a
        start or a rewind.
        """

    def step_traced(self, step: int, decisions: Sequence[Decision]) -> None:
        """Called when the function of a stage's steps has been traced and is not compiled yet.
        `step` is the next step; `decisions` say what runs each operator, and why.
        """

    def after_dispatch(self, step: int, pending: Metrics) -> None:
        """Called when `step` was sent to the devices. `pending` holds its metrics, whose arrays the
        devices are still computing.
        """

    def step_ended(self, step: int, metrics: Metrics, state: State) -> None:
        """Called once for every step, when it has ended. Usually the devices are then already
        computing the next step. `metrics` are the metrics of `step`. `state` is the newest train
        state, which may be the one after the next step.
        """


@dataclasses.dataclass(frozen=True)
class _Registered:
    """A hook with the arguments of `Trainer.add_hook`."""

    hook: Hook | Callable[[StepInfo], None]
    name: str
    every: tuple[int, ...]
    at_stage_end: bool
    at_stop: bool
    after_stop: bool
    required: bool

    def is_due(self, step: int, ends_stage: bool, stopping: bool) -> bool:
        """Whether the hook is called after `step`."""
        return (
            any(period and step % period == 0 for period in self.every)
            or (self.at_stage_end and ends_stage)
            or (self.at_stop and stopping)
        )


def stop_at_hook_error(name: str, step: int, error: Exception) -> None:
    """Raises a UserError whose message says in one line which hook failed, after which step, and
    why. This is the default of `Trainer`'s argument `on_hook_error`.
    """
    raise UserError(
        f"{describe_hook_error(name, step, error)}: correct it, or set train.on_hook_error = "
        "'continue' to train on without it",
        getattr(error, "exit_code", ExitCode.CRASHED),
    ) from error


def describe_hook_error(name: str, step: int, error: Exception) -> str:
    """Returns a part of a message: which hook failed after which step, the error, and the file and
    line that raised it.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    kind = type(error).__name__
    return (
        f"the hook {name} failed after step {step} ({kind}: {error_message(error)}; "
        f"{frame.filename}, line {frame.lineno})"
    )


# ---- Loop


class Clock:
    """Measures how long steps take, without the time that hooks take. Steps are measured in laps: a
    lap is one measurement over several steps.

    Attributes:
      data_wait: the seconds of the current lap during which the loop waited for batches.
    """

    def __init__(self):
        self._since = time.perf_counter()
        self._paused_at: float | None = None
        self._last_step = 0
        self.data_wait = 0.0

    def restart(self, step: int) -> None:
        """Begins a new lap now. `step` is the last step that has ended."""
        self._since = time.perf_counter()
        self._last_step = step
        self.data_wait = 0.0

    def lap(self, step: int) -> tuple[int, float, float]:
        """Ends the lap now, and begins the next one. `step` is the last step that has ended.

        Returns:
          (steps, seconds, seconds of waiting for data) of the lap that ended.
        """
        now = time.perf_counter() if self._paused_at is None else self._paused_at
        lap = (step - self._last_step, now - self._since, self.data_wait)
        self._since = now
        self._last_step = step
        self.data_wait = 0.0
        return lap

    def pause(self) -> None:
        """Stops the clock until `resume`."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Starts the clock again after `pause`."""
        self._since += time.perf_counter() - self._paused_at
        self._paused_at = None


class Trainer:
    """Runs the training loop.

    Attributes:
      run: the resolved run.
      stage: the stage of the current step; None before the first step.
      cursor: where that stage reads the training data; None before the first step.
      data: the rows of that stage; None before the first step.
      clock: measures the time of steps.
    """

    def __init__(
        self,
        run: ResolvedRun,
        data: Sequence[Data],
        cursors: DataCursors,
        make_step: Callable[[ResolvedRun, ResolvedStage], TrainStep] = make_train_step,
        on_hook_error: Callable[[str, int, Exception], None] = stop_at_hook_error,
    ):
        """Makes a trainer without hooks.

        Args:
          run: the resolved run.
          data: the rows of every stage.
          cursors: where every stage reads its rows.
          make_step: makes the update step of a stage.
          on_hook_error: called with (name of the hook, step, error) when a hook fails, unless the
            hook was registered as required. If the call returns, training continues.
        """
        self.run = run
        self.clock = Clock()
        self.stage: ResolvedStage | None = None
        self.data: Data | None = None
        self.cursor: DataCursor | None = None
        self._all_data = data
        self._cursors = cursors
        self._make_step = make_step
        self._on_hook_error = on_hook_error
        self._hooks: list[_Registered] = []
        self._stopping = False

    def add_hook(
        self,
        hook: Hook | Callable[[StepInfo], None],
        *,
        every: int | Sequence[int] = 1,
        at_stage_end: bool = False,
        at_stop: bool = False,
        after_stop: bool = False,
        name: str = "",
        required: bool = False,
    ) -> None:
        """Registers a hook. `train` calls `hook(info)` after the steps for which the hook is due.
        Hooks that are due after the same step are called in the order of registration.

        If a hook is due after a step, the loop waits until the devices have finished the step. With
        `every=1`, the loop therefore never takes the next batch, or dispatches the next step, while
        the devices still compute.

        Args:
          hook: a function of a `StepInfo`, or a `Hook`.
          every: the hook is called after each step that is a multiple of this number, or of one of
            these numbers; 0: no such calls.
          at_stage_end: whether the hook is also called after the last step of every stage.
          at_stop: whether the hook is also called after the step at which the run is stopped.
          after_stop: whether the hook, if it is due after the step at which the run is stopped, is
            called after the hooks without `after_stop`, one of which saves. `call_missed_hooks`
            calls it with a `StepInfo` that has no batch and no metrics.
          name: the hook's name in messages; default: the name of the function or class.
          required: whether training needs the hook. An error in a required hook ends the run with
            this error; errors in other hooks go to `on_hook_error`.
        """
        if not name:
            named = hook if hasattr(hook, "__qualname__") else type(hook)
            name = f"{named.__module__}:{named.__qualname__}"
        periods = (every,) if isinstance(every, int) else tuple(every)
        self._hooks.append(
            _Registered(hook, name, periods, at_stage_end, at_stop, after_stop, required)
        )

    def stop(self) -> None:
        """Makes `train` return after the current step."""
        self._stopping = True

    def train(self, state: State, steps_before: int = 0) -> tuple[int, State, Metrics]:
        """Trains until the last step of the run, or until a hook calls `stop`.

        Args:
          state: the train state, which the first step donates.
          steps_before: the number of steps of the run that led to `state`.

        Returns:
          (number of steps of the run so far, the state after them, the metrics of the last step).
        """
        self._stopping = False
        self._last_ended = steps_before
        self.clock.restart(steps_before)
        metrics: Metrics = {}
        step = steps_before
        for step in range(steps_before + 1, self.run.steps + 1):
            begins_stage = step == steps_before + 1 or step > self.stage.last_step
            if begins_stage:
                batches = self._begin_stage(step, state)

            # Batch: read the rows of this process, then make arrays over all devices
            self._call_all("before_batch", step)
            wait_start = time.perf_counter()
            batch = self._layout.to_global(next(batches))
            self.clock.data_wait += time.perf_counter() - wait_start

            # Step: dispatch it while the devices still compute the step before it. Then wait for
            # the step before it: with more than one step in the queue, the display and the reaction
            # to a signal would be late.
            self._call_all("before_step", step, metrics)
            previous = metrics
            if begins_stage:
                self._trace_step(step, state, batch)
            state, metrics = self._train_step(state, batch)
            self._call_all("after_dispatch", step, metrics)
            jax.block_until_ready(previous)
            self._end_step(step - 1, previous, state)

            # Hooks
            ends_stage = step == self.stage.last_step
            due = [hook for hook in self._hooks if hook.is_due(step, ends_stage, self._stopping)]
            if self._stopping:  # who asked for the stop may not wait for evaluations: save first
                due.sort(key=lambda hook: hook.after_stop)
            if due:
                jax.block_until_ready(metrics)
                self._end_step(step, metrics, state)
                info = StepInfo(step, self.stage, state, batch, metrics, ends_stage, self._stopping)
                self.clock.pause()
                for registered in due:
                    self._call(registered, registered.hook, step, info)
                self.clock.resume()
            if begins_stage:  # exclude the compilation from the measured time
                jax.block_until_ready(metrics)
                self.clock.restart(step)
            if self._stopping:
                break
        return step, state, metrics

    def call_missed_hooks(self, step: int, state: State) -> None:
        """Calls the hooks with `after_stop` that are due after `step`, before `train` continues
        from there: the process that took the step was killed after its save, before they had ended.
        """
        number = stage_number(self._cursors, step)
        stage, self.data = self.run.stages[number], self._all_data[number]
        ends_stage = step == stage.last_step
        info = StepInfo(step, stage, state, {}, {}, ends_stage, stopping=False)
        for registered in self._hooks:
            if registered.after_stop and registered.is_due(step, ends_stage, stopping=False):
                self._call(registered, registered.hook, step, info)

    def _begin_stage(self, step: int, state: State) -> Iterator[dict]:
        """Switches to the stage of `step`. If the step before belongs to another stage, this
        changes the guards in `state`, in place (see `guards.reset`).

        Returns:
          The batches from `step` on, with the rows of this process only.
        """
        previous_number = stage_number(self._cursors, step - 1)
        number = stage_number(self._cursors, step)
        stage = self.run.stages[number]
        cursor = self._cursors[number]
        if previous_number != number:
            previous_cursor = self._cursors[previous_number]
            offset = int(state["guards"]["data_offset"])
            state["guards"] = guards.reset(
                self.run.config.guards,
                state["guards"],
                offset_in_next_stage(offset, previous_cursor, cursor),
                previous_cursor.same_stream(cursor),
            )
        if stage != self.stage:
            self._train_step = self._make_step(self.run, stage)
            self._layout = BatchLayout(self.run.batch_sharding, stage.batch_size)
        self.stage = stage
        self.cursor = cursor
        self.data = self._all_data[number]
        self._call_all("stage_begins", step, stage, cursor)
        first_batch = cursor.batch(step, int(state["guards"]["data_offset"]))
        return self.data.batches(first_batch, self._layout.rows)

    def _trace_step(self, step: int, state: State, batch: Batch) -> None:
        """Traces the stage's update step, unless this was already done or `make_step` made a
        function that JAX has not jitted, and tells the hooks what runs its operators.
        """
        if not hasattr(self._train_step, "trace"):
            return
        decisions = trace_and_record(lambda: self._train_step.trace(state, batch))
        if decisions:
            self._call_all("step_traced", step, decisions)

    def _end_step(self, step: int, metrics: Metrics, state: State) -> None:
        """Calls `step_ended` of all hooks, unless this was already done for `step`."""
        if step > self._last_ended:
            self._last_ended = step
            self._call_all("step_ended", step, metrics, state)

    def _call_all(self, method: str, step: int, *arguments: Any) -> None:
        """Calls the method named `method` of every hook that is a `Hook`."""
        for registered in self._hooks:
            if isinstance(registered.hook, Hook):
                self._call(registered, getattr(registered.hook, method), step, step, *arguments)

    def _call(
        self, registered: _Registered, function: Callable, step: int, *arguments: Any
    ) -> None:
        """Calls a method of a hook, or the hook itself. An error in a required hook is raised;
        other errors go to `on_hook_error`.
        """
        try:
            function(*arguments)
        except jax.errors.JaxRuntimeError:
            raise  # a device or another process failed, not the hook
        except Exception as error:
            if registered.required:
                raise
            self._on_hook_error(registered.name, step, error)
