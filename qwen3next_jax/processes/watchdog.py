"""Handles signals, and ends a process whose step never ends.

When a step exceeds its time limit, WORKDIR/hang-TIME-PROCESS.txt gets the stacks of all threads.
"""

import faulthandler
import json
import math
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.common.storage import BucketPath

_HANDLED = (signal.SIGINT, signal.SIGTERM)
# Signals that come within this many seconds count as one signal. When a parent with several threads
# is killed, each child gets the signal once for each of the parent's threads. On a busy machine the
# last of these signals comes a second later, when the parent's memory is free; by then this process
# has another parent.
_SAME_SIGNAL_SECONDS = 0.25


class Signals:
    """Catches SIGINT and SIGTERM. Use it as a context manager.

    The first signal sets `caught` and prints a line; the training loop then ends the current step,
    saves and stops. A second signal ends the process at once, without saving. A thread reads the
    signals, so this works while the main thread waits for a device.
    """

    def __init__(self, show: Callable[[str], None]):
        """Makes a handler of signals.

        Args:
          show: function that prints a line of text. The function has to work while a live display
            is shown, too.
        """
        self.caught = False
        self._caught_at = 0.0
        self._parent = os.getppid()
        self._show = show

    def __enter__(self):
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before = {number: signal.signal(number, _do_nothing) for number in _HANDLED}
        self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._read, name="signals", daemon=True).start()
        return self

    def __exit__(self, *exception):
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()  # ends the thread

    def _read(self) -> None:
        """Reads, in a thread, the number of each signal that arrives, and handles the signal."""
        with self._reader:
            while received := self._reader.recv(1):
                if received[0] in _HANDLED:
                    self._handle(received[0])

    def _handle(self, number: int) -> None:
        parent, self._parent = self._parent, os.getppid()
        if not self.caught:
            self.caught, self._caught_at = True, time.monotonic()
            line = (
                f"{signal.Signals(number).name}: saving after the current step; again to stop "
                "now, without saving"
            )
            # A thread prints the line: a terminal that blocks must not delay the second signal.
            threading.Thread(target=self._show, args=(line,), daemon=True).start()
            return
        repeated = time.monotonic() - self._caught_at < _SAME_SIGNAL_SECONDS
        if self._parent == parent and not repeated:
            os.write(2, b"second signal: stopped at once, without saving\n")
            os._exit(ExitCode.ABORTED)


def _do_nothing(number: int, frame: object) -> None:
    """Does nothing. Python writes the number of a signal to the wake-up descriptor only if the
    signal has a handler. The handler itself would act too late, because Python calls it only when
    the main thread has returned from XLA.
    """


class Watchdog:
    """Writes the stacks of all threads to a file and ends the process with `ExitCode.HANG`, if a
    step takes longer than the limit set with `allow`. Use it as a context manager.

    Time during which the whole process is stopped (SIGSTOP, a suspended machine) does not count.
    """

    def __init__(self, workdir: pathlib.Path, process: int = 0, tick: float = 0.25):
        """Makes a watchdog without a time limit.

        Args:
          workdir: the run's folder, to which the stacks are written.
          process: index of this process, for the name of the file with the stacks.
          tick: number of seconds between two checks of the time.
        """
        self._workdir, self._process, self._tick = workdir, process, tick
        self._limit = (math.inf, "", 0)  # limit in seconds, what it limits, current step
        self._done = threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._done.set()
        self._thread.join()

    def allow(self, seconds: float, what: str, step: int) -> None:
        """Sets a new time limit, which begins now: `seconds`, or no limit if that is 0.

        Args:
          what: what the limit applies to, for the message: "a step", …
          step: the current training step.
        """
        # One assignment needs no lock, which matters because this method is called at every step.
        self._limit = (seconds or math.inf, what, step)

    def _watch(self) -> None:
        before, limit, left = time.monotonic(), None, math.inf
        while not self._done.wait(self._tick):
            now = time.monotonic()
            if limit is not self._limit:  # `allow` set a new limit
                limit = self._limit
                left = limit[0]
            else:
                left -= min(now - before, 2 * self._tick)
            before = now
            if left <= 0:
                self._end_process(*limit)

    def _end_process(self, allowed: float, what: str, step: int) -> None:
        """Writes the stacks of all threads and a "stop" event, and exits with `ExitCode.HANG`.
        `allowed`: the exceeded time limit in seconds. `allow` explains the other arguments.
        """
        path = self._workdir / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{self._process}.txt"
        reason = f"{what} at step {step} did not end within {allowed:g} s"
        if isinstance(path, BucketPath):
            self._end_process_in_bucket(path, reason)
        try:
            with path.open("w") as file:
                file.write(reason + "\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            stop = {
                "event": "stop",
                "step": step,
                "time": round(time.time(), 3),
                "reason": reason,
                "exit_code": int(ExitCode.HANG),
                "stacks": str(path),
            }
            # The event is written directly, because the main thread may hold the locks of the
            # display and the metrics file.
            if self._process == 0:
                with (self._workdir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(stop) + "\n")
        finally:  # even if writing failed
            os.write(2, f"error: {reason}: the stacks of all threads are in {path}\n".encode())
            sys.stderr.flush()
            os._exit(ExitCode.HANG)

    def _end_process_in_bucket(self, path: BucketPath, reason: str) -> None:
        """Ends the process. The stacks go to standard error first, because the bucket may be what
        the process waits for; then, as far as possible, to `path`.
        """
        try:
            os.write(2, f"error: {reason}; the stacks of all threads:\n".encode())
            with tempfile.TemporaryFile() as file:
                faulthandler.dump_traceback(file, all_threads=True)
                file.seek(0)
                stacks = file.read()
            os.write(2, stacks)
            path.with_patience(5.0).write_bytes(f"{reason}\n\n".encode() + stacks)
            os.write(2, f"the stacks are also in {path}\n".encode())
        finally:
            os._exit(ExitCode.HANG)
