"""Writes and reads the arrays of a train state with Orbax, to a folder or to one in a bucket."""

import fnmatch
import logging
import math
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from qwen3next_jax.common.errors import UserError, one_line, require
from qwen3next_jax.training.state import State

# Orbax logs every directory that it touches as a warning.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
# After a failed save Orbax leaves tasks unfinished, and asyncio logs a traceback for each.
# `CheckpointWriter` reports the failure itself.
logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())


def _print_unraisable(error: Any) -> None:
    """Prints an exception that could not be raised, except those of TensorStore's threads after a
    failed save: each write that ends then reports to an event loop that Orbax has closed.
    """
    if str(error.exc_value) != "Event loop is closed":
        _print_before(error)


_print_before, sys.unraisablehook = sys.unraisablehook, _print_unraisable

# The errors that Orbax and TensorStore raise if a disk is full or not mounted.
SAVE_ERRORS = (OSError, ValueError, RuntimeError)


@epath.register_path_cls
class OrbaxPath(type(epath.Path("/"))):
    """A folder as Orbax gets it: a local one, or one in a bucket.

    Orbax finds the files of each process with `glob`. That of `epath.Path` takes the whole path for
    a pattern: under a folder named `lr=[0.1]` it finds nothing, and Orbax writes a checkpoint
    without its index; under `a*` it finds the files of other runs, too.
    """

    def glob(self, pattern: str) -> Iterator["OrbaxPath"]:
        """Yields the files and folders in this folder whose names match; no "**"."""
        folder, _, pattern = pattern.rpartition("/")
        inside = self / folder
        for path in inside.iterdir() if inside.is_dir() else ():
            if fnmatch.fnmatchcase(path.name, pattern):
                yield path


def make_checkpointer(in_background: bool = False) -> ocp.AsyncCheckpointer:
    """Returns Orbax's writer and reader of checkpoints.

    Args:
      in_background: whether it is used in another thread than the train step. Then its barriers
        between processes go through the coordinator, because a program on the devices would come
        between the steps in another order on each process.
    """
    # Weights compress by 8 % only, and uncompressed arrays are saved and read twice as fast.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    if not in_background:
        return ocp.AsyncCheckpointer(handler)
    processes = set(range(jax.process_count()))
    return ocp.AsyncCheckpointer(
        handler,
        multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=processes),
    )


def write_arrays(folder: pathlib.Path, state: State) -> None:
    """Writes `state` to the new `folder`, and waits until it is on the disk."""
    with make_checkpointer() as checkpointer:
        checkpointer.save(OrbaxPath(folder), args=ocp.args.PyTreeSave(with_text_keys(state)))


def count_chunks(state: State) -> int:
    """Returns the number of entries that a checkpoint of `state` has at least: for each array its
    description and its chunks, one for each shard.
    """
    count = 0
    for leaf in jax.tree.leaves(state):
        count += 1
        if leaf.size:
            is_sharded = isinstance(leaf, jax.Array)
            shard = leaf.sharding.shard_shape(leaf.shape) if is_sharded else leaf.shape
            count += leaf.size // math.prod(shard)
    return count


def check_chunks(folder: dict[str, Any], expected: int) -> None:
    """Checks that the index of the arrays in a folder, by which they are read, names all chunks.

    Args:
      folder: TensorStore's specification of the folder.
      expected: `count_chunks` of the state that was written.

    Raises:
      OSError: chunks are missing, or the index cannot be read.
    """
    try:
        index = tensorstore.KvStore.open({"driver": "ocdbt", "base": folder}).result()
        found = len(index.list().result())
    except ValueError as error:
        raise OSError(f"Orbax's index cannot be read: {one_line(str(error))}") from error
    if found < expected:
        raise OSError(f"Orbax's index names {found} of {expected} chunks")


def read_arrays(folder: pathlib.Path, abstract_state: State, partial: bool = False) -> State:
    """Reads the arrays in `folder`, without verifying digests.

    Args:
      abstract_state: the structure, dtypes and shardings of the result.
      partial: whether `folder` may hold more arrays than `abstract_state` has; they are not read.

    Raises:
      UserError: the arrays have another structure, or cannot be read.
    """
    require(
        not os.fspath(folder).startswith("s3://"),
        f"{folder}: Orbax reads no checkpoints from s3://",
    )
    pattern = with_text_keys(abstract_state)
    arguments = ocp.args.PyTreeRestore(
        item=pattern,
        restore_args=ocp.checkpoint_utils.construct_restore_args(pattern),
        partial_restore=partial,
    )
    try:
        with make_checkpointer() as checkpointer:
            restored = checkpointer.restore(OrbaxPath(folder), args=arguments)
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"{folder}: not a checkpoint of this model ({reason})") from error
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror or error})") from error
    return with_keys_of(restored, abstract_state)


def with_text_keys(state: Any) -> Any:
    """Returns `state` with every dict key converted to text, because nnx numbers the entries of a
    List with ints, and Orbax stores only text keys.
    """
    if type(state) is dict:
        return {str(key): with_text_keys(value) for key, value in state.items()}
    if isinstance(state, tuple):
        values = [with_text_keys(value) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else tuple(values)
    return state


def with_keys_of(restored: Any, pattern: Any) -> Any:
    """Undoes `with_text_keys`: returns the values of `restored` under the keys of `pattern`.
    Leaves are matched by key and not by order, because as text "10" sorts before "2".
    """
    if type(pattern) is dict:
        return {key: with_keys_of(restored[str(key)], value) for key, value in pattern.items()}
    if isinstance(pattern, tuple):
        values = [with_keys_of(a, b) for a, b in zip(restored, pattern, strict=True)]
        return type(pattern)(*values) if hasattr(pattern, "_fields") else tuple(values)
    return restored
