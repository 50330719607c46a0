"""The lock of a run whose folder is in a bucket: a lease, which its owner must renew.

    WORKDIR/lock    who trains here: {"owner", "host", "process", "seconds", "released"}

A bucket has no locks that end with their process. So a thread of the owner writes the object
WORKDIR/lock again every third of `seconds`, each time on the condition that the object has the
version that the owner wrote last. Another process takes the lock if its own clock has counted
`seconds` without a change of the object; the clocks of two machines are never compared. If the
owner was frozen or cut off, its next write finds another version, and the owner ends before it
writes anything else.

The thread also notices if the bucket does not answer, and ends the process after `patience`
seconds. Every process of a run has a thread that watches the bucket, but only the thread of process
0 writes the lock.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import (
    ExitCode,
    UserError,
    escape_control,
    one_line,
    require,
    warn,
)
from qwen3next_jax.common.storage import ABSENT, BucketPath, VersionConflict

_LONGEST_LEASE_SECONDS = 30.0  # seconds
_LARGEST_LOCK_BYTES = 1 << 16  # bytes of the object


class Lease:
    """The lock of a run's folder in a bucket. Use the class as a context manager: its exit releases
    the lock.
    """

    def __init__(self, workdir: BucketPath, patience: float, is_owner: bool = True):
        """Makes a lock that is not held yet.

        Args:
          workdir: the run's folder.
          patience: the seconds for which the bucket may be unreachable before the process ends.
          is_owner: whether this is process 0, which holds the lock. All processes except process 0
            only watch whether the bucket answers.
        """
        self.seconds = min(_LONGEST_LEASE_SECONDS, patience)
        self._workdir, self._patience, self._is_owner = workdir, patience, is_owner
        # An attempt of the thread ends before its next one is due.
        self._path = (workdir / "lock").with_patience(self.seconds / 6)
        self._record = {
            "owner": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "seconds": self.seconds,
        }
        self._version = ABSENT
        self._renewed = 0.0  # when this process last knew that it has the lock, time.monotonic()
        self._lock = threading.Lock()  # of _version and _renewed
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._describe_unsaved: list[Callable[[], str]] = []

    def __enter__(self):
        if self._thread is None and not self._is_owner:  # the owner begins in `run_locked`
            self._start_thread()
        return self

    def __exit__(self, *exception):
        self._done.set()
        if self._thread is None:  # another process has the lock, or it is released already
            return
        self._thread.join()
        self._thread = None
        if self._is_owner:
            try:
                self._write_lock(released=True)
            except OSError as error:
                warn(f"{self._path}: not released ({error.strerror}); it ends by itself")

    def run_locked(self, function: Callable[[], Any]) -> Any:
        """Takes the lock and returns `function()`. If another process has the lock, first waits
        until the other process renews the lock, or until its lease has ended.

        Raises:
          UserError: another process has the lock, or the folder cannot be written to.
        """
        self._acquire()
        self._start_thread()
        try:
            return function()
        except BaseException:
            self.__exit__()
            raise

    def add_unsaved_reporter(self, describe_unsaved: Callable[[], str]) -> None:
        """Adds a function that returns a description of what has not been saved, or "" if all is
        saved. If the process has to end because of the bucket, the error message contains the
        descriptions.
        """
        self._describe_unsaved.append(describe_unsaved)

    def confirm(self, now: bool = False) -> None:
        """Ends this process if another process has taken the lock. Call this method before deleting
        an object, and before replacing an object without a condition on its version. Does nothing
        unless `is_owner`.

        Args:
          now: whether to ask the bucket in any case; if false, a lock that was renewed less than
            half of `seconds` ago counts as held.

        Raises:
          OSError: the bucket does not answer.
        """
        if self._is_owner and (now or time.monotonic() - self._renewed > self.seconds / 2):
            self._renew_or_ping()

    def end_process(self, code: ExitCode, reason: str) -> None:
        """Prints one line and ends the process at once. A regular end of the process would wait for
        its threads, which may be waiting for the bucket.
        """
        unsaved = "; ".join(filter(None, (describe() for describe in self._describe_unsaved)))
        unsaved = f"; not saved: {unsaved}" if unsaved else ""
        warn(f"{self._workdir}: {reason}{unsaved}", "error")
        sys.stdout.flush()
        os._exit(code)

    # ---- the lock

    def _acquire(self) -> None:
        try:
            before = self._read_lock()
            if before is not None:
                self._wait_for_lease_end(*before)
            self._write_lock(patience=self._patience)
        except VersionConflict as error:
            raise self._taken_error((self._read_lock() or ("", {}))[1]) from error
        except OSError as error:
            raise UserError(
                f"--workdir={self._workdir}: cannot be written to ({error.strerror}): give this "
                "account the right to write objects there, or another folder",
                getattr(error, "exit_code", ExitCode.USER_ERROR),
            ) from error

    def _wait_for_lease_end(self, version: str, record: dict[str, Any]) -> None:
        """Waits until the lease of another process has ended. Stores the version of the lock, which
        the next write of the lock must replace.

        Raises:
          UserError: the other process renewed the lock.
        """
        self._version = version
        if record.get("released"):
            return
        seconds = float(record["seconds"])
        owner = _describe_owner(record)
        waiting = f"{self._workdir}: waiting up to {seconds:g} s for the lock of {owner}"
        print(escape_control(waiting), flush=True)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(1.0, seconds / 10))
            now = self._read_lock()
            if now is None or now[1].get("released"):
                self._version = now[0] if now else ABSENT
                return
            if now[0] != version:
                raise self._taken_error(now[1])

    def _taken_error(self, record: dict[str, Any]) -> UserError:
        """Returns the UserError which says that another process has the lock. `record`: content of
        the lock.
        """
        return UserError(
            f"{self._workdir}: another process is training in it ({_describe_owner(record)}): "
            "wait for it, end it, or give another --workdir"
        )

    def _read_lock(self) -> tuple[str, dict[str, Any]] | None:
        """Returns (version, content) of the object WORKDIR/lock; None if there is none."""
        path = self._path.with_patience(self._patience)
        entry = path.file_info()
        if entry is None:
            return None
        foreign = f"{path}: not the lock of a run: another program's object; give another --workdir"
        require(entry.size <= _LARGEST_LOCK_BYTES, foreign)
        try:
            record = json_files.parse(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise UserError(foreign) from error
        # Another value would let this process wait for ever.
        seconds = record.get("seconds")
        is_number = type(seconds) in (int, float) and 0 < seconds <= _LONGEST_LEASE_SECONDS
        require("owner" in record and is_number, foreign)
        return entry.version, record

    def _write_lock(self, released: bool = False, patience: float | None = None) -> None:
        """Writes WORKDIR/lock, on the condition that the object has the version that this process
        knows.

        Args:
          released: whether this process gives the lock up.
          patience: the seconds for which a failed write is repeated; None: the `patience_seconds`
            of the lock's path.
        """
        path = self._path if patience is None else self._path.with_patience(patience)
        # Two writes never have the same bytes, so a write whose answer was lost is recognized.
        content = self._record | {"released": released, "renewal": uuid.uuid4().hex}
        with self._lock:
            begun = time.monotonic()
            self._version = path.write(json.dumps(content).encode(), replaces=self._version)
            self._renewed = begun

    # ---- the thread

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._renew_periodically, name="lease", daemon=True)
        self._thread.start()

    def _renew_periodically(self) -> None:
        """Renews the lock every third of `seconds`, until the lock is released. Ends the process if
        the bucket does not answer for `patience` seconds. Runs in a thread of its own.
        """
        failing_since, reason = None, ""
        while not self._done.wait(self.seconds / 3):
            began = time.monotonic()
            try:
                self._renew_or_ping()
                failing_since = None
            except OSError as error:
                # Time during which the process was stopped does not count.
                failing_since = failing_since or began
                reason = error.strerror or str(error)
                if time.monotonic() - failing_since > self._patience - self.seconds / 3:
                    self.end_process(
                        ExitCode.STORAGE,
                        f"the bucket did not take what this run wrote for {self._patience:g} s "
                        f"(checkpoint.patience; {reason}): the same command continues when it "
                        "does",
                    )

    def _renew_or_ping(self) -> None:
        """Renews the lock if `is_owner`. If this process is not the owner, only reads the lock, to
        see whether the bucket answers.
        """
        if not self._is_owner:
            self._path.file_info()
            return
        try:
            self._write_lock()
        except VersionConflict:
            found_lock = self._read_lock()
            if found_lock is not None and found_lock[1].get("owner") == self._record["owner"]:
                self._version = found_lock[0]
                return
            other = found_lock[1] if found_lock else {}
            self.end_process(
                ExitCode.TAKEN_OVER,
                f"{_describe_owner(other)} has taken over this run, because this process did not "
                f"renew its lock for {self.seconds:g} s: this one stops without writing anything "
                "else",
            )


def _describe_owner(record: dict[str, Any]) -> str:
    """Returns the process and the host of the owner, from the content of a lock, in one line."""
    return one_line(f"process {record.get('process')} on {record.get('host')}")
