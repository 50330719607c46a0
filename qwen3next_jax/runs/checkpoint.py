"""The checkpoints of a run: written in the background (Orbax), sealed with digests, verified,
kept or deleted, read back.

WORKDIR/checkpoints/STEP/     train state after STEP steps, sealed by a manifest of digests (see
`manifest`)
WORKDIR/damaged/              checkpoints that were found damaged on resume
"""

import concurrent.futures
import logging
import os
import pathlib
import re
import shutil
import time
from collections.abc import Container
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.errors import ExitCode, UserError, require, warn
from qwen3next_jax.config import CheckpointConfig, Config
from qwen3next_jax.model import Qwen3Next, declared
from qwen3next_jax.processes.distributed import broadcast_from_process_0, is_process_0
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.folder import (
    check_nothing_lost,
    config_of,
    read_run,
    run_id,
    saved_steps,
    unwritable,
)
from qwen3next_jax.runs.versions import check_versions
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.sharding.rules import tree_shardings
from qwen3next_jax.training.state import State, abstract_model

# Orbax reports every directory it touches at the level of a warning.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
# After a failed save it leaves tasks behind, of which asyncio tells at length; the failure itself
# is told by `Checkpoints`.
logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())

# a checkpoint loses its name before its files, so that half of one is never found
_DELETED = ".deleted-"
# what Orbax and TensorStore raise for a disk that is full or gone
_SAVE_ERRORS = (OSError, ValueError, RuntimeError)


class Checkpoints:
    """The checkpoints of one run. Saving returns at once; leaving the `with` block waits for the
    last save.

    A checkpoint counts once it is sealed: a damaged or unsealed one is passed over, and said to
    be. A save that fails is told, not raised: training goes on, and the older checkpoints stay.
    Nothing is written before `begin`.

    Retention keeps the newest `keep_last` whole checkpoints, and those at multiples of
    `keep_every` and at the ends of stages. Each is read once more, in the background, when the
    next one is sealed: one that has been damaged since then does not count, and an older one is
    kept in its place.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        keep: CheckpointConfig | None = None,
        keep_steps: Container[int] = (),
    ):
        """`keep` None opens them for reading. `keep_steps`: whose checkpoints stay, too."""
        self.directory = pathlib.Path(workdir).absolute() / "checkpoints"
        self._keep, self._keep_steps = keep, keep_steps
        self._checkpointer = _checkpointer()
        self._background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: tuple[int, concurrent.futures.Future] | None = None
        self._events: list[tuple[str, int, dict[str, Any]]] = []
        # the newest good step, and the digest of what was found good
        self._found_good: tuple[int, str | None] | None = None
        self._read_again: set[int] = set()  # kept ones that were whole after a later one was sealed

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.wait()
        self._background.shutdown()
        self._checkpointer.close()

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending; whether they are whole is another question."""
        return saved_steps(self.directory.parent)

    def newest_good_step(self) -> int | None:
        """The newest step whose checkpoint is whole; newer damaged ones are reported on standard
        error. Process 0 looks, and tells the others.

        Raises:
          UserError: the run that trains here has been saved, but nothing whole is left (see
          `check_nothing_lost`).
        """
        found = broadcast_from_process_0(self._find_good)
        self._found_good = found and tuple(found)
        return found and found[0]

    def _find_good(self) -> tuple[int, str | None] | None:
        for step in reversed(self.steps()):
            digest = manifest.digest(self.directory / str(step))  # of what is looked at next
            damage = self._damage(step)
            if damage is None:
                return step, digest
            warn(f"{self.directory / str(step)} is passed over: {damage}")
            self._events.append(("damaged", step, {"reason": damage}))
        if self._keep is not None:
            check_nothing_lost(self.directory.parent)
        return None

    def begin(self, first_step: int) -> None:
        """Makes room for the checkpoints after `first_step`, the newest good one: what lies
        there is damaged, and is moved to WORKDIR/damaged; what a killed save left is removed.
        The folder must be the same one to all processes.
        """

        def clear() -> None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers()
                for step in self.steps():
                    if step > first_step:
                        self._move_aside(step)
            except OSError as error:
                raise unwritable(self.directory.parent, error) from error

        broadcast_from_process_0(clear)

    def save(self, step: int, state: State) -> None:
        """Starts to save; waits for the save before to be complete. Its outcome is told by
        `events`.
        """
        self.wait()
        if broadcast_from_process_0(lambda: step in self.steps()):
            return
        begun = time.perf_counter()
        try:
            self._checkpointer.save(
                self.directory / str(step), args=ocp.args.PyTreeSave(with_text_keys(state))
            )
        except _SAVE_ERRORS as error:
            self._failed(step, error)
            return
        self._saving = (step, self._background.submit(self._finish, step, begun))

    def wait(self) -> None:
        """Returns once the last save is complete and sealed, or has failed."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving[1]])
            self._collect()

    def events(self) -> list[tuple[str, int, dict[str, Any]]]:
        """What happened since the last call, as (event, step, values): "checkpoint",
        "save_failed", "damaged". Cheap.
        """
        if self._saving is not None and self._saving[1].done():
            self._collect()
        told, self._events = self._events, []
        return told

    def restore(
        self, step: int, abstract_state: State, whole: bool = True, digest: str | None = None
    ) -> State:
        """The state saved after `step` steps, in the structure, dtypes and shardings of
        `abstract_state`, which may be a part of it (the parameters without the optimizer's
        moments) where `whole` is False.

        Args:
          digest: what `manifest.digest` of the checkpoint, or its first digits, must be.

        Raises:
          UserError: there is no such checkpoint, it is damaged, it belongs to another model, it
          is not the one of `digest`, or it changed while it was read.
        """
        where = self.directory / str(step)
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{where}: no such checkpoint; saved steps: {known}")
        # The folder may be another run's, which deletes old checkpoints while this one reads.
        before = manifest.stamp(where)
        found = manifest.digest(where)
        if digest is not None and not (found or "").startswith(digest):
            raise UserError(
                f"{where}: not the checkpoint of which this run took the digest {digest}: it was "
                "removed or replaced since: put it back, or begin a new --workdir with a "
                "checkpoint that stays"
            )
        if (step, found) != self._found_good and (damage := self._damage(step)):
            raise UserError(f"{where}: damaged: {damage}")
        try:
            state = read_arrays(where, abstract_state, whole)
        finally:  # whatever the reader made of files that changed under its hands
            if manifest.stamp(where) != before:
                raise UserError(
                    f"{where}: removed or replaced while it was read: start again, with a "
                    "checkpoint that stays (the run that wrote it deletes old ones)"
                )
        # older manifests do not name it
        if "step" in state and (held := int(state["step"])) != step:
            raise UserError(
                f"{where}: it holds the state after step {held}: the folder was renamed or "
                "copied; give it its name back, or remove it"
            )
        return state

    # ---- in the background

    def _finish(self, step: int, begun: float) -> list[tuple[str, int, dict[str, Any]]]:
        """Waits for Orbax, seals, and lets go of what need not be kept. → events."""
        self._checkpointer.wait_until_finished()
        if not is_process_0():
            return []
        size = manifest.write_manifest(
            self.directory / str(step), step, run_id(self.directory.parent)
        )
        saved = (
            "checkpoint",
            step,
            {"seconds": round(time.perf_counter() - begun, 3), "bytes": size},
        )
        try:
            return [saved, *self._delete_old(step)]
        # such as a file held open on NFS: that one stays, and what was just sealed is whole
        except OSError as error:
            warn(
                f"{self.directory}: an old checkpoint could not be deleted ({error}); what is "
                "left of it goes at the next start"
            )
            return [saved]

    def _delete_old(self, sealed: int) -> list[tuple[str, int, dict[str, Any]]]:
        events, good = [], 0
        for step in reversed(self.steps()):
            folder = self.directory / str(step)
            if good < self._keep.keep_last:
                damage = (
                    None
                    if step == sealed
                    else self._damage(step, sizes_only=step in self._read_again)
                )
                if damage is None:
                    good += 1
                    self._read_again |= {step} - {sealed}
                else:
                    events.append(("damaged", step, {"reason": damage}))
            elif step not in self._keep_steps and not (
                self._keep.keep_every and step % self._keep.keep_every == 0
            ):
                gone = self.directory / f"{_DELETED}{step}"
                os.rename(folder, gone)
                shutil.rmtree(gone)
        return events

    # ---- files

    def _damage(self, step: int, sizes_only: bool = False) -> str | None:
        return manifest.find_damage(
            self.directory / str(step), sizes_only, run_id(self.directory.parent)
        )

    def _collect(self) -> None:
        (step, future), self._saving = self._saving, None
        error = future.exception()
        if isinstance(error, _SAVE_ERRORS):
            self._failed(step, error)
        else:
            self._events += future.result()

    def _failed(self, step: int, error: BaseException) -> None:
        reason = " ".join(str(error).split())[:200]
        # what failed here may have worked elsewhere: only a new start makes all alike again
        if jax.process_count() > 1:
            raise UserError(
                f"{self.directory / str(step)} could not be saved ({reason}); the older "
                "checkpoints are as they were: make room, and start all processes again",
                ExitCode.NOT_SAVED,
            ) from error
        warn(
            f"{self.directory / str(step)} could not be saved ({reason}); training goes on, and "
            "the older checkpoints are as they were"
        )
        self._events.append(("save_failed", step, {"reason": reason}))
        self._checkpointer = _checkpointer()  # the old one may still hold the error
        shutil.rmtree(self.directory / str(step), ignore_errors=True)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Removes what a killed or failed save, or a killed deletion, left behind."""
        for path in self.directory.iterdir():
            if path.name.startswith(_DELETED) or "orbax-checkpoint-tmp" in path.name:
                shutil.rmtree(path, ignore_errors=True)

    def _move_aside(self, step: int) -> None:
        """Into damaged/, of which the newest `keep_last` stay: a run that is killed often would
        fill the disk with them.
        """
        target = self.directory.parent / "damaged" / f"{step}-{time.time_ns()}"
        target.parent.mkdir(exist_ok=True)
        os.rename(self.directory / str(step), target)
        found = [  # what has another name was put there by someone else
            path
            for path in target.parent.iterdir()
            if re.fullmatch("[0-9]+-[0-9]+", path.name) and path.is_dir()
        ]
        found.sort(key=lambda path: [int(part) for part in path.name.split("-")])
        for old in found[: -self._keep.keep_last]:
            shutil.rmtree(old, ignore_errors=True)


def _checkpointer() -> ocp.AsyncCheckpointer:
    # Weights hardly compress (8 %), and uncompressed arrays are saved and read twice as fast.
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def write_arrays(folder: pathlib.Path, state: State) -> None:
    """Writes `state` to the new `folder`, and waits for it."""
    with _checkpointer() as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(with_text_keys(state)))


def read_arrays(folder: pathlib.Path, abstract_state: State, whole: bool = True) -> State:
    """The arrays in `folder` in the structure, dtypes and shardings of `abstract_state`; where
    not `whole`, of those that it names. Digests are not looked at.

    Raises:
      UserError: they are of another structure.
    """
    pattern = with_text_keys(abstract_state)
    arguments = ocp.args.PyTreeRestore(
        item=pattern,
        restore_args=ocp.checkpoint_utils.construct_restore_args(pattern),
        partial_restore=not whole,
    )
    try:
        with _checkpointer() as checkpointer:
            restored = checkpointer.restore(folder, args=arguments)
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"{folder}: not a checkpoint of this model ({reason})") from error
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror or error})") from error
    return with_keys_of(restored, abstract_state)


def with_text_keys(state: Any) -> Any:
    """nnx numbers the entries of a List with ints; Orbax keeps only text keys, so both sides of
    it see text.
    """
    if type(state) is dict:
        return {str(key): with_text_keys(value) for key, value in state.items()}
    if isinstance(state, tuple):
        values = [with_text_keys(value) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else tuple(values)
    return state


def with_keys_of(restored: Any, pattern: Any) -> Any:
    """Undoes `with_text_keys`, key by key: as text "10" sorts before "2", so the order of leaves
    is not the same.
    """
    if type(pattern) is dict:
        return {key: with_keys_of(restored[str(key)], value) for key, value in pattern.items()}
    if isinstance(pattern, tuple):
        values = [with_keys_of(a, b) for a, b in zip(restored, pattern, strict=True)]
        return type(pattern)(*values) if hasattr(pattern, "_fields") else tuple(values)
    return restored


class Trained(NamedTuple):
    """A model from a checkpoint of a run.

    digest: of the checkpoint's manifest, and so of the weights.
    """

    model: Qwen3Next
    config: Config
    step: int
    digest: str


def load_trained(
    workdir: pathlib.Path,
    step: int | None = None,
    mesh: Mesh | None = None,
    record: dict[str, Any] | None = None,
) -> Trained:
    """A run's newest checkpoint, or the one after `step` steps.

    Args:
      mesh: the devices that share it; None: one device.
      record: the content of its run.json, where the caller has read it.

    Raises:
      UserError: it cannot be loaded, or another run took its place since `record` was read.
    """
    record = read_run(workdir) if record is None else record
    config = config_of(record, workdir)
    check_versions(workdir, record, config)
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.newest_good_step() if step is None else step
        # What has this digest is loaded, and it is a checkpoint of the run that `record` is of.
        where = checkpoints.directory / str(step)
        digest = manifest.digest(where)
        require(
            run_id(workdir) == record.get("id", ""),
            f"{workdir}: another run took its place while it was read: start again",
        )
        if step is None:
            raise UserError(
                f"{workdir}: no whole checkpoint; let the run reach its first one "
                f"(checkpoint.every = {config.checkpoint.every})"
            )
        graphdef, params = abstract_model(config.model)
        wanted = {"params": params, "step": jax.ShapeDtypeStruct((), np.int32)}
        abstract = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            wanted,
            tree_shardings(
                wanted, declared(config.model), single_device_mesh() if mesh is None else mesh
            ),
        )
        leaves, tree = jax.tree.flatten(
            checkpoints.restore(step, abstract, whole=False, digest=digest)["params"]
        )
    # restored arrays are committed to their device; committed and uncommitted inputs are different
    # programs to jit
    if mesh is None:
        # one after another, as there may not be room for all of them twice
        for i, leaf in enumerate(leaves):
            leaves[i] = jax.device_put(jax.device_get(leaf))
    digest = digest or manifest.digest(where)  # of one that was sealed since
    return Trained(nnx.merge(graphdef, jax.tree.unflatten(tree, leaves)), config, step, digest)
