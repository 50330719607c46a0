"""The stages of a run, and where each of them reads the training data. Nothing here needs JAX.

A run without `train.stages` has one stage. A stage continues with the row after the last one that
the stage before it took, and a branch with the row after its parent's last one: no row is read
twice. If both stages read the same training stream (the same fingerprint), the next stage takes
the stream's next row. If they mix the same streams with other weights, each stream continues with
its own next row; a rewind passes over rows of the mix, whichever stream they belong to. Rows of
another length are other streams, which begin with their first row.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config import Config, DataConfig, OptimizerConfig, Stage, TrainConfig
from qwen3next_jax.data.pipeline import Data, mix_streams, open_data
from qwen3next_jax.data.preparation import Progress

# What a stage may set, by the group of settings that it belongs to.
SETTINGS = {
    "train": (
        "batch_size",
        "gradient_accumulation",
        "sequence_length",
        "remat",
        "indexer_training",
    ),
    "data": ("weights",),
    "optimizer": ("learning_rate", "schedule", "decay_fraction", "final_fraction"),
}


@dataclasses.dataclass(frozen=True)
class ResolvedStage:
    """A stage with every setting worked out.

    Attributes:
      name: as records show it; "" where the run has no `train.stages`.
      steps_before: steps of the run that are taken before this stage begins.
      last_step: the last step of the run that belongs to this stage.
      schedule_start: steps of the run that are taken before its learning-rate schedule begins.
      train: `train.steps` is the length of the learning-rate schedule; `train.stages` is empty.
      data, optimizer: the stage's settings.
    """

    name: str
    steps_before: int
    last_step: int
    schedule_start: int
    train: TrainConfig
    data: DataConfig
    optimizer: OptimizerConfig

    @property
    def steps(self) -> int:
        return self.last_step - self.steps_before

    @property
    def batch_size(self) -> int:
        """Rows of a step, over all devices and micro-batches."""
        return self.train.batch_size

    @property
    def sequence_length(self) -> int:
        return self.train.sequence_length

    @property
    def micro_batches(self) -> int:
        return self.train.gradient_accumulation

    @property
    def tokens_per_step(self) -> int:
        """Padding included."""
        return self.batch_size * self.sequence_length

    def alone(self, config: Config) -> Config:
        """The run `config` with this stage as its only one, from step 0 of its schedule."""
        return dataclasses.replace(
            config, train=self.train, data=self.data, optimizer=self.optimizer
        )


def resolve_stages(config: Config) -> tuple[ResolvedStage, ...]:
    """The stages of a run in their order.

    Raises:
      UserError: one of them cannot be trained; the message names it.
    """
    stages = config.train.stages
    if not stages:
        steps = config.train.steps
        return (ResolvedStage("", 0, steps, 0, config.train, config.data, config.optimizer),)
    boundaries = [0, *itertools.accumulate(stage.steps for stage in stages)]
    terms = " + ".join(str(stage.steps) for stage in stages)
    require(
        boundaries[-1] == config.train.steps,
        f"train.steps = {config.train.steps}, but the steps of train.stages, {terms}, come to "
        f"{boundaries[-1]}: set the one to the other",
    )
    # Stages with which a learning-rate schedule begins; it lasts until the next such stage.
    schedule_starts = [i for i, stage in enumerate(stages) if not i or _given(stage, "optimizer")]
    resolved = []
    for i, stage in enumerate(stages):
        begin = max(start for start in schedule_starts if start <= i)
        end = min((start for start in schedule_starts if start > i), default=len(stages))
        no_warmup = {"warmup_steps": 0} if begin else {}
        try:
            require(stage.steps >= 1, f"steps = {stage.steps}: expected at least 1")
            train = dataclasses.replace(
                config.train,
                stages=(),
                steps=boundaries[end] - boundaries[begin],
                **_given(stage, "train"),
            )
            one = ResolvedStage(
                name=stage.name or str(i + 1),
                steps_before=boundaries[i],
                last_step=boundaries[i + 1],
                schedule_start=boundaries[begin],
                train=train,
                data=dataclasses.replace(config.data, **_given(stage, "data")),
                optimizer=dataclasses.replace(
                    config.optimizer, **_given(stages[begin], "optimizer"), **no_warmup
                ),
            )
            one.alone(config)  # checks the groups against each other
        except UserError as error:
            raise UserError(f"train.stages[{i}]: {error}") from error
        resolved.append(one)
    return tuple(resolved)


def _given(stage: Stage, group: str) -> dict[str, Any]:
    """The settings of a group that the stage sets."""
    values = {name: getattr(stage, name) for name in SETTINGS[group]}
    return {name: value for name, value in values.items() if value is not None}


def stage_at(stages: Sequence[ResolvedStage], step: int) -> ResolvedStage:
    """The stage that takes `step` (from 1); beyond the last step the last stage."""
    return next((stage for stage in stages if step <= stage.last_step), stages[-1])


def tokens_seen(stages: Sequence[ResolvedStage], step: int) -> int:
    """Tokens in the first `step` steps of a run, padding included."""
    return sum(
        max(min(step, stage.last_step) - stage.steps_before, 0) * stage.tokens_per_step
        for stage in stages
    )


def open_stages(
    stages: Sequence[ResolvedStage], vocab_size: int, progress: Progress | None = None
) -> list[Data]:
    """The rows of every stage; rows that are not prepared yet are prepared now."""
    return [
        open_data(stage.data, stage.sequence_length, stage.batch_size, vocab_size, progress)
        for stage in stages
    ]


class DataCursor(NamedTuple):
    """Where a stage reads the training data; run.json holds it under these names.

    Attributes:
      fingerprint: the fingerprint of the training stream.
      batch_size: rows of a step.
      step: steps of the run that are taken when the stage begins to read.
      row: the row of the training stream with which it begins.
      starts: of every stream that the run has read: the row with which it begins here.
      streams: the streams that are mixed, with their weights; {} for a single one.
    """

    fingerprint: str
    batch_size: int
    step: int = 0
    row: int = 0
    starts: Mapping[str, int] = {}
    streams: Mapping[str, float] = {}

    def batch(self, step: int, data_offset: int) -> int:
        """Which batch of the stage's data `step` (of the run, from 1) takes, when rewinds have
        passed over `data_offset` batches.
        """
        return step - 1 - self.step + data_offset

    def advance(self, step: int, data: Data, data_offset: int = 0) -> "DataCursor":
        """The cursor of the next stage, which reads `data` after `step` steps of the run; this
        stage took the last of them.
        """
        rows = self.row + (step - self.step + data_offset) * self.batch_size
        if data.fingerprint == self.fingerprint:
            return self._replace(
                batch_size=data.batch_size, step=step, row=rows, streams=dict(data.streams)
            )
        taken = rows_taken(self.streams, rows) if self.streams else {self.fingerprint: rows}
        starts = dict(self.starts) | {
            name: self.starts.get(name, 0) + count for name, count in taken.items()
        }
        return DataCursor(data.fingerprint, data.batch_size, step, 0, starts, dict(data.streams))

    def same_stream(self, other: "DataCursor") -> bool:
        """Whether both read batches of as many rows of the same training stream, so that their
        losses and gradients can be compared.
        """
        return (self.fingerprint, self.batch_size) == (other.fingerprint, other.batch_size)


# One for every stage; None for a stage that was over before the run began, as in a branch.
DataCursors = Sequence[DataCursor | None]


def rows_taken(streams: Mapping[str, float], rows: int) -> dict[str, int]:
    """Of every stream: how many of the first `rows` rows of the mix belong to it, which is the
    number of its next row.
    """
    weights = tuple(streams.values())
    mix = mix_streams(weights)
    found = {i: 0 for i, weight in enumerate(weights) if not weight}
    while len(found) < len(streams):
        stream, row = mix[rows]
        found.setdefault(stream, row)
        rows += 1
    return {name: found[i] for i, name in enumerate(streams)}


def place_cursors(
    stages: Sequence[ResolvedStage], data: Sequence[Data], first: DataCursor
) -> DataCursors:
    """The cursor of every stage of a run that begins at `first`; each stage's data begin there
    from now on.
    """
    cursors: list[DataCursor | None] = []
    for stage, rows in zip(stages, data, strict=True):
        before = cursors[-1] if cursors else None
        if stage.last_step <= first.step:
            cursor = None
        elif before:
            cursor = before.advance(stage.steps_before, rows)
        else:
            cursor = first.advance(first.step, rows)
        if cursor:
            rows.begin(cursor.row, cursor.starts)
        cursors.append(cursor)
    return cursors


def recorded_cursors(run: Mapping[str, Any], batch_size: int) -> DataCursors:
    """The cursors that a run.json holds. Older code wrote one fingerprint, for a run of
    `batch_size` rows a step.
    """
    if isinstance(run["data"], str):
        return [DataCursor(run["data"], batch_size)]
    return [cursor and DataCursor(**cursor) for cursor in run["data"]]


def first_cursor(cursors: DataCursors) -> DataCursor:
    """The cursor of the first step of the run."""
    return next(cursor for cursor in cursors if cursor)


def stage_number(cursors: DataCursors, step: int) -> int:
    """Number of the stage that takes `step` (of the run, from 1). The state after a step counts
    its `data_offset` in batches of that stage; the state with which the run begins, in those of
    the first stage.
    """
    return max(
        (i for i, cursor in enumerate(cursors) if cursor and cursor.step < step),
        default=cursors.index(first_cursor(cursors)),
    )


def after_rewind(cursors: DataCursors, step: int, data_offset: int, to_step: int) -> int:
    """The `data_offset` with which the state after `to_step` continues behind the batch of
    `step`, which was taken with `data_offset`.
    """
    sizes = [cursors[stage_number(cursors, s)].batch_size for s in range(to_step, step + 1)]
    return -(-(data_offset * sizes[-1] + sum(sizes[1:])) // sizes[0])


def offset_in_next_stage(data_offset: int, before: DataCursor, now: DataCursor) -> int:
    """The `data_offset` with which the stage that reads `now` begins, when the stage before it
    ended with `data_offset`: what rewinds passed over stays passed over.
    """
    batches = -(-data_offset * before.batch_size // now.batch_size)
    return batches if before.fingerprint == now.fingerprint else max(batches, 0)
