"""Checkpoints in a bucket.

    WORKDIR/checkpoints/STEP/manifest.json    written last, on the condition that there is none
    WORKDIR/arrays/STEP-RUN-PROCESS-N/        what Orbax wrote; the manifest names this folder
    WORKDIR/damaged/STEP-TIME/manifest.json   the manifest of a checkpoint that was found damaged

Because a bucket has no rename, every save writes its arrays to a new folder, and a checkpoint
exists once a manifest names this folder. A checkpoint is moved by moving its manifest. If a process
was frozen while it saved, and lost the run's lock, it cannot change the files of the process that
took the lock.
"""

import random
import threading
import time
import uuid
from collections.abc import Container

import jax
import orbax.checkpoint as ocp

from qwen3next_jax.common.errors import ExitCode, one_line, warn
from qwen3next_jax.common.storage import ABSENT, BucketPath, VersionConflict
from qwen3next_jax.config import CheckpointConfig
from qwen3next_jax.processes.distributed import broadcast_from_process_0, is_process_0
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.record import run_id
from qwen3next_jax.runs.store.arrays import (
    SAVE_ERRORS,
    OrbaxPath,
    check_chunks,
    count_chunks,
    make_checkpointer,
    with_text_keys,
)
from qwen3next_jax.runs.store.checkpoints import CheckpointWriter, SaveEvents
from qwen3next_jax.runs.store.lease import Lease
from qwen3next_jax.training.state import State


class BucketCheckpoints(CheckpointWriter):
    """Writes the checkpoints of a run to a bucket. `save` copies the state to the memory of the
    host and returns. A thread then writes the copy to the bucket, and tries again if a write fails.
    """

    def __init__(
        self,
        workdir: BucketPath,
        retention: CheckpointConfig,
        keep_steps: Container[int],
        lease: Lease,
    ):
        """Opens the checkpoints of the run in `workdir`.

        Args:
          retention, keep_steps: as for `CheckpointWriter`.
          lease: the run's lock.
        """
        super().__init__(workdir, retention, keep_steps, make_checkpointer(in_background=True))
        self._lease = lease
        self._saved_steps: set[int] | None = None  # None: not read yet
        self._saved_steps_lock = threading.Lock()
        self._process = uuid.uuid4().hex[:8]
        lease.add_unsaved_reporter(self._describe_unsaved)

    def steps(self) -> list[int]:
        with self._saved_steps_lock:
            if self._saved_steps is None:
                self._saved_steps = set(super().steps())
            return sorted(self._saved_steps)

    def save(self, step: int, state: State, may_skip: bool = False) -> None:
        # Process 0 decides for all: another one may be done with its part of the save.
        def step_being_saved() -> int:
            is_skipped = self._is_saving() and not self._retains(step)
            return self._saving[0] if is_skipped else 0

        if may_skip and broadcast_from_process_0(step_being_saved):
            if is_process_0():
                reason = f"the checkpoint of step {self._saving[0]} is still being written"
                warn(f"step {step} is not saved: {reason}")
                self._events.append(("save_failed", step, {"reason": reason}))
            return
        self.wait()

        def name_attempt() -> str:
            if step in self.steps():
                return ""
            return self._new_attempt_name(step)

        attempt = broadcast_from_process_0(name_attempt)
        if attempt:
            copy = _copy_to_host(state)
            self._saving = (
                step,
                self._background.submit(self._save_with_retries, step, attempt, copy),
            )

    def _is_saving(self) -> bool:
        return self._saving is not None and not self._saving[1].done()

    def _new_attempt_name(self, step: int) -> str:
        return f"{step}-{self._run[:8]}-{self._process}-{uuid.uuid4().hex[:4]}"

    def _save_with_retries(self, step: int, attempt: str, state: State) -> SaveEvents:
        """Writes the arrays and the manifest, and deletes old checkpoints. If a write fails, tries
        again for `checkpoint.patience` seconds. Returns the events of the save.
        """
        start_time = time.perf_counter()
        state = with_text_keys(state)
        while True:
            try:
                size = self._write_once(step, attempt, state)
                break
            except SAVE_ERRORS as error:
                seconds = time.perf_counter() - start_time
                reason = one_line(str(error))
                # Several processes would have to agree on another attempt.
                if jax.process_count() > 1 or seconds > self._retention.patience:
                    self._lease.end_process(
                        ExitCode.STORAGE,
                        f"the checkpoint of step {step} could not be written for {seconds:.0f} s "
                        f"({reason})",
                    )
                warn(f"the checkpoint of step {step} could not be written ({reason}); trying again")
                time.sleep(random.uniform(0.5, 1.5) * min(1 + seconds / 4, 10))
                attempt = self._new_attempt_name(step)
                self._checkpointer = make_checkpointer(in_background=True)
        if not is_process_0():
            return []
        with self._saved_steps_lock:
            self._saved_steps.add(step)
        return self._events_after_save(step, start_time, size)

    def _delete_old(self, newest: int) -> SaveEvents:
        self._lease.confirm()
        return super()._delete_old(newest)

    def _write_once(self, step: int, attempt: str, state: State) -> int:
        """Tries once to write the arrays and the manifest. Returns the size in bytes."""
        arrays = self.workdir / "arrays" / attempt
        self._checkpointer.save(OrbaxPath(arrays), args=ocp.args.PyTreeSave(state))
        self._checkpointer.wait_until_finished()
        if not is_process_0():
            return 0
        place = {"driver": "gcs", "bucket": arrays.bucket, "path": f"{arrays.key}/"}
        check_chunks(place, count_chunks(state))
        self.before_manifest()
        self._lease.confirm()
        folder = self.directory / str(step)
        try:
            return manifest.write_bucket_manifest(folder, arrays, step, self._run)
        except VersionConflict:
            # There is a manifest. Ends this process if another one has the lock.
            self._lease.confirm(now=True)
            if f"-{self._process}-" in manifest.arrays_folder(folder).name:
                # The answer to an earlier attempt was lost.
                return sum(entry.size for entry in arrays.file_infos().values())
            # A process that had the lock before this one was frozen just before its write.
            late = (folder / manifest.FILE_NAME).file_info()
            return manifest.write_bucket_manifest(
                folder, arrays, step, self._run, replaces=late.version if late else ABSENT
            )

    def _describe_unsaved(self) -> str:
        return f"the checkpoint of step {self._saving[0]}" if self._is_saving() else ""

    # ---- files

    def _delete(self, step: int) -> None:
        folder = self.directory / str(step)
        arrays = manifest.arrays_folder(folder)
        # Without the manifest there is no checkpoint; a process that is killed now leaves files
        # that the next start removes.
        (folder / manifest.FILE_NAME).unlink(missing_ok=True)
        arrays.remove_tree()
        with self._saved_steps_lock:
            self._saved_steps.discard(step)

    def _remove_leftovers(self) -> None:
        """Deletes the folders of arrays of this run that no manifest names. If the manifest of a
        step is damaged, so that it names no folder, all arrays of this step stay.
        """
        workdir = self.workdir
        run = run_id(workdir) or ""
        attempts: dict[str, list[str]] = {}  # step → the names of the folders of its attempts
        for path in (workdir / "arrays").iterdir():
            step, _, rest = path.name.partition("-")
            if run and rest.startswith(run[:8] + "-"):
                attempts.setdefault(step, []).append(path.name)
        if not attempts:
            return
        steps = {str(step) for step in self.steps()}
        moved = list((workdir / "damaged").iterdir())
        damaged = {folder: manifest.arrays_folder(folder) for folder in moved}
        unreadable = {
            folder.name.partition("-")[0] for folder, arrays in damaged.items() if arrays == folder
        }
        for step, names in attempts.items():
            if step in unreadable:
                continue
            named = {arrays.name for arrays in damaged.values()}
            if step in steps and (len(names) > 1 or damaged):
                folder = self.directory / step
                arrays = manifest.arrays_folder(folder)
                if arrays == folder:
                    continue
                named.add(arrays.name)
            elif step in steps:
                continue
            for name in names:
                if name not in named:
                    (workdir / "arrays" / name).remove_tree()

    def _move_to_damaged(self, step: int) -> None:
        """As `CheckpointWriter._move_to_damaged`. Moves only the manifest; the arrays stay where
        they are.
        """
        workdir, source = self.workdir, self.directory / str(step) / manifest.FILE_NAME
        if source.is_file():
            target = workdir / "damaged" / f"{step}-{time.time_ns()}" / manifest.FILE_NAME
            target.write_bytes(source.read_bytes())
            source.unlink(missing_ok=True)
        with self._saved_steps_lock:
            self._saved_steps.discard(step)
        moved = list((workdir / "damaged").iterdir())
        moved.sort(key=lambda path: [int(part) for part in path.name.split("-")])
        for old in moved[: -self._retention.keep_last]:
            arrays = manifest.arrays_folder(old)
            (old / manifest.FILE_NAME).unlink(missing_ok=True)
            if arrays.parent == workdir / "arrays":
                arrays.remove_tree()


def _copy_to_host(state: State) -> State:
    """Returns a copy of `state` in the memory of the hosts, with the same shardings. After this
    call the train step may overwrite `state`. On CPU, the memory of the device is that of the host.
    """

    def copy(leaf: jax.Array) -> jax.Array:
        if next(iter(leaf.sharding.device_set)).platform == "cpu":
            return leaf.copy()
        return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))

    return jax.block_until_ready(jax.tree.map(copy, state))
