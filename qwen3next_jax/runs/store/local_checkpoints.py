"""Checkpoints on a file system.

    WORKDIR/checkpoints/STEP/     what Orbax wrote, and the manifest
    WORKDIR/frozen/               the parameters that are frozen as a whole, written once, before
                                  the first checkpoint
    WORKDIR/damaged/STEP-TIME/    a checkpoint that was found damaged

Orbax writes the arrays in a background thread.
"""

import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Container

import jax
import orbax.checkpoint as ocp

from qwen3next_jax.common.errors import ExitCode, UserError, warn
from qwen3next_jax.config import CheckpointConfig
from qwen3next_jax.processes.distributed import broadcast_from_process_0, is_process_0
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.checkpoint import split_frozen
from qwen3next_jax.runs.record import run_id
from qwen3next_jax.runs.store.arrays import (
    SAVE_ERRORS,
    OrbaxPath,
    check_chunks,
    count_chunks,
    make_checkpointer,
    with_text_keys,
    write_arrays,
)
from qwen3next_jax.runs.store.checkpoints import CheckpointWriter, SaveEvents
from qwen3next_jax.training.state import State

# The prefix of the folder of a checkpoint that is being deleted. The folder is renamed before its
# files are removed, so no reader finds a checkpoint without some of its files.
_DELETED_PREFIX = ".deleted-"


class LocalCheckpoints(CheckpointWriter):
    """Writes the checkpoints of a run to a folder on a file system. If a save fails, a run of one
    process continues, and `take_events` reports the failure; a run of several processes ends.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        retention: CheckpointConfig,
        keep_steps: Container[int] = (),
        frozen_paths: frozenset[str] = frozenset(),
    ):
        """Opens the checkpoints of the run in `workdir`.

        Args:
          retention, keep_steps: as for `CheckpointWriter`.
          frozen_paths: the paths of the parameters that the run does not change.
        """
        super().__init__(workdir, retention, keep_steps, make_checkpointer())
        self._frozen_paths = frozen_paths

    def save(self, step: int, state: State, may_skip: bool = False) -> None:
        self.wait()
        if broadcast_from_process_0(lambda: step in self.steps()):
            return
        start_time = time.perf_counter()
        try:
            if self._frozen_paths:
                state = self._write_frozen_once(state)
            self._checkpointer.save(
                OrbaxPath(self.directory / str(step)),
                args=ocp.args.PyTreeSave(with_text_keys(state)),
            )
        except SAVE_ERRORS as error:
            self._report_failed_save(step, error)
            return
        expected = count_chunks(state)
        self._saving = (
            step,
            self._background.submit(self._finish_save, step, start_time, expected),
        )

    def _finish_save(self, step: int, start_time: float, expected: int) -> SaveEvents:
        """Waits until Orbax has written the arrays, writes the manifest, and deletes old
        checkpoints. Returns the events of the save.

        Args:
          start_time: `time.perf_counter` at the start of the save.
          expected: `count_chunks` of the state.
        """
        self._checkpointer.wait_until_finished()
        if not is_process_0():
            return []
        folder = self.directory / str(step)
        _check_chunks_of_folder(folder, expected)
        if self._frozen_paths:
            paths = sorted(self._frozen_paths)
            record = {"manifest": manifest.digest_of_manifest(self._frozen), "parameters": paths}
            (folder / manifest.FROZEN_FILE_NAME).write_text(json.dumps(record, indent=1))
        self.before_manifest()
        size = manifest.write_manifest(folder, step, run_id(self.workdir))
        return self._events_after_save(step, start_time, size)

    def _write_frozen_once(self, state: State) -> State:
        """Writes the frozen parameters to WORKDIR/frozen, unless an earlier save of this run has
        written them. Returns `state` without them.
        """
        trained, frozen = split_frozen(state, self._frozen_paths)
        run = run_id(self.workdir)

        def clear_if_damaged() -> bool:
            if manifest.find_damage(self._frozen, sizes_only=True, run=run) is None:
                return False
            shutil.rmtree(self._frozen, ignore_errors=True)
            return True

        if broadcast_from_process_0(clear_if_damaged):
            write_arrays(self._frozen, frozen)
            if is_process_0():
                _check_chunks_of_folder(self._frozen, count_chunks(frozen))
                manifest.write_manifest(self._frozen, run=run)
        return trained

    # ---- failed saves

    def _collect_save_events(self) -> None:
        (step, future), self._saving = self._saving, None
        error = future.exception()
        if isinstance(error, SAVE_ERRORS):
            self._report_failed_save(step, error)
        else:
            self._events += future.result()

    def _report_failed_save(self, step: int, error: BaseException) -> None:
        """Warns that the save of `step` failed, and removes its files.

        Raises:
          UserError: the run has several processes, all of which must start again after a failed
            save.
        """
        reason = " ".join(str(error).split())[:200]
        # Other processes may have saved; only a new start brings all processes to the same state.
        if jax.process_count() > 1:
            raise UserError(
                f"{self.directory / str(step)} could not be saved ({reason}); the older "
                "checkpoints are unchanged: make room, and start all processes again",
                ExitCode.NOT_SAVED,
            ) from error
        warn(
            f"{self.directory / str(step)} could not be saved ({reason}); training continues, "
            "and the older checkpoints are unchanged"
        )
        self._events.append(("save_failed", step, {"reason": reason}))
        self._checkpointer = make_checkpointer()  # the old one may still hold the error
        shutil.rmtree(self.directory / str(step), ignore_errors=True)
        self._remove_leftovers()

    # ---- files

    def _delete(self, step: int) -> None:
        renamed = self.directory / f"{_DELETED_PREFIX}{step}"
        os.rename(self.directory / str(step), renamed)
        shutil.rmtree(renamed)

    def _remove_leftovers(self) -> None:
        for path in self.directory.iterdir():
            if path.name.startswith(_DELETED_PREFIX) or "orbax-checkpoint-tmp" in path.name:
                shutil.rmtree(path, ignore_errors=True)

    def _move_to_damaged(self, step: int) -> None:
        target = self.workdir / "damaged" / f"{step}-{time.time_ns()}"
        target.parent.mkdir(exist_ok=True)
        os.rename(self.directory / str(step), target)
        moved = [  # folders with other names are not from this method, and are left alone
            path
            for path in target.parent.iterdir()
            if re.fullmatch("[0-9]+-[0-9]+", path.name) and path.is_dir()
        ]
        moved.sort(key=lambda path: [int(part) for part in path.name.split("-")])
        for old in moved[: -self._retention.keep_last]:
            shutil.rmtree(old, ignore_errors=True)


def _check_chunks_of_folder(folder: pathlib.Path, expected: int) -> None:
    check_chunks({"driver": "file", "path": f"{folder}/"}, expected)
