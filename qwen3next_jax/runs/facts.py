"""Reads, once, what the start of a run depends on: the folder of the run, the model in
`train.init_from`, the tokenizers of both, and what is installed here. `runs.start.decide` decides
from these facts alone. JAX is not imported, so that a mistake is found within a second.

Errors of this file are about what cannot be read. What was read but does not fit is refused by
`decide`.
"""

import dataclasses
import importlib
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from qwen3next_jax.common.errors import UserError, require, require_path
from qwen3next_jax.common.storage import BucketPath, check_bucket, to_path
from qwen3next_jax.common.subpackages import require_subpackage
from qwen3next_jax.config import Config, DataConfig, ModelConfig, TelemetryConfig
from qwen3next_jax.config.registry import TEXT_SOURCES
from qwen3next_jax.data.pipeline import data_source_class
from qwen3next_jax.data.tokens import Tokenizer, load_tokenizer, same_token_ids
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.folder import RunFolder, read_folder, saved_steps
from qwen3next_jax.runs.record import RunRecord, read_config, read_record
from qwen3next_jax.runs.store import open_store


class SavedStep(NamedTuple):
    """A checkpoint of another run. Only the sizes of its files have been compared.

    Attributes:
      folder: the folder of the run.
      step: the number of steps after which it was saved.
      saved_steps: all steps of the run that have a folder of a checkpoint.
      digest: the first digits of the digest of its manifest, as records of parents hold them; ""
        if it has none.
      damage: what is wrong with it; None if nothing is.
    """

    folder: pathlib.Path | BucketPath
    step: int
    saved_steps: tuple[int, ...]
    digest: str
    damage: str | None


@dataclasses.dataclass(frozen=True)
class ParentRun:
    """The run in `train.init_from`.

    Attributes:
      folder: its folder.
      record: its run.json.
      config: its configuration.
      saved: the checkpoint with which a new run begins; None if there is no valid one.
      skipped: step → what is wrong with its checkpoint, for checkpoints newer than `saved`; {} if
        `train.init_from` names a step.
    """

    folder: pathlib.Path | BucketPath
    record: RunRecord
    config: Config
    saved: SavedStep | None
    skipped: Mapping[int, str]

    @property
    def model(self) -> ModelConfig:
        return self.config.model


@dataclasses.dataclass(frozen=True)
class PretrainedModel:
    """The Hugging Face directory in `train.init_from`.

    Attributes:
      folder: the directory.
      model: the settings of its model.
      files: `interop.weights.modification_digest` of the directory, as this process sees it.
    """

    folder: pathlib.Path | BucketPath
    model: ModelConfig
    files: str


class Tokens(NamedTuple):
    """The tokenizers of a new run and of the model with which it begins.

    Attributes:
      ours: the tokenizer of the run.
      fingerprint: the fingerprint of the model's tokenizer; "" if it has none.
      is_text: whether the model was trained on text.
      theirs: the model's tokenizer, if both are text and the fingerprints differ.
      place: where it is, for messages.
    """

    ours: Tokenizer
    fingerprint: str
    is_text: bool
    theirs: Tokenizer | None
    place: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the start of a run depends on.

    Attributes:
      folder: the folder of the run; as if it were empty, if the run starts anew.
      restart: whether what is in the folder is moved aside first.
      takes_other_writers: `RunStore.takes_other_writers` of the folder.
      missing_packages: packages that the telemetry of the run needs, and that are not installed.
      data: the settings `data` of the run, with the name of a tokenizer.
      source: the model in `train.init_from`; None if it is "", or the run has a checkpoint.
      tokens: the tokenizers to compare; None if there is no `source`.
    """

    folder: RunFolder
    restart: bool = dataclasses.field(compare=False)
    takes_other_writers: bool
    missing_packages: tuple[str, ...]
    data: DataConfig
    source: ParentRun | PretrainedModel | None
    tokens: Tokens | None = dataclasses.field(compare=False)


def read_facts(
    config: Config,
    workdir: pathlib.Path | BucketPath,
    restart: bool = False,
    writes_telemetry: bool = True,
) -> Facts:
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
    store.check(f"--workdir={workdir}")
    restart = restart or store.is_restart_unfinished()
    folder = RunFolder(store.workdir) if restart else read_folder(store.workdir)
    init_from = config.train.init_from
    # A resumed run does not read the model with which it began.
    source = _read_source(init_from, folder) if init_from and not folder.complete_steps else None
    data = config.data
    if _lacks_tokenizer(data):
        name = _tokenizer_of_start(folder, init_from, source)
        data = dataclasses.replace(data, tokenizer=name)
    tokens = _read_tokens(data, config.model.vocab_size, source) if source else None
    return Facts(
        folder,
        restart,
        store.takes_other_writers,
        _missing_packages(config.telemetry) if writes_telemetry else (),
        data,
        source,
        tokens,
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
    """Splits RUN@STEP into (RUN, STEP). Without @STEP, or if a folder is called RUN@STEP, the
    second value is None.
    """
    match = re.fullmatch(r"(.+)@([0-9]{1,18})", init_from)
    if match is None or to_path(init_from).exists():
        return to_path(init_from), None
    return to_path(match[1]), int(match[2])


def is_run(init_from: str) -> bool:
    """Whether `train.init_from` names a run, not a Hugging Face directory."""
    path, step = split_step(init_from)
    return step is not None or (path / "run.json").exists()


def _check_is_there(init_from: str) -> None:
    """Raises UserError unless `train.init_from` names a folder that holds run.json or config.json,
    or has the form RUN@STEP with an existing folder RUN.
    """
    where = f"train.init_from = {init_from}"
    require_path(where, init_from)
    path, step = split_step(init_from)
    check_bucket(where, path)
    if step is not None:
        require(path.is_dir(), f"{where}: there is no folder {path}")
        return
    reason = "has neither run.json nor config.json" if path.is_dir() else "does not exist here"
    require(
        (path / "run.json").exists() or (path / "config.json").exists(),
        f"{where}: it {reason}: expected a run (RUN or RUN@STEP) or a Hugging Face directory, "
        "on a file system or in a bucket",
    )


def _read_source(init_from: str, folder: RunFolder) -> ParentRun | PretrainedModel:
    """Reads the model in `train.init_from`. If the run was killed before its first checkpoint, it
    begins again with the same step of its parent, even if the parent has newer checkpoints.
    """
    _check_is_there(init_from)
    path, step = split_step(init_from)
    if is_run(init_from):
        begun = folder.record if folder.has_trained else None
        recorded = begun.parent.step if begun and begun.parent else None
        return _read_parent(path, step, recorded)
    require_subpackage("interop", f"train.init_from = {init_from}")
    from qwen3next_jax.interop.hf_config import read_hf_config
    from qwen3next_jax.interop.weights import modification_digest

    return PretrainedModel(path, read_hf_config(path), modification_digest(path))


def _read_parent(
    path: pathlib.Path | BucketPath, step: int | None, recorded: int | None
) -> ParentRun:
    """Reads the run in `path`.

    Args:
      step: the step that `train.init_from` names; None if it names none.
      recorded: the step with which the run had begun before it was killed; None if it is new.
    """
    record = read_record(path)
    config = record.read_config(path)
    skipped: dict[int, str] = {}
    if step is None:
        step, skipped = newest_complete_step(path, record.id, recorded)
    saved = None if step is None else read_saved_step(path, step, record.id)
    return ParentRun(path, record, config, saved, skipped)


def newest_complete_step(
    path: pathlib.Path | BucketPath, run: str, wanted: int | None = None
) -> tuple[int | None, dict[int, str]]:
    """Finds the newest checkpoint in the folder `path` that belongs to `run` and has files of the
    right sizes.

    Args:
      wanted: the step to take instead, if it is known.

    Returns:
      Its step, None if there is none; and step → damage, for the newer checkpoints.
    """
    damages: dict[int, str] = {}
    for step in reversed(saved_steps(path)):
        if wanted is not None and step <= wanted:
            break
        damage = manifest.find_damage(path / "checkpoints" / str(step), sizes_only=True, run=run)
        if damage is not None:
            damages[step] = damage
        elif wanted is None:
            return step, damages
    return wanted, damages


def read_saved_step(path: pathlib.Path | BucketPath, step: int, run: str) -> SavedStep:
    """Reads a checkpoint of the run in `path`, whose id is `run`. Compares only the sizes of its
    files with its manifest; `Checkpoints.restore` verifies their digests.
    """
    saved, folder = tuple(saved_steps(path)), path / "checkpoints" / str(step)
    if step not in saved:
        return SavedStep(path, step, saved, "", "it is missing")
    # The digest is read first. If another checkpoint replaces this one before `find_damage`, the
    # digest does not match, and `restore` raises an error.
    digest = manifest.digest(folder)
    damage = manifest.find_damage(folder, sizes_only=True, run=run)
    if digest is None:
        damage = damage or "it is being written or deleted"
    return SavedStep(path, step, saved, (digest or "")[:20], damage)


def require_saved(where: str, saved: SavedStep) -> None:
    """Raises a UserError that begins with `where` if the checkpoint is missing or damaged."""
    steps = ", ".join(map(str, saved.saved_steps)) or "none"
    require(
        saved.step in saved.saved_steps,
        f"{where}: it has no checkpoint of step {saved.step}; saved steps: {steps}",
    )
    folder = saved.folder / "checkpoints" / str(saved.step)
    require(saved.damage is None, f"{where}: {folder}: damaged: {saved.damage}")


# ---- Tokenizers


def with_tokenizer(data: DataConfig, init_from: str) -> DataConfig:
    """Returns the settings `data` of a new run, with the name of a tokenizer in place of
    data.tokenizer = "": that of the model in `train.init_from`, or "bytes" if `init_from` is "".

    Raises:
      UserError: `init_from` does not exist, or is a Hugging Face directory without tokenizer.json.
    """
    if not _lacks_tokenizer(data):
        return data
    return dataclasses.replace(data, tokenizer=tokenizer_of_model(init_from))


def _lacks_tokenizer(data: DataConfig) -> bool:
    return not data.tokenizer and data.source in TEXT_SOURCES


def _tokenizer_of_start(
    folder: RunFolder, init_from: str, source: ParentRun | PretrainedModel | None
) -> str:
    """Returns the value of data.tokenizer for a run whose data.tokenizer is "". A resumed run keeps
    its own tokenizer; a new run takes that of the model in `train.init_from`, or "bytes".

    Raises:
      UserError: `source` has no tokenizer.json, or a record of the run in `folder` is missing.
    """
    if record := folder.trained_record():
        name = record.read_config(folder.path).data.tokenizer or "bytes"
        copy = folder.path / "tokenizer"
        is_same = not copy.exists() or _has_fingerprint(name, record.tokenizer)
        return name if is_same else str(copy)
    if isinstance(source, ParentRun):
        return _tokenizer_of_run(source.folder, source.config)
    return _tokenizer_of_directory(init_from, source.folder) if source else "bytes"


def _has_fingerprint(name: str, fingerprint: str) -> bool:
    """Whether the tokenizer `name` can be loaded and has this fingerprint."""
    try:
        return load_tokenizer(name).fingerprint == fingerprint
    except UserError:
        return False


def tokenizer_of_model(init_from: str) -> str:
    """Returns the value of data.tokenizer with which the model in `train.init_from` was trained;
    "bytes" if `init_from` is "".

    Raises:
      UserError: `init_from` does not exist, or is a Hugging Face directory without tokenizer.json.
    """
    if not init_from:
        return "bytes"
    _check_is_there(init_from)
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


def _read_tokens(data: DataConfig, vocab_size: int, source: ParentRun | PretrainedModel) -> Tokens:
    """Loads the tokenizers of a new run and of the model with which it begins."""
    from qwen3next_jax.data.synthetic import TaskTokenizer

    # `runs.checks` compares sizes. Before that, `decide` names a tokenizer that is another one.
    ours = data_source_class(data).tokenizer_of(
        data, None if data.source in TEXT_SOURCES else vocab_size
    )
    if isinstance(source, ParentRun):
        fingerprint = source.record.tokenizer
        is_text = fingerprint != TaskTokenizer(source.model.vocab_size).fingerprint
        name = _tokenizer_of_run(source.folder, source.config)
        place = f"a copy is in {source.folder / 'tokenizer'}, unless it is bytes"
    else:
        name = place = str(source.folder / "tokenizer.json")
        is_text = (source.folder / "tokenizer.json").exists()
        fingerprint = load_tokenizer(name).fingerprint if is_text else ""
    theirs = None
    if is_text and ours.reads_text and not same_token_ids(ours.fingerprint, fingerprint):
        theirs = load_tokenizer(name)
    return Tokens(ours, fingerprint, is_text, theirs, place)
