"""Writes the folder of a run, on a disk or in a bucket. `store.store.RunStore` is the interface."""

import pathlib

from qwen3next_jax.common.storage import BucketPath, to_path
from qwen3next_jax.runs.store.local import LocalStore
from qwen3next_jax.runs.store.store import RunStore


def open_store(
    workdir: pathlib.Path | BucketPath, patience: float | None = None, is_owner: bool = True
) -> RunStore:
    """Returns the store of the run in `workdir`. Reads and writes nothing yet.

    Args:
      patience: the seconds for which a bucket may be unreachable before the process ends; None: the
        `patience_seconds` of the bucket's path.
      is_owner: whether this process takes the lock of the folder, as process 0 of a run does.
    """
    workdir = to_path(workdir)
    if not isinstance(workdir, BucketPath):
        return LocalStore(workdir)
    from qwen3next_jax.runs.store.bucket import BucketStore

    return BucketStore(
        workdir, workdir.patience_seconds if patience is None else patience, is_owner
    )
