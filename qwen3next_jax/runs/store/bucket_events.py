"""Writes the events of a run to a bucket, where nothing can be appended to an object.

    WORKDIR/metrics/000000.jsonl, 000001.jsonl, …    the lines of metrics.jsonl, in pieces

A thread writes the newest piece again every few seconds, with the lines that came since, until it
has `_PIECE` bytes; then the next piece begins. So a killed process loses the events of a few
seconds, and the number of pieces depends on the bytes alone.

Every write demands the version of the piece that this process wrote or read last. If the piece has
another version, it is written only if this process still has the run's lock, and if the piece holds
a beginning of what is to be written: then the answer to an earlier write was lost. `keep`, with
which a process begins, writes the newest piece again. From then on a process that had the lock
before cannot change the record.
"""

import threading
import time
from collections.abc import Collection
from typing import Any

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import ExitCode, warn
from qwen3next_jax.common.events import events_file_pieces, is_valid_event
from qwen3next_jax.common.storage import ABSENT, BucketPath, VersionConflict
from qwen3next_jax.runs.store.events import Before, EventLog, is_kept
from qwen3next_jax.runs.store.lease import Lease

_PIECE = 1 << 20  # bytes
_INTERVAL = 5.0  # seconds between two writes; a store takes one write a second to one object


class BucketEvents(EventLog):
    """metrics.jsonl in a bucket, in pieces, which a thread writes."""

    def __init__(self, path: BucketPath, lease: Lease, patience: float):
        """Begins the thread, without reading any piece.

        Args:
          path: WORKDIR/metrics.jsonl, the name by which readers know the pieces.
          lease: the run's lock.
          patience: the seconds for which a write may fail before the process ends.
        """
        self._path, self._lease, self._patience = path, lease, patience
        self._number, self._version, self._content = 0, ABSENT, b""
        self._pending, self._lines = b"", 0  # not written yet
        self._lock = threading.Lock()  # of _pending and _lines
        self._writing = threading.Lock()  # of the piece
        self._failing_since: float | None = None
        self._wake, self._closed = threading.Event(), False
        lease.on_end(self._describe_unsaved)
        self._thread = threading.Thread(target=self._write_often, name="metrics", daemon=True)
        self._thread.start()

    def keep(self, last_step: int, repeated: Collection[str] = ()) -> Before:
        """Reads the pieces from the newest one back to the first that holds a "train" event of
        `last_step` or an earlier step: all events before it are kept. The result counts only events
        in the pieces that were read.
        """
        self.flush()
        with self._writing:
            end, step = None, 0
            paths = events_file_pieces(self._path)
            for path in reversed(paths):
                entry = path.file_info()
                content = path.read_bytes() if entry else b""
                events = list(_events(content))
                for _, event in reversed(events):
                    end = end or event["time"]
                    if event["event"] == "train":
                        step = step or event["step"]
                kept = b"".join(
                    line + b"\n" for line, event in events if is_kept(event, last_step, repeated)
                )
                version = entry.version if entry else ABSENT
                # The newest piece is always written again: another process that still believes it
                # has the lock then holds an old version of it.
                if kept != content or path == paths[-1]:
                    version = path.write(kept, replaces=version)
                if path == paths[-1] and path != self._path:
                    self._number, self._version = int(path.stem), version
                    self._content = kept
                if any(e["event"] == "train" and e["step"] <= last_step for _, e in events):
                    break
        return Before(end, step)

    def append(self, line: bytes) -> None:
        with self._lock:
            self._pending += line
            self._lines += 1

    def flush(self) -> None:
        while not self._try_to_write():
            time.sleep(0.2)

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join()
        self.flush()

    def _write_often(self) -> None:
        while not self._closed:
            self._wake.wait(_INTERVAL)
            if not self._closed:
                self._try_to_write()

    def _try_to_write(self) -> bool:
        """Writes what is pending. Returns True if all pending lines are now written. Ends the
        process if another one has written the piece, or after `patience` seconds of failures.
        """
        with self._writing:
            with self._lock:
                pending, lines = self._pending, self._lines
            if not pending:
                return True
            if len(self._content) >= _PIECE:
                self._number, self._version, self._content = self._number + 1, ABSENT, b""
            path = self._path.with_suffix("") / f"{self._number:06d}.jsonl"
            path = path.with_patience(self._lease.seconds / 6)
            content = self._content + pending
            try:
                self._version = self._put(path, content, self._version)
            except OSError as error:
                now = time.monotonic()
                if self._failing_since is None:
                    self._failing_since = now
                    warn(f"{path}: cannot be written ({error.strerror}); trying again")
                elif now - self._failing_since > self._patience:
                    self._lease.end_process(
                        ExitCode.STORAGE,
                        f"{path.name} could not be written for {self._patience:g} s "
                        f"(checkpoint.patience; {error.strerror})",
                    )
                return False
            self._content, self._failing_since = content, None
            with self._lock:
                self._pending, self._lines = self._pending[len(pending) :], self._lines - lines
                return not self._pending

    def _put(self, path: BucketPath, content: bytes, version: str) -> str:
        """Writes the newest piece. If it has another version, either the answer to an earlier write
        of this process was lost, or another process has the lock.
        """
        try:
            return path.write(content, replaces=version)
        except VersionConflict:
            entry, there = path.file_info(), path.read_bytes()
            # If another process took the lock after this, it also wrote the piece after it.
            self._lease.confirm(now=True)
            if entry is not None and content.startswith(there):
                return path.write(content, replaces=entry.version)
            self._lease.end_process(
                ExitCode.TAKEN_OVER,
                f"another process has written {path.name}, so this one does not train here any "
                "more",
            )
            raise

    def _describe_unsaved(self) -> str:
        return f"{self._lines} events of metrics.jsonl" if self._lines else ""


def _events(content: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """Returns the lines of a piece that are events, with their events."""
    found = []
    for line in content.splitlines():
        try:
            event = json_files.parse(line)
        except ValueError:
            continue
        if is_valid_event(event):
            found.append((line, event))
    return found
