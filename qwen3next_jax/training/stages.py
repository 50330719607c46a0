"""The stages of a run, and where each stage reads the training data. This file does not need JAX.

A run without `train.stages` has one stage. No stage reads a row that an earlier stage has read. A
branch (a run that continues from a checkpoint of another run, its parent) reads no row that the
parent had read before this checkpoint. How the second of two consecutive stages reads:

- If both stages read the same training stream (their data have the same fingerprint), the second
  stage continues with the stream's next row.
- If both stages mix the same streams, but with different weights, the second stage continues each
  stream with the stream's next row.
- If the rows of the two stages have different lengths, the stages read different streams, and the
  second stage reads each of its streams from the first row.

A rewind (a return to an earlier checkpoint after a loss spike) skips rows of the mix of streams,
without regard to the stream that a row comes from.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config import Config, DataConfig, OptimizerConfig, Stage, TrainConfig
from qwen3next_jax.data.pipeline import DataSource, Epoch, open_data, row_counts_of_streams
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
    """A stage of a run, with the values of all its settings.

    Attributes:
      name: the stage's name in records; "" if the run has no `train.stages`.
      steps_before: the number of steps of the run before the stage begins.
      last_step: the number of the stage's last step; the first step of the run has the number 1.
      schedule_start: the number of steps of the run before the stage's learning-rate schedule
        begins.
      train: the stage's settings of the group "train". `train.steps` is the length of the stage's
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
        """Returns the configuration of a run that consists of this stage alone, with a
        learning-rate schedule that begins at step 0.
        """
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
    # Indices of the stages at which a learning-rate schedule begins: the first stage, and each
    # stage that sets a setting of the optimizer. A schedule lasts until the next one begins.
    schedule_starts = [
        i for i, stage in enumerate(stages) if not i or _stage_overrides(stage, "optimizer")
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
                **_stage_overrides(stage, "train"),
            )
            resolved_stage = ResolvedStage(
                name=stage.name or str(i + 1),
                steps_before=boundaries[i],
                last_step=boundaries[i + 1],
                schedule_start=boundaries[begin],
                train=train,
                data=dataclasses.replace(config.data, **_stage_overrides(stage, "data")),
                optimizer=dataclasses.replace(
                    config.optimizer, **_stage_overrides(stages[begin], "optimizer"), **no_warmup
                ),
            )
            resolved_stage.as_single_stage(
                config
            )  # raises UserError if groups contradict each other
        except UserError as error:
            raise UserError(f"train.stages[{i}]: {error}") from error
        resolved.append(resolved_stage)
    return tuple(resolved)


def _stage_overrides(stage: Stage, group: str) -> dict[str, Any]:
    """Returns name → value of the settings of `group` that the stage sets, such as "batch_size" of
    the group "train".
    """
    values = {name: getattr(stage, name) for name in STAGE_SETTINGS[group]}
    return {name: value for name, value in values.items() if value is not None}


def stage_at(stages: Sequence[ResolvedStage], step: int) -> ResolvedStage:
    """Returns the stage that contains step number `step` of the run, or the last stage if the run
    has fewer steps. The first step has the number 1.
    """
    return next((stage for stage in stages if step <= stage.last_step), stages[-1])


def tokens_seen(stages: Sequence[ResolvedStage], step: int) -> int:
    """Returns the number of tokens in the first `step` steps of a run, including padding."""
    return sum(
        max(min(step, stage.last_step) - stage.steps_before, 0) * stage.tokens_per_step
        for stage in stages
    )


def open_data_of_stages(
    stages: Sequence[ResolvedStage], vocab_size: int, progress: Progress | None = None
) -> list[DataSource]:
    """Opens the data of every stage, in order. If no earlier run has tokenised and packed the data,
    this function does.

    Args:
      stages: the stages of the run.
      vocab_size: the size of the model's vocabulary.
      progress: function that is called repeatedly while data are prepared, to report progress;
        None: no reports.
    """
    return [
        open_data(stage.data, stage.sequence_length, stage.batch_size, vocab_size, progress)
        for stage in stages
    ]


class DataCursor(NamedTuple):
    """Where a stage reads the training data. The file run.json holds the cursors of a run's stages,
    with the attributes of this class as keys.

    Attributes:
      fingerprint: the fingerprint of the training stream.
      batch_size: rows per step.
      step: the number of steps of the run before the stage begins to read.
      row: the row of the training stream with which the stage begins.
      starts: name of a stream that the run has read before → the row of this stream with which the
        stage begins.
      streams: name of a stream in the mix → its weight; {} if the training stream is not a mix (a
        synthetic task).
    """

    fingerprint: str
    batch_size: int
    step: int = 0
    row: int = 0
    starts: Mapping[str, int] = {}
    streams: Mapping[str, float] = {}

    def batch_index(self, step: int, data_offset: int) -> int:
        """Returns the index of the batch that a step reads. The first batch of the stage has the
        index 0.

        Args:
          step: the number of the step; the first step of the run has the number 1.
          data_offset: the number of batches that rewinds have skipped.
        """
        return step - 1 - self.step + data_offset

    def for_next_stage(self, step: int, data: DataSource, data_offset: int = 0) -> "DataCursor":
        """Returns the cursor of the next stage, given the cursor of the stage that contains step
        number `step` of the run.

        Args:
          step: the number of steps of the run before the next stage.
          data: the data of the next stage.
          data_offset: the number of batches that rewinds have skipped in the stage of this cursor.
        """
        if data.fingerprint == self.fingerprint:
            return self._replace(
                batch_size=data.batch_size,
                step=step,
                row=self._next_row_of_mix(step, data_offset),
                streams=dict(data.stream_weights),
            )
        starts = self.rows_read_by_stream(step, data_offset)
        return DataCursor(
            data.fingerprint, data.batch_size, step, 0, starts, dict(data.stream_weights)
        )

    def rows_read_by_stream(self, step: int, data_offset: int = 0) -> dict[str, int]:
        """Returns name of a stream → the number of its rows that the run has read after `step`
        steps, including the rows that rewinds skipped. The stage of this cursor must contain step
        number `step`.
        """
        rows = self._next_row_of_mix(step, data_offset)
        taken = (
            rows_taken_by_stream(self.streams, rows) if self.streams else {self.fingerprint: rows}
        )
        return dict(self.starts) | {
            name: self.starts.get(name, 0) + count for name, count in taken.items()
        }

    def _next_row_of_mix(self, step: int, data_offset: int) -> int:
        return self.row + (step - self.step + data_offset) * self.batch_size

    @property
    def continues_stream(self) -> bool:
        """Whether the stage continues a stream that the run, or its parent, has read before."""
        return bool(self.row or self.starts.keys() & {self.fingerprint, *self.streams})

    def reads_same_stream(self, other: "DataCursor") -> bool:
        """Whether the stages of both cursors read batches of the same size from the same training
        stream, so that their losses and gradient norms are comparable.
        """
        return (self.fingerprint, self.batch_size) == (other.fingerprint, other.batch_size)


class SourceReading(NamedTuple):
    """How much of a source a run has read.

    Attributes:
      epochs: how often the run has read the source.
      tokens_read: the number of tokens that the run has read, without padding. The tokens of an
        unfinished epoch are estimated from its number of rows.
      source_documents: the number of documents of the source, read or not.
    """

    epochs: float
    tokens_read: float
    source_documents: int


def reading_by_source(
    rows: Mapping[str, int], epochs: Mapping[str, Epoch]
) -> dict[str, SourceReading]:
    """Returns name of a source → how much of it was read.

    Args:
      rows: name of a stream → the number of its rows that were read (the result of
        `DataCursor.rows_read_by_stream`).
      epochs: name of a stream → one epoch of the stream (`DataSource.stream_epochs`), for the
        streams of all stages. Streams that never repeat have no epochs, so the result leaves out
        the sources of such streams.
    """
    found: dict[str, SourceReading] = {}
    for stream, epoch in epochs.items():
        share = rows.get(stream, 0) / epoch.rows
        before = found.get(epoch.source, SourceReading(0.0, 0.0, 0))
        found[epoch.source] = SourceReading(
            before.epochs + share, before.tokens_read + share * epoch.tokens, epoch.documents
        )
    return found


def epoch_by_stream(data: Sequence[DataSource]) -> dict[str, Epoch]:
    """Returns name of a stream → the sizes of one epoch of the stream, for the streams of all
    stages.
    """
    return {name: epoch for rows in data for name, epoch in rows.stream_epochs.items()}


# A model learns little more from data that it reads more often (Muennighoff et al. 2023,
# "Scaling Data-Constrained Language Models").
_MOST_EPOCHS = 4


def _format_document_count(count: int) -> str:
    return "1 document" if count == 1 else f"{count:,} documents"


def describe_epochs(read: Mapping[str, SourceReading], steps: int) -> str:
    """Returns a text that says how often a run of `steps` steps reads each source; "" if no source
    repeats.
    """
    if not read:
        return ""
    if len(read) == 1:
        (source,) = read.values()
        text = f"{source.epochs:.3g} epochs of {_format_document_count(source.source_documents)}"
    else:
        first, *others = (
            f"{source.epochs:.3g}{{}} of {name} ({_format_document_count(source.source_documents)})"
            for name, source in read.items()
        )
        text = ", ".join((first.format(" epochs"), *(other.format("") for other in others)))
    in_one = {name: source.epochs / steps for name, source in read.items()}
    often = [
        f"{epochs:.3g}" + (f" of {name}" if len(read) > 1 else "")
        for name, epochs in in_one.items()
        if epochs > 1
    ]
    return f"reads {text}" + (f"; in one step {', '.join(often)}" if often else "")


def epochs_warning(read: Mapping[str, SourceReading]) -> str:
    """Returns a warning if a run repeats a source so often that a model learns little more from it;
    else "".
    """
    often = [
        (f"{name} " if len(read) > 1 else "its data ") + f"{source.epochs:.3g} times"
        for name, source in read.items()
        if source.epochs > _MOST_EPOCHS
    ]
    if not often:
        return ""
    return (
        f"the run reads {', '.join(often)}: after {_MOST_EPOCHS} times a model learns little more "
        "from the same documents; add data, lower the weight of the source, or take fewer steps"
    )


# The cursor of every stage. It is None for a stage that ended before the run began to read, which
# happens in a branch: the parent run has read that stage.
DataCursors = Sequence[DataCursor | None]


def rows_taken_by_stream(streams: Mapping[str, float], rows: int) -> dict[str, int]:
    """Returns name of a stream → how many of the first `rows` rows of a mix come from this stream.
    `streams`: name of a stream → its weight. If a stream is read from its row 0, its count is also
    the index of its next row.
    """
    return dict(zip(streams, row_counts_of_streams(tuple(streams.values()), rows), strict=True))


def start_data_at_cursors(
    stages: Sequence[ResolvedStage], data: Sequence[DataSource], first: DataCursor
) -> DataCursors:
    """Computes the cursor of every stage, and makes the data of each stage begin at its cursor.

    Args:
      stages: the stages of the run.
      data: the data of every stage; this function calls the method `begin` of each.
      first: the cursor at the first step of the run, even if the run is resumed at a later step.
    """
    cursors: list[DataCursor | None] = []
    for stage, rows in zip(stages, data, strict=True):
        before = cursors[-1] if cursors else None
        if stage.last_step <= first.step:
            cursor = None
        elif before:
            cursor = before.for_next_stage(stage.steps_before, rows)
        else:
            cursor = first.for_next_stage(first.step, rows)
        if cursor:
            rows.set_start(cursor.row, cursor.starts)
        cursors.append(cursor)
    return cursors


def cursor_of_first_step(cursors: DataCursors) -> DataCursor:
    """Returns the cursor of the stage that contains the first step of the run."""
    return next(cursor for cursor in cursors if cursor)


def stage_index_of_step(cursors: DataCursors, step: int) -> int:
    """Returns the index of the stage that contains step number `step` of the run. The first stage
    has the index 0, and the first step of the run has the number 1. For a step before the first
    step of the run, such as 0, this function returns the index of the run's first stage.

    The `data_offset` in the train state after a step counts batches of the stage that contains the
    step.
    """
    return max(
        (i for i, cursor in enumerate(cursors) if cursor and cursor.step < step),
        default=cursors.index(cursor_of_first_step(cursors)),
    )


def data_offset_after_rewind(
    cursors: DataCursors, step: int, data_offset: int, to_step: int
) -> int:
    """Computes the `data_offset` after a rewind. In a rewind the run returns to an earlier step and
    continues with data that it has not read yet.

    Args:
      cursors: the cursors of the run's stages.
      step: the step at which the rewind was decided. The run also skips the batch of this step.
      data_offset: the `data_offset` of the train state at that step: the number of batches that
        earlier rewinds had skipped.
      to_step: the step to whose train state the run returns.

    Returns:
      The `data_offset` to put into the train state after `to_step`, so that the next batch begins
      after the batch of `step`.
    """
    sizes = [cursors[stage_index_of_step(cursors, s)].batch_size for s in range(to_step, step + 1)]
    return -(-(data_offset * sizes[-1] + sum(sizes[1:])) // sizes[0])


def data_offset_in_next_stage(
    data_offset: int, previous_cursor: DataCursor, next_cursor: DataCursor
) -> int:
    """Computes the `data_offset` with which a stage begins, so that the stage reads no row that a
    rewind has skipped.

    Args:
      data_offset: the data offset at the end of the previous stage, in batches of that stage.
      previous_cursor: the cursor of the previous stage.
      next_cursor: the cursor of the stage that begins.
    """
    batches = -(-data_offset * previous_cursor.batch_size // next_cursor.batch_size)
    return batches if previous_cursor.fingerprint == next_cursor.fingerprint else max(batches, 0)
