"""Merges checkpoints: computes a weighted mean of their parameters (`qwen3next merge`).

Only the model of the last checkpoint is in memory as a whole. The parameters of all other
checkpoints than the last are read in groups of arrays, one checkpoint after another.

The mean is computed as p_n + Σ_i w_i (p_i − p_n), where p_n are the parameters of the last
checkpoint. So parameters that are equal in all checkpoints, such as frozen parameters, are
bit-identical in the mean.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from qwen3next_jax.common.errors import UserError, did_you_mean, require, require_path
from qwen3next_jax.common.locks import lock_file
from qwen3next_jax.common.storage import BucketPath, is_bucket
from qwen3next_jax.common.trees import leaves_by_path, map_leaves
from qwen3next_jax.config import Config
from qwen3next_jax.config.compatibility import settings_incompatible_with_weights
from qwen3next_jax.data.tokens import same_token_ids
from qwen3next_jax.processes.distributed import broadcast_from_process_0
from qwen3next_jax.runs.checkpoint import Checkpoints
from qwen3next_jax.runs.facts import (
    newest_plausible_step,
    read_checkpoint_status,
    require_plausible_checkpoint,
    split_step,
)
from qwen3next_jax.runs.init_from import NON_STRUCTURAL_SETTINGS, describe_optimizer_scaling
from qwen3next_jax.runs.record import MergedCheckpoint, RunRecord, read_record
from qwen3next_jax.runs.store.local import LocalStore
from qwen3next_jax.runs.store.store import not_writable_error
from qwen3next_jax.runs.telemetry import MetricsFile
from qwen3next_jax.runs.versions import check_module_versions
from qwen3next_jax.trained.load import tokenizer_of_run
from qwen3next_jax.training.parameter_groups import ParameterGroups, make_parameter_groups
from qwen3next_jax.training.resolve import make_update_rules
from qwen3next_jax.training.state import State, abstract_train_state, init_sharded_rule_entries
from qwen3next_jax.training.update_rules import UpdateRule

# Arrays are read in groups of at most this many bytes; a larger array is read alone.
GROUP_BYTES = 1 << 30

# ---- Weights

# Name of a decay d(x), which falls from d(0) = 1 to d(1) = 0 → its integral from 0 to x.
_INTEGRALS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda x: x - x**2 / 2,  # d = 1 - x
    "cosine": lambda x: x / 2 + np.sin(np.pi * x) / (2 * np.pi),  # d = (1 + cos πx) / 2
    "1-sqrt": lambda x: x - 2 / 3 * x**1.5,  # d = 1 - √x
}


def weight_of_each_checkpoint(text: str, steps: Sequence[int]) -> np.ndarray:
    """Returns the weight of each checkpoint in the mean, float64 [checkpoints]. The weights sum to
    1.

    "uniform" gives all checkpoints the same weight. A list such as "1,2,1" gives the ratios of the
    weights. The name of a learning-rate decay is for checkpoints of a run with a constant learning
    rate: their mean then approximates a run whose learning rate decays from the first checkpoint to
    the last (WSM, 2507.17634).

    Let θ_0 … θ_n be the checkpoints and Δ_i = θ_i − θ_{i−1} the sum of the updates in interval i. A
    learning rate that is d times as large makes an update d times as large. If the gradients stayed
    the same, a run whose learning rate is d_i times as large in interval i would end at

        θ_0 + Σ_i d_i Δ_i  =  Σ_i w_i θ_i   with   w_i = d_i − d_{i+1},  d_0 = 1,  d_{n+1} = 0,

    by summation by parts. The weights w_i sum to d_0 = 1, and none is negative if the learning rate
    never rises. The factor d_i is the mean over interval i of the decay d(x), where x grows with
    the steps from 0 at the first checkpoint to 1 at the last. For checkpoints at equal distances,
    "linear" is the uniform mean, but with half the weight for the first and the last checkpoint. In
    training, the gradients do not stay the same, so the mean only approximates a run whose learning
    rate decays; docs/adapting.md shows how to measure the difference.

    Args:
      text: "uniform", a name of a decay, or numbers separated by commas.
      steps: the step of each checkpoint.

    Raises:
      UserError: `text` has none of these forms, its number of weights is not the number of
        checkpoints, or its weights sum to 0; or `text` names a decay and `steps` do not ascend.
    """
    flag, count = f"--weights={text}", len(steps)
    if text == "uniform":
        return np.full(count, 1 / count)
    if text not in _INTEGRALS:
        return _parse_listed_weights(flag, text, count)
    require(
        all(before < after for before, after in zip(steps, steps[1:])),
        f"{flag}: the steps {', '.join(map(str, steps))} do not ascend: name the checkpoints in "
        "the order of training, each once",
    )
    if count == 1:
        return np.ones(1)
    x = (np.asarray(steps, float) - steps[0]) / (steps[-1] - steps[0])
    decays = np.diff(_INTEGRALS[text](x)) / np.diff(x)
    return -np.diff(decays, prepend=1.0, append=0.0)


def _parse_listed_weights(flag: str, text: str, count: int) -> np.ndarray:
    """Returns the weights in `text`, divided by their sum."""
    names = ("uniform", *_INTEGRALS)
    try:
        listed = np.array([float(part) for part in text.split(",")])
    except ValueError as error:
        raise UserError(
            f"{flag}: expected {', '.join(names)}, or numbers separated by commas"
            f"{did_you_mean(text, names)}"
        ) from error
    require(np.isfinite(listed).all(), f"{flag}: expected finite numbers")
    require(
        len(listed) == count,
        f"{flag}: it has {len(listed)} weights for {count} checkpoints: expected one for each",
    )
    require(
        abs(listed.sum()) > 1e-6 * np.abs(listed).sum(),
        f"{flag}: the weights sum to {listed.sum():g}, so there is no mean: expected another sum "
        "than 0",
    )
    return listed / listed.sum()


# ---- Checkpoints


class MergeSource(NamedTuple):
    """A checkpoint to merge.

    Attributes:
      name: the checkpoint as the user gave it, RUN or RUN@STEP.
      folder: the folder of its run.
      step: the number of steps after which the checkpoint was saved.
      run_record: the content of run.json.
      config: the configuration of the run.
      manifest_digest: the first digits of the SHA-256 digest of the checkpoint's manifest.
    """

    name: str
    folder: pathlib.Path | BucketPath
    step: int
    run_record: RunRecord
    config: Config
    manifest_digest: str

    def as_merged_checkpoint(self, weight: float) -> MergedCheckpoint:
        """Returns the entry for this checkpoint in the list "merged" of run.json. `weight`: its
        weight in the mean.
        """
        path = str(self.folder.absolute())
        return MergedCheckpoint(path, self.step, self.manifest_digest, self.run_record.id, weight)


def find_sources(names: Sequence[str]) -> list[MergeSource]:
    """Finds the checkpoints to merge, and checks that they can be merged. Reads no array.

    Args:
      names: for each checkpoint RUN@STEP, or RUN for the newest checkpoint of the run.

    Raises:
      UserError: there is no such checkpoint, or it is damaged; a model has adapters; or the models,
        tokenizers, frozen parameters or scaling (`optimizer.scaling`) of two runs differ.
    """
    sources = [_find_source(name) for name in names]
    last = sources[-1]
    for source in sources:
        model, of_last = source.config.model, last.config.model
        require(
            not model.lora.rank,
            f"{source.name}: its model has adapters (model.lora), and the mean of two matrices A "
            "times the mean of two matrices B is not the mean of their products: expected runs "
            "without adapters",
        )
        for name in settings_incompatible_with_weights(model, of_last):
            theirs, ours = (
                c.mixers if name == "layer_types" else getattr(c, name) for c in (model, of_last)
            )
            require(
                name in NON_STRUCTURAL_SETTINGS - {"mtp_depth"},
                f"{source.name}: its model.{name} is {theirs}, that of {last.name} is {ours}: "
                "expected checkpoints of the same model",
            )
        require(
            same_token_ids(source.run_record.tokenizer, last.run_record.tokenizer),
            f"{source.name}: it was trained with another tokenizer than {last.name} (fingerprint "
            f"{source.run_record.tokenizer[:12]}, there {last.run_record.tokenizer[:12]}), so its "
            "ids have another meaning: expected runs with the same tokenizer",
        )
        scaling, of_last = (
            describe_optimizer_scaling(one.config.optimizer) for one in (source, last)
        )
        require(
            scaling == of_last,
            f"{source.name}: its optimizer.scaling is {scaling}, that of {last.name} is {of_last}, "
            "so its parameters have other sizes: expected runs with the same scaling",
        )
        freeze, of_last = source.config.train.freeze, last.config.train.freeze
        require(
            freeze == of_last,
            f"{source.name}: its train.freeze is {freeze}, that of {last.name} is {of_last}: "
            "expected runs that froze the same parameters",
        )
    return sources


def _find_source(name: str) -> MergeSource:
    require_path(name, name)
    folder, step = split_step(name)
    require((folder / "run.json").exists(), f"{name}: expected RUN or RUN@STEP; no run there")
    record = read_record(folder)
    config = record.read_config(folder)
    if step is None:
        step, _ = newest_plausible_step(folder, record.id)
        require(step is not None, f"{name}: the run has no valid checkpoint")
    status = read_checkpoint_status(folder, step, record.id)
    require_plausible_checkpoint(name, status)
    check_module_versions(folder, record.versions, record.code, config.model)
    return MergeSource(name, folder, step, record, config, status.manifest_digest)


# ---- Mean


def read_merged_state(
    sources: Sequence[MergeSource],
    weights: Sequence[float],
    mesh: Mesh,
    whole: bool = True,
    group_bytes: int = GROUP_BYTES,
) -> State:
    """Reads the train state of the last checkpoint, with merged parameters.

    Args:
      sources: the checkpoints to merge, from `find_sources`.
      weights: the weight of each checkpoint; the weights sum to 1.
      mesh: the devices over which the state is sharded.
      whole: whether to read all entries of the train state; if false, only "params" and "step" are
        read.
      group_bytes: the arrays of all checkpoints but the last are read in groups of about this size.

    Returns:
      The train state. The parameters in the state are the weighted mean of the checkpoints'
      parameters. The entries of update rules, such as the moving average, begin anew from the
      merged parameters. The optimizer state and all other entries are those of the last checkpoint.

    Raises:
      UserError: a checkpoint is damaged, or was replaced after `find_sources` found it.
    """
    last = sources[-1]
    groups = _parameter_groups_of_config(last.config)
    rules = make_update_rules(last.config, groups)
    abstract = _abstract_state_of_config(last.config, groups, (), mesh)
    if not whole:
        abstract = {name: abstract[name] for name in ("params", "step")}
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(Checkpoints(source.folder)) for source in sources]

        def read(number: int, wanted: State, partial: bool) -> State:
            source = sources[number]
            return readers[number].restore(source.step, wanted, partial, source.manifest_digest)

        state = read(-1, abstract, partial=True)
        # Nothing else may refer to an array that is replaced, or two models would be in memory.
        merged = leaves_by_path(state.pop("params"))
        for paths in (
            _path_groups_by_bytes(abstract["params"], group_bytes) if len(sources) > 1 else ()
        ):
            wanted = {"params": _select_paths(abstract["params"], paths)}
            base = {path: merged[path] for path in paths}
            total = None
            for number, weight in enumerate(weights[:-1]):
                theirs = leaves_by_path(read(number, wanted, partial=True)["params"])
                total = _add_weighted_difference(total, weight, theirs, base)
            merged |= _add_to_base(base, total)
    state["params"] = map_leaves(lambda path, _: merged[path], abstract["params"])
    if not whole:
        return state
    with_entries = _abstract_state_of_config(last.config, groups, rules, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, with_entries)
    return state | init_sharded_rule_entries(rules, state["params"], shardings)


def _path_groups_by_bytes(params: dict, group_bytes: int) -> Iterator[list[str]]:
    """Yields lists of paths. The arrays at the paths of a list have at most `group_bytes` bytes
    together; a larger array gets a list of its own.
    """
    group, used = [], 0
    for path, leaf in leaves_by_path(params).items():
        size = leaf.size * leaf.dtype.itemsize
        if group and used + size > group_bytes:
            yield group
            group, used = [], 0
        group.append(path)
        used += size
    yield group


def _select_paths(params: dict, paths: Sequence[str]) -> dict:
    return map_leaves(lambda path, leaf: leaf if path in paths else None, params)


@jax.jit
def _add_weighted_difference(
    sum_so_far: dict | None, weight: jax.Array, params: dict, base: dict
) -> dict[str, jax.Array]:
    """Returns sum_so_far + weight · (params − base) for each array; None counts as 0."""
    difference = jax.tree.map(lambda a, b: weight.astype(a.dtype) * (a - b), params, base)
    return difference if sum_so_far is None else jax.tree.map(jnp.add, sum_so_far, difference)


@jax.jit
def _add_to_base(base: dict, total: dict) -> dict[str, jax.Array]:
    # x + 0 is not x for x = -0
    return jax.tree.map(lambda b, t: jnp.where(t == 0, b, b + t), base, total)


def _parameter_groups_of_config(config: Config) -> ParameterGroups:
    return make_parameter_groups(config.model, config.train.freeze, config.optimizer)


def _abstract_state_of_config(
    config: Config, groups: ParameterGroups, rules: Sequence[UpdateRule], mesh: Mesh
) -> State:
    return abstract_train_state(
        config.model,
        config.optimizer,
        groups,
        rules,
        config.guards,
        mesh,
        config.parallel.slice_state,
    )


# ---- Run


def require_writable_new_folder(out: pathlib.Path | BucketPath) -> None:
    """Raises UserError unless a merged run can be written to the new folder `out`."""
    require(
        not is_bucket(out),
        f"--out={out}: a merged run is written to a file system: give a folder there, and copy it",
    )
    LocalStore(out).check_can_hold_run(f"--out={out}")
    require(
        not os.path.lexists(out),
        f"--out={out}: already there: expected a new folder; choose another, or remove it first",
    )


def write_merged_run(
    sources: Sequence[MergeSource], weights: Sequence[float], mesh: Mesh, out: pathlib.Path
) -> None:
    """Writes a run that can be continued from the step of the last checkpoint, with merged
    parameters. The folder `out` is created only when all its files are written. If there are
    several processes, all must call this function.

    The merged run has the configuration, optimizer state, step and data of the last checkpoint. The
    run.json of the merged run has the entry "merged", a list of the merged checkpoints with their
    weights.

    Args:
      sources, weights, mesh: the arguments of `read_merged_state`.
      out: the new folder.

    Raises:
      UserError: a checkpoint is damaged, or `out` exists or cannot be written.
    """
    last = sources[-1]
    state = read_merged_state(sources, weights, mesh)
    merged = tuple(
        source.as_merged_checkpoint(float(weight))
        for source, weight in zip(sources, weights, strict=True)
    )
    base = last.run_record.source
    record = dataclasses.replace(
        last.run_record,
        source=base and dataclasses.replace(base, files=""),
        parent=None,
        merged=merged,
        id=uuid.uuid4().hex,
        changes=(),
    )
    tokenizer = tokenizer_of_run(last.folder, last.run_record)
    partial = _PartialFolder(out)
    store = LocalStore(partial.folder)

    def begin() -> None:
        partial.create_and_lock()
        store.write_run_json_and_tokenizer(record, tokenizer, new=True)
        with MetricsFile(store.open_events(), last.step) as metrics:
            metrics.write("merged", last.step, merged=[dataclasses.asdict(one) for one in merged])

    broadcast_from_process_0(begin)
    frozen_paths = _parameter_groups_of_config(last.config).frozen_paths
    with store.open_checkpoints(last.config.checkpoint, frozen_paths=frozen_paths) as checkpoints:
        checkpoints.prepare_folder(last.step)
        checkpoints.read_run_id()
        checkpoints.save(last.step, state)
        checkpoints.wait()
        events = checkpoints.take_events()
    for name, _, values in events:
        reason = values.get("reason")
        require(name != "save_failed", f"--out={out}: not written ({reason}): make room")

    broadcast_from_process_0(partial.rename_to_final)


class _PartialFolder:
    """The folder `.NAME.partial` beside `--out=NAME`, in which process 0 writes a merged run. A
    lock ensures that only one process at a time writes to the folder. Files that a killed merge
    left in the folder are removed. A merge recognises its folder by the file `_MARK`; a folder
    without this file is never changed.
    """

    _MARK = "merging"
    # What a merge writes; a folder with anything else is not touched. run.tmp is run.json before it
    # is whole.
    _OWN = frozenset(
        ("merging", "run.json", "run.tmp", "metrics.jsonl", "tokenizer", "checkpoints", "frozen")
    )
    _CONTENT = "qwen3next merge writes a run here, and removes what a killed merge left here\n"

    def __init__(self, out: pathlib.Path):
        self._out = out
        self.folder = out.absolute().parent / f".{out.name}.partial"

    def create_and_lock(self) -> None:
        """Makes the folder, removes everything in it but the file `_MARK`, and locks this file.

        Raises:
          UserError: `out` exists; or the folder was not made by a merge, is in use by another
            merge, or cannot be written to.
        """
        require_writable_new_folder(self._out)
        mark = self.folder / self._MARK
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            require(
                self._made_by_merge(mark) or not any(self.folder.iterdir()),
                f"--out={self._out}: it is written in {self.folder}, which holds other files: "
                "rename or remove that folder, or give another --out",
            )
            self._lock = mark.open("a")
            require(
                lock_file(self._lock, self.folder),
                f"--out={self._out}: another merge is writing there: wait for it, or give another "
                "folder",
            )
            require_writable_new_folder(self._out)  # another merge may have ended meanwhile
            mark.write_text(self._CONTENT)
            for path in self.folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path != mark:
                    path.unlink()
        except OSError as error:
            raise not_writable_error(self._out, error, "--out") from error

    def _made_by_merge(self, mark: pathlib.Path) -> bool:
        """Whether a merge made the folder. A merge that was killed before it wrote the content of
        `_MARK` left an empty file `_MARK` and nothing else.
        """
        if not mark.is_file() or mark.is_symlink():
            return False
        content, names = mark.read_bytes(), {path.name for path in self.folder.iterdir()}
        if not content:
            return names == {self._MARK}
        return content == self._CONTENT.encode() and names <= self._OWN

    def rename_to_final(self) -> None:
        """Renames the folder to `out`.

        Raises:
          UserError: `out` exists, or cannot be written.
        """
        require_writable_new_folder(self._out)
        try:
            self.folder.rename(self._out)
            (self._out / self._MARK).unlink()
            self._lock.close()
        except OSError as error:
            raise not_writable_error(self._out, error, "--out") from error
