"""Writes and reads the arrays of a train state with Orbax, in a folder on a disk or in a bucket."""

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
    """Prints an exception that Python could not raise (`sys.unraisablehook`), but not the error
    "Event loop is closed". TensorStore's threads cause this error after a failed save, when they
    report the end of their writes to an event loop that Orbax has closed.
    """
    if str(error.exc_value) != "Event loop is closed":
        _previous_hook(error)


_previous_hook, sys.unraisablehook = sys.unraisablehook, _print_unraisable

# The errors that Orbax and TensorStore raise if a disk is full or not mounted.
SAVE_ERRORS = (OSError, ValueError, RuntimeError)


@epath.register_path_cls
class OrbaxPath(type(epath.Path("/"))):
    """A subclass of `epath.Path` with another method `glob`. The class is registered, so Orbax gets
    it wherever Orbax makes a path.

    Orbax finds the files of each process with `glob`. `epath.Path.glob` treats the whole path as a
    pattern. So in a folder named `lr=[0.1]`, `epath.Path.glob` finds nothing, and Orbax writes a
    checkpoint without an index; in a folder named `a*`, `epath.Path.glob` also finds the files of
    other runs.
    """

    def glob(self, pattern: str) -> Iterator["OrbaxPath"]:
        """Yields the files and folders in this folder whose names match `pattern`. Does not support
        "**".
        """
        folder, _, pattern = pattern.rpartition("/")
        folder_path = self / folder
        for path in folder_path.iterdir() if folder_path.is_dir() else ():
            if fnmatch.fnmatchcase(path.name, pattern):
                yield path


def make_checkpointer(in_background: bool = False) -> ocp.AsyncCheckpointer:
    """Returns Orbax's writer and reader of checkpoints.

    Args:
      in_background: whether a thread uses the checkpointer while another thread runs train steps.
        With `in_background`, processes wait for each other through JAX's coordinator. A program on
        the devices would be no safe barrier: two processes could run it between different train
        steps.
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
    """Writes `state` to the new `folder`, and waits until all arrays are on the disk."""
    with make_checkpointer() as checkpointer:
        checkpointer.save(OrbaxPath(folder), args=ocp.args.PyTreeSave(with_text_keys(state)))


def count_chunks(state: State) -> int:
    """Returns the least number of entries that the index of a checkpoint of `state` has. Each array
    has one entry for its description and one for each chunk; a chunk is a shard.
    """
    count = 0
    for leaf in jax.tree.leaves(state):
        count += 1
        if leaf.size:
            is_sharded = isinstance(leaf, jax.Array)
            shard = leaf.sharding.shard_shape(leaf.shape) if is_sharded else leaf.shape
            count += leaf.size // math.prod(shard)
    return count


def check_chunks(folder_spec: dict[str, Any], expected_chunks: int) -> None:
    """Checks that Orbax's index of the arrays in a folder names all chunks of the arrays.

    Args:
      folder_spec: TensorStore's specification of the folder.
      expected_chunks: `count_chunks` of the state that was written.

    Raises:
      OSError: chunks are missing, or the index cannot be read.
    """
    try:
        index = tensorstore.KvStore.open({"driver": "ocdbt", "base": folder_spec}).result()
        found = len(index.list().result())
    except ValueError as error:
        raise OSError(f"Orbax's index cannot be read: {one_line(str(error))}") from error
    if found < expected_chunks:
        raise OSError(f"Orbax's index names {found} of {expected_chunks} chunks")


def read_arrays(folder: pathlib.Path, abstract_state: State, partial: bool = False) -> State:
    """Reads the arrays in `folder`. Does not verify digests.

    Args:
      abstract_state: the structure, dtypes and shardings of the result.
      partial: whether `folder` may hold more arrays than `abstract_state` has; they are not read.

    Raises:
      UserError: the saved arrays have another structure than `abstract_state`, or cannot be read.
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
    return with_original_keys(restored, abstract_state)


def with_text_keys(state: Any) -> Any:
    """Returns `state` with every dict key converted to text. The keys of an nnx List are ints, and
    Orbax stores only text keys.
    """
    if type(state) is dict:
        return {str(key): with_text_keys(value) for key, value in state.items()}
    if isinstance(state, tuple):
        values = [with_text_keys(value) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else tuple(values)
    return state


def with_original_keys(restored: Any, pattern: Any) -> Any:
    """Returns `restored` with the keys of `pattern` in place of the text keys that `with_text_keys`
    made. The function matches leaves by key and not by order, because the text "10" sorts before
    "2".
    """
    if type(pattern) is dict:
        return {
            key: with_original_keys(restored[str(key)], value) for key, value in pattern.items()
        }
    if isinstance(pattern, tuple):
        values = [with_original_keys(a, b) for a, b in zip(restored, pattern, strict=True)]
        return type(pattern)(*values) if hasattr(pattern, "_fields") else tuple(values)
    return restored
