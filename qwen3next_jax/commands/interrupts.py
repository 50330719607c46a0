"""Handles Ctrl-C and SIGTERM, with which a user or a scheduler ends a command."""

import os
import signal
import socket
import threading
import time

from qwen3next_jax.common.errors import ExitCode


class InterruptThread(threading.Thread):
    """A thread that reacts to Ctrl-C while XLA compiles. Python raises KeyboardInterrupt only after
    the compilation, which can take minutes. This thread prints a line at the first Ctrl-C, and ends
    the process at the second. While a command has its own handler of SIGINT, the thread does
    nothing.
    """

    def __init__(self):
        super().__init__(name="interrupts", daemon=True)
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        first = True
        while received := self._reader.recv(1):
            if (
                received[0] != signal.SIGINT
                or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            ):
                continue
            if not first:
                os._exit(ExitCode.INTERRUPTED)
            first = False
            time.sleep(0.5)  # usually the command ends within this time
            os.write(2, b"interrupted: ends after the current operation; again to stop now\n")


def interrupt_at_sigterm() -> None:
    """Makes SIGTERM act like Ctrl-C, so that a process that a scheduler ends by SIGTERM prints a
    line. Only commands that do not stay in compiled code for long call this function.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
