"""Child processes that do not outlive their parent."""

import ctypes
import os
import signal
import sys


def end_with(parent: int, number: signal.Signals) -> None:
    """In a child process: asks Linux for the signal `number` when the process `parent` dies,
    however it dies.
    """
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
    if os.getppid() != parent:  # dead before that
        os._exit(1)
