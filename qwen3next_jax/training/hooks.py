"""Hooks: what a run does besides its steps. The loop calls them, and knows none of them."""

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from qwen3next_jax.common.errors import ExitCode, UserError, error_message
from qwen3next_jax.ops.implementations import Decision
from qwen3next_jax.training.gradients import Batch
from qwen3next_jax.training.stages import DataCursor, ResolvedStage
from qwen3next_jax.training.state import State

Metrics = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What a hook is told about a step. Hooks are called with it when the step has ended.

    Attributes:
      step: the number of steps of the run so far, including this one.
      stage: the stage that the step belongs to.
      state: the train state after the step. The next step donates it, so a hook has to copy the
        values that it needs later.
      batch: the batch of the step.
      metrics: the step's metrics (see `loop.make_train_step`), on the devices.
      ends_stage: whether this is the last step of the stage.
      stopping: whether the run ends after this step because `loop.Trainer.stop` was called.
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
        """Called after each step for which the hook is due (see `loop.Trainer.add_hook`), when the
        step has ended. The run's clock is paused, so that the hook does not count as training time.
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
class RegisteredHook:
    """A hook with the arguments of `loop.Trainer.add_hook`."""

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


HOOK_ADVICE = "correct it, or set train.on_hook_error = 'continue' to train on without it"


def stop_at_hook_error(name: str, step: int, error: Exception) -> None:
    """Raises a UserError whose message says in one line which hook failed, after which step, and
    why. This is the default of the argument `on_hook_error` of `loop.Trainer`.
    """
    raise UserError(
        f"{describe_hook_error(name, step, error)}: {HOOK_ADVICE}",
        getattr(error, "exit_code", ExitCode.HOOK_FAILED),
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
