"""What the stages of a run read, and what a stage takes over from the one before it.

A stage reads on where the one before it stopped, and a run where its parent did (`branching`): no row of a stream is read again.
Where the training stream is the same one (one fingerprint), it goes on with its next row. Where its streams are mixed otherwise,
each goes on with its own next row. Rows of another length are other streams, which begin with their first row.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from qwen3next_jax.config import Config, GuardConfig, parts_of
from qwen3next_jax.data.pipeline import Data, open_data, rows_taken
from qwen3next_jax.data.preparation import Progress
from qwen3next_jax.training.guards import init_guards


class Reading(NamedTuple):
    """What a stage reads, as run.json holds it.

    fingerprint: of the training stream. step: how many steps of the run are taken when it begins; row: the row of the training
    stream that comes next then. streams: that it mixes; starts: of each that was ever read, the row with which it begins. batch_size:
    rows of a step.
    """

    fingerprint: str
    batch_size: int
    step: int = 0
    row: int = 0
    starts: Mapping[str, int] = {}
    streams: Mapping[str, float] = {}

    def batch(self, step: int, data_offset: int) -> int:
        """Which batch of the stage's data `step` (of the run, from 1) takes, after rewinds passed over `data_offset` of them."""
        return step - 1 - self.step + data_offset

    def then(self, step: int, data: Data, data_offset: int = 0) -> "Reading":
        """What is read of `data` once `step` steps of the run are taken, the last of them by this stage."""
        rows = self.row + (step - self.step + data_offset) * self.batch_size
        if data.fingerprint == self.fingerprint:
            return self._replace(batch_size=data.batch_size, step=step, row=rows, streams=dict(data.streams))
        taken = rows_taken(self.streams, rows) if self.streams else {self.fingerprint: rows}
        starts = dict(self.starts) | {name: self.starts.get(name, 0) + count for name, count in taken.items()}
        return Reading(data.fingerprint, data.batch_size, step, 0, starts, dict(data.streams))

    def like(self, other: "Reading") -> bool:
        """Whether losses and gradients are of the same kind: batches of as many rows of the same training stream."""
        return (self.fingerprint, self.batch_size) == (other.fingerprint, other.batch_size)


Readings = Sequence[Reading | None]  # of every stage; None: it was over before the run began, as in a branch


def open_stages(config: Config, progress: Progress | None = None) -> list[Data]:
    """The rows of every stage, prepared where they have to be."""
    return [open_data(part.config.data, part.config.train.sequence_length, part.config.train.batch_size, config.model.vocab_size, progress)
            for part in parts_of(config)]


def read_on(config: Config, data: Sequence[Data], first: Reading) -> Readings:
    """What every stage of a run reads that begins as `first` says; each of `data` reads so from here on."""
    readings: list[Reading | None] = []
    for part, rows in zip(parts_of(config), data, strict=True):
        before = readings[-1] if readings else None
        reading = None if part.last <= first.step else before.then(part.first, rows) if before else first.then(first.step, rows)
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
    """Number of the stage that takes `step` (of the run, from 1), in whose batches the state after it counts `data_offset`; of a
    state with which the run begins, the first stage's."""
    return max((i for i, reading in enumerate(readings) if reading and reading.step < step), default=readings.index(first_of(readings)))


def rewound(readings: Readings, step: int, data_offset: int, to_step: int) -> int:
    """The `data_offset` with which a state after `to_step` goes on behind the batch of `step`, which was taken with `data_offset`."""
    sizes = [readings[stage_of(readings, s)].batch_size for s in range(to_step, step + 1)]
    return -(-(data_offset * sizes[-1] + sum(sizes[1:])) // sizes[0])


def take_over(config: GuardConfig, guards: dict[str, jax.Array], before: Reading, now: Reading) -> dict[str, jax.Array]:
    """The guards' part of the state with which a stage begins that reads `now`, from that with which the one that read `before`
    ended. Rows that rewinds passed over stay so; losses of another kind are no measure of spikes, so the window begins anew."""
    offset = -(-int(guards["data_offset"]) * before.batch_size // now.batch_size)
    return renewed(config, guards, offset if before.fingerprint == now.fingerprint else max(offset, 0), before.like(now))


def renewed(config: GuardConfig, guards: dict[str, jax.Array], data_offset: int, goes_on: bool) -> dict[str, jax.Array]:
    """`guards` with another `data_offset`; unless it `goes_on`, with an empty window."""
    # The optimizer counts its own updates, which are the steps less those that were skipped: that count stays.
    kept = guards if goes_on else init_guards(config) | {name: guards[name] for name in ("skipped", "spikes")}
    return jax.device_put(kept | {"data_offset": np.int32(data_offset)}, guards["data_offset"].sharding)
