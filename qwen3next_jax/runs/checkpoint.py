"""Writes, verifies, deletes and reads the checkpoints of a run.

    WORKDIR/checkpoints/STEP/   train state after STEP steps, with a manifest (`runs.manifest`)
    WORKDIR/frozen/             the parameters that the run does not change, with a manifest
    WORKDIR/damaged/            checkpoints that a resume found damaged

Orbax writes the arrays in a background thread. A checkpoint is complete once it has its manifest.

Parameters that are frozen as a whole are written once, to WORKDIR/frozen, before the first
checkpoint. The file frozen.json of a checkpoint lists their paths, and has the digest of that
folder's manifest. A checkpoint without this file holds the whole state; so do all checkpoints in
buckets.
"""

import concurrent.futures
import fnmatch
import json
import logging
import math
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.errors import (
    ExitCode,
    UserError,
    one_line,
    require,
    warn,
)
from qwen3next_jax.common.storage import BucketPath, to_path
from qwen3next_jax.common.trees import join, map_leaves
from qwen3next_jax.config import CheckpointConfig, Config, ModelConfig
from qwen3next_jax.model import Qwen3Next, declared
from qwen3next_jax.model.adapter_names import is_adapter
from qwen3next_jax.processes.distributed import broadcast_from_process_0, is_process_0
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.folder import (
    check_checkpoints_not_lost,
    config_of,
    not_writable,
    read_run,
    run_id,
    saved_steps,
)
from qwen3next_jax.runs.versions import check_versions
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.sharding.rules import tree_shardings
from qwen3next_jax.training.average import without_paths
from qwen3next_jax.training.parameter_groups import make_parameter_groups
from qwen3next_jax.training.state import State, abstract_model

# Orbax logs every directory that it touches as a warning.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
# After a failed save Orbax leaves tasks unfinished, and asyncio logs a traceback for each.
# `Checkpoints` reports the failure itself.
logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())


def _print_unraisable(error: Any) -> None:
    """Prints an exception that could not be raised, except those of TensorStore's threads after a
    failed save: each write that ends then reports to an event loop that Orbax has closed.
    """
    if str(error.exc_value) != "Event loop is closed":
        _print_before(error)


_print_before, sys.unraisablehook = sys.unraisablehook, _print_unraisable

# The prefix of the name of a checkpoint that is being deleted. The folder is renamed before its
# files are removed, so no reader finds a checkpoint without some of its files.
_DELETED = ".deleted-"
# The errors that Orbax and TensorStore raise if a disk is full or not mounted.
SAVE_ERRORS = (OSError, ValueError, RuntimeError)


class Checkpoints:
    """The checkpoints of one run. `save` returns at once; leaving the `with` block waits for the
    last save.

    A checkpoint is valid if it has a manifest and its files match the manifest. A resume skips all
    other checkpoints and reports them. If a save fails, training continues, and `events` reports
    the failure; in a run of several processes, the run ends. Nothing is written before `begin` is
    called.

    Old checkpoints are deleted. The run keeps the newest `keep_last` valid checkpoints, and the
    checkpoints whose step is a multiple of `keep_every` or the end of a stage. When a checkpoint is
    complete, the background thread verifies the previous checkpoint again. If that is damaged, it
    is not one of the `keep_last`, and an older checkpoint is kept in its place.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        retention: CheckpointConfig | None = None,
        keep_steps: Container[int] = (),
        frozen_paths: frozenset[str] = frozenset(),
    ):
        """Opens the checkpoints of the run in `workdir`.

        Args:
          retention: the settings that say which checkpoints to keep; None if the caller only reads
            checkpoints.
          keep_steps: steps whose checkpoints are never deleted.
          frozen_paths: the paths of the parameters that the run does not change.
        """
        self.directory = to_path(workdir).absolute() / "checkpoints"
        self._retention, self._keep_steps = retention, keep_steps
        self._frozen_paths = frozen_paths
        self._frozen = self.directory.parent / "frozen"
        self._checkpointer = make_checkpointer(isinstance(self.directory, BucketPath))
        self._background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: tuple[int, concurrent.futures.Future] | None = None
        self._events: list[tuple[str, int, dict[str, Any]]] = []
        # the step that was last found valid, and the digest of its manifest
        self._verified: tuple[int, str | None] | None = None
        # steps whose checkpoints were read again, and found valid, after a later one was complete
        self._reread: set[int] = set()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.wait()
        self._background.shutdown()
        self._checkpointer.close()

    def steps(self) -> list[int]:
        """Returns, in ascending order, the steps with a checkpoint folder, whether valid or not."""
        return saved_steps(self.directory.parent)

    def newest_good_step(self) -> int | None:
        """Returns the newest step whose checkpoint is valid; None if there is none. Process 0 reads
        the files, warns of newer damaged checkpoints, and sends the result to the other processes.

        Raises:
          UserError: the run had checkpoints, and none of them is valid (see
            `check_checkpoints_not_lost`).
        """
        verified = broadcast_from_process_0(self._find_newest_good)
        self._verified = verified and tuple(verified)
        return verified and verified[0]

    def _find_newest_good(self) -> tuple[int, str | None] | None:
        """Returns the newest step whose checkpoint is valid, and the digest of its manifest; None
        if there is none. Warns of each newer checkpoint, which is damaged.
        """
        for step in reversed(self.steps()):
            # The digest is read before the files, so it belongs to the files that are verified.
            digest = manifest.digest(self.directory / str(step))
            damage = self._find_damage(step)
            if damage is None:
                return step, digest
            warn(f"{self.directory / str(step)} is skipped: {damage}")
            self._events.append(("damaged", step, {"reason": damage}))
        if self._retention is not None:
            check_checkpoints_not_lost(self.directory.parent)
        return None

    def begin(self, newest_good: int) -> None:
        """Prepares the folder for the checkpoints after step `newest_good`, the newest valid step.

        Moves the damaged checkpoints after that step to WORKDIR/damaged, and removes the files that
        a killed save left behind. Process 0 does this for all processes, which therefore have to
        see the same folder.

        Raises:
          UserError: the folder cannot be written to.
        """

        def clear() -> None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers()
                for step in self.steps():
                    if step > newest_good:
                        self._move_aside(step)
            except OSError as error:
                raise not_writable(self.directory.parent, error) from error

        broadcast_from_process_0(clear)

    def save(self, step: int, state: State, may_skip: bool = False) -> None:
        """Waits for the previous save, and then starts to save `state` in the background. `events`
        reports the result later. If the step already has a checkpoint folder, nothing is saved.

        Args:
          may_skip: whether a run in a bucket may leave this save out, and report that, if the
            previous one is not complete; a file system is waited for.

        Raises:
          UserError: a save failed, and the run has several processes.
        """
        self.wait()
        if broadcast_from_process_0(lambda: step in self.steps()):
            return
        start_time = time.perf_counter()
        try:
            if self._frozen_paths:
                state = self._without_frozen(state)
            self._checkpointer.save(
                OrbaxPath(self.directory / str(step)),
                args=ocp.args.PyTreeSave(with_text_keys(state)),
            )
        except SAVE_ERRORS as error:
            self._report_failure(step, error)
            return
        expected = count_chunks(state)
        self._saving = (step, self._background.submit(self._finish, step, start_time, expected))

    def wait(self) -> None:
        """Waits until the last save is complete, with its manifest, or has failed."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving[1]])
            self._collect()

    def events(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Returns the events since the last call, as (event, step, values). The events are
        "checkpoint", "save_failed" and "damaged". Does not wait for a save.
        """
        if self._saving is not None and self._saving[1].done():
            self._collect()
        events, self._events = self._events, []
        return events

    def restore(
        self, step: int, abstract_state: State, partial: bool = False, digest: str | None = None
    ) -> State:
        """Reads the state after `step` steps.

        Args:
          abstract_state: the structure, dtypes and shardings of the result.
          partial: whether `abstract_state` may be a part of the saved state, such as the parameters
            without the optimizer's moments.
          digest: the expected `manifest.digest` of the checkpoint, or its first digits; None
            accepts any digest.

        Raises:
          UserError: there is no such checkpoint, it is damaged, it belongs to another model, it has
            another digest, or it changed while it was read.
        """
        where = self.directory / str(step)
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{where}: no such checkpoint; saved steps: {known}")
        # The folder may belong to another run, which may delete old checkpoints during the read.
        before = manifest.file_stats(where)
        actual_digest = manifest.digest(where)
        if digest is not None and not (actual_digest or "").startswith(digest):
            raise UserError(
                f"{where}: not the checkpoint with the digest {digest} that this run found before: "
                "removed or replaced since: put it back, or start in a new --workdir from a "
                "checkpoint that is not deleted"
            )
        if (step, actual_digest) != self._verified and (damage := self._find_damage(step)):
            raise UserError(f"{where}: damaged: {damage}")
        self._verified = step, actual_digest  # so reading it in parts digests its files once
        try:
            state = self._read_state(where, abstract_state, partial)
        finally:  # this error replaces an error that the reader raised because files changed
            if manifest.file_stats(where) != before:
                raise UserError(
                    f"{where}: removed or replaced while it was read: start again from a "
                    "checkpoint that is not deleted (the run that wrote it deletes old ones)"
                )
        return state

    # ---- in the background

    def _finish(
        self, step: int, start_time: float, expected: int
    ) -> list[tuple[str, int, dict[str, Any]]]:
        """Waits for Orbax, writes the manifest, and deletes old checkpoints. Returns the events
        (event, step, values) to record.

        Args:
          start_time: `time.perf_counter` at the start of the save.
          expected: `count_chunks` of the state.
        """
        self._checkpointer.wait_until_finished()
        if not is_process_0():
            return []
        folder = self.directory / str(step)
        check_chunks(folder, expected)
        if self._frozen_paths:
            paths = sorted(self._frozen_paths)
            record = {"manifest": manifest.digest(self._frozen), "parameters": paths}
            (folder / manifest.FROZEN).write_text(json.dumps(record, indent=1))
        size = manifest.write_manifest(folder, step, run_id(self.directory.parent))
        saved = (
            "checkpoint",
            step,
            {"seconds": round(time.perf_counter() - start_time, 3), "bytes": size},
        )
        try:
            return [saved, *self._delete_old(step)]
        # For example, NFS does not remove a folder with a file that is still open. The new
        # checkpoint is complete all the same.
        except OSError as error:
            warn(
                f"{self.directory}: an old checkpoint could not be deleted ({error}); the next "
                "start removes its remaining files"
            )
            return [saved]

    def _delete_old(self, newest: int) -> list[tuple[str, int, dict[str, Any]]]:
        """Deletes the checkpoints that retention does not keep. Returns a "damaged" event for each
        damaged checkpoint that it finds. `newest` is the step whose checkpoint was just completed.
        """
        events, good = [], 0
        for step in reversed(self.steps()):
            if good < self._retention.keep_last:
                damage = None
                if step != newest:
                    damage = self._find_damage(step, sizes_only=step in self._reread)
                if damage is None:
                    good += 1
                    self._reread |= {step} - {newest}
                else:
                    events.append(("damaged", step, {"reason": damage}))
            elif not self._keeps(step):
                self._delete(step)
        return events

    def _keeps(self, step: int) -> bool:
        """Whether the checkpoint of this step is never deleted."""
        every = self._retention.keep_every
        return step in self._keep_steps or bool(every and step % every == 0)

    # ---- frozen parameters

    def _without_frozen(self, state: State) -> State:
        """Returns `state` without the frozen parameters. Writes them, unless an earlier save of
        this run did.
        """
        trained, frozen = _split(state, self._frozen_paths)
        run = run_id(self.directory.parent)

        def clear() -> bool:
            if manifest.find_damage(self._frozen, sizes_only=True, run=run) is None:
                return False
            shutil.rmtree(self._frozen, ignore_errors=True)
            return True

        if broadcast_from_process_0(clear):
            write_arrays(self._frozen, frozen)
            if is_process_0():
                check_chunks(self._frozen, count_chunks(frozen))
                manifest.write_manifest(self._frozen, run=run)
        return trained

    def _read_state(self, where: pathlib.Path, abstract_state: State, partial: bool) -> State:
        """Reads the arrays of the checkpoint in `where`, and the frozen parameters.

        Raises:
          UserError: the frozen parameters are damaged, or those of another run.
        """
        if not (where / manifest.FROZEN).is_file():
            return read_arrays(manifest.arrays_folder(where), abstract_state, partial)
        record = manifest.read_frozen_record(where)
        trained, frozen = _split(abstract_state, frozenset(record["parameters"]))
        require(
            manifest.digest(self._frozen) == record["manifest"],
            f"{self._frozen}: not the frozen parameters with which {where} was trained (their "
            "digest differs): put back the folder that was written with this run",
        )
        if damage := manifest.find_damage(self._frozen):
            raise UserError(f"{self._frozen}: damaged: {damage}")
        state = read_arrays(where, trained, partial) if trained else {}
        if not frozen:
            return state
        return join(state, read_arrays(self._frozen, frozen, partial=True))

    # ---- files

    def _delete(self, step: int) -> None:
        renamed = self.directory / f"{_DELETED}{step}"
        os.rename(self.directory / str(step), renamed)
        shutil.rmtree(renamed)

    def _find_damage(self, step: int, sizes_only: bool = False) -> str | None:
        return manifest.find_damage(
            self.directory / str(step), sizes_only, run_id(self.directory.parent)
        )

    def _collect(self) -> None:
        """Records the events, or the failure, of the save that has ended."""
        (step, future), self._saving = self._saving, None
        error = future.exception()
        if isinstance(error, SAVE_ERRORS):
            self._report_failure(step, error)
        else:
            self._events += future.result()

    def _report_failure(self, step: int, error: BaseException) -> None:
        """Reports a failed save and removes its files.

        Raises:
          UserError: the run has several processes.
        """
        reason = " ".join(str(error).split())[:200]
        # Other processes may have saved; only a new start brings all processes to the same state.
        if jax.process_count() > 1:
            raise UserError(
                f"{self.directory / str(step)} could not be saved ({reason}); the older "
                "checkpoints are unchanged: make room, and start all processes again",
                ExitCode.NOT_SAVED,
            ) from error
        warn(
            f"{self.directory / str(step)} could not be saved ({reason}); training continues, "
            "and the older checkpoints are unchanged"
        )
        self._events.append(("save_failed", step, {"reason": reason}))
        self._checkpointer = make_checkpointer()  # the old one may still hold the error
        shutil.rmtree(self.directory / str(step), ignore_errors=True)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Removes the files that a killed or failed save, or a killed deletion, left behind."""
        for path in self.directory.iterdir():
            if path.name.startswith(_DELETED) or "orbax-checkpoint-tmp" in path.name:
                shutil.rmtree(path, ignore_errors=True)

    def _move_aside(self, step: int) -> None:
        """Moves a checkpoint to WORKDIR/damaged, and keeps only the newest `keep_last` checkpoints
        there; otherwise a run that is killed often would fill the disk.
        """
        target = self.directory.parent / "damaged" / f"{step}-{time.time_ns()}"
        target.parent.mkdir(exist_ok=True)
        os.rename(self.directory / str(step), target)
        moved = [  # folders with other names are not from this method, and are left alone
            path
            for path in target.parent.iterdir()
            if re.fullmatch("[0-9]+-[0-9]+", path.name) and path.is_dir()
        ]
        moved.sort(key=lambda path: [int(part) for part in path.name.split("-")])
        for old in moved[: -self._retention.keep_last]:
            shutil.rmtree(old, ignore_errors=True)


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


def check_chunks(folder: pathlib.Path | BucketPath, expected: int) -> None:
    """Checks that the index of the arrays in `folder`, by which they are read, names all chunks.

    Args:
      expected: `count_chunks` of the state that was written.

    Raises:
      OSError: chunks are missing, or the index cannot be read.
    """
    base = {"driver": "file", "path": f"{folder}/"}
    if isinstance(folder, BucketPath):
        base = {"driver": "gcs", "bucket": folder.bucket, "path": f"{folder.key}/"}
    try:
        index = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
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
    if isinstance(folder, BucketPath):
        require(folder.scheme == "gs", f"{folder}: Orbax reads no checkpoints from s3://")
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


def _split(state: State, frozen_paths: frozenset[str]) -> tuple[State, State]:
    """Returns (`state` without the parameters at these paths, a state with these alone). A state
    without parameters has no entry "params", because Orbax reads no empty dict.
    """

    def only(frozen: bool) -> dict:
        keep = lambda path, leaf: leaf if (path in frozen_paths) == frozen else None
        params = map_leaves(keep, state["params"])
        return {"params": params} if params else {}

    if "params" not in state:
        return state, {}
    others = {name: value for name, value in state.items() if name != "params"}
    return others | only(False), only(True)


class TrainedModel(NamedTuple):
    """A model from a checkpoint of a run.

    Attributes:
      model: the model with its trained parameters.
      step: number of steps for which the model was trained.
      digest: the digest of the checkpoint's manifest, which identifies the weights.
    """

    model: Qwen3Next
    step: int
    digest: str


class TrainedAdapters(NamedTuple):
    """The adapters of a run (`model.lora`), without the matrices that they adapt.

    Attributes:
      config: the settings of the model.
      adapters: nested dict of NumPy arrays.
      step: number of steps for which the adapters were trained.
      base_digest: the digest of the manifest of WORKDIR/frozen, which identifies the matrices; ""
        if the checkpoint holds them itself.
    """

    config: ModelConfig
    adapters: dict
    step: int
    base_digest: str


def load_adapters(
    workdir: pathlib.Path, step: int | None = None, ema: bool = False
) -> TrainedAdapters:
    """Loads the adapters from a checkpoint of the run in `workdir`.

    Args:
      step: number of steps after which the checkpoint was saved; None: the newest valid one.
      ema: whether to load their moving average (`train.ema`) instead.

    Raises:
      UserError: the model has no adapters, or the checkpoint cannot be loaded or has no average.
    """
    run_config = config_of(read_run(workdir), workdir)
    config = run_config.model
    require(config.lora.rank > 0, f"{workdir}: its model has no adapters (model.lora.rank = 0)")
    _, params = abstract_model(config)
    adapters = map_leaves(lambda path, leaf: leaf if is_adapter(path) else None, params)
    wanted = _entries_of_params(workdir, run_config, adapters, ema)
    shardings = tree_shardings(wanted, declared(config), single_device_mesh())
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        wanted,
        shardings,
    )
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.newest_good_step() if step is None else step
        require(step is not None, f"{workdir}: no valid checkpoint")
        state = jax.device_get(checkpoints.restore(step, abstract, partial=True))
    record = checkpoints.directory / str(step) / manifest.FROZEN
    digest = manifest.read_frozen_record(record.parent)["manifest"] if record.is_file() else ""
    return TrainedAdapters(config, _params_of_entries(state), step, digest)


def _entries_of_params(workdir: pathlib.Path, config: Config, params: dict, ema: bool) -> State:
    """Returns the step and the entries of the train state that hold `params`, or with `ema` their
    moving average; for both, parameters that are frozen as a whole are in "params".

    Raises:
      UserError: the run has no average.
    """
    step = {"step": jax.ShapeDtypeStruct((), np.int32)}
    if not ema:
        return step | {"params": params}
    require(
        config.train.ema > 0,
        f"{workdir}: its run keeps no average of its parameters (train.ema = 0): leave out --ema",
    )
    groups = make_parameter_groups(config.model, config.train.freeze, config.optimizer)
    frozen_paths = groups.frozen_paths
    frozen = map_leaves(lambda path, leaf: leaf if path in frozen_paths else None, params)
    average = {"average": without_paths(params, frozen_paths)}
    return step | {"ema": average} | ({"params": frozen} if frozen else {})


def _params_of_entries(state: State) -> dict:
    """Undoes `_entries_of_params`, for the arrays that were read."""
    return join(state.get("params", {}), state.get("ema", {}).get("average", {}))


def load_trained(
    workdir: pathlib.Path,
    step: int | None = None,
    mesh: Mesh | None = None,
    record: dict[str, Any] | None = None,
    merge: bool = True,
    ema: bool = False,
) -> TrainedModel:
    """Loads the model from a checkpoint of the run in `workdir`.

    Args:
      step: number of steps after which the checkpoint was saved; None: the newest valid one.
      mesh: the devices over which the parameters are sharded; None: one device.
      record: the content of run.json; None if the caller has not read it.
      merge: whether to add the products of adapters (`model.lora`) to their matrices, so that the
        model has no adapters.
      ema: whether to load the moving average of the parameters (`train.ema`) instead.

    Raises:
      UserError: the checkpoint cannot be loaded or has no average, or another run has replaced this
        one since `record` was read.
    """
    record = read_run(workdir) if record is None else record
    config = config_of(record, workdir)
    check_versions(workdir, record, config.model)
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.newest_good_step() if step is None else step
        # `restore` verifies this digest, so the weights come from the run of `record`.
        where = checkpoints.directory / str(step)
        digest = manifest.digest(where)
        require(
            run_id(workdir) == record["id"],
            f"{workdir}: another run replaced it while it was read: start again",
        )
        if step is None:
            raise UserError(
                f"{workdir}: no valid checkpoint; let the run reach its first one "
                f"(checkpoint.every = {config.checkpoint.every})"
            )
        graphdef, params = abstract_model(config.model)
        wanted = _entries_of_params(workdir, config, params, ema)
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            wanted,
            tree_shardings(
                wanted, declared(config.model), single_device_mesh() if mesh is None else mesh
            ),
        )
        state = checkpoints.restore(step, abstract, partial=True, digest=digest)
        leaves, tree = jax.tree.flatten(_params_of_entries(state))
        del state
    # Restored arrays are committed to their device. jit would compile a function for them even if
    # it has compiled the function for uncommitted arrays, so uncommitted copies replace the arrays.
    if mesh is None:
        # one at a time, because the device may not have memory for two copies of all arrays
        for i, leaf in enumerate(leaves):
            leaves[i] = jax.device_put(jax.device_get(leaf))
    digest = digest or manifest.digest(where)  # the manifest may have been written since
    model = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
    if merge and config.model.lora.rank:
        from qwen3next_jax.model.adapters import merged_model

        model = merged_model(model)
    return TrainedModel(model, step, digest)
