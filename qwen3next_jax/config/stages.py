"""The stages of a run, such as main phase, longer rows, anneal. A run without `train.stages` is a run of one stage."""

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qwen3next_jax.errors import UserError, require

if TYPE_CHECKING:
    from qwen3next_jax.config.run import Config

Schedule = Literal["cosine", "warmup_stable_decay", "linear", "constant"]
Remat = Literal["none", "block", "dots", "offload"]
# What a stage may set, by the group it is of.
SETTINGS = {"train": ("batch_size", "gradient_accumulation", "sequence_length", "remat"), "data": ("weights",),
            "optimizer": ("learning_rate", "schedule", "decay_fraction", "final_fraction")}


@dataclasses.dataclass(frozen=True)
class Stage:
    """An entry of `train.stages`: so many steps, and settings for them; None: as the run has it."""

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


class Part(NamedTuple):
    """A stage as it is trained: after `first` steps of the run, until `last` are taken. `config`: as of a run without stages, but that
    its train.steps are those of its learning-rate schedule, which begins after `schedule_from` steps of the run."""

    name: str
    first: int
    last: int
    schedule_from: int
    config: "Config"


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
    begins = [i for i, stage in enumerate(stages) if not i or _given(stage, "optimizer")]  # stages with which a schedule begins
    parts = []
    for i, stage in enumerate(stages):
        begin, end = max(b for b in begins if b <= i), min((b for b in begins if b > i), default=len(stages))
        changes = {"train": {"stages": (), "steps": firsts[end] - firsts[begin]} | _given(stage, "train"), "data": _given(stage, "data"),
                   "optimizer": _given(stages[begin], "optimizer") | ({"warmup_steps": 0} if begin else {})}
        try:
            require(stage.steps >= 1, f"steps = {stage.steps}: expected at least 1")
            one = dataclasses.replace(config, **{g: dataclasses.replace(getattr(config, g), **new) for g, new in changes.items()})
        except UserError as error:
            raise UserError(f"train.stages[{i}]: {error}") from error
        parts.append(Part(stage.name or str(i + 1), firsts[i], firsts[i + 1], firsts[begin], one))
    return tuple(parts)


def _given(stage: Stage, group: str) -> dict[str, Any]:
    return {name: getattr(stage, name) for name in SETTINGS[group] if getattr(stage, name) is not None}


def part_at(config: "Config", step: int) -> Part:
    """The stage that takes step `step` (from 1); beyond the last step the last stage."""
    return next((part for part in parts_of(config) if step <= part.last), parts_of(config)[-1])


def tokens_seen(config: "Config", step: int) -> int:
    """In the first `step` steps of a run, padding included."""
    return sum(max(min(step, part.last) - part.first, 0) * part.config.train.batch_size * part.config.train.sequence_length
               for part in parts_of(config))
