"""Rewinds: after a loss spike, a run restores a checkpoint and skips the data up to the spike."""

from collections.abc import Sequence

import jax
import numpy as np

from qwen3next_jax.data.pipeline import DataSource
from qwen3next_jax.runs.first_state import make_first_state
from qwen3next_jax.runs.guard_flags import RunHalted
from qwen3next_jax.runs.start import Start
from qwen3next_jax.runs.store.checkpoints import CheckpointWriter
from qwen3next_jax.runs.telemetry import MetricsFile
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import DataCursors, data_offset_after_rewind
from qwen3next_jax.training.state import State

MAX_REWINDS = 3  # the largest number of rewinds to the same checkpoint in one process


class Rewinder:
    """Rewinds a run, at most `MAX_REWINDS` times to the same checkpoint or to step 0. The numbers
    of rewinds are not saved, so a process that resumes the run counts from 0 again.
    """

    def __init__(
        self,
        run: ResolvedRun,
        data: Sequence[DataSource],
        cursors: DataCursors,
        start: Start,
        checkpoints: CheckpointWriter,
        metrics: MetricsFile,
    ):
        """Makes a rewinder. If the run has no checkpoint, a rewind loads the state of step 0 again.

        Args:
          run: the run.
          data: the training data of every stage.
          cursors: for every stage, the place in the training data at which the stage begins to
            read.
          start: the decision about the start.
          checkpoints: the checkpoints of this run.
          metrics: the file to which the "rewind" event is written.
        """
        self._run = run
        self._data = data
        self._cursors = cursors
        self._start = start
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._rewinds: dict[int, int] = {}  # step → number of rewinds to it

    def rewind(self, halt: RunHalted) -> tuple[int, State] | None:
        """Restores the newest valid checkpoint, and lets the data continue after the batch of the
        spike.

        Args:
          halt: the exception with which the guards halted the run. This method deletes
            `halt.state`.

        Returns:
          (step, train state) of the checkpoint; None if the run must end, because no spike halted
          it, `guards.on_spike` is not "rewind", or MAX_REWINDS is reached.
        """
        if not halt.is_spike or self._run.config.guards.on_spike != "rewind":
            return None
        self._checkpoints.wait()
        step = self._checkpoints.newest_valid_step() or 0
        self._rewinds[step] = self._rewinds.get(step, 0) + 1
        if self._rewinds[step] > MAX_REWINDS:
            return None
        data_offset = data_offset_after_rewind(
            self._cursors, halt.step, int(halt.state["guards"]["data_offset"]), step
        )
        # The old state is deleted first, because a device may not have memory for two states.
        jax.tree.map(lambda leaf: leaf.delete(), halt.state)
        if step:
            state = self._checkpoints.restore(step, self._run.abstract_state)
        else:
            state, _ = make_first_state(self._run, self._data, self._start)
        self._checkpoints.prepare_folder(step)
        sharding = state["guards"]["data_offset"].sharding
        state["guards"]["data_offset"] = jax.device_put(np.int32(data_offset), sharding)
        self._metrics.remove_events_after(step)
        self._metrics.write(
            "rewind", halt.step, to_step=step, data_offset=data_offset, reason=halt.reason
        )
        return step, state
