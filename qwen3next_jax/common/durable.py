"""What is on disk stays there."""

import os
import pathlib


def to_disk(path: pathlib.Path) -> None:
    """Returns when a power failure can no longer take the content of a file, or the names in a
    folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
