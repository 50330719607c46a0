"""Reads, once, what the start of a run depends on: the folder of the run, the model in
`train.init_from`, the tokenizers of the run and of this model, and which packages are installed.
From the settings and the facts that this file reads, and from nothing else,
`runs.start.decide_start` decides how the run starts. This file does not import JAX, so that the
user learns of a mistake within a second.

The errors that this file raises are about files that cannot be read. If files can be read, but the
run cannot start with their content, `decide_start` raises the error.
"""

import dataclasses
import importlib
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from qwen3next_jax.common.errors import UserError, require, require_path
from qwen3next_jax.common.storage import BucketPath, check_bucket_access, to_path
from qwen3next_jax.common.subpackages import require_subpackage
from qwen3next_jax.config import Config, DataConfig, ModelConfig, TelemetryConfig
from qwen3next_jax.config.registry import TEXT_SOURCES
from qwen3next_jax.data.pipeline import data_source_class
from qwen3next_jax.data.tokens import Tokenizer, load_tokenizer, same_token_ids
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.folder import RunFolder, read_folder, saved_steps
from qwen3next_jax.runs.record import RunRecord, read_config, read_record
from qwen3next_jax.runs.store import open_store


class CheckpointStatus(NamedTuple):
    """Whether another run has a checkpoint of a step, and whether the checkpoint is plausible (see
    `runs.checkpoint`).

    Attributes:
      run_folder: the folder of the other run.
      step: the step of the checkpoint.
      saved_steps: all steps for which the other run has a folder of a checkpoint.
      manifest_digest: the first 20 digits of the digest of the checkpoint's manifest; "" if the
        manifest is missing.
      damage: why the checkpoint is missing or not plausible; None if it is plausible.
    """

    run_folder: pathlib.Path | BucketPath
    step: int
    saved_steps: tuple[int, ...]
    manifest_digest: str
    damage: str | None


@dataclasses.dataclass(frozen=True)
class ParentRun:
    """The run in `train.init_from`.

    Attributes:
      folder: the folder of the run that `train.init_from` names.
      record: the content of its run.json.
      config: its configuration.
      checkpoint: the checkpoint with which the new run begins; None if `train.init_from` names no
        step and no checkpoint is plausible.
      damage_of_skipped: step → why the checkpoint of this step is not plausible, for all
        checkpoints newer than `checkpoint`; {} if `train.init_from` names a step.
    """

    folder: pathlib.Path | BucketPath
    record: RunRecord
    config: Config
    checkpoint: CheckpointStatus | None
    damage_of_skipped: Mapping[int, str]

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model


@dataclasses.dataclass(frozen=True)
class PretrainedModel:
    """The Hugging Face directory in `train.init_from`.

    Attributes:
      folder: the directory.
      model_config: the settings of its model.
      files_digest: a digest of the names, sizes and times of its files, as this process sees them
        (`interop.weights.modification_digest`).
    """

    folder: pathlib.Path | BucketPath
    model_config: ModelConfig
    files_digest: str


class TokenizerPair(NamedTuple):
    """The tokenizers of a new run and of the model in `train.init_from`.

    Attributes:
      run_tokenizer: the tokenizer of the run.
      initial_model_fingerprint: the fingerprint of the model's tokenizer; "" if the model has none.
      model_reads_text: whether the model was trained on text.
      initial_model_tokenizer: the model's tokenizer; None if the run or the model does not read
        text, or if the two tokenizers give the same ids.
      initial_model_tokenizer_place: where the user finds the model's tokenizer, for messages.
    """

    run_tokenizer: Tokenizer
    initial_model_fingerprint: str
    model_reads_text: bool
    initial_model_tokenizer: Tokenizer | None
    initial_model_tokenizer_place: str


@dataclasses.dataclass(frozen=True)
class StartFacts:
    """All facts on which the decision about the start of a run depends.

    Attributes:
      folder: the content of the run's folder; empty if `restart` is true.
      restart: whether the start first moves the files of an old run to WORKDIR/before-TIME.
      other_libraries_can_write: whether libraries such as TensorBoard can write into the folder.
      missing_packages: packages that the telemetry of the run needs, and that are not installed.
      data: the settings `data` of the run, with the name of a tokenizer.
      initial_model: the model in `train.init_from`; None if the setting is "", or if the run has a
        checkpoint of its own.
      tokenizers: the tokenizers to compare; None if there is no `initial_model`.
    """

    folder: RunFolder
    restart: bool = dataclasses.field(compare=False)
    other_libraries_can_write: bool
    missing_packages: tuple[str, ...]
    data: DataConfig
    initial_model: ParentRun | PretrainedModel | None
    tokenizers: TokenizerPair | None = dataclasses.field(compare=False)


def read_facts(
    config: Config,
    workdir: pathlib.Path | BucketPath,
    restart: bool = False,
    writes_telemetry: bool = True,
) -> StartFacts:
    """Reads what the start of a run depends on.

    Args:
      config: the configuration of the run.
      workdir: the folder of the run.
      restart: whether the run begins anew and does not resume the run in `workdir`.
      writes_telemetry: whether this process writes the telemetry of the run.

    Raises:
      UserError: a run cannot be in `workdir`, or `train.init_from` or a tokenizer cannot be read.
    """
    store = open_store(workdir)
    store.check_can_hold_run(f"--workdir={workdir}")
    restart = restart or store.has_unfinished_move()
    folder = RunFolder(store.workdir) if restart else read_folder(store.workdir)
    init_from = config.train.init_from
    # A resumed run does not read the model with which it began.
    initial_model = None
    if init_from and not folder.complete_steps:
        initial_model = _read_initial_model(init_from, folder)
    data = config.data
    if _lacks_tokenizer(data):
        name = _default_tokenizer(folder, init_from, initial_model)
        data = dataclasses.replace(data, tokenizer=name)
    tokenizers = None
    if initial_model:
        tokenizers = _load_tokenizers(data, config.model.vocab_size, initial_model)
    return StartFacts(
        folder,
        restart,
        store.other_libraries_can_write,
        _missing_packages(config.telemetry) if writes_telemetry else (),
        data,
        initial_model,
        tokenizers,
    )


def _missing_packages(telemetry: TelemetryConfig) -> tuple[str, ...]:
    needed = {"tensorboardX": telemetry.tensorboard, "wandb": telemetry.wandb}
    missing = []
    for package in (name for name, is_needed in needed.items() if is_needed):
        try:
            importlib.import_module(package)
        except ImportError:
            missing.append(package)
    return tuple(missing)


# ---- train.init_from


def split_step(init_from: str) -> tuple[pathlib.Path | BucketPath, int | None]:
    """Splits RUN@STEP into (RUN, STEP). If the text has no @STEP, or if there is a folder with the
    whole name RUN@STEP, returns (the whole text, None).
    """
    match = re.fullmatch(r"(.+)@([0-9]{1,18})", init_from)
    if match is None or to_path(init_from).exists():
        return to_path(init_from), None
    return to_path(match[1]), int(match[2])


def is_run(init_from: str) -> bool:
    """Whether `train.init_from` names a run, not a Hugging Face directory."""
    path, step = split_step(init_from)
    return step is not None or (path / "run.json").exists()


def _check_init_from_exists(init_from: str) -> None:
    """Raises UserError unless `train.init_from` names a folder that holds run.json or config.json,
    or has the form RUN@STEP with an existing folder RUN.
    """
    where = f"train.init_from = {init_from}"
    require_path(where, init_from)
    path, step = split_step(init_from)
    check_bucket_access(where, path)
    if step is not None:
        require(path.is_dir(), f"{where}: there is no folder {path}")
        return
    reason = "has neither run.json nor config.json" if path.is_dir() else "does not exist here"
    require(
        (path / "run.json").exists() or (path / "config.json").exists(),
        f"{where}: it {reason}: expected a run (RUN or RUN@STEP) or a Hugging Face directory, "
        "on a file system or in a bucket",
    )


def _read_initial_model(init_from: str, folder: RunFolder) -> ParentRun | PretrainedModel:
    """Reads the model in `train.init_from`. If this run was killed before its first checkpoint, it
    begins again with the checkpoint of its parent that its run.json names, even if the parent has
    newer checkpoints.
    """
    _check_init_from_exists(init_from)
    path, step = split_step(init_from)
    if is_run(init_from):
        begun = folder.record if folder.has_trained else None
        recorded_step = begun.parent.step if begun and begun.parent else None
        return _read_parent(path, step, recorded_step)
    require_subpackage("interop", f"train.init_from = {init_from}")
    from qwen3next_jax.interop.hf_config import read_hf_config
    from qwen3next_jax.interop.weights import modification_digest

    return PretrainedModel(path, read_hf_config(path), modification_digest(path))


def _read_parent(
    path: pathlib.Path | BucketPath, named_step: int | None, recorded_step: int | None
) -> ParentRun:
    """Reads the run in the folder `path`, and the status of the checkpoint with which the new run
    begins.

    Args:
      named_step: the step that `train.init_from` names; None if it names none.
      recorded_step: the step in the new run's own run.json, if the new run was killed before its
        first checkpoint; None if it has no run.json yet.
    """
    record = read_record(path)
    config = record.read_config(path)
    step, skipped = named_step, {}
    if named_step is None and recorded_step is None:
        step, skipped = newest_plausible_step(path, record.id)
    elif named_step is None:
        step = recorded_step
        newer = (later for later in saved_steps(path) if later > recorded_step)
        found = {later: _find_size_damage(path, later, record.id) for later in newer}
        skipped = {later: damage for later, damage in found.items() if damage is not None}
    status = None if step is None else read_checkpoint_status(path, step, record.id)
    return ParentRun(path, record, config, status, skipped)


def newest_plausible_step(
    path: pathlib.Path | BucketPath, run: str
) -> tuple[int | None, dict[int, str]]:
    """Finds the newest plausible checkpoint (see `runs.checkpoint`) of the run in the folder
    `path`.

    Args:
      run: the id of the run. A checkpoint of another run is not plausible.

    Returns:
      (step, damage): the step of the checkpoint, or None if no checkpoint is plausible; and step →
      why the checkpoint of that step is not plausible, for every newer checkpoint.
    """
    damage_of_newer: dict[int, str] = {}
    for step in reversed(saved_steps(path)):
        damage = _find_size_damage(path, step, run)
        if damage is None:
            return step, damage_of_newer
        damage_of_newer[step] = damage
    return None, damage_of_newer


def _find_size_damage(path: pathlib.Path | BucketPath, step: int, run: str) -> str | None:
    """Returns why the checkpoint of `step` is not plausible; None if it is plausible."""
    return manifest.find_damage(path / "checkpoints" / str(step), sizes_only=True, run=run)


def read_checkpoint_status(
    path: pathlib.Path | BucketPath, step: int, run: str
) -> CheckpointStatus:
    """Reads whether the run in the folder `path`, whose id is `run`, has a plausible checkpoint of
    `step`. Reads no array: `Checkpoints.restore` checks whether the checkpoint is valid.
    """
    steps, folder = tuple(saved_steps(path)), path / "checkpoints" / str(step)
    if step not in steps:
        return CheckpointStatus(path, step, steps, "", "it is missing")
    # The digest of the manifest is read before the sizes of the files. If another checkpoint
    # replaces this one in between, the digest does not match, and `restore` raises an error.
    digest = manifest.digest_of_manifest(folder)
    damage = _find_size_damage(path, step, run)
    if digest is None:
        damage = damage or "it is being written or deleted"
    return CheckpointStatus(path, step, steps, (digest or "")[:20], damage)


def require_plausible_checkpoint(where: str, status: CheckpointStatus) -> None:
    """Raises a UserError that begins with `where` if the checkpoint is missing or not plausible."""
    steps = ", ".join(map(str, status.saved_steps)) or "none"
    require(
        status.step in status.saved_steps,
        f"{where}: it has no checkpoint of step {status.step}; saved steps: {steps}",
    )
    folder = status.run_folder / "checkpoints" / str(status.step)
    require(status.damage is None, f"{where}: {folder}: damaged: {status.damage}")


# ---- Tokenizers


def with_tokenizer(data: DataConfig, init_from: str) -> DataConfig:
    """Returns `data`, the settings of a new run's data, with a tokenizer in place of
    data.tokenizer = "": the tokenizer of the model in `train.init_from`, or "bytes" if `init_from`
    is "".

    Raises:
      UserError: `init_from` does not exist, or is a Hugging Face directory without tokenizer.json.
    """
    if not _lacks_tokenizer(data):
        return data
    return dataclasses.replace(data, tokenizer=tokenizer_of_init_from(init_from))


def _lacks_tokenizer(data: DataConfig) -> bool:
    return not data.tokenizer and data.source in TEXT_SOURCES


def _default_tokenizer(
    folder: RunFolder, init_from: str, initial_model: ParentRun | PretrainedModel | None
) -> str:
    """Returns the tokenizer of a run whose data.tokenizer is "", as a value of that setting. A
    resumed run keeps its own tokenizer. A new run takes the tokenizer of the model in
    `train.init_from`, or "bytes" if there is no such model.

    Raises:
      UserError: the Hugging Face directory in `train.init_from` has no tokenizer.json, or a file
        of the run in `folder` is missing.
    """
    if record := folder.record_if_trained():
        name = record.read_config(folder.path).data.tokenizer or "bytes"
        copy = folder.path / "tokenizer"
        is_same = not copy.exists() or _has_fingerprint(name, record.tokenizer)
        return name if is_same else str(copy)
    if isinstance(initial_model, ParentRun):
        return _tokenizer_of_run(initial_model.folder, initial_model.config)
    return _tokenizer_of_directory(init_from, initial_model.folder) if initial_model else "bytes"


def _has_fingerprint(name: str, fingerprint: str) -> bool:
    """Whether the tokenizer `name` can be loaded and has the fingerprint `fingerprint`."""
    try:
        return load_tokenizer(name).fingerprint == fingerprint
    except UserError:
        return False


def tokenizer_of_init_from(init_from: str) -> str:
    """Returns the tokenizer with which the model in `train.init_from` was trained, as a value of
    the setting data.tokenizer; "bytes" if `init_from` is "".

    Raises:
      UserError: `init_from` does not exist, or is a Hugging Face directory without tokenizer.json.
    """
    if not init_from:
        return "bytes"
    _check_init_from_exists(init_from)
    path, _ = split_step(init_from)
    if is_run(init_from):
        return _tokenizer_of_run(path, read_config(path))
    return _tokenizer_of_directory(init_from, path)


def _tokenizer_of_directory(init_from: str, path: pathlib.Path | BucketPath) -> str:
    file = path / "tokenizer.json"
    require(
        file.exists(),
        f"train.init_from = {init_from}: it has no tokenizer.json: set data.tokenizer to that "
        "of its model ('bytes', or the path of a tokenizer.json)",
    )
    saved_bytes = same_token_ids(
        load_tokenizer(str(file)).fingerprint, load_tokenizer("").fingerprint
    )
    return "bytes" if saved_bytes else str(file)


def _tokenizer_of_run(path: pathlib.Path | BucketPath, config: Config) -> str:
    copy = path / "tokenizer"
    return str(copy) if copy.exists() else config.data.tokenizer or "bytes"


def _load_tokenizers(
    data: DataConfig, vocab_size: int, initial_model: ParentRun | PretrainedModel
) -> TokenizerPair:
    """Loads the tokenizers of a new run and of the model in `train.init_from`."""
    from qwen3next_jax.data.synthetic import TaskTokenizer

    # For text the size of the vocabulary is not compared here: `runs.checks` compares it later, so
    # that `decide_start` can first say that the tokenizer is not that of the model.
    run_tokenizer = data_source_class(data).tokenizer_of(
        data, None if data.source in TEXT_SOURCES else vocab_size
    )
    if isinstance(initial_model, ParentRun):
        fingerprint = initial_model.record.tokenizer
        is_text = fingerprint != TaskTokenizer(initial_model.model_config.vocab_size).fingerprint
        name = _tokenizer_of_run(initial_model.folder, initial_model.config)
        place = f"a copy is in {initial_model.folder / 'tokenizer'}, unless it is bytes"
    else:
        name = place = str(initial_model.folder / "tokenizer.json")
        is_text = (initial_model.folder / "tokenizer.json").exists()
        fingerprint = load_tokenizer(name).fingerprint if is_text else ""
    initial_model_tokenizer = None
    if (
        is_text
        and run_tokenizer.reads_text
        and not same_token_ids(run_tokenizer.fingerprint, fingerprint)
    ):
        initial_model_tokenizer = load_tokenizer(name)
    return TokenizerPair(run_tokenizer, fingerprint, is_text, initial_model_tokenizer, place)
