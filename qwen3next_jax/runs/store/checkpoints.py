"""Writes and deletes the checkpoints of a run: what a disk and a bucket have in common.

    WORKDIR/damaged/    checkpoints that a resume found damaged

A checkpoint is complete once it has its manifest, which is written last.
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
from qwen3next_jax.runs.store.store import not_writable
from qwen3next_jax.training.state import State

Events = list[tuple[str, int, dict[str, Any]]]  # (event, step, values)


class CheckpointWriter(Checkpoints):
    """The checkpoints of the run that trains. `save` returns at once; leaving the `with` block
    waits for the last save.

    A resume skips checkpoints that are not valid, and reports them. Nothing is written before
    `begin` is called.

    Old checkpoints are deleted. The run keeps the newest `keep_last` valid checkpoints, and the
    checkpoints whose step is a multiple of `keep_every` or the end of a stage. With `keep_best` it
    also keeps the checkpoint with the lowest held-out loss. When a checkpoint is complete, the
    background thread verifies the previous checkpoint again. If that is damaged, it is not one of
    the `keep_last`, and an older checkpoint is kept in its place.

    Attributes:
      before_manifest: called in the background thread before a manifest is written. The run sets it
        to write its metrics first, so that no checkpoint is newer than the record of its steps.
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
        self._saving: tuple[int, concurrent.futures.Future[Events]] | None = None
        self._events: Events = []
        # steps whose checkpoints were read again, and found valid, after a later one was complete
        self._reread: set[int] = set()
        # step → held-out loss, on process 0
        self._losses: dict[int, float] = {}

    def __exit__(self, *exception):
        self.wait()
        self._background.shutdown()
        self._checkpointer.close()

    def _find_newest_good(self) -> tuple[int, str | None] | None:
        found = super()._find_newest_good()
        if found is None:
            check_checkpoints_not_lost(self.workdir)
        return found

    def _skip(self, step: int, damage: str) -> None:
        super()._skip(step, damage)
        self._events.append(("damaged", step, {"reason": damage}))

    def begin(self, newest_good: int) -> None:
        """Prepares the folder for the checkpoints after step `newest_good`, the newest valid step.

        Moves the damaged checkpoints after that step to WORKDIR/damaged, and removes the files that
        a killed save left behind. Process 0 does this for all processes, which therefore have to
        see the same folder.

        Raises:
          UserError: the folder cannot be written to.
        """

        def clear() -> None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers()
                for step in self.steps():
                    if step > newest_good:
                        self._move_aside(step)
            except OSError as error:
                raise not_writable(self.workdir, error) from error
            if self._retention.keep_best:
                self._read_losses(newest_good)

        broadcast_from_process_0(clear)

    def _read_losses(self, last_step: int) -> None:
        """Reads the held-out losses up to `last_step` from the record of the run."""
        events = (event for _, event in iterate_events(self.workdir / "metrics.jsonl"))
        losses = heldout_losses(events).items()
        self._losses = {step: loss for step, loss in losses if step <= last_step}

    def hear(self, event: Event) -> None:
        """Remembers the loss of a "heldout" event that the run has just written."""
        self._losses |= heldout_losses([event])

    def best_step(self) -> int | None:
        """Returns the step of the checkpoint with the lowest held-out loss, on process 0; None if
        no checkpoint was evaluated.
        """
        return self._best_of(self.steps())

    def _best_of(self, steps: Iterable[int]) -> int | None:
        evaluated = [step for step in sorted(steps) if step in self._losses]
        return min(evaluated, key=self._losses.get, default=None)

    def set_run(self) -> None:
        """Reads the id of the run, which the manifests name. Call this method once run.json is
        written: before that, it may be the run.json of another run.
        """
        self._run = broadcast_from_process_0(lambda: run_id(self.workdir)) or ""

    @abc.abstractmethod
    def save(self, step: int, state: State, may_skip: bool = False) -> None:
        """Starts to save `state` in the background. `events` reports the result later. If the step
        already has a checkpoint, nothing is saved.

        Args:
          may_skip: whether a run in a bucket may leave this save out, and report that, if the
            previous one is not complete; a file system is waited for.

        Raises:
          UserError: a save failed, and the run has several processes.
        """

    def wait(self) -> None:
        """Waits until the last save is complete, with its manifest, or has failed."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving[1]])
            self._collect()

    def events(self) -> Events:
        """Returns the events since the last call. The events are "checkpoint", "save_failed" and
        "damaged". Does not wait for a save.
        """
        if self._saving is not None and self._saving[1].done():
            self._collect()
        events, self._events = self._events, []
        return events

    def _collect(self) -> None:
        """Records the events of the save that has ended."""
        (_, future), self._saving = self._saving, None
        self._events += future.result()

    # ---- in the background

    def _end_save(self, step: int, start_time: float, size: int) -> Events:
        """Deletes old checkpoints. Returns the events.

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

    def _delete_old(self, newest: int) -> Events:
        """Deletes the checkpoints that retention does not keep. Returns a "damaged" event for each
        damaged checkpoint that it finds. `newest` is the step whose checkpoint was just completed.
        """
        events, good = [], 0
        for step in reversed(self.steps()):
            if good < self._retention.keep_last:
                damage = None
                if step != newest:
                    damage = self._find_damage(step, sizes_only=step in self._reread)
                if damage is None:
                    good += 1
                    self._reread |= {step} - {newest}
                else:
                    events.append(("damaged", step, {"reason": damage}))
                    self._losses.pop(step, None)  # the best is one of the others
            elif not self._keeps(step):
                self._delete(step)
        return events

    def _keeps(self, step: int) -> bool:
        """Whether the checkpoint of this step stays even if `keep_last` newer ones are valid. Only
        process 0 knows which is the best.
        """
        every = self._retention.keep_every
        if step in self._keep_steps or (every and step % every == 0):
            return True
        if not self._retention.keep_best:
            return False
        being_written = {self._saving[0]} if self._saving else set()
        return step == self._best_of({step, *being_written, *self.steps()})

    # ---- files

    @abc.abstractmethod
    def _delete(self, step: int) -> None:
        """Deletes the checkpoint of a step, so that no reader finds it without some of its files,
        wherever the process is killed.
        """

    @abc.abstractmethod
    def _remove_leftovers(self) -> None:
        """Removes the files that a killed or failed save, or a killed deletion, left behind."""

    @abc.abstractmethod
    def _move_aside(self, step: int) -> None:
        """Moves a checkpoint to WORKDIR/damaged, and keeps only the newest `keep_last` checkpoints
        there; otherwise a run that is killed often would fill the disk.
        """
