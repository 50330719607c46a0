"""The interface by which a run writes its folder, and what a disk and a bucket have in common.

    WORKDIR/lock           says that a process trains here
    WORKDIR/run.json       configuration, data, tokenizer, code, …: `runs.record`
    WORKDIR/tokenizer/     a copy of the tokenizer, if it came from a file
    WORKDIR/before-TIME/   the files that `--restart` moved

A disk has locks that end with their process, a rename that moves a whole folder, and files to which
lines can be appended. A bucket has none of these, but writes of whole objects that succeed only if
the object still has the version that the writer read. `LocalStore` and `BucketStore` do the same
with what they have. A run makes one of them (`runs.store.open_store`); no other file of a run asks
where the folder is.
"""

import abc
import dataclasses
import pathlib
from collections.abc import Callable, Container
from typing import Any

from qwen3next_jax.common.errors import UserError, require, require_path
from qwen3next_jax.common.storage import BucketPath, remove_tree, write_text_atomically
from qwen3next_jax.config import CheckpointConfig
from qwen3next_jax.runs.record import RunRecord, read_record, run_text
from qwen3next_jax.runs.store.events import EventLog


class RunStore(abc.ABC):
    """The folder of one run. Use it as a context manager, whose end releases the lock.

    Attributes:
      workdir: the path of the folder.
      takes_other_writers: whether libraries that know only files can write into the folder:
        TensorBoard, Weights & Biases, JAX's profiler.
      is_quick_to_read: whether all events of a run can be read at every checkpoint.
    """

    takes_other_writers: bool
    is_quick_to_read: bool

    def __init__(self, workdir: pathlib.Path | BucketPath):
        self.workdir = workdir

    # ---- whether a run can be here

    @abc.abstractmethod
    def check(self, where: str) -> None:
        """Raises a UserError that begins with `where` if a run cannot write to the folder: because
        of its name, because the paths in it would be too long, or because there is no such bucket.
        """

    def _check_folder_path(self, where: str, names: tuple[str, ...], forbidden: str) -> None:
        """Checks that Orbax and TensorStore, which write the arrays, can write to the folder.

        Args:
          names: the names that the path of the folder consists of.
          forbidden: the characters to which TensorStore gives another meaning in a path.
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
        block, or if `function` raises.

        Raises:
          UserError: another process has the lock, or the folder cannot be written to.
        """

    # ---- --restart

    @abc.abstractmethod
    def is_restart_unfinished(self) -> bool:
        """Whether a process was killed in `move_aside`. The remaining files belong to the old run,
        so the next start moves them too, with or without --restart.
        """

    @abc.abstractmethod
    def move_aside(self) -> None:
        """Moves all files of a run into `workdir`/before-TIME. If a process was killed in such a
        move, continues that move.

        Raises:
          UserError: the folder cannot be written to, or a file would replace another one.
        """

    @abc.abstractmethod
    def run_files(self) -> dict[str, Any]:
        """Returns name → what identifies the file, for files of the run in the folder: none of them
        is there any more once `move_aside` has moved the run.
        """

    # ---- run.json and the tokenizer

    def write_run(self, record: RunRecord) -> None:
        """Writes run.json, whole or not at all.

        Raises:
          UserError: the file cannot be written.
        """
        try:
            write_text_atomically(self.workdir / "run.json", run_text(record))
        except OSError as error:
            raise not_writable(self.workdir, error) from error

    def add_to_run(self, **values: Any) -> None:
        """Replaces these entries of run.json. Does not write the file if it already has them."""
        before = read_record(self.workdir)
        record = dataclasses.replace(before, **values)
        if record != before:
            self.write_run(record)

    def write_run_and_tokenizer(self, record: RunRecord | None, tokenizer: Any, new: bool) -> None:
        """Writes run.json and a copy of the tokenizer, before the first step.

        Args:
          record: the content of run.json; None if run.json does not change.
          tokenizer: the tokenizer of the run. If it came from a file, it is copied, so that the run
            no longer needs that file.
          new: whether the run has no checkpoint yet. If so, a copy of a tokenizer that is already
            in the folder is from an earlier start that took no step, and is replaced.
        """
        from qwen3next_jax.data.tokens import HuggingFaceTokenizer

        if record:
            self.write_run(record)
        copy = self.workdir / "tokenizer"
        if new:
            remove_tree(copy)
        if isinstance(tokenizer, HuggingFaceTokenizer) and not copy.exists():
            self._copy_tokenizer(tokenizer, copy)

    @abc.abstractmethod
    def _copy_tokenizer(self, tokenizer: Any, copy: Any) -> None:
        """Writes the files of the tokenizer to the new folder `copy`, whole or not at all."""

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
        """Returns what writes the lines of metrics.jsonl."""

    @abc.abstractmethod
    def dump_folder(self, step: int) -> Any:
        """Returns the path of the folder for a dump of `step` (`runs.guard_flags`)."""

    @abc.abstractmethod
    def write_manifest(self, folder: Any) -> None:
        """Writes the manifest of the complete `folder`, which is in the run's folder."""

    @abc.abstractmethod
    def write_stacks(self, process: int, stop: dict[str, Any]) -> None:
        """Writes the stacks of all threads of a process that hangs, and says on standard error
        where they are. Other threads may hold any lock, and may be waiting for the bucket.

        Args:
          process: the index of the process.
          stop: the "stop" event of the run.
        """


def not_writable(workdir: Any, error: OSError, flag: str = "--workdir") -> UserError:
    """Returns the UserError that says that the run's folder, which `flag` named, cannot be written
    to, because of `error`.
    """
    return UserError(
        f"{flag}={workdir}: cannot be written to ({error.strerror}): give another folder"
    )
