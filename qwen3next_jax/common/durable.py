"""Makes written files survive a power failure."""

import os
import pathlib


def fsync(path: pathlib.Path) -> None:
    """Forces the content of a file, or the names in a folder, from memory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
