"""The training loop: batches, the update step, hooks. Read this file to follow one batch from
file to loss.

    mesh     `sharding.mesh.make_mesh`: the devices, as a grid with named axes
    data     `data.preparation` packs documents into rows of tokens; `data.pipeline.Data` says
             what row i of the endless training stream is, and step s takes B rows from s·B on
    model    `model.Qwen3Next`; its parameters are the "params" of the train state (`state`)
    step     `make_train_step`, below: (state, batch) → (state, metrics), compiled once a stage
    loop     `Trainer.train`, below: the next batch, the step, the hooks

`resolve.resolve_run` works out the configuration for a mesh, once; the functions here read what
they need from the `ResolvedRun`. Everything that a run does besides its steps (evaluation,
samples, checkpoints, diagnostics, metrics, display, profiler, watchdog) is a hook: `runs.train`
registers them, and this file names none.

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
from qwen3next_jax.model import declared
from qwen3next_jax.sharding.batch_layout import BatchLayout
from qwen3next_jax.sharding.compiler_options import compiler_options
from qwen3next_jax.training import guards
from qwen3next_jax.training.diagnostics import norms_by_layer
from qwen3next_jax.training.gradients import Batch, make_gradients
from qwen3next_jax.training.indexer import keep_indexers
from qwen3next_jax.training.loss import total_loss
from qwen3next_jax.training.optimizer import learning_rate_schedule, make_optimizer
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.router_bias import update_router_bias
from qwen3next_jax.training.stages import (
    DataCursor,
    DataCursors,
    ResolvedStage,
    offset_in_next_stage,
    stage_number,
)
from qwen3next_jax.training.state import State

Metrics = dict[str, Any]
TrainStep = Callable[[State, Batch], tuple[State, Metrics]]

# ---- Step


def make_train_step(
    run: ResolvedRun, stage: ResolvedStage, loss: Callable = total_loss
) -> TrainStep:
    """→ the update step of `stage`, jitted; it donates the state.

    train_step(state, batch) → (state, metrics):
      state: see `state`; lies as `run.abstract_state` says.
      batch: "tokens" and "segment_ids", int32 [B, T], as `run.batch_sharding` says; of some data
        also "target_mask", bool [B, T].
      metrics: scalars, but for expert_load [sparse layers, experts] and grad_norms (before
        clipping; see `norms_by_layer`).

    Args:
      loss: as `loss.total_loss`.
    """
    gradients = make_gradients(run, stage, loss)
    schedule = learning_rate_schedule(stage.optimizer, stage.train.steps, stage.schedule_start)
    optimizer = make_optimizer(stage.optimizer, declared(run.model), schedule, run.compute_mesh)
    guard_config = run.config.guards

    def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
        # Gradients of the whole batch, micro-batch after micro-batch.
        grads, loss_parts, counts = gradients(state["params"], batch)
        grad_norm = optax.tree.norm(grads)

        # Whether loss or gradient went wrong, so that the update is skipped.
        skip, guard_state, guard_metrics = guards.check(
            guard_config, state["guards"], loss_parts["total_loss"], grad_norm
        )

        # Clipping, the optimizer's direction, weight decay, learning rate.
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        params = update_router_bias(
            run.model, params, loss_parts.get("expert_load"), stage.train.router_bias_rate
        )
        if stage.train.indexer_training == "frozen":
            params = keep_indexers(run.model, state["params"], params)

        metrics = loss_parts | guard_metrics
        metrics |= {
            "grad_norm": grad_norm,
            "grad_norms": norms_by_layer(run.model, grads),
            "tokens": counts.tokens,
            "flags": metrics["flags"] | guards.NO_TARGETS * ~counts.has_targets,
            # The optimizer has not seen the skipped steps, so neither has its schedule.
            "learning_rate": schedule(state["step"] - state["guards"]["skipped"]),
        }
        if "indexer_loss" in loss_parts:
            metrics["indexer_loss_weight"] = stage.train.indexer_loss_weight
        new_state = {
            "params": guards.keep_if(skip, state["params"], params),
            "opt_state": guards.keep_if(skip, state["opt_state"], opt_state),
            "step": state["step"] + 1,
            "guards": guard_state,
        }
        return new_state, metrics

    everywhere = NamedSharding(run.mesh, PartitionSpec())
    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(run.state_shardings, run.batch_sharding),
        out_shardings=(run.state_shardings, everywhere),
        compiler_options=compiler_options(run.config.parallel, run.mesh) or None,
    )


# ---- Hooks


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What a hook is called with, when a step has ended.

    Attributes:
      step: steps of the run taken so far, this one included.
      stage: the stage that the step belongs to.
      state: the train state after the step. The next step donates it: read it now, keep a copy.
      batch: what the step was taken on.
      metrics: what the step returned (see `make_train_step`), still on the devices.
      ends_stage: whether it is the stage's last step.
      stopping: whether the run ends after this step, because something asked for it.
    """

    step: int
    stage: ResolvedStage
    state: State
    batch: Batch
    metrics: Metrics
    ends_stage: bool
    stopping: bool


class Hook:
    """Something that a run does besides its steps: override the moments that it needs.

    A plain function of a `StepInfo` is a hook, too.
    """

    def __call__(self, info: StepInfo) -> None:
        """After each step for which the hook is due (see `Trainer.add_hook`). The step has
        ended, and the clock of the metrics stands still.
        """

    def stage_begins(self, step: int, stage: ResolvedStage, cursor: DataCursor) -> None:
        """Before `step`, the first one of a stage, or the first one after a start or a rewind:
        the step will be compiled.
        """

    def before_batch(self, step: int) -> None:
        """Before the batch of every step is read."""

    def before_step(self, step: int, pending: Metrics) -> None:
        """Before every step, when its batch is there. The devices may still be computing
        `pending`, the metrics of the step before it ({} where there is none).
        """

    def after_dispatch(self, step: int, pending: Metrics) -> None:
        """After the step has been handed to the devices, which are now computing `pending`, its
        metrics.
        """

    def step_ended(self, step: int, metrics: Metrics, state: State) -> None:
        """Once for every step, when it has ended: mostly while the next one is computed. `state`
        is the newest state.
        """


@dataclasses.dataclass(frozen=True)
class _Registered:
    """A hook and when it is due."""

    hook: Hook | Callable[[StepInfo], None]
    name: str
    every: tuple[int, ...]
    at_stage_end: bool
    at_stop: bool
    required: bool

    def is_due(self, step: int, ends_stage: bool, stopping: bool) -> bool:
        return (
            any(n and step % n == 0 for n in self.every)
            or (self.at_stage_end and ends_stage)
            or (self.at_stop and stopping)
        )


def stop_at_hook_error(name: str, step: int, error: Exception) -> None:
    """Ends the run with one line that says which hook failed, where and why."""
    raise UserError(
        f"{describe_hook_error(name, step, error)}: correct it, or set train.on_hook_error = "
        "'continue' to train on without it",
        getattr(error, "exit_code", ExitCode.CRASHED),
    ) from error


def describe_hook_error(name: str, step: int, error: Exception) -> str:
    """Which hook failed at which step, and the line of code that raised the error."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind = type(error).__name__
    return (
        f"the hook {name} failed after step {step} ({kind}: {error_message(error)}; "
        f"{place.filename}, line {place.lineno})"
    )


# ---- Loop


class Clock:
    """Seconds that steps take, without what hooks take."""

    def __init__(self):
        self._since = time.perf_counter()
        self._paused_at: float | None = None
        self._last_step = 0
        self.data_wait = 0.0  # seconds since the last lap

    def restart(self, step: int) -> None:
        """Counts from now on, after `step`."""
        self._since = time.perf_counter()
        self._last_step = step
        self.data_wait = 0.0

    def lap(self, step: int) -> tuple[int, float, float]:
        """(steps, their seconds, seconds of them spent waiting for data) since the last lap."""
        now = time.perf_counter() if self._paused_at is None else self._paused_at
        taken = (step - self._last_step, now - self._since, self.data_wait)
        self._since = now
        self._last_step = step
        self.data_wait = 0.0
        return taken

    def pause(self) -> None:
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        self._since += time.perf_counter() - self._paused_at
        self._paused_at = None


class Trainer:
    """Takes the steps of a run.

    Attributes:
      run: what is trained.
      stage, cursor, data: those of the step under way.
      clock: see `Clock`.
    """

    def __init__(
        self,
        run: ResolvedRun,
        data: Sequence[Data],
        cursors: DataCursors,
        make_step: Callable[[ResolvedRun, ResolvedStage], TrainStep] = make_train_step,
        on_hook_error: Callable[[str, int, Exception], None] = stop_at_hook_error,
    ):
        """Args:
        data: the rows of every stage.
        cursors: where every stage reads them.
        make_step: makes the update step of a stage.
        on_hook_error: called with the hook's name, the step and the error, when a hook fails
          that the run can do without; training continues when it returns.
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
        name: str = "",
        required: bool = False,
    ) -> None:
        """Calls `hook(info)` after steps for which it is due, in the order of registration.

        The run waits for a step after which a hook is due, so `every=1` costs the overlap of
        one step with the hand-over of the next.

        Args:
          hook: a function of a `StepInfo`, or a `Hook`.
          every: steps between two calls, or several such numbers; 0 for none.
          at_stage_end: also after the last step of every stage.
          at_stop: also after the step with which the run is stopped.
          name: for messages; by default the function's own.
          required: the run cannot do without it: any error in it ends the run as it is.
        """
        if not name:
            known = hook if hasattr(hook, "__qualname__") else type(hook)
            name = f"{known.__module__}:{known.__qualname__}"
        periods = (every,) if isinstance(every, int) else tuple(every)
        self._hooks.append(_Registered(hook, name, periods, at_stage_end, at_stop, required))

    def stop(self) -> None:
        """Ends the run after the step under way."""
        self._stopping = True

    def train(self, state: State, first_step: int = 0) -> tuple[int, State, Metrics]:
        """Trains from `state`, after `first_step` steps, to the last step or until a hook calls
        `stop`. → (steps taken in all, the state then, the metrics of the last step).
        """
        self._stopping = False
        self._ended = first_step
        self.clock.restart(first_step)
        metrics: Metrics = {}
        step = first_step
        for step in range(first_step + 1, self.run.steps + 1):
            begins_stage = step == first_step + 1 or step > self.stage.last_step
            if begins_stage:
                batches = self._begin_stage(step, state)

            # Batch: this process's rows, then one array over all devices
            self._at("before_batch", step)
            asked = time.perf_counter()
            batch = self._layout.to_global(next(batches))
            self.clock.data_wait += time.perf_counter() - asked

            # Step: handed over while the devices still compute the one before it. No more than
            # one waits there: more would only make the display and a signal late.
            self._at("before_step", step, metrics)
            previous = metrics
            state, metrics = self._train_step(state, batch)
            self._at("after_dispatch", step, metrics)
            jax.block_until_ready(previous)
            self._end_step(step - 1, previous, state)

            # Hooks
            ends_stage = step == self.stage.last_step
            due = [h for h in self._hooks if h.is_due(step, ends_stage, self._stopping)]
            if due:
                jax.block_until_ready(metrics)
                self._end_step(step, metrics, state)
                info = StepInfo(step, self.stage, state, batch, metrics, ends_stage, self._stopping)
                self.clock.pause()
                for registered in due:
                    self._call(registered, registered.hook, step, info)
                self.clock.resume()
            if begins_stage:  # the compilation is not part of any speed
                jax.block_until_ready(metrics)
                self.clock.restart(step)
            if self._stopping:
                break
        return step, state, metrics

    def _begin_stage(self, step: int, state: State) -> Iterator[dict]:
        """Prepares for the stage of `step`. → its batches from there on, this process's rows."""
        before, number = (stage_number(self._cursors, s) for s in (step - 1, step))
        stage = self.run.stages[number]
        cursor = self._cursors[number]
        if before != number:
            was = self._cursors[before]
            offset = int(state["guards"]["data_offset"])
            state["guards"] = guards.reset(
                self.run.config.guards,
                state["guards"],
                offset_in_next_stage(offset, was, cursor),
                was.same_stream(cursor),
            )
        if stage != self.stage:
            self._train_step = self._make_step(self.run, stage)
            self._layout = BatchLayout(self.run.batch_sharding, stage.batch_size)
        self.stage = stage
        self.cursor = cursor
        self.data = self._all_data[number]
        self._at("stage_begins", step, stage, cursor)
        first_batch = cursor.batch(step, int(state["guards"]["data_offset"]))
        return self.data.batches(first_batch, self._layout.rows)

    def _end_step(self, step: int, metrics: Metrics, state: State) -> None:
        """Tells the hooks, once, that `step` has ended."""
        if step > self._ended:
            self._ended = step
            self._at("step_ended", step, metrics, state)

    def _at(self, moment: str, step: int, *arguments: Any) -> None:
        """Calls the method `moment` of every hook that has it."""
        for registered in self._hooks:
            if isinstance(registered.hook, Hook):
                self._call(registered, getattr(registered.hook, moment), step, step, *arguments)

    def _call(
        self, registered: _Registered, function: Callable, step: int, *arguments: Any
    ) -> None:
        try:
            function(*arguments)
        except jax.errors.JaxRuntimeError:
            raise  # a device or another process failed: no fault of the hook
        except Exception as error:
            if registered.required:
                raise
            self._on_hook_error(registered.name, step, error)
