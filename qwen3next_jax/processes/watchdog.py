"""Handles SIGINT and SIGTERM, and ends a process whose training step hangs."""

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from qwen3next_jax.common.errors import ExitCode

_HANDLED = (signal.SIGINT, signal.SIGTERM)
# Signals that come within this many seconds count as one signal. When a parent with several threads
# is killed, each child gets the signal once for each of the parent's threads. On a busy machine the
# last of these signals comes a second later, when the parent's memory is free; by then this process
# has another parent.
_SAME_SIGNAL_SECONDS = 0.25


class SignalHandler:
    """Catches SIGINT and SIGTERM. Use it as a context manager.

    The first signal sets `caught` and prints a line; the training loop then finishes the current
    step or the next one, saves a checkpoint and stops. A second signal ends the process at once,
    without saving. A separate thread reads the signals, so a signal is handled even while the main
    thread waits for a device.
    """

    def __init__(self, show: Callable[[str], None]):
        """Makes a handler of signals.

        Args:
          show: function that prints a line of text, also while a live display is on the terminal.
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
        threading.Thread(target=self._read_signals, name="signals", daemon=True).start()
        return self

    def __exit__(self, *exception):
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()  # ends the thread

    def _read_signals(self) -> None:
        """Reads, in a thread, the number of each signal that arrives, and handles the signal."""
        with self._reader:
            while received := self._reader.recv(1):
                if received[0] in _HANDLED:
                    self._handle_signal(received[0])

    def _handle_signal(self, number: int) -> None:
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
    signal has a handler. A Python handler would act too late, because Python calls it only when the
    main thread has returned from XLA.
    """


class Watchdog:
    """Ends the process with `ExitCode.HANG` if a step takes longer than the limit set with
    `set_time_limit`. Before the watchdog ends the process, it writes the stacks of all threads. Use
    the class as a context manager.

    Time during which the whole process is stopped (SIGSTOP, a suspended machine) does not count.
    """

    def __init__(self, write_stacks: Callable[[dict[str, Any]], None], tick: float = 0.25):
        """Makes a watchdog without a time limit.

        Args:
          write_stacks: function of the run's "stop" event that writes the stacks of all threads.
            `write_stacks` must not take a lock, because the main thread may hold the locks of the
            display and the metrics file.
          tick: number of seconds between two checks of the time.
        """
        self._write_stacks, self._tick = write_stacks, tick
        self._limit = (math.inf, "", 0)  # limit in seconds, what it limits, current step
        self._done = threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._done.set()
        self._thread.join()

    def set_time_limit(self, seconds: float, what: str, step: int) -> None:
        """Sets a new time limit of `seconds` from now; 0: no limit.

        Args:
          what: what must end within the limit, for the message: "a step", …
          step: the current training step.
        """
        # One assignment needs no lock, which matters because this method is called at every step.
        self._limit = (seconds or math.inf, what, step)

    def _watch(self) -> None:
        """Runs in a thread: ends the process when the newest time limit has passed. Between two
        checks of the time, at most two ticks count as elapsed, so that time during which the
        process is suspended does not count.
        """
        before, limit, left = time.monotonic(), None, math.inf
        while not self._done.wait(self._tick):
            now = time.monotonic()
            if limit is not self._limit:  # `set_time_limit` set a new limit
                limit = self._limit
                left = limit[0]
            else:
                left -= min(now - before, 2 * self._tick)
            before = now
            if left <= 0:
                self._end_process(*limit)

    def _end_process(self, allowed: float, what: str, step: int) -> None:
        """Calls `write_stacks` with a "stop" event, and exits with `ExitCode.HANG`. `allowed`: the
        time limit that has passed, in seconds. `what` and `step`: the arguments of
        `set_time_limit`.
        """
        stop = {
            "event": "stop",
            "step": step,
            "time": round(time.time(), 3),
            "reason": f"{what} at step {step} did not end within {allowed:g} s",
            "exit_code": int(ExitCode.HANG),
        }
        try:
            self._write_stacks(stop)
        finally:  # even if writing failed
            sys.stderr.flush()
            os._exit(ExitCode.HANG)
