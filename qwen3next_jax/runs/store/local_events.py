"""Writes the events of a run to metrics.jsonl on a file system, line by line."""

import os
import pathlib
from collections.abc import Collection

from qwen3next_jax.common.durable import fsync
from qwen3next_jax.common.errors import UserError, warn
from qwen3next_jax.common.events import iterate_events
from qwen3next_jax.runs.store.events import EarlierProgress, EventLog, is_kept


class LocalEvents(EventLog):
    """metrics.jsonl on a file system. Another process may append lines to the file at any time
    (`LocalStore.write_thread_stacks`).
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file: int | None = None  # a descriptor
        self._unwritten = b""

    def remove_events_after(
        self, last_step: int, repeated: Collection[str] = ()
    ) -> EarlierProgress:
        """As `EventLog.remove_events_after`. Rewrites the file without these events."""
        self.close()
        before, temporary = EarlierProgress(None, 0), self._path.with_suffix(".tmp")
        try:
            with temporary.open("w") as file:
                for line, event in iterate_events(self._path):
                    is_step = event["event"] == "train"
                    before = EarlierProgress(
                        event["time"], event["step"] if is_step else before.last_train_step
                    )
                    if is_kept(event, last_step, repeated):
                        file.write(line.rstrip("\n") + "\n")
            fsync(temporary)  # without this, a power failure may leave an empty file
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot be written ({error.strerror}): make room, or give another "
                "--workdir"
            ) from error
        os.replace(temporary, self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        return before

    def append(self, line: bytes) -> None:
        has_warned = bool(self._unwritten)
        self._unwritten += line
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if not has_warned:
                warn(f"{self._path}: cannot be written ({error.strerror}); trying again later")

    def flush(self) -> None:
        """Does nothing, because a written line survives the end of the process."""

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
