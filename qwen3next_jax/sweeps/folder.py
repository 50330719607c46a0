"""The folder of a sweep, on a disk or in a bucket: its lock, and the logs of its points.

WORKDIR/lock                    the file that the runner of the sweep locks
WORKDIR/points/NAME/log.txt     what the processes of a point print
"""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.locks import lock_file
from qwen3next_jax.common.storage import BucketPath
from qwen3next_jax.runs.store.lease import Lease


class LocalFolder:
    """The folder of a sweep on a file system."""

    def __init__(self, workdir: pathlib.Path):
        self._workdir = workdir

    @contextlib.contextmanager
    def locked(self) -> Iterator[tuple[int, ...]]:
        """Holds the lock of the folder, and yields the file descriptors of the lock. The processes
        of the points inherit the descriptors, so the folder stays locked as long as one of these
        processes runs, even if this process is killed.

        Raises:
          UserError: another runner holds the lock.
        """
        with (self._workdir / "lock").open("a") as lock:
            require(
                lock_file(lock, self._workdir),
                f"{self._workdir}: another runner, or a point it left, is at work there: wait for "
                "it or stop it",
            )
            yield (lock.fileno(),)

    def log_path(self, point: str) -> pathlib.Path:
        """Returns the local file for the output of a point."""
        return self._workdir / "points" / point / "log.txt"

    def store_ended_log(self, point: str) -> None:
        """Does nothing, because the log of a point is written into the folder of the sweep."""


class BucketFolder:
    """The folder of a sweep in a bucket, with the same methods as `LocalFolder`."""

    def __init__(self, workdir: BucketPath):
        self._workdir = workdir
        self._logs = tempfile.TemporaryDirectory()

    @contextlib.contextmanager
    def locked(self) -> Iterator[tuple[int, ...]]:
        """Holds the lock of the folder, which is a lease in the bucket. Yields (), because the
        processes of the points cannot inherit a lease.
        """
        with Lease(self._workdir, self._workdir.patience_seconds) as lease:
            lease.run_locked(lambda: None)
            yield ()

    def log_path(self, point: str) -> pathlib.Path:
        return pathlib.Path(self._logs.name) / point / "log.txt"

    def store_ended_log(self, point: str) -> None:
        """Uploads the log of a point that has ended into the bucket."""
        target = self._workdir / "points" / point / "log.txt"
        target.upload(self.log_path(point))


def open_sweep_folder(workdir: Any) -> LocalFolder | BucketFolder:
    """Returns the folder of the sweep at the path `workdir`."""
    return BucketFolder(workdir) if isinstance(workdir, BucketPath) else LocalFolder(workdir)
