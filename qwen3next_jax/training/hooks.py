"""Hooks: what a run does besides its training steps. The training loop calls all hooks in the same
way and names none of them.
"""

import dataclasses
import pathlib
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from qwen3next_jax.common.errors import ExitCode, UserError, error_message
from qwen3next_jax.ops.implementations import Decision
from qwen3next_jax.training.gradients import Batch
from qwen3next_jax.training.stages import DataCursor, ResolvedStage
from qwen3next_jax.training.state import State

Metrics = dict[str, Any]

_PACKAGE = pathlib.Path(__file__).parents[1]
_STANDARD_LIBRARY = pathlib.Path(sysconfig.get_path("stdlib"))


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """The argument of a hook: describes a step that has ended.

    Attributes:
      step: the number of steps of the run so far, including this one.
      stage: the stage that the step belongs to.
      state: the train state after the step. The next step donates the state, so a hook has to copy
        the values that it needs later.
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
    """Base class of hooks, which do what a run does besides its training steps. The training loop
    calls each method of a hook at a different moment; a subclass overrides the methods that it
    needs. A plain function of a `StepInfo` is a hook as well.
    """

    def __call__(self, info: StepInfo) -> None:
        """Called after each step for which the hook is due (see `loop.Trainer.add_hook`), when the
        step has ended. The run's clock is paused, so that the hook does not count as training time.
        """

    def stage_begins(self, step: int, stage: ResolvedStage, cursor: DataCursor) -> None:
        """Called before `step`, which is the first step of a stage, or the first step after a start
        or a rewind. `step` may take longer than other steps, because the update step may have to be
        compiled.
        """

    def before_batch(self, step: int) -> None:
        """Called before the batch of `step` is read."""

    def before_step(self, step: int, pending: Metrics) -> None:
        """Called before `step`, after its batch was read. `pending` holds the metrics of the
        previous step, whose arrays the devices may still be computing; it is {} before the first
        step after a start or a rewind.
        """

    def step_traced(self, step: int, decisions: Sequence[Decision]) -> None:
        """Called when a stage's update step has been traced and is not compiled yet. `step` is the
        next step; `decisions` say which implementation runs each operator, and why.
        """

    def after_dispatch(self, step: int, pending: Metrics) -> None:
        """Called when `step` was sent to the devices. `pending` holds the metrics of `step`, whose
        arrays the devices are still computing.
        """

    def step_ended(self, step: int, metrics: Metrics, newest_state: State) -> None:
        """Called once for every step, when it has ended. Usually the devices are already computing
        the next step when this method is called. `metrics` are the metrics of `step`.
        `newest_state` is the newest train state, which may already include the next step.
        """


@dataclasses.dataclass(frozen=True)
class RegisteredHook:
    """A hook with the arguments of `loop.Trainer.add_hook`."""

    hook: Hook | Callable[[StepInfo], None]
    name: str
    every: tuple[int, ...]
    at_stage_end: bool
    at_stop: bool
    last_at_stop: bool
    required: bool

    def is_due(self, step: int, ends_stage: bool, stopping: bool) -> bool:
        """Whether the hook is called after `step`."""
        return (
            any(period and step % period == 0 for period in self.every)
            or (self.at_stage_end and ends_stage)
            or (self.at_stop and stopping)
        )


HOOK_ADVICE = "correct it, or set train.on_hook_error = 'continue' to train on without it"


def raise_hook_error(name: str, step: int, error: Exception) -> None:
    """Raises a UserError whose message says in one line which hook failed, after which step, and
    why. The argument `on_hook_error` of `loop.Trainer` has this function as its default.
    """
    raise UserError(
        f"{describe_hook_error(name, step, error)}: {HOOK_ADVICE}", exit_code_of_hook_error(error)
    ) from error


def exit_code_of_hook_error(error: Exception) -> ExitCode:
    """Returns the exit code of a run that ends because a hook raised `error`: the exit code of the
    error if it has its own, such as that of a bucket that does not answer, else `HOOK_FAILED`.
    """
    code = getattr(error, "exit_code", ExitCode.USER_ERROR)
    return ExitCode.HOOK_FAILED if code == ExitCode.USER_ERROR else code


def describe_hook_error(name: str, step: int, error: Exception) -> str:
    """Returns a part of an error message: which hook failed after which step, the error, and a file
    and line. The file and line are those of the last frame in the user's own code in the traceback,
    or of the last frame in this package if the traceback contains no code of the user.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # the last of the frames with the lowest number of `_rank_of_code_owner`
    frame = min(reversed(frames), key=lambda frame: _rank_of_code_owner(frame.filename))
    kind = type(error).__name__
    return (
        f"the hook {name} failed after step {step} ({kind}: {error_message(error)}; "
        f"{frame.filename}, line {frame.lineno})"
    )


def _rank_of_code_owner(filename: str) -> int:
    """Returns 0 for a file of the user, 1 for a file of this package, 2 for a file of a library."""
    path = pathlib.Path(filename)
    # The package itself may be installed among the libraries.
    if path.is_relative_to(_PACKAGE):
        return 1
    is_library = {"site-packages", "dist-packages"} & {*path.parts}
    if is_library or path.is_relative_to(_STANDARD_LIBRARY) or filename.startswith("<"):
        return 2
    return 0
