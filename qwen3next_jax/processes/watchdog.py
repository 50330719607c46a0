"""Handles signals, and ends a process whose step never ends.

WORKDIR/hang-TIME-PROCESS.txt    the stacks of all threads, written when a step exceeds its time
"""

import faulthandler
import json
import math
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from qwen3next_jax.common.errors import ExitCode

_HANDLED = (signal.SIGINT, signal.SIGTERM)
# Signals that come within this many seconds count as one: when a parent with several threads is
# killed, its children get the signal once for each of its threads. On a busy machine the last one
# comes a second later, when the parent's memory is free; by then this process has another parent.
_SAME_SIGNAL_SECONDS = 0.25


class Signals:
    """Catches SIGINT and SIGTERM. A context manager.

    The first signal sets `caught` and prints a line; the training loop then ends the current step,
    saves and stops. A second signal ends the process at once, without saving. A thread reads the
    signals, so this works while the main thread waits for a device.
    """

    def __init__(self, show: Callable[[str], None]):
        """`show` prints a line without disturbing what else is on the screen."""
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
        """The thread: reads the number of each signal that arrives."""
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
    """The handler of the signals. Python writes the number of a signal to the wake-up descriptor
    only if the signal has a handler. The handler itself is of no use here: Python calls it when
    the main thread has returned from XLA.
    """


class Watchdog:
    """Ends the process with `ExitCode.HANG`, and dumps the stacks of all threads, if a step takes
    longer than the time that `allow` gave it. A context manager.

    Time during which the whole process is stopped (SIGSTOP, a suspended machine) does not count.
    """

    def __init__(self, workdir: pathlib.Path, process: int = 0, tick: float = 0.25):
        """Args:
        workdir: the run's folder, where the dump goes.
        process: index of this process, for the dump's name.
        tick: seconds between two looks at the clock.
        """
        self._workdir, self._process, self._tick = workdir, process, tick
        self._limit = (math.inf, "", 0)  # seconds, what may take them, at which step
        self._done = threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._done.set()
        self._thread.join()

    def allow(self, seconds: float, what: str, step: int) -> None:
        """Allows `seconds` from now on (0: no limit).

        Args:
          what: what takes the time, for the message: "a step", …
          step: the current training step.
        """
        # Called at every step: one assignment, which needs no lock.
        self._limit = (seconds or math.inf, what, step)

    def _watch(self) -> None:
        before, limit, left = time.monotonic(), None, math.inf
        while not self._done.wait(self._tick):
            now = time.monotonic()
            if limit is not self._limit:  # `allow` was called; only this thread counts down
                limit = self._limit
                left = limit[0]
            else:
                left -= min(now - before, 2 * self._tick)
            before = now
            if left <= 0:
                self._end_process(*limit)

    def _end_process(self, allowed: float, what: str, step: int) -> None:
        path = self._workdir / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{self._process}.txt"
        reason = f"{what} at step {step} did not end within {allowed:g} s"
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
            # Written directly: the main thread may hold the lock of the display and its log.
            if self._process == 0:
                with (self._workdir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(stop) + "\n")
        finally:  # even if writing failed
            os.write(2, f"error: {reason}: the stacks of all threads are in {path}\n".encode())
            sys.stderr.flush()
            os._exit(ExitCode.HANG)
