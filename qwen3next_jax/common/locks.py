"""Locks of files, which the operating system releases when a process ends, even by a kill."""

import fcntl
import pathlib
from typing import IO

from qwen3next_jax.common.errors import warn


def lock_file(file: IO | int, folder: pathlib.Path) -> bool:
    """Locks an open file (or the descriptor of an open folder) until it is closed or the process
    ends. Returns False if another process has locked the file. If the file cannot be locked,
    warns that no lock protects `folder`, and returns True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        warn(
            f"{folder}: it cannot be locked ({error.strerror}): if another process writes "
            "to this folder at the same time, nothing stops it, and each overwrites the files of "
            "the other: start only one"
        )
    return True
