"""The folder of a run on a file system.

WORKDIR/lock                   the process that trains here holds its lock (flock)
WORKDIR/tokenizer.partial/     the copy of the tokenizer until it is whole
WORKDIR/before-TIME.partial/   the files that `--restart` moves, until all of them are moved
WORKDIR/hang-TIME-PROCESS.txt  the stacks of all threads of a process that hung
"""

import contextlib
import faulthandler
import itertools
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Container
from typing import Any

from qwen3next_jax.common.durable import fsync
from qwen3next_jax.common.errors import require
from qwen3next_jax.common.locks import lock_file
from qwen3next_jax.config import CheckpointConfig
from qwen3next_jax.runs.store.events import EventLog
from qwen3next_jax.runs.store.store import RunStore, not_writable_error

# The names of the files and folders of a run that `--restart` moves.
_RUN_FILES = (
    "run.json",
    "metrics.jsonl",
    "checkpoints",
    "damaged",
    "dumps",
    "eval",
    "frozen",
    "profile",
    "report.html",
    "tensorboard",
    "tokenizer",
    "wandb_id",
)
_PARTIAL_SUFFIX = ".partial"  # the suffix of before-TIME until all files are moved
_PARTIAL_NAME = re.compile(r"before-\d{8}-\d{6}(-\d+)?\.partial")
_BUCKET_LIKE_FOLDERS = (
    ("gs",),
    ("s3",),
    ("az",),
    ("hf",),
)  # folders of / that etils takes for buckets


class LocalStore(RunStore):
    """The folder of a run on a file system. The operating system releases the lock of the folder
    when the process ends, even if it is killed.
    """

    other_libraries_can_write = True
    is_quick_to_read = True

    def __init__(self, workdir: pathlib.Path):
        super().__init__(workdir)
        self._lock = None

    def check_can_hold_run(self, where: str) -> None:
        names = self.workdir.absolute().parts[1:]
        self._check_folder_path(where, names, forbidden="\\")
        require(
            names[:1] not in _BUCKET_LIKE_FOLDERS,
            f"{where}: Orbax takes it for a bucket: give another folder",
        )

    # ---- the lock

    def __exit__(self, *exception):
        if self._lock is not None:
            self._lock.close()

    def run_locked(self, function: Callable[[], Any]) -> Any:
        self._acquire()
        try:
            return function()
        except BaseException:
            self._lock.close()
            raise

    def _acquire(self) -> None:
        try:
            self.workdir.mkdir(parents=True, exist_ok=True)
            self._lock = (self.workdir / "lock").open("a")
        except OSError as error:
            raise not_writable_error(self.workdir, error) from error
        require(
            lock_file(self._lock, self.workdir),
            f"{self.workdir}: another process is training in it: wait for it, end it, or give "
            "another --workdir",
        )

    # ---- --restart

    def has_unfinished_move(self) -> bool:
        return self._unfinished_move_folder() is not None

    def _unfinished_move_folder(self) -> pathlib.Path | None:
        """Returns the folder to which an unfinished `move_old_run_aside` moves the old run; None if
        no move is unfinished.
        """
        partial_moves = [
            path
            for path in self.workdir.glob(f"before-*{_PARTIAL_SUFFIX}")
            if _PARTIAL_NAME.fullmatch(path.name)
        ]
        return min(partial_moves, default=None)

    def move_old_run_aside(self) -> None:
        """Moves the files one by one to before-TIME.partial, and at last renames this folder to
        before-TIME. If the process is killed during the move, the next call moves the remaining
        files.
        """
        workdir, partial = self.workdir, self._unfinished_move_folder()
        if partial is None and not self.run_file_identities():
            return
        try:
            if partial is None:
                stamp = time.strftime("before-%Y%m%d-%H%M%S")
                names = (f"{stamp}-{n}" if n else stamp for n in itertools.count())
                name = next(name for name in names if not os.path.lexists(workdir / name))
                partial = workdir / (name + _PARTIAL_SUFFIX)
                partial.mkdir()
                fsync(workdir)
            for name in self.run_file_identities():
                require(
                    not os.path.lexists(partial / name),
                    f"{workdir}: {name} is there and also in {partial.name}, to which a restart "
                    f"moves it: rename {partial.name}, or give another --workdir",
                )
                (workdir / name).rename(partial / name)
            fsync(partial)
            partial.rename(workdir / partial.name.removesuffix(_PARTIAL_SUFFIX))
            fsync(workdir)
        except OSError as error:
            raise not_writable_error(workdir, error) from error

    def run_file_identities(self) -> dict[str, tuple[int, int]]:
        """Returns name → (device, inode) for each file or folder of the run in `workdir`. A move
        does not change the device and the inode of a file.
        """
        identities = {}
        for name in _RUN_FILES:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                stat = (self.workdir / name).lstat()
                identities[name] = (stat.st_dev, stat.st_ino)
        return identities

    # ---- what a run writes

    def _copy_tokenizer(self, tokenizer: Any, copy: pathlib.Path) -> None:
        partial = copy.with_name("tokenizer.partial")
        partial.mkdir(exist_ok=True)
        tokenizer.save(partial)
        partial.rename(copy)

    def open_checkpoints(
        self,
        retention: CheckpointConfig,
        keep_steps: Container[int] = (),
        frozen_paths: frozenset[str] = frozenset(),
    ) -> Any:
        from qwen3next_jax.runs.store.local_checkpoints import LocalCheckpoints

        return LocalCheckpoints(self.workdir, retention, keep_steps, frozen_paths)

    def open_events(self) -> EventLog:
        from qwen3next_jax.runs.store.local_events import LocalEvents

        return LocalEvents(self.workdir / "metrics.jsonl")

    def dump_folder(self, step: int) -> pathlib.Path:
        return self.workdir.absolute() / "dumps" / str(step)

    def write_manifest(self, folder: pathlib.Path) -> None:
        from qwen3next_jax.runs import manifest

        manifest.write_manifest(folder)

    def write_thread_stacks(self, process: int, stop: dict[str, Any]) -> None:
        path = self.workdir / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{process}.txt"
        reason = stop["reason"]
        try:
            with path.open("w") as file:
                file.write(reason + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            if process == 0:
                with (self.workdir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(stop | {"stacks": str(path)}) + "\n")
        finally:  # even if writing failed
            os.write(2, f"error: {reason}: the stacks of all threads are in {path}\n".encode())
