"""The stages of a run: what each is, what it reads, and what it takes over from the one before
it. A run without `train.stages` is a run of one. Nothing here needs JAX.

A stage reads on where the one before it stopped, and a run where its parent did (`branching`):
no row of a stream is read again. Where the training stream is the same one (one fingerprint), it
goes on with its next row. Where its streams are mixed otherwise, each goes on with its own next
row (as many rows of the mix are passed over as rewinds passed over before, whichever stream's
they are). Rows of another length are other streams, which begin with their first row.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config import Config, Stage
from qwen3next_jax.data.pipeline import Data, mix_streams, open_data
from qwen3next_jax.data.preparation import Progress

# What a stage may set, by the group it is of.
SETTINGS = {
    "train": ("batch_size", "gradient_accumulation", "sequence_length", "remat"),
    "data": ("weights",),
    "optimizer": ("learning_rate", "schedule", "decay_fraction", "final_fraction"),
}


class Part(NamedTuple):
    """A stage as it is trained: after `first` steps of the run, until `last` are taken.
    `config`: as of a run without stages, but that its train.steps are those of its learning-rate
    schedule, which begins after `schedule_from` steps of the run.
    """

    name: str
    first: int
    last: int
    schedule_from: int
    config: Config


def parts_of(config: Config) -> tuple[Part, ...]:
    """The stages of a run in their order.

    Raises:
      UserError: one of them cannot be trained (it is named).
    """
    stages = config.train.stages
    if not stages:
        return (Part("", 0, config.train.steps, 0, config),)
    firsts, terms = (
        [0, *itertools.accumulate(stage.steps for stage in stages)],
        " + ".join(str(stage.steps) for stage in stages),
    )
    require(
        firsts[-1] == config.train.steps,
        f"train.steps = {config.train.steps}, but the steps of train.stages, {terms}, come to "
        f"{firsts[-1]}: set the one to the other",
    )
    # stages with which a schedule begins
    begins = [i for i, stage in enumerate(stages) if not i or _given(stage, "optimizer")]
    parts = []
    for i, stage in enumerate(stages):
        begin, end = (
            max(b for b in begins if b <= i),
            min((b for b in begins if b > i), default=len(stages)),
        )
        changes = {
            "train": {"stages": (), "steps": firsts[end] - firsts[begin]} | _given(stage, "train"),
            "data": _given(stage, "data"),
            "optimizer": _given(stages[begin], "optimizer")
            | ({"warmup_steps": 0} if begin else {}),
        }
        try:
            require(stage.steps >= 1, f"steps = {stage.steps}: expected at least 1")
            one = dataclasses.replace(
                config,
                **{g: dataclasses.replace(getattr(config, g), **new) for g, new in changes.items()},
            )
        except UserError as error:
            raise UserError(f"train.stages[{i}]: {error}") from error
        parts.append(Part(stage.name or str(i + 1), firsts[i], firsts[i + 1], firsts[begin], one))
    return tuple(parts)


def _given(stage: Stage, group: str) -> dict[str, Any]:
    return {
        name: getattr(stage, name) for name in SETTINGS[group] if getattr(stage, name) is not None
    }


def part_at(config: Config, step: int) -> Part:
    """The stage that takes step `step` (from 1); beyond the last step the last stage."""
    return next((part for part in parts_of(config) if step <= part.last), parts_of(config)[-1])


def tokens_seen(config: Config, step: int) -> int:
    """In the first `step` steps of a run, padding included."""
    return sum(
        max(min(step, part.last) - part.first, 0)
        * part.config.train.batch_size
        * part.config.train.sequence_length
        for part in parts_of(config)
    )


def rows_taken(streams: Mapping[str, float], rows: int) -> dict[str, int]:
    """How many of the first `rows` rows of the mix of `streams` are of each: the number of the
    next one that is.
    """
    mix, found = (
        mix_streams(tuple(streams.values())),
        {i: 0 for i, weight in enumerate(streams.values()) if not weight},
    )
    while len(found) < len(streams):
        stream, row = mix[rows]
        found.setdefault(stream, row)
        rows += 1
    return {name: found[i] for i, name in enumerate(streams)}


class Reading(NamedTuple):
    """What a stage reads, as run.json holds it.

    fingerprint: of the training stream. step: how many steps of the run are taken when it
    begins; row: the row of the training stream that comes next then. streams: that it mixes;
    starts: of each that was ever read, the row with which it begins. batch_size: rows of a step.
    """

    fingerprint: str
    batch_size: int
    step: int = 0
    row: int = 0
    starts: Mapping[str, int] = {}
    streams: Mapping[str, float] = {}

    def batch(self, step: int, data_offset: int) -> int:
        """Which batch of the stage's data `step` (of the run, from 1) takes, after rewinds
        passed over `data_offset` of them.
        """
        return step - 1 - self.step + data_offset

    def then(self, step: int, data: Data, data_offset: int = 0) -> "Reading":
        """What is read of `data` once `step` steps of the run are taken, the last of them by
        this stage.
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
        return Reading(data.fingerprint, data.batch_size, step, 0, starts, dict(data.streams))

    def like(self, other: "Reading") -> bool:
        """Whether losses and gradients are of the same kind: batches of as many rows of the same
        training stream.
        """
        return (self.fingerprint, self.batch_size) == (other.fingerprint, other.batch_size)


# of every stage; None: it was over before the run began, as in a branch
Readings = Sequence[Reading | None]


def open_stages(config: Config, progress: Progress | None = None) -> list[Data]:
    """The rows of every stage, prepared where they have to be."""
    return [
        open_data(
            part.config.data,
            part.config.train.sequence_length,
            part.config.train.batch_size,
            config.model.vocab_size,
            progress,
        )
        for part in parts_of(config)
    ]


def read_on(config: Config, data: Sequence[Data], first: Reading) -> Readings:
    """What every stage of a run reads that begins as `first` says; each of `data` reads so from
    here on.
    """
    readings: list[Reading | None] = []
    for part, rows in zip(parts_of(config), data, strict=True):
        before = readings[-1] if readings else None
        reading = (
            None
            if part.last <= first.step
            else before.then(part.first, rows)
            if before
            else first.then(first.step, rows)
        )
        if reading:
            rows.begin(reading.row, reading.starts)
        readings.append(reading)
    return readings


def recorded(run: Mapping[str, Any], config: Config) -> Readings:
    """What the stages of the run with this run.json read. Older code wrote down one fingerprint."""
    if isinstance(run["data"], str):
        return [Reading(run["data"], config.train.batch_size)]
    return [reading and Reading(**reading) for reading in run["data"]]


def first_of(readings: Readings) -> Reading:
    """What the first step of the run reads."""
    return next(reading for reading in readings if reading)


def stage_of(readings: Readings, step: int) -> int:
    """Number of the stage that takes `step` (of the run, from 1), in whose batches the state
    after it counts `data_offset`; of a state with which the run begins, the first stage's.
    """
    return max(
        (i for i, reading in enumerate(readings) if reading and reading.step < step),
        default=readings.index(first_of(readings)),
    )


def rewound(readings: Readings, step: int, data_offset: int, to_step: int) -> int:
    """The `data_offset` with which a state after `to_step` goes on behind the batch of `step`,
    which was taken with `data_offset`.
    """
    sizes = [readings[stage_of(readings, s)].batch_size for s in range(to_step, step + 1)]
    return -(-(data_offset * sizes[-1] + sum(sizes[1:])) // sizes[0])


def data_offset_of(offset: int, before: Reading, now: Reading) -> int:
    """The `data_offset` with which a stage begins that reads `now`, after the one that read
    `before` ended with `offset`: what rewinds passed over stays so.
    """
    batches = -(-offset * before.batch_size // now.batch_size)
    return batches if before.fingerprint == now.fingerprint else max(batches, 0)
