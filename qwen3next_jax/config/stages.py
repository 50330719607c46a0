"""The stages of a run, such as main phase, longer rows, anneal. A run without `train.stages` is a run of one stage."""

import dataclasses
import itertools
from typing import TYPE_CHECKING, Literal

from qwen3next_jax.errors import UserError, require

if TYPE_CHECKING:
    from qwen3next_jax.config.run import Config

Schedule = Literal["cosine", "warmup_stable_decay", "linear", "constant"]
Remat = Literal["none", "block", "dots", "offload"]
_TRAIN, _DATA = ("batch_size", "gradient_accumulation", "sequence_length", "remat"), ("weights",)
_SCHEDULE = ("learning_rate", "schedule", "decay_fraction", "final_fraction")


@dataclasses.dataclass(frozen=True)
class Stage:
    """An entry of `train.stages`: so many steps, and settings of the groups train, data, optimizer for them; None: as the run has it."""

    steps: int = 0
    name: str = ""  # in records and reports; "": its number
    batch_size: int | None = None
    gradient_accumulation: int | None = None
    sequence_length: int | None = None
    remat: Remat | None = None
    weights: tuple[float, ...] | None = None
    # A stage that sets one of these has a learning-rate schedule of its own, over its steps and without warm-up. One that sets
    # none goes on with the schedule of the stage before, which then runs over the steps of both.
    learning_rate: float | None = None
    schedule: Schedule | None = None
    decay_fraction: float | None = None
    final_fraction: float | None = None

    def given(self, names: tuple[str, ...]) -> dict:
        """Those of the settings `names` that this stage sets."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclasses.dataclass(frozen=True)
class Part:
    """A stage as it is trained.

    Attributes:
      first, last: the steps of the run that are taken when it begins and when it ends.
      tokens_before: of the stages before it.
      config: as of a run without stages, but that train.steps is the length of its learning-rate schedule.
      schedule_from: steps of the run that are taken when that schedule begins.
    """

    name: str
    first: int
    last: int
    tokens_before: int
    config: "Config"
    schedule_from: int = 0

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.config.train.batch_size * self.config.train.sequence_length

    @property
    def settings(self) -> dict:
        """What the steps of a stage depend on, by name."""
        groups = (self.config.train, self.config.data, self.config.optimizer)
        names = (*_TRAIN, *_DATA, *_SCHEDULE)
        return {"schedule_from": self.schedule_from} | {name: getattr(next(g for g in groups if hasattr(g, name)), name) for name in names}

    def begun(self, step: int) -> bool:
        """Whether a run that has trained to `step` has begun it."""
        return self.first < max(step, 1)

    def tokens_seen(self, step: int) -> int:
        """By the run when `step` steps are taken, the last of them by this stage."""
        return self.tokens_before + (step - self.first) * self.tokens


def parts_of(config: "Config") -> tuple[Part, ...]:
    """The stages of a run in their order.

    Raises:
      UserError: one of them cannot be trained (it is named).
    """
    train, stages = config.train, config.train.stages
    if not stages:
        return (Part("", 0, train.steps, 0, config),)
    firsts = [0, *itertools.accumulate(stage.steps for stage in stages)]
    terms = " + ".join(str(stage.steps) for stage in stages)
    require(firsts[-1] == train.steps, f"train.steps = {train.steps}, but the steps of train.stages, {terms}, come to {firsts[-1]}: "
                                       "set the one to the other")
    begins = [i for i, stage in enumerate(stages) if not i or stage.given(_SCHEDULE)]  # stages with which a schedule begins
    parts, tokens = [], 0
    for i, (stage, first, last) in enumerate(zip(stages, firsts, firsts[1:])):
        begin = max(b for b in begins if b <= i)
        end = min((b for b in begins if b > i), default=len(stages))
        try:
            require(stage.steps >= 1, f"steps = {stage.steps}: expected at least 1")
            optimizer = dataclasses.replace(config.optimizer, **stages[begin].given(_SCHEDULE), **({"warmup_steps": 0} if begin else {}))
            one = dataclasses.replace(
                config, optimizer=optimizer, data=dataclasses.replace(config.data, **stage.given(_DATA)),
                train=dataclasses.replace(train, stages=(), steps=firsts[end] - firsts[begin], **stage.given(_TRAIN)))
        except UserError as error:
            raise UserError(f"train.stages[{i}]: {error}") from error
        parts.append(Part(stage.name or str(i + 1), first, last, tokens, one, firsts[begin]))
        tokens += (last - first) * parts[-1].tokens
    return tuple(parts)


def tokens_of(config: "Config") -> int:
    """That a whole run trains on, padding included."""
    return parts_of(config)[-1].tokens_seen(config.train.steps)


def part_at(config: "Config", step: int) -> Part:
    """The stage that takes step `step` (from 1); beyond the last step the last stage."""
    return next((part for part in parts_of(config) if step <= part.last), parts_of(config)[-1])
