"""The training loop: batches, the update step, hooks. Read this file to follow one batch from
file to loss.

    mesh     `sharding.mesh.make_mesh` arranges the devices as a grid with named axes.
    data     `data.preparation` packs documents into rows of tokens. `data.pipeline.DataSource`
             gives row i of the endless training stream. Batch n of a stage holds B consecutive
             rows: row n·B of the stage and the B − 1 rows after it. `stages.DataCursor` says with
             which row of the stream the stage begins.
    model    `model.Qwen3Next` is the model. The model's parameters are the entry "params" of the
             train state (see `state`).
    step     `make_train_step`, below, makes the function (state, batch) → (state, metrics). JAX
             compiles the update step once per stage.
    loop     `Trainer.train`, below, repeats: read the next batch, do the step, call the hooks.

`resolve.resolve_run` resolves the configuration for a mesh once; the functions in this file take
its result, a `ResolvedRun`. An update rule (`update_rules`) changes the train state after the
optimizer. A hook (`hooks`) does what a run does besides its training steps, such as evaluation,
checkpoints and metrics. `resolve` makes the update rules and `runs.train` registers the hooks; this
file names no rule and no hook.

Letters: B batch, T time.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from qwen3next_jax.data.pipeline import DataSource
from qwen3next_jax.ops.implementations import trace_and_record
from qwen3next_jax.sharding.batch_layout import BatchLayout
from qwen3next_jax.sharding.compiler_options import compiler_options
from qwen3next_jax.training import guards
from qwen3next_jax.training.clock import Clock
from qwen3next_jax.training.gradients import Batch, gradient_norms, make_gradients
from qwen3next_jax.training.hooks import (
    Hook,
    Metrics,
    RegisteredHook,
    StepInfo,
    raise_hook_error,
)
from qwen3next_jax.training.loss import token_count_metrics, total_loss
from qwen3next_jax.training.optimizer import learning_rate_schedule
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import (
    DataCursor,
    DataCursors,
    ResolvedStage,
    data_offset_in_next_stage,
    stage_index_of_step,
)
from qwen3next_jax.training.state import State
from qwen3next_jax.training.update import make_update
from qwen3next_jax.training.update_rules import StepInput, apply_rule

TrainStep = Callable[[State, Batch], tuple[State, Metrics]]

# ---- Step


def make_train_step(
    run: ResolvedRun, stage: ResolvedStage, loss: Callable = total_loss
) -> TrainStep:
    """Makes the jitted update step of `stage`.

    Args:
      run: the resolved run: the model, the mesh, the update rules, and the settings.
      stage: the settings of the stage.
      loss: a function with the arguments and results of `loss.total_loss`.

    Returns:
      A function train_step(state, batch) → (new state, metrics), which donates `state`:
        state: the train state (see the file `state`), with the shardings of
          `run.abstract_state`.
        batch: "tokens" and "segment_ids", int32 [B, T], with `run.batch_sharding`; from some
          sources of data also "target_mask", bool [B, T], "loss_weights", float32 [B, T], or
          "expert_ids", int16 [B, T, layers, A] (see `loss.total_loss`).
        metrics: the parts of the loss (`loss.total_loss`), among them expert_load [layers with
          experts, experts]; the metrics of `guards.check_step`, `loss.token_count_metrics` and
          `gradients.gradient_norms`; learning_rate; and the metrics of the update rules. A metric
          for which this docstring gives no shape is a scalar.
    """
    gradients = make_gradients(run, stage, loss)
    schedule = learning_rate_schedule(stage.optimizer, stage.train.steps, stage.schedule_start)
    update = make_update(run, stage, schedule)

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        # Gradients of the whole batch, one micro-batch after another
        grads, loss_parts, counts = gradients(state["params"], batch)
        norms = gradient_norms(run, state["params"], grads)

        # Guards: they decide whether this step's update is skipped.
        skip, guard_state, guard_metrics = guards.check_step(
            run.config.guards,
            state["guards"],
            loss_parts["total_loss"],
            norms["grad_norm"],
            counts.has_targets,
        )

        # Optimizer: clipping, direction, weight decay, learning rate. The learning rate follows
        # the number of updates, which are the steps that were not skipped. The value below is the
        # metric and the rate of lazy AdamW. The main optimizer counts its updates itself, and
        # evaluates the same schedule.
        learning_rate = schedule(state["step"] - state["guards"]["skipped"])
        params, opt_state = update(grads, state["params"], state["opt_state"], learning_rate, skip)
        after = state | {
            "params": params,
            "opt_state": opt_state,
            "step": state["step"] + 1,
            "guards": guard_state,
        }
        metrics = loss_parts | guard_metrics | norms | token_count_metrics(batch, counts)
        metrics["learning_rate"] = learning_rate

        # Rules: they change what no gradient changes.
        step = StepInput(stage, batch, state_before=state)
        for rule in run.rules:
            after, metrics = apply_rule(rule, step, after, metrics, skip)
        return after, metrics

    replicated = NamedSharding(run.mesh, PartitionSpec())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(run.state_shardings, run.batch_sharding),
        out_shardings=(run.state_shardings, replicated),
        compiler_options=compiler_options(run.config.parallel, run.mesh) or None,
    )


# ---- Loop


class Trainer:
    """Runs the training loop.

    Attributes:
      run: the resolved run.
      stage: the stage of the current step; None before the first step.
      cursor: where the current stage reads the training data; None before the first step.
      data: the rows of the current stage; None before the first step.
      clock: measures the time of steps.
      wants_to_stop: whether a hook of this process has called `stop`.
    """

    def __init__(
        self,
        run: ResolvedRun,
        data: Sequence[DataSource],
        cursors: DataCursors,
        make_step: Callable[[ResolvedRun, ResolvedStage], TrainStep] = make_train_step,
        on_hook_error: Callable[[str, int, Exception], None] = raise_hook_error,
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
        self.data: DataSource | None = None
        self.cursor: DataCursor | None = None
        self._all_data = data
        self._cursors = cursors
        self._make_step = make_step
        self._on_hook_error = on_hook_error
        self._hooks: list[RegisteredHook] = []
        self.wants_to_stop = False
        self._stopping = False

    def add_hook(
        self,
        hook: Hook | Callable[[StepInfo], None],
        *,
        every: int | Sequence[int] = 1,
        at_stage_end: bool = False,
        at_stop: bool = False,
        last_at_stop: bool = False,
        name: str = "",
        required: bool = False,
    ) -> None:
        """Registers a hook. `train` calls `hook(info)` after the steps for which the hook is due.
        Hooks that are due after the same step are called in the order of registration.

        If a hook is due after a step, the loop waits until the devices have finished the step
        before it calls the hook. A hook with `every=1` therefore prevents the loop from reading the
        next batch, or dispatching the next step, while the devices compute.

        Args:
          hook: a function of a `StepInfo`, or a `Hook`.
          every: one number or several; the hook is called after each step that is a multiple of one
            of them; 0: no such calls.
          at_stage_end: whether the hook is also called after the last step of every stage.
          at_stop: whether the hook is also called after the step at which the run is stopped.
          last_at_stop: whether, at the step at which the run is stopped, the hook is called after
            the hooks without this flag, so that the checkpoint is saved first. If the process is
            killed before it calls the hook, the process that resumes the run calls it
            (`call_missed_hooks`), with a `StepInfo` that has no batch and no metrics.
          name: the hook's name in messages; default: the name of the function or class.
          required: whether training needs the hook. An error in a required hook ends the run; an
            error in another hook goes to `on_hook_error`.
        """
        if not name:
            named = hook if hasattr(hook, "__qualname__") else type(hook)
            name = f"{named.__module__}:{named.__qualname__}"
        periods = (every,) if isinstance(every, int) else tuple(every)
        self._hooks.append(
            RegisteredHook(hook, name, periods, at_stage_end, at_stop, last_at_stop, required)
        )

    def stop(self, agreed: bool = False) -> None:
        """Makes `train` return after the current step or, if no step is being taken (during
        `call_missed_hooks`), after the next step.

        All processes of a run have to return from `train` after the same step. In a run of several
        processes, a call of `stop` on one process only sets `wants_to_stop` of this process.
        `runs.hooks.StopHook` then calls `stop(agreed=True)` on every process, and all processes
        return from `train` after the next step.

        Args:
          agreed: whether every process makes this call at the same step.
        """
        self.wants_to_stop = True
        if agreed or jax.process_count() == 1:
            self._stopping = True

    def train(self, state: State, steps_before: int = 0) -> tuple[int, State, Metrics]:
        """Trains until the last step of the run, or until a hook calls `stop`.

        Args:
          state: the train state, which the first step donates.
          steps_before: the number of steps of the run that led to `state`.

        Returns:
          (number of steps of the run so far, the state after them, the metrics of the last step).
        """
        self._last_ended = steps_before
        self.clock.restart(steps_before)
        metrics: Metrics = {}
        step = steps_before
        for step in range(steps_before + 1, self.run.steps + 1):
            enters_stage = step == steps_before + 1 or step > self.stage.last_step
            if enters_stage:
                batches = self._begin_stage(step, state)

            # Batch: read the rows of this process, then make arrays over all devices
            self._call_hook_method("before_batch", step)
            wait_start = time.perf_counter()
            batch = self._layout.to_global(next(batches))
            self.clock.data_wait += time.perf_counter() - wait_start

            # Step: dispatch it while the devices still compute the step before it. Then wait for
            # the step before it: with more than one step in the queue, the display and the reaction
            # to a signal would be late.
            self._call_hook_method("before_step", step, metrics)
            previous = metrics
            if enters_stage:
                self._trace_step(step, state, batch)
            state, metrics = self._train_step(state, batch)
            self._call_hook_method("after_dispatch", step, metrics)
            jax.block_until_ready(previous)
            # `state` is already the state after `step`. If the guards halted the run at `step - 1`,
            # `step` changed no parameter (`guards.check_step`).
            self._call_step_ended(step - 1, previous, state)

            # Hooks
            ends_stage = step == self.stage.last_step
            was_stopping = self._stopping
            if due := self._due_hooks(step, ends_stage):
                jax.block_until_ready(metrics)
                self._call_step_ended(step, metrics, state)
                info = StepInfo(step, self.stage, state, batch, metrics, ends_stage, self._stopping)
                self.clock.pause()
                self._call_due_hooks(due, info)
                if self._stopping and not was_stopping:  # a hook has called `stop` since then
                    later = [h for h in self._due_hooks(step, ends_stage) if h not in due]
                    self._call_due_hooks(later, dataclasses.replace(info, stopping=True))
                self.clock.resume()
            if enters_stage:  # exclude the compilation from the measured time
                jax.block_until_ready(metrics)
                self.clock.restart(step)
            if self._stopping:
                break
        self._stopping = self.wants_to_stop = False
        return step, state, metrics

    def call_missed_hooks(self, step: int, state: State) -> None:
        """Calls the hooks with `last_at_stop` that are due after `step`. Call this method before
        `train` if the process that took `step` was killed after it had saved the checkpoint and
        before the hooks with `last_at_stop` had ended.
        """
        number = stage_index_of_step(self._cursors, step)
        stage, self.data = self.run.stages[number], self._all_data[number]
        ends_stage = step == stage.last_step
        info = StepInfo(step, stage, state, {}, {}, ends_stage, stopping=False)
        for registered in self._hooks:
            if registered.last_at_stop and registered.is_due(step, ends_stage, stopping=False):
                self._call_hook(registered, registered.hook, step, info)

    def _begin_stage(self, step: int, state: State) -> Iterator[dict]:
        """Switches to the stage of `step`. If the previous step belongs to another stage, the
        method replaces the guards in the dict `state` (see `guards.reset_for_stage`).

        Returns:
          The batches from `step` on, with the rows of this process only.
        """
        previous_number = stage_index_of_step(self._cursors, step - 1)
        number = stage_index_of_step(self._cursors, step)
        stage = self.run.stages[number]
        cursor = self._cursors[number]
        if previous_number != number:
            previous_cursor = self._cursors[previous_number]
            offset = int(state["guards"]["data_offset"])
            state["guards"] = guards.reset_for_stage(
                self.run.config.guards,
                state["guards"],
                data_offset_in_next_stage(offset, previous_cursor, cursor),
                previous_cursor.reads_same_stream(cursor),
            )
        if stage != self.stage:
            self._train_step = self._make_step(self.run, stage)
            self._layout = BatchLayout(self.run.batch_sharding, stage.batch_size)
        self.stage = stage
        self.cursor = cursor
        self.data = self._all_data[number]
        self._call_hook_method("stage_begins", step, stage, cursor)
        first_batch = cursor.batch_index(step, int(state["guards"]["data_offset"]))
        return self.data.batches(first_batch, self._layout.rows)

    def _due_hooks(self, step: int, ends_stage: bool) -> list[RegisteredHook]:
        """Returns the hooks that are due after `step`, in the order in which they are called."""
        due = [hook for hook in self._hooks if hook.is_due(step, ends_stage, self._stopping)]
        if self._stopping:  # who asked for the stop may not wait for evaluations: save first
            due.sort(key=lambda hook: hook.last_at_stop)
        return due

    def _call_due_hooks(self, due: Sequence[RegisteredHook], info: StepInfo) -> None:
        for registered in due:  # one of them may stop the run
            current_info = dataclasses.replace(info, stopping=self._stopping)
            self._call_hook(registered, registered.hook, info.step, current_info)

    def _trace_step(self, step: int, state: State, batch: Batch) -> None:
        """Traces the stage's update step, and calls `step_traced` of all hooks with the chosen
        implementations of its operators. Does nothing if the step was traced before, or is not a
        jitted function.
        """
        if not hasattr(self._train_step, "trace"):
            return
        decisions = trace_and_record(lambda: self._train_step.trace(state, batch))
        if decisions:
            self._call_hook_method("step_traced", step, decisions)

    def _call_step_ended(self, step: int, metrics: Metrics, newest_state: State) -> None:
        """Calls `step_ended` of all hooks, unless they were already called for `step`."""
        if step > self._last_ended:
            self._last_ended = step
            self._call_hook_method("step_ended", step, metrics, newest_state)

    def _call_hook_method(self, method: str, step: int, *arguments: Any) -> None:
        """Calls the method named `method` of every hook that is a `Hook`."""
        for registered in self._hooks:
            if isinstance(registered.hook, Hook):
                self._call_hook(
                    registered, getattr(registered.hook, method), step, step, *arguments
                )

    def _call_hook(
        self, registered: RegisteredHook, function: Callable, step: int, *arguments: Any
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
