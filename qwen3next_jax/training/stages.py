"""The stages of a run, and where each of them reads the training data. Nothing here needs JAX.

A run without `train.stages` has one stage. A stage reads no row that an earlier stage has read, and
a branch no row that its parent has read before the branch. If two consecutive stages read the same
training stream (their data have the same fingerprint), the second stage continues with the next row
of this stream. If they mix the same streams with different weights, the second stage continues each
stream with the stream's own next row. A rewind skips rows of the mix, whichever streams they come
from. Rows of another length form other streams, which begin with their first row.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config import Config, DataConfig, OptimizerConfig, Stage, TrainConfig
from qwen3next_jax.data.pipeline import Data, open_data, rows_of_streams
from qwen3next_jax.data.preparation import Progress

# Name of a group of settings → the settings in this group that a stage can set.
STAGE_SETTINGS = {
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
    """A stage with the values of all settings.

    Attributes:
      name: the stage's name in records; "" if the run has no `train.stages`.
      steps_before: the number of steps of the run before the stage begins.
      last_step: the last step of the stage, counted from the start of the run.
      schedule_start: the number of steps of the run before the stage's learning-rate schedule
        begins.
      train: the stage's settings of the group "train"; but `train.steps` is the length of the
        learning-rate schedule, and `train.stages` is empty.
      data: the stage's settings of the group "data".
      optimizer: the stage's settings of the group "optimizer".
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
        """The number of steps of the stage."""
        return self.last_step - self.steps_before

    @property
    def batch_size(self) -> int:
        """The number of rows per step, over all devices and micro-batches."""
        return self.train.batch_size

    @property
    def sequence_length(self) -> int:
        """The number of tokens per row."""
        return self.train.sequence_length

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per step."""
        return self.train.gradient_accumulation

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens per step, including padding."""
        return self.batch_size * self.sequence_length

    def as_single_stage(self, config: Config) -> Config:
        """The configuration of a run with this stage only, whose schedule begins at step 0."""
        return dataclasses.replace(
            config, train=self.train, data=self.data, optimizer=self.optimizer
        )


def resolve_stages(config: Config) -> tuple[ResolvedStage, ...]:
    """Returns the stages of a run in order.

    Raises:
      UserError: the settings of a stage are not valid; the message names the stage.
    """
    stages = config.train.stages
    if not stages:
        steps = config.train.steps
        return (ResolvedStage("", 0, steps, 0, config.train, config.data, config.optimizer),)
    boundaries = [0, *itertools.accumulate(stage.steps for stage in stages)]
    terms = " + ".join(str(stage.steps) for stage in stages)
    require(
        boundaries[-1] == config.train.steps,
        f"train.steps = {config.train.steps}, but the steps of train.stages, {terms}, sum to "
        f"{boundaries[-1]}: change one of them so that both are equal",
    )
    # Indices of the stages at which a learning-rate schedule begins. A schedule lasts until the
    # next of these stages.
    schedule_starts = [
        i for i, stage in enumerate(stages) if not i or _overrides(stage, "optimizer")
    ]
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
                **_overrides(stage, "train"),
            )
            resolved_stage = ResolvedStage(
                name=stage.name or str(i + 1),
                steps_before=boundaries[i],
                last_step=boundaries[i + 1],
                schedule_start=boundaries[begin],
                train=train,
                data=dataclasses.replace(config.data, **_overrides(stage, "data")),
                optimizer=dataclasses.replace(
                    config.optimizer, **_overrides(stages[begin], "optimizer"), **no_warmup
                ),
            )
            resolved_stage.as_single_stage(config)  # checks the groups against each other
        except UserError as error:
            raise UserError(f"train.stages[{i}]: {error}") from error
        resolved.append(resolved_stage)
    return tuple(resolved)


def _overrides(stage: Stage, group: str) -> dict[str, Any]:
    """Returns name → value, for the settings of a group that the stage sets."""
    values = {name: getattr(stage, name) for name in STAGE_SETTINGS[group]}
    return {name: value for name, value in values.items() if value is not None}


def stage_at(stages: Sequence[ResolvedStage], step: int) -> ResolvedStage:
    """The stage that contains `step` (from 1); after the last step, the last stage."""
    return next((stage for stage in stages if step <= stage.last_step), stages[-1])


def tokens_seen(stages: Sequence[ResolvedStage], step: int) -> int:
    """The number of tokens in the first `step` steps of a run, including padding."""
    return sum(
        max(min(step, stage.last_step) - stage.steps_before, 0) * stage.tokens_per_step
        for stage in stages
    )


def open_stages(
    stages: Sequence[ResolvedStage], vocab_size: int, progress: Progress | None = None
) -> list[Data]:
    """Opens the rows of every stage. Prepares rows that are not prepared yet."""
    return [
        open_data(stage.data, stage.sequence_length, stage.batch_size, vocab_size, progress)
        for stage in stages
    ]


class DataCursor(NamedTuple):
    """Where a stage reads the training data. A run.json holds these attributes under their names.

    Attributes:
      fingerprint: the fingerprint of the training stream.
      batch_size: rows per step.
      step: the number of steps of the run before the stage begins to read.
      row: the row of the training stream with which the stage begins.
      starts: name of a stream that the run has read → the stream's row with which the stage
        begins.
      streams: name of a stream in the mix → its weight; {} if the training stream is not a mix
        (a synthetic task).
    """

    fingerprint: str
    batch_size: int
    step: int = 0
    row: int = 0
    starts: Mapping[str, int] = {}
    streams: Mapping[str, float] = {}

    def batch(self, step: int, data_offset: int) -> int:
        """Returns the number, in the stage's data, of the batch that `step` of the run (counted
        from 1) reads if rewinds have skipped `data_offset` batches.
        """
        return step - 1 - self.step + data_offset

    def advance(self, step: int, data: Data, data_offset: int = 0) -> "DataCursor":
        """Returns the cursor of the next stage. This cursor must be the cursor of the stage that
        contains `step`.

        Args:
          step: number of steps of the run before the next stage.
          data: the rows of the next stage.
          data_offset: the number of batches that rewinds have skipped in the stage of this cursor.
        """
        rows = self.row + (step - self.step + data_offset) * self.batch_size
        if data.fingerprint == self.fingerprint:
            return self._replace(
                batch_size=data.batch_size, step=step, row=rows, streams=dict(data.streams)
            )
        rows_of_streams = (
            rows_taken(self.streams, rows) if self.streams else {self.fingerprint: rows}
        )
        starts = dict(self.starts) | {
            name: self.starts.get(name, 0) + count for name, count in rows_of_streams.items()
        }
        return DataCursor(data.fingerprint, data.batch_size, step, 0, starts, dict(data.streams))

    def same_stream(self, other: "DataCursor") -> bool:
        """Whether the stages of both cursors read batches of the same size from the same training
        stream. Then their losses and gradient norms are comparable.
        """
        return (self.fingerprint, self.batch_size) == (other.fingerprint, other.batch_size)


# The cursor of every stage; None for a stage of a branch that ended before the branch began.
DataCursors = Sequence[DataCursor | None]


def rows_taken(streams: Mapping[str, float], rows: int) -> dict[str, int]:
    """Returns name of a stream → how many of the first `rows` rows of a mix come from this stream.
    If the mix began with the stream's row 0, this is also the index of the stream's next row.
    """
    return dict(zip(streams, rows_of_streams(tuple(streams.values()), rows), strict=True))


def place_cursors(
    stages: Sequence[ResolvedStage], data: Sequence[Data], first: DataCursor
) -> DataCursors:
    """Computes the cursor of every stage of a run that begins at `first`, and makes the data of
    each stage begin at the stage's cursor.

    Args:
      stages: the stages of the run.
      data: the rows of every stage; this function calls their `begin`.
      first: the cursor with which the run begins.
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
    """Returns the cursors that a run.json records.

    Args:
      run: the contents of the run.json.
      batch_size: the run's number of rows per step, for files of older versions, which hold a
        single fingerprint instead of cursors.
    """
    if isinstance(run["data"], str):
        return [DataCursor(run["data"], batch_size)]
    return [cursor and DataCursor(**cursor) for cursor in run["data"]]


def first_cursor(cursors: DataCursors) -> DataCursor:
    """The cursor of the stage that contains the first step of the run."""
    return next(cursor for cursor in cursors if cursor)


def stage_number(cursors: DataCursors, step: int) -> int:
    """Returns the index of the stage that contains `step` of the run (counted from 1).

    The `data_offset` in the train state after a step counts batches of the stage of this step. In
    the state before the first step, it counts batches of the first stage.
    """
    return max(
        (i for i, cursor in enumerate(cursors) if cursor and cursor.step < step),
        default=cursors.index(first_cursor(cursors)),
    )


def after_rewind(cursors: DataCursors, step: int, data_offset: int, to_step: int) -> int:
    """Computes the `data_offset` after a rewind.

    Args:
      cursors: the cursors of the run's stages.
      step: the step whose batch the run skips.
      data_offset: the data offset at that step.
      to_step: the step to which the run returns.

    Returns:
      The new `data_offset` of the state after `to_step`; with it, the run continues with the data
      after the batch of `step`.
    """
    sizes = [cursors[stage_number(cursors, s)].batch_size for s in range(to_step, step + 1)]
    return -(-(data_offset * sizes[-1] + sum(sizes[1:])) // sizes[0])


def offset_in_next_stage(data_offset: int, before: DataCursor, now: DataCursor) -> int:
    """Computes the `data_offset` with which a stage begins, so that it does not read rows that a
    rewind has skipped.

    Args:
      data_offset: the data offset at the end of the stage before it.
      before: the cursor of the stage before it.
      now: the cursor of the stage.
    """
    batches = -(-data_offset * before.batch_size // now.batch_size)
    return batches if before.fingerprint == now.fingerprint else max(batches, 0)
