"""`RunStore`, the interface through which a run writes its folder, on a disk or in a bucket.

    WORKDIR/lock           says that a process trains here
    WORKDIR/run.json       configuration, data, tokenizer, code, …: `runs.record`
    WORKDIR/tokenizer/     a copy of the tokenizer, if it came from a file
    WORKDIR/before-TIME/   the files that `--restart` moved

A disk has locks that end with their process, renames that move a whole folder, and files to which
lines can be appended. A bucket has none of these. Instead, a bucket has conditional writes: a write
of a whole object succeeds only if the object still has the version that the writer read.
`LocalStore` and `BucketStore` implement the same methods with what a disk and a bucket offer.
`runs.store.open_store` makes a `LocalStore` or a `BucketStore`. Outside `runs/store/`, no code of
`runs/` asks whether the folder is on a disk or in a bucket.
"""

import abc
import dataclasses
import pathlib
from collections.abc import Callable, Container
from typing import Any

from qwen3next_jax.common.errors import UserError, require, require_path
from qwen3next_jax.common.storage import BucketPath, remove_tree, write_text_atomically
from qwen3next_jax.config import CheckpointConfig
from qwen3next_jax.runs.record import RunRecord, read_record, run_json_text
from qwen3next_jax.runs.store.events import EventLog


class RunStore(abc.ABC):
    """The folder of one run. Use the class as a context manager: its exit releases the lock.

    Attributes:
      workdir: the path of the folder.
      other_libraries_can_write: whether TensorBoard, Weights & Biases and JAX's profiler, which
        write ordinary files, can write into the folder.
      is_quick_to_read: whether a run can read all its events at every checkpoint without a long
        delay.
    """

    other_libraries_can_write: bool
    is_quick_to_read: bool

    def __init__(self, workdir: pathlib.Path | BucketPath):
        self.workdir = workdir

    # ---- whether a run can be here

    @abc.abstractmethod
    def check_can_hold_run(self, where: str) -> None:
        """Raises a UserError that begins with `where` if a run cannot write to the folder, because
        the folder's name is not allowed, the paths in it would be too long, or the bucket does not
        exist.
        """

    def _check_folder_path(self, where: str, names: tuple[str, ...], forbidden: str) -> None:
        """Checks that Orbax and TensorStore, which write the arrays, can write to the folder.

        Args:
          names: the parts of the folder's path.
          forbidden: the characters that have a special meaning in a path of TensorStore.
        """
        # longer than any path that a run writes, so that no later save fails
        require_path(where, self.workdir.absolute() / "checkpoints" / ("0" * 200))
        wrong = next((c for c in "".join(names) if c in forbidden), "")
        require(not wrong, f"{where}: the path holds {wrong!r}: give a folder without it")
        require("gs:" not in names, f"{where}: Orbax takes it for a bucket: give another folder")

    # ---- the lock

    def __enter__(self):
        return self

    @abc.abstractmethod
    def __exit__(self, *exception): ...

    @abc.abstractmethod
    def run_locked(self, function: Callable[[], Any]) -> Any:
        """Takes the lock and returns `function()`. The lock is released at the end of the `with`
        block of the store, or if `function` raises an exception.

        Raises:
          UserError: another process has the lock, or the folder cannot be written to.
        """

    # ---- --restart

    @abc.abstractmethod
    def has_unfinished_move(self) -> bool:
        """Whether a process was killed in `move_old_run_aside`, so that files of the old run
        remain. The next start moves the remaining files, with or without --restart.
        """

    @abc.abstractmethod
    def move_old_run_aside(self) -> None:
        """Moves all files of the run in the folder to `workdir`/before-TIME. If a process was
        killed in an earlier move, continues the earlier move.

        Raises:
          UserError: the folder cannot be written to, or a file would replace another one.
        """

    @abc.abstractmethod
    def run_file_identities(self) -> dict[str, Any]:
        """Returns name → identity of the file, for files of the run in the folder. Once
        `move_old_run_aside` has moved the run, the folder no longer has any of the files in the
        returned dict.
        """

    # ---- run.json and the tokenizer

    def write_run_json(self, record: RunRecord) -> None:
        """Writes run.json. If the process is killed during the write, the old run.json remains.

        Raises:
          UserError: the file cannot be written.
        """
        try:
            write_text_atomically(self.workdir / "run.json", run_json_text(record))
        except OSError as error:
            raise not_writable_error(self.workdir, error) from error

    def update_run_json(self, **values: Any) -> None:
        """Replaces entries of run.json. Does not write run.json if it already has `values`."""
        before = read_record(self.workdir)
        record = dataclasses.replace(before, **values)
        if record != before:
            self.write_run_json(record)

    def write_run_json_and_tokenizer(
        self, record: RunRecord | None, tokenizer: Any, new: bool
    ) -> None:
        """Writes run.json and a copy of the tokenizer, before the first step.

        Args:
          record: the content of run.json; None if run.json does not change.
          tokenizer: the tokenizer of the run. A tokenizer that came from a file is copied, so that
            the run no longer needs the file.
          new: whether the run has no checkpoint yet. In a new run, a tokenizer that is already in
            the folder is replaced, because it is from an earlier start that saved no checkpoint.
        """
        from qwen3next_jax.data.tokens import ByteTokenizer

        if record:
            self.write_run_json(record)
        copy = self.workdir / "tokenizer"
        if new:
            remove_tree(copy)
        is_from_file = tokenizer.reads_text and not isinstance(tokenizer, ByteTokenizer)
        if is_from_file and not copy.exists():
            self._copy_tokenizer(tokenizer, copy)

    @abc.abstractmethod
    def _copy_tokenizer(self, tokenizer: Any, copy: Any) -> None:
        """Writes the files of the tokenizer to the new folder `copy`. Even if the process is
        killed, it leaves no folder `copy` that lacks files.
        """

    # ---- what a run writes while it trains

    @abc.abstractmethod
    def open_checkpoints(
        self,
        retention: CheckpointConfig,
        keep_steps: Container[int] = (),
        frozen_paths: frozenset[str] = frozenset(),
    ) -> Any:
        """Returns the `store.checkpoints.CheckpointWriter` of the run.

        Args:
          retention: the settings that say which checkpoints to keep.
          keep_steps: steps whose checkpoints are never deleted.
          frozen_paths: the paths of the parameters that the run does not change.
        """

    @abc.abstractmethod
    def open_events(self) -> EventLog:
        """Returns the object that writes the lines of metrics.jsonl."""

    @abc.abstractmethod
    def dump_folder(self, step: int) -> Any:
        """Returns the path of the folder to which a dump of `step` is written."""

    @abc.abstractmethod
    def write_manifest(self, folder: Any) -> None:
        """Writes the manifest of `folder`, a complete subfolder of the run's folder."""

    @abc.abstractmethod
    def write_thread_stacks(self, process: int, stop: dict[str, Any]) -> None:
        """Writes the stacks of all threads of this process, because it hangs, and says on standard
        error where the stacks are. Takes no lock of this process, because a thread that hangs may
        hold the lock. Waits only a few seconds for a bucket.

        Args:
          process: the index of the process.
          stop: the "stop" event of the run.
        """


def not_writable_error(workdir: Any, error: OSError, flag: str = "--workdir") -> UserError:
    """Returns the UserError that says that the run's folder cannot be written to, because of
    `error`. `flag`: the command-line flag that names the folder.
    """
    return UserError(
        f"{flag}={workdir}: cannot be written to ({error.strerror}): give another folder"
    )
