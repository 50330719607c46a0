"""`CheckpointWriter`, the base class that writes and deletes the checkpoints of a run. The subclass
`LocalCheckpoints` writes to a disk, `BucketCheckpoints` to a bucket.

    WORKDIR/damaged/    checkpoints that a resume found damaged

`runs.checkpoint` defines the words saved, complete, valid and damaged.
"""

import abc
import concurrent.futures
import time
from collections.abc import Callable, Container, Iterable
from typing import Any

import orbax.checkpoint as ocp

from qwen3next_jax.common.errors import warn
from qwen3next_jax.common.events import heldout_losses, iterate_events
from qwen3next_jax.config import CheckpointConfig
from qwen3next_jax.processes.distributed import broadcast_from_process_0
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.folder import check_checkpoints_not_lost
from qwen3next_jax.runs.record import run_id
from qwen3next_jax.runs.store.events import Event
from qwen3next_jax.runs.store.store import not_writable_error
from qwen3next_jax.training.state import State

SaveEvents = list[tuple[str, int, dict[str, Any]]]  # (event, step, values)


class CheckpointWriter(Checkpoints):
    """Writes the checkpoints of a run while it trains. `save` returns before the checkpoint is
    written. The end of the `with` block waits for the last save.

    A resume warns of damaged checkpoints, and uses the newest valid one. Nothing is written before
    the first call of `prepare_folder`.

    Old checkpoints are deleted. The run keeps the newest `keep_last` valid checkpoints, and the
    checkpoints whose step is a multiple of `keep_every` or the end of a stage. With `keep_best` the
    run also keeps the checkpoint with the lowest held-out loss. When a checkpoint is complete, the
    background thread verifies the previous checkpoint again. If the previous checkpoint is damaged,
    an older one is kept in its place.

    Attributes:
      before_manifest: function that the background thread calls before it writes a manifest. A run
        sets `before_manifest` to a function that writes its metrics, so that metrics.jsonl has all
        steps up to the newest checkpoint.
    """

    def __init__(
        self,
        workdir: Any,
        retention: CheckpointConfig,
        keep_steps: Container[int],
        checkpointer: ocp.AsyncCheckpointer,
    ):
        """Opens the checkpoints of the run in `workdir`.

        Args:
          retention: the settings that say which checkpoints to keep.
          keep_steps: steps whose checkpoints are never deleted.
          checkpointer: Orbax's writer.
        """
        super().__init__(workdir)
        self.before_manifest: Callable[[], None] = lambda: None
        self._retention, self._keep_steps = retention, keep_steps
        self._run = ""
        self._checkpointer = checkpointer
        self._background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: tuple[int, concurrent.futures.Future[SaveEvents]] | None = None
        self._events: SaveEvents = []
        # steps whose checkpoints were read again, and found valid, after a later one was complete
        self._reread: set[int] = set()
        # step → held-out loss, on process 0
        self._heldout_losses: dict[int, float] = {}

    def __exit__(self, *exception):
        self.wait()
        self._background.shutdown()
        self._checkpointer.close()

    def _find_newest_valid(self) -> tuple[int, str | None] | None:
        found = super()._find_newest_valid()
        if found is None:
            check_checkpoints_not_lost(self.workdir)
        return found

    def _report_skipped(self, step: int, damage: str) -> None:
        super()._report_skipped(step, damage)
        self._events.append(("damaged", step, {"reason": damage}))

    def prepare_folder(self, newest_valid: int) -> None:
        """Prepares the folder for new checkpoints. Moves the damaged checkpoints after the step
        `newest_valid` to WORKDIR/damaged, and removes the files that a killed save left behind.
        Process 0 moves and removes files for all processes, so all processes must see the same
        folder.

        Args:
          newest_valid: the newest step whose checkpoint is valid; 0 if there is none.

        Raises:
          UserError: the folder cannot be written to.
        """

        def clean_folder() -> None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers()
                for step in self.steps():
                    if step > newest_valid:
                        self._move_to_damaged(step)
            except OSError as error:
                raise not_writable_error(self.workdir, error) from error
            if self._retention.keep_best:
                self._read_heldout_losses(newest_valid)

        broadcast_from_process_0(clean_folder)

    def _read_heldout_losses(self, last_step: int) -> None:
        """Reads the held-out losses up to `last_step` from metrics.jsonl."""
        events = (event for _, event in iterate_events(self.workdir / "metrics.jsonl"))
        losses = heldout_losses(events).items()
        self._heldout_losses = {step: loss for step, loss in losses if step <= last_step}

    def note_heldout_loss(self, event: Event) -> None:
        """Remembers the loss if `event`, which the run has just written, is a "heldout" event."""
        self._heldout_losses |= heldout_losses([event])

    def best_step(self) -> int | None:
        """Returns the step of the checkpoint with the lowest held-out loss; None if no checkpoint
        was evaluated. Only process 0 knows the losses.
        """
        return self._best_step_among(self.steps())

    def _best_step_among(self, steps: Iterable[int]) -> int | None:
        evaluated = [step for step in sorted(steps) if step in self._heldout_losses]
        return min(evaluated, key=self._heldout_losses.get, default=None)

    def read_run_id(self) -> None:
        """Reads the id of the run from run.json, for the manifests. Call this method only after the
        run has written run.json, because an earlier run.json in the folder may be that of another
        run.
        """
        self._run = broadcast_from_process_0(lambda: run_id(self.workdir)) or ""

    @abc.abstractmethod
    def save(self, step: int, state: State, may_skip: bool = False) -> None:
        """Starts to save `state` in the background. `take_events` reports the result later. If the
        step already has a checkpoint, nothing is saved.

        Args:
          may_skip: whether this save may be left out, with an event "save_failed", if the previous
            save is still being written. Only a run in a bucket leaves saves out; a run on a disk
            waits for the previous save.

        Raises:
          UserError: a save failed, and the run has several processes.
        """

    def wait(self) -> None:
        """Waits until the last save is complete, with its manifest, or has failed."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving[1]])
            self._collect_save_events()

    def take_events(self) -> SaveEvents:
        """Returns the events "checkpoint", "save_failed" and "damaged" since the last call. Does
        not wait for a save.
        """
        if self._saving is not None and self._saving[1].done():
            self._collect_save_events()
        events, self._events = self._events, []
        return events

    def _collect_save_events(self) -> None:
        """Takes over the events of the save that has ended, for `take_events`."""
        (_, future), self._saving = self._saving, None
        self._events += future.result()

    # ---- in the background

    def _events_after_save(self, step: int, start_time: float, size: int) -> SaveEvents:
        """Deletes old checkpoints. Returns the event of the save that has ended, and the events of
        the deletion of old checkpoints.

        Args:
          step: the step whose checkpoint was just completed.
          start_time: `time.perf_counter` at the start of the save.
          size: the bytes of the checkpoint.
        """
        seconds = round(time.perf_counter() - start_time, 3)
        saved = ("checkpoint", step, {"seconds": seconds, "bytes": size})
        try:
            return [saved, *self._delete_old(step)]
        # For example, NFS does not remove a folder with a file that is still open. The new
        # checkpoint is complete all the same.
        except OSError as error:
            warn(
                f"{self.directory}: an old checkpoint could not be deleted ({error}); the next "
                "start removes its remaining files"
            )
            return [saved]

    def _delete_old(self, newest: int) -> SaveEvents:
        """Deletes the checkpoints that the settings do not keep. Returns a "damaged" event for each
        damaged checkpoint found. `newest` is the step whose checkpoint was just completed.
        """
        events, valid = [], 0
        for step in reversed(self.steps()):
            if valid < self._retention.keep_last:
                damage = None
                if step != newest:
                    damage = self._find_damage(step, sizes_only=step in self._reread)
                if damage is None:
                    valid += 1
                    self._reread |= {step} - {newest}
                else:
                    events.append(("damaged", step, {"reason": damage}))
                    self._heldout_losses.pop(step, None)  # the best is one of the others
            elif not self._retains(step):
                self._delete(step)
        return events

    def _retains(self, step: int) -> bool:
        """Whether the settings keep the checkpoint of this step even if `keep_last` newer
        checkpoints are valid. Only process 0 knows which checkpoint is the best.
        """
        every = self._retention.keep_every
        if step in self._keep_steps or (every and step % every == 0):
            return True
        if not self._retention.keep_best:
            return False
        being_written = {self._saving[0]} if self._saving else set()
        return step == self._best_step_among({step, *being_written, *self.steps()})

    # ---- files

    @abc.abstractmethod
    def _delete(self, step: int) -> None:
        """Deletes the checkpoint of a step. Even if the process is killed during the deletion, no
        reader finds a checkpoint that lacks some of its files.
        """

    @abc.abstractmethod
    def _remove_leftovers(self) -> None:
        """Removes the files that a killed or failed save or a killed deletion left behind."""

    @abc.abstractmethod
    def _move_to_damaged(self, step: int) -> None:
        """Moves a checkpoint to WORKDIR/damaged. Keeps only the newest `keep_last` checkpoints in
        WORKDIR/damaged, because a run that is killed often would fill the disk.
        """
