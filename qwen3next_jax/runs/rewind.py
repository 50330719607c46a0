"""Going back to a checkpoint after a spike, and past the data that brought it."""

from collections.abc import Sequence

import jax
import numpy as np

from qwen3next_jax.data.pipeline import Data
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.incidents import Halted
from qwen3next_jax.runs.preflight import Parent
from qwen3next_jax.runs.start import start_state
from qwen3next_jax.runs.telemetry import MetricsFile
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import DataCursors, after_rewind
from qwen3next_jax.training.state import State

MAX_REWINDS = 3  # to one checkpoint


class Rewinder:
    """Rewinds a run that began with `parent`, or with the Hugging Face directory whose stamp
    `files` is; gives up when one checkpoint has been tried `MAX_REWINDS` times."""

    def __init__(
        self,
        run: ResolvedRun,
        data: Sequence[Data],
        cursors: DataCursors,
        parent: Parent | None,
        files: str,
        checkpoints: Checkpoints,
        metrics: MetricsFile,
    ):
        self._run = run
        self._data = data
        self._cursors = cursors
        self._parent = parent
        self._files = files
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._times: dict[int, int] = {}  # step → rewinds to it

    def rewind(self, halt: Halted) -> tuple[int, State] | None:
        """→ (step, state) of the newest good checkpoint, whose next batch is the one behind the
        spike; None where the run must end.
        """
        if not halt.spike or self._run.config.guards.on_spike != "rewind":
            return None
        self._checkpoints.wait()
        step = self._checkpoints.newest_good_step() or 0
        self._times[step] = self._times.get(step, 0) + 1
        if self._times[step] > MAX_REWINDS:
            return None
        data_offset = after_rewind(
            self._cursors, halt.step, int(halt.state["guards"]["data_offset"]), step
        )
        # A device may not have room for two states.
        jax.tree.map(lambda leaf: leaf.delete(), halt.state)
        if step:
            state = self._checkpoints.restore(step, self._run.abstract_state)
        else:
            state, _ = start_state(self._run, self._data, self._parent, self._files)
        self._checkpoints.begin(step)
        place = state["guards"]["data_offset"].sharding
        state["guards"]["data_offset"] = jax.device_put(np.int32(data_offset), place)
        self._metrics.rewind(step)
        self._metrics.write(
            "rewind", halt.step, to_step=step, data_offset=data_offset, reason=halt.reason
        )
        return step, state
