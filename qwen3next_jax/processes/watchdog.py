"""What happens to the process from outside and from nowhere: signals, and steps that never end.

WORKDIR/hang-TIME-PROCESS.txt    the stacks of all threads, where no step ended within the limit
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
# Seconds within which several are one: a parent with threads that is killed sends its children
# "the" signal once for each thread. The last comes when its memory is free, on a busy machine a
# second later: by then this process has another parent.
_ONE_SIGNAL = 0.25


class Signals:
    """Notes the first SIGINT or SIGTERM in `caught`, so that the step under way ends and is
    saved, and says so; a second one, a moment later, ends the process at once, even while it
    waits for a device: a thread of its own reads them. A context manager.
    """

    def __init__(self, say: Callable[[str], None]):
        """`say` shows a line beside what is on the screen."""
        self.caught, self._noted, self._parent, self._say = False, 0.0, os.getppid(), say

    def __enter__(self):
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before = {number: signal.signal(number, _noted_elsewhere) for number in _HANDLED}
        self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._read, name="signals", daemon=True).start()
        return self

    def __exit__(self, *exception):
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()  # ends the thread

    def _read(self) -> None:
        with self._reader:
            while received := self._reader.recv(1):
                if received[0] not in _HANDLED:
                    continue
                before, self._parent = self._parent, os.getppid()
                if self.caught and (
                    self._parent != before or time.monotonic() - self._noted < _ONE_SIGNAL
                ):
                    continue
                if self.caught:
                    os.write(2, b"second signal: left at once, without saving\n")
                    os._exit(ExitCode.ABORTED)
                self.caught, self._noted = True, time.monotonic()
                line = (
                    f"{signal.Signals(received[0]).name}: saving after the step under way; again "
                    "to stop now, without saving"
                )
                # In a thread: a terminal that does not take the line must not keep the second
                # signal waiting.
                threading.Thread(target=self._say, args=(line,), daemon=True).start()


def _noted_elsewhere(number: int, frame: object) -> None:
    """Python writes the numbers of signals that have a handler to the wake-up descriptor; the
    handler itself would have to wait until the main thread is back from XLA.
    """


class Watchdog:
    """Ends the process with `ExitCode.HANG` and a dump of all stacks once the time last allowed
    has run out.

    Time during which the whole process stood still (SIGSTOP, a suspended machine) does not
    count. Use as a context manager; until `allow` is called it waits for ever.
    """

    def __init__(self, workdir: pathlib.Path, process: int = 0, tick: float = 0.25):
        """`tick`: seconds between two looks at the clock."""
        self._workdir, self._process, self._tick = workdir, process, tick
        self._limit = (math.inf, "", 0)  # seconds, for what, at which step
        self._done = threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._done.set()
        self._thread.join()

    def allow(self, seconds: float, what: str, step: int) -> None:
        """From now on `seconds` (0: any time) for `what` at `step`. Called at every step: one
        assignment, no lock.
        """
        self._limit = (seconds or math.inf, what, step)

    def _watch(self) -> None:
        before, limit, left = time.monotonic(), None, math.inf
        while not self._done.wait(self._tick):
            now = time.monotonic()
            if limit is not self._limit:  # a new one; only this thread counts it down
                limit = self._limit
                left = limit[0]
            else:
                left -= min(now - before, 2 * self._tick)
            before = now
            if left <= 0:
                self._bark(*limit)

    def _bark(self, allowed: float, what: str, step: int) -> None:
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
            if self._process == 0:  # past the display, which the main thread may hold
                with (self._workdir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(stop) + "\n")
        finally:  # whatever the disk says
            os.write(2, f"error: {reason}: the stacks of all threads are in {path}\n".encode())
            sys.stderr.flush()
            os._exit(ExitCode.HANG)
