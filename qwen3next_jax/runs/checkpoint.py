"""Reads and verifies the checkpoints of a run, and loads models from them.

    WORKDIR/checkpoints/STEP/   train state after STEP steps, with a manifest (`runs.manifest`)
    WORKDIR/frozen/             the parameters that the run does not change, with a manifest

`runs.store.checkpoints` writes both folders. A checkpoint that does not hold the whole state has a
file frozen.json. This frozen.json lists the paths of the parameters that are frozen as a whole and
therefore saved in WORKDIR/frozen, and has the digest of the manifest of WORKDIR/frozen. In a bucket
every checkpoint holds the whole state.

Four words say how far a checkpoint can be trusted; each includes the words above it:

    saved       its folder WORKDIR/checkpoints/STEP exists (`folder.saved_steps`)
    complete    it has a manifest, which is written last (`folder.complete_steps`)
    plausible   the manifest names this run and this step, and the names and sizes of the files are
                those in the manifest (`facts.newest_plausible_step`)
    valid       the content of all files has the digests in the manifest
                (`Checkpoints.newest_valid_step`, `Checkpoints.restore`)

A checkpoint is "damaged" if it is saved, but a check found that it is not plausible or not valid.
"""

import pathlib
from typing import Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.errors import UserError, require, warn
from qwen3next_jax.common.storage import BucketPath, to_path
from qwen3next_jax.common.trees import join_trees, map_leaves
from qwen3next_jax.config import Config, ModelConfig
from qwen3next_jax.model import Qwen3Next, parameter_declarations
from qwen3next_jax.model.adapter_names import is_adapter
from qwen3next_jax.processes.distributed import broadcast_from_process_0
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.folder import best_step, describe_lost_checkpoints, saved_steps
from qwen3next_jax.runs.record import RunRecord, read_config, read_record, run_id
from qwen3next_jax.runs.store.arrays import read_arrays
from qwen3next_jax.runs.versions import check_module_versions
from qwen3next_jax.sharding.mesh import single_device_mesh
from qwen3next_jax.sharding.rules import tree_shardings
from qwen3next_jax.training.average import without_paths
from qwen3next_jax.training.parameter_groups import make_parameter_groups
from qwen3next_jax.training.state import State, abstract_model

# Which checkpoint of a run to load: that of a step, that with the lowest held-out loss ("best"), or
# the newest valid checkpoint (None).
StepChoice = int | Literal["best"] | None


class Checkpoints:
    """Reads the checkpoints of one run. Use the class as a context manager, because the subclass
    `CheckpointWriter` waits for its last save at the end of the `with` block.
    """

    def __init__(self, workdir: pathlib.Path | BucketPath):
        """Finds the checkpoints of the run in `workdir`."""
        self.workdir = to_path(workdir).absolute()
        self.directory = self.workdir / "checkpoints"
        self._frozen = self.workdir / "frozen"
        # the step that was last found valid, and the digest of its manifest
        self._verified: tuple[int, str | None] | None = None

    def __enter__(self):
        return self

    def __exit__(self, *exception): ...

    def steps(self) -> list[int]:
        """Returns the steps whose checkpoints are saved, valid or not, in ascending order."""
        return saved_steps(self.workdir)

    def newest_valid_step(self) -> int | None:
        """Returns the newest step whose checkpoint is valid; None if there is none. Process 0 reads
        the files, warns of damaged checkpoints that are newer, and sends the result to the other
        processes.

        Raises:
          UserError: this object is a `CheckpointWriter`, and the run had checkpoints, but none of
            them is valid.
        """
        verified = broadcast_from_process_0(self._find_newest_valid)
        self._verified = verified and tuple(verified)
        return verified and verified[0]

    def _find_newest_valid(self) -> tuple[int, str | None] | None:
        """Returns (the newest step whose checkpoint is valid, the digest of its manifest); None if
        no checkpoint is valid. Warns of every checkpoint that is newer than the newest valid one,
        and therefore damaged.
        """
        for step in reversed(self.steps()):
            # The digest is read before the files, so it belongs to the files that are verified.
            digest = manifest.digest_of_manifest(self.directory / str(step))
            damage = self._find_damage(step)
            if damage is None:
                return step, digest
            self._report_skipped(step, damage)
        return None

    def _report_skipped(self, step: int, damage: str) -> None:
        """Warns of a damaged checkpoint."""
        warn(f"{self.directory / str(step)} is skipped: {damage}")

    def _find_damage(self, step: int, sizes_only: bool = False) -> str | None:
        return manifest.find_damage(self.directory / str(step), sizes_only, run_id(self.workdir))

    def find_step(self, step: StepChoice) -> int | None:
        """Returns the number of the step that `step` (a number, "best" or None) chooses. If `step`
        is None and no checkpoint is valid, returns None. All processes have to call this method.

        Raises:
          UserError: `step` is "best", and no checkpoint was evaluated.
        """
        if step == "best":
            return broadcast_from_process_0(lambda: best_step(self.workdir))
        return self.newest_valid_step() if step is None else step

    def restore(
        self, step: int, abstract_state: State, partial: bool = False, digest: str | None = None
    ) -> State:
        """Verifies the checkpoint of `step`, and reads the train state from it.

        Args:
          abstract_state: the structure, dtypes and shardings of the result.
          partial: whether `abstract_state` may be a part of the saved state, such as the parameters
            without the optimizer's moments.
          digest: the expected digest of the checkpoint's manifest, or its first digits; None
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
        before = manifest.file_versions(where)
        actual_digest = manifest.digest_of_manifest(where)
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
            if manifest.file_versions(where) != before:
                raise UserError(
                    f"{where}: removed or replaced while it was read: start again from a "
                    "checkpoint that is not deleted (the run that wrote it deletes old ones)"
                )
        return state

    def _read_state(self, where: pathlib.Path, abstract_state: State, partial: bool) -> State:
        """Reads the arrays of the checkpoint in the folder `where`, and the frozen parameters from
        WORKDIR/frozen.

        Raises:
          UserError: the frozen parameters are damaged, or belong to another run.
        """
        if not (where / manifest.FROZEN_FILE_NAME).is_file():
            return read_arrays(manifest.arrays_folder(where), abstract_state, partial)
        record = manifest.read_frozen_record(where)
        trained, frozen = split_frozen(abstract_state, frozenset(record["parameters"]))
        require(
            manifest.digest_of_manifest(self._frozen) == record["manifest"],
            f"{self._frozen}: not the frozen parameters with which {where} was trained (their "
            "digest differs): put back the folder that was written with this run",
        )
        if damage := manifest.find_damage(self._frozen):
            raise UserError(f"{self._frozen}: damaged: {damage}")
        state = read_arrays(where, trained, partial) if trained else {}
        if not frozen:
            return state
        return join_trees(state, read_arrays(self._frozen, frozen, partial=True))


def split_frozen(state: State, frozen_paths: frozenset[str]) -> tuple[State, State]:
    """Splits a train state into two: `state` without the parameters at `frozen_paths`, and a state
    with these parameters alone. A state without parameters has no entry "params", because Orbax
    cannot read an empty dict.
    """

    def params_entry(frozen: bool) -> dict:
        keep = lambda path, leaf: leaf if (path in frozen_paths) == frozen else None
        params = map_leaves(keep, state["params"])
        return {"params": params} if params else {}

    if "params" not in state:
        return state, {}
    others = {name: value for name, value in state.items() if name != "params"}
    return others | params_entry(frozen=False), params_entry(frozen=True)


class TrainedModel(NamedTuple):
    """A model from a checkpoint of a run.

    Attributes:
      model: the model with its trained parameters.
      step: number of steps for which the model was trained.
      manifest_digest: the digest of the checkpoint's manifest, which identifies the weights.
    """

    model: Qwen3Next
    step: int
    manifest_digest: str


class TrainedAdapters(NamedTuple):
    """The LoRA adapters of a run (`model.lora`), without the matrices that they adapt.

    Attributes:
      model_config: the settings of the model.
      adapters: the parameters of the adapters, a nested dict of NumPy arrays.
      step: number of steps for which the adapters were trained.
      frozen_manifest_digest: the digest of the manifest of WORKDIR/frozen, which identifies the
        matrices; "" if the checkpoint itself holds the matrices.
    """

    model_config: ModelConfig
    adapters: dict
    step: int
    frozen_manifest_digest: str


def load_adapters(
    workdir: pathlib.Path, step: StepChoice = None, ema: bool = False
) -> TrainedAdapters:
    """Loads the LoRA adapters from a checkpoint of the run in `workdir`.

    Args:
      step: which checkpoint to load.
      ema: whether to load the moving average of the adapters (`train.ema`) instead of the adapters.

    Raises:
      UserError: the model has no adapters, or the checkpoint cannot be loaded or has no average.
    """
    run_config = read_config(workdir)
    config = run_config.model
    require(config.lora.rank > 0, f"{workdir}: its model has no adapters (model.lora.rank = 0)")
    _, params = abstract_model(config)
    adapters = map_leaves(lambda path, leaf: leaf if is_adapter(path) else None, params)
    entries = _entries_to_read(workdir, run_config, adapters, ema)
    shardings = tree_shardings(entries, parameter_declarations(config), single_device_mesh())
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        entries,
        shardings,
    )
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.find_step(step)
        if step is None:
            raise UserError(_no_checkpoint_message(workdir, run_config))
        state = jax.device_get(checkpoints.restore(step, abstract, partial=True))
    record = checkpoints.directory / str(step) / manifest.FROZEN_FILE_NAME
    digest = manifest.read_frozen_record(record.parent)["manifest"] if record.is_file() else ""
    return TrainedAdapters(config, _params_in_entries(state), step, digest)


def _no_checkpoint_message(workdir: pathlib.Path, config: Config) -> str:
    """Returns the error message about a run that has no valid checkpoint to load."""
    no_checkpoint_yet = (
        "no valid checkpoint; let the run reach its first one "
        f"(checkpoint.every = {config.checkpoint.every})"
    )
    return f"{workdir}: {describe_lost_checkpoints(workdir) or no_checkpoint_yet}"


def _entries_to_read(workdir: pathlib.Path, config: Config, params: dict, ema: bool) -> State:
    """Returns the entries of the abstract train state to read for the parameters `params`: "step"
    and "params". With `ema`, the entry "ema" has the moving averages of the parameters, and
    "params" has only the parameters that are frozen as a whole, which have no average.

    Raises:
      UserError: `ema` is true, and the run has no moving average.
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


def _params_in_entries(state: State) -> dict:
    """Returns the parameters in a state that has the structure of `_entries_to_read`."""
    return join_trees(state.get("params", {}), state.get("ema", {}).get("average", {}))


def load_trained(
    workdir: pathlib.Path,
    step: StepChoice = None,
    mesh: Mesh | None = None,
    record: RunRecord | None = None,
    merge: bool = True,
    ema: bool = False,
) -> TrainedModel:
    """Loads the model from a checkpoint of the run in `workdir`.

    Args:
      step: which checkpoint to load.
      mesh: the devices over which the parameters are sharded; None: one device.
      record: the content of run.json; None if the caller has not read it.
      merge: whether to add the products of adapters (`model.lora`) to their matrices, so that the
        model has no adapters.
      ema: whether to load the moving average of the parameters (`train.ema`) instead of the
        parameters.

    Raises:
      UserError: the checkpoint cannot be loaded or has no average, or another run has replaced the
        run in `workdir` since `record` was read.
    """
    record = read_record(workdir) if record is None else record
    config = record.read_config(workdir)
    check_module_versions(workdir, record.versions, record.code, config.model)
    with Checkpoints(workdir) as checkpoints:
        step = checkpoints.find_step(step)
        # `restore` verifies this digest, so the weights come from the run of `record`.
        where = checkpoints.directory / str(step)
        digest = manifest.digest_of_manifest(where)
        require(
            run_id(workdir) == record.id,
            f"{workdir}: another run replaced it while it was read: start again",
        )
        if step is None:
            raise UserError(_no_checkpoint_message(workdir, config))
        graphdef, params = abstract_model(config.model)
        entries = _entries_to_read(workdir, config, params, ema)
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            entries,
            tree_shardings(
                entries,
                parameter_declarations(config.model),
                single_device_mesh() if mesh is None else mesh,
            ),
        )
        state = checkpoints.restore(step, abstract, partial=True, digest=digest)
        leaves, tree = jax.tree.flatten(_params_in_entries(state))
        del state
    # Restored arrays are committed to their device. jit would compile a function for them even if
    # it has compiled the function for uncommitted arrays, so uncommitted copies replace the arrays.
    if mesh is None:
        # one at a time, because the device may not have memory for two copies of all arrays
        for i, leaf in enumerate(leaves):
            leaves[i] = jax.device_put(jax.device_get(leaf))
    digest = digest or manifest.digest_of_manifest(
        where
    )  # the manifest may have been written since
    model = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
    if merge and config.model.lora.rank:
        from qwen3next_jax.model.adapters import merged_model

        model = merged_model(model)
    return TrainedModel(model, step, digest)
