"""Child processes that do not outlive their parent."""

import ctypes
import os
import signal
import sys


def die_with_parent(parent_pid: int, signal_number: signal.Signals) -> None:
    """Makes Linux send the signal `signal_number` to this process when its parent dies, for
    whatever reason. A child process must call this function. If the process `parent_pid` is already
    dead, the child process exits at once.
    """
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal_number)
    if os.getppid() != parent_pid:
        os._exit(1)
