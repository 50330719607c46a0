"""Writes the events of a run to a bucket, where nothing can be appended to an object.

    WORKDIR/metrics/000000.jsonl, 000001.jsonl, …    the lines of metrics.jsonl, in pieces

Every few seconds a thread writes the newest piece of metrics.jsonl again, with the lines that were
added. Once this piece has `_PIECE_BYTES` bytes, the next piece begins. So a killed process loses
only the events of a few seconds, and the number of pieces depends only on the number of bytes.

Every write is conditional: the piece must have the version that this process wrote or read last. If
the piece has another version, but this process still has the run's lock, and the piece holds a
beginning of what is to be written, then the answer to an earlier write was lost, and the process
writes the piece. If the piece has another version in any other case, the process ends. A process
begins with `remove_events_after`, which writes the newest piece again, so that a process that had
the lock before can no longer write this piece.
"""

import threading
import time
from collections.abc import Collection
from typing import Any

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import ExitCode, warn
from qwen3next_jax.common.events import events_file_pieces, is_valid_event
from qwen3next_jax.common.storage import ABSENT, BucketPath, VersionConflict
from qwen3next_jax.runs.store.events import EarlierProgress, EventLog, is_kept
from qwen3next_jax.runs.store.lease import Lease

_PIECE_BYTES = 1 << 20  # bytes
_WRITE_INTERVAL_SECONDS = (
    5.0  # seconds between two writes; a store takes one write a second to one object
)


class BucketEvents(EventLog):
    """Writes metrics.jsonl to a bucket, in pieces. A thread writes the pieces."""

    def __init__(self, path: BucketPath, lease: Lease, patience: float):
        """Starts the thread that writes the pieces, without reading any piece.

        Args:
          path: WORKDIR/metrics.jsonl, the name under which readers open the pieces.
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
        lease.add_unsaved_reporter(self._describe_unsaved)
        self._thread = threading.Thread(
            target=self._write_periodically, name="metrics", daemon=True
        )
        self._thread.start()

    def remove_events_after(
        self, last_step: int, repeated: Collection[str] = ()
    ) -> EarlierProgress:
        """As `EventLog.remove_events_after`. Reads the pieces from the newest one back, until a
        piece holds a "train" event of `last_step` or an earlier step, because all events in earlier
        pieces stay. The result covers only the events in the pieces that were read.
        """
        self.flush()
        with self._writing:
            end, step = None, 0
            paths = events_file_pieces(self._path)
            for path in reversed(paths):
                entry = path.file_info()
                content = path.read_bytes() if entry else b""
                events = list(_parse_events(content))
                for _, event in reversed(events):
                    end = end or event["time"]
                    if event["event"] == "train":
                        step = step or event["step"]
                kept_content = b"".join(
                    line + b"\n" for line, event in events if is_kept(event, last_step, repeated)
                )
                version = entry.version if entry else ABSENT
                # The newest piece is always written again: another process that still believes it
                # has the lock then holds an old version of it.
                if kept_content != content or path == paths[-1]:
                    version = path.write(kept_content, replaces=version)
                if path == paths[-1] and path != self._path:
                    self._number, self._version = int(path.stem), version
                    self._content = kept_content
                if any(e["event"] == "train" and e["step"] <= last_step for _, e in events):
                    break
        return EarlierProgress(end, step)

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

    def _write_periodically(self) -> None:
        while not self._closed:
            self._wake.wait(_WRITE_INTERVAL_SECONDS)
            if not self._closed:
                self._try_to_write()

    def _try_to_write(self) -> bool:
        """Writes the pending lines. Returns whether all pending lines are now written. Ends the
        process if another process has written the piece, or after `patience` seconds of failures.
        """
        with self._writing:
            with self._lock:
                pending, lines = self._pending, self._lines
            if not pending:
                return True
            if len(self._content) >= _PIECE_BYTES:
                self._number, self._version, self._content = self._number + 1, ABSENT, b""
            path = self._path.with_suffix("") / f"{self._number:06d}.jsonl"
            path = path.with_patience(self._lease.seconds / 6)
            content = self._content + pending
            try:
                self._version = self._write_piece(path, content, self._version)
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

    def _write_piece(self, path: BucketPath, content: bytes, version: str) -> str:
        """Writes the newest piece, on the condition that it has `version`, and returns the new
        version. If the piece has another version, either the answer to an earlier write of this
        process was lost, or another process has the lock; in the second case, this process ends.
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


def _parse_events(content: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """Returns (line, event) for each line of a piece that is a valid event."""
    found = []
    for line in content.splitlines():
        try:
            event = json_files.parse(line)
        except ValueError:
            continue
        if is_valid_event(event):
            found.append((line, event))
    return found
