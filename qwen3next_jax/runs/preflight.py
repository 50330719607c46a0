"""Checks whether a run can start, without JAX and without reading a large file, so that the user
learns of a mistake within a second.

In a run of one process, train.py makes these checks before it loads JAX. `runs.train.train` makes
them in every run, on all processes together.
"""

import dataclasses
import importlib
import pathlib
import re
from typing import Any

from qwen3next_jax.common.errors import UserError, as_user_error, require, require_path
from qwen3next_jax.common.installation import how_to_install
from qwen3next_jax.common.storage import BucketPath, check_bucket, to_path
from qwen3next_jax.common.subpackages import require_subpackage
from qwen3next_jax.config import (
    Config,
    DataConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    TelemetryConfig,
    TrainConfig,
)
from qwen3next_jax.config.compatibility import weights_differ
from qwen3next_jax.config.registry import TEXT_SOURCES
from qwen3next_jax.data.pipeline import source_of
from qwen3next_jax.data.tokens import Tokenizer, extends, load_tokenizer, same_tokens
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.folder import (
    check_settings,
    complete_steps,
    config_of,
    is_restart_unfinished,
    is_trained,
    read_config,
    read_run,
    require_run_path,
    run_id,
    saved_steps,
    trained_run,
)
from qwen3next_jax.training.stages import resolve_stages

# The record of a run's parent in run.json, a dict with these keys. "path": the parent's folder.
# "step": the step of the checkpoint with which the run began. "manifest": the first digits of the
# digest of the checkpoint's manifest. "run": the parent's id.
Parent = dict[str, Any]
# Model settings that have no effect on a model without experts.
EXPERT_SETTINGS = {
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
}
# Model settings that may differ between the run and the model in `train.init_from`, because they
# change neither the shape nor the meaning of a parameter.
NOT_STRUCTURE = {
    "dtype",
    "mtp_depth",
    "decay_init",
    "initializer_range",
    "delta_rule",
    "bos_token_id",
    "eos_token_id",
    "hf_form",
    "hf_fused_experts",
    "lora",
}


def check(
    config: Config, workdir: pathlib.Path, restart: bool = False, records: bool = True
) -> None:
    """Checks the folder of the run, the packages for telemetry, the tokenizer, the globs of
    `data.path`, and `train.init_from`.

    Args:
      config: the configuration of the run.
      workdir: the folder of the run.
      restart: whether the run begins anew and does not resume the run in `workdir`.
      records: whether this process writes the telemetry of the run.

    Raises:
      UserError: a check failed; the message names the first mistake.
    """
    require_run_path(f"--workdir={workdir}", workdir)
    if isinstance(workdir, BucketPath):
        require(
            workdir.scheme == "gs",
            f"--workdir={workdir}: Orbax writes no checkpoints to s3://: give gs:// or a folder on "
            "a file system (s3:// may hold prepared data and Hugging Face directories)",
        )
        check_bucket(f"--workdir={workdir}", workdir)
        _check_local_only(config)
    if records:
        _check_packages(config.telemetry)
    restart = restart or is_restart_unfinished(workdir)
    if not restart:
        check_settings(workdir, config)
    data = with_tokenizer(config.data, config.train.init_from, workdir, restart)
    config = dataclasses.replace(config, data=data)
    # A resumed run does not read `train.init_from`.
    if config.train.init_from and (restart or not complete_steps(workdir)):
        init_from = config.train.init_from
        parent = find_parent(config.train, config.optimizer, workdir, restart)
        check_structure(config.model, init_from, parent)
        if parent and config.train.init_state == "all":
            model = read_config(to_path(parent["path"])).model
            require(
                model.vocab_size == config.model.vocab_size,
                f"train.init_from = {init_from}: its vocab_size is {model.vocab_size}, here it is "
                f"{config.model.vocab_size}, so its optimizer has no state for the new tokens: set "
                "both to the same, or train.init_state = 'weights'",
            )
            theirs = model.lora
            require(
                theirs == config.model.lora,
                f"train.init_from = {init_from}: its model.lora is {theirs}, here it is "
                f"{config.model.lora}, so its optimizer has the state of other parameters: set "
                "both to the same, or train.init_state = 'weights'",
            )
        compare_tokens(config.data, config.model.vocab_size, init_from)
    for data, length in dict.fromkeys(
        (stage.data, stage.sequence_length) for stage in resolve_stages(config)
    ):
        source_of(data).check(data, length, config.model.vocab_size)
        source_of(data).check_model(data, config.model)


def _check_local_only(config: Config) -> None:
    """Raises UserError if a setting needs a workdir on a file system."""
    for needed, setting in (
        (config.telemetry.tensorboard, "telemetry.tensorboard = True"),
        (config.telemetry.wandb, f"telemetry.wandb = {config.telemetry.wandb!r}"),
        (config.profile.steps, f"profile.steps = {config.profile.steps!r}"),
    ):
        require(
            not needed,
            f"{setting}: its files are written to a local --workdir alone: leave it out, or give a "
            "--workdir on a file system",
        )


def with_tokenizer(
    data: DataConfig, init_from: str, workdir: pathlib.Path, restart: bool = False
) -> DataConfig:
    """Returns `data` with the name of a tokenizer in place of data.tokenizer = "". A resumed run
    keeps its own tokenizer. A run that begins with the model in `train.init_from` takes that
    model's tokenizer, and any other new run takes "bytes".

    Args:
      init_from: `train.init_from`.
      workdir: the folder of the run.
      restart: whether the run begins anew and does not resume the run in `workdir`.

    Raises:
      UserError: the Hugging Face directory `init_from` has no tokenizer.json.
    """
    if data.tokenizer or data.source not in TEXT_SOURCES:
        return data
    if before := None if restart else trained_run(workdir):
        name, copy = read_config(workdir).data.tokenizer or "bytes", workdir / "tokenizer"
        if copy.exists() and not _has_fingerprint(name, before["tokenizer"]):
            name = str(copy)
    else:
        name = tokenizer_of_model(init_from)
    return dataclasses.replace(data, tokenizer=name)


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
        copy, name = path / "tokenizer", read_config(path).data.tokenizer
        return str(copy) if copy.exists() else name or "bytes"
    file = path / "tokenizer.json"
    require(
        file.exists(),
        f"train.init_from = {init_from}: it has no tokenizer.json: set data.tokenizer to that "
        "of its model ('bytes', or the path of a tokenizer.json)",
    )
    saved_bytes = same_tokens(load_tokenizer(str(file)).fingerprint, load_tokenizer("").fingerprint)
    return "bytes" if saved_bytes else str(file)


def compare_tokens(data: DataConfig, vocab_size: int, init_from: str) -> str:
    """Compares the tokenizer of the data with the tokenizer of the model in `train.init_from`.

    Args:
      data: the settings of the data, from `with_tokenizer`.
      vocab_size: `model.vocab_size`.
      init_from: `train.init_from`.

    Returns:
      A description of the tokenizer, for the terminal.

    Raises:
      UserError: the data and the model are both text, and their tokenizers differ.
    """
    path, _ = split_step(init_from)
    ours = source_of(data).tokenizer_of(data, vocab_size)
    if (path / "run.json").exists():
        from qwen3next_jax.data.synthetic import TaskTokens

        theirs = read_run(path)["tokenizer"]
        is_text = theirs != TaskTokens(read_config(path).model.vocab_size).fingerprint
        copy = f" (a copy is in {path / 'tokenizer'}, unless it is bytes)"
    else:
        file = path / "tokenizer.json"
        theirs, copy = load_tokenizer(str(file)).fingerprint if file.exists() else "", f" ({file})"
        is_text = bool(theirs)
    if same_tokens(ours.fingerprint, theirs):
        return f"its tokenizer ({data.tokenizer})" if ours.reads_text else "its ids"
    if is_text and ours.reads_text and extends(ours, theirs_tokenizer := _tokenizer_of(path)):
        return (
            f"its tokenizer with {ours.vocab_size - theirs_tokenizer.vocab_size} further tokens "
            f"({data.tokenizer})"
        )
    require(
        not is_text or not ours.reads_text,
        f"train.init_from = {init_from}: it was trained with another tokenizer than "
        f"data.tokenizer = {data.tokenizer!r} (fingerprint {theirs[:12]}, here "
        f"{ours.fingerprint[:12]}), so its ids have another meaning: leave data.tokenizer out, "
        f"or set it to the tokenizer of that model{copy}",
    )
    what = data.tokenizer if ours.reads_text else f"ids of {data.source}"
    if not theirs:
        return f"{what} (it has no tokenizer to compare with)"
    return f"OTHER TOKENS than it was trained on ({what})"


def _tokenizer_of(folder: pathlib.Path) -> Tokenizer:
    """Returns the tokenizer of the text model in `folder`, a run or a Hugging Face directory."""
    if not (folder / "run.json").exists():
        return load_tokenizer(str(folder / "tokenizer.json"))
    copy = folder / "tokenizer"
    return load_tokenizer(str(copy) if copy.exists() else read_config(folder).data.tokenizer)


def _check_packages(telemetry: TelemetryConfig) -> None:
    """Raises UserError if a package that `telemetry` needs is not installed."""
    for needed, setting, package, extra in (
        (telemetry.tensorboard, "telemetry.tensorboard = True", "tensorboardX", "tensorboard"),
        (telemetry.wandb, f"telemetry.wandb = {telemetry.wandb!r}", "wandb", "wandb"),
    ):
        if needed:
            how = f"{how_to_install(extra)}, or leave the setting out"
            with as_user_error(f"{setting} needs the package {package}: {how}", ImportError):
                importlib.import_module(package)


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
    if isinstance(path, BucketPath):
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


def steps_of_parent(train: TrainConfig) -> int:
    """Returns the number of steps of the parent that count as steps of this run: with
    `train.init_state` = "all", the step of the checkpoint in `train.init_from`. Returns 0 for any
    other run, or if the parent has no checkpoint.
    """
    if not train.init_from or train.init_state != "all":
        return 0
    require_path(f"train.init_from = {train.init_from!r}", train.init_from)
    path, step = split_step(train.init_from)
    return max(complete_steps(path), default=0) if step is None else step


def find_parent(
    train: TrainConfig, optimizer: OptimizerConfig, workdir: pathlib.Path, restart: bool = False
) -> Parent | None:
    """Finds the run in `train.init_from`, the parent, and the checkpoint of the parent with which
    this run begins. If this run was killed before its first checkpoint, it begins again with the
    same step of the parent, even if the parent has newer checkpoints. This function compares only
    the sizes of the checkpoint's files; `Checkpoints.restore` verifies their digests.

    Args:
      train: the settings `train` of this run.
      optimizer: the optimizer of this run.
      workdir: the folder of this run.
      restart: whether this run begins anew and does not resume the run in `workdir`.

    Returns:
      The record of the parent; None if `train.init_from` names no run, or this run has a
      checkpoint.

    Raises:
      UserError: the parent does not exist or has no such step, or its state does not fit this run.
    """
    where = f"train.init_from = {train.init_from}"
    if not train.init_from or not restart and complete_steps(workdir):
        return None
    _check_is_there(train.init_from)
    path, step = split_step(train.init_from)
    if not is_run(train.init_from):
        require(
            train.init_state == "weights",
            f"{where}: a Hugging Face directory has no optimizer state: set train.init_state = "
            "'weights'",
        )
        return None
    require(
        path.resolve() != workdir.resolve(),
        f"{where}: that is the folder of this run: give another --workdir",
    )
    record = read_run(path)
    theirs, theirs_id = config_of(record, path), record["id"]
    recorded = read_run(workdir).get("parent", {}) if not restart and is_trained(workdir) else {}
    if step is None:
        step = recorded.get("step")
    if step is None:
        step = newest_complete_step(path, theirs_id)
        require(
            step is not None,
            f"{where}: it has no valid checkpoint yet (its checkpoint.every = "
            f"{theirs.checkpoint.every})",
        )
    digest = find_checkpoint(where, path, step, theirs_id)
    scalings = [describe_scaling(one) for one in (theirs.optimizer, optimizer)]
    require(
        scalings[0] == scalings[1],
        f"{where}: its optimizer.scaling is {scalings[0]}, here it is {scalings[1]}: its "
        "parameters have the sizes of its scaling: set optimizer.scaling, base_width and "
        "base_depth to its values",
    )
    if train.init_state == "all":
        require(
            theirs.optimizer.name == optimizer.name,
            f"{where}: its optimizer.name is {theirs.optimizer.name!r}, here it is "
            f"{optimizer.name!r}, which has another "
            "state: set both to the same optimizer, or train.init_state = 'weights'",
        )
        require(
            theirs.optimizer.mean_dtype == optimizer.mean_dtype,
            f"{where}: its optimizer.mean_dtype is {theirs.optimizer.mean_dtype!r}, here it is "
            f"{optimizer.mean_dtype!r}: set both to the same, or train.init_state = 'weights'",
        )
        require(
            theirs.train.freeze == train.freeze,
            f"{where}: its train.freeze is {theirs.train.freeze}, here it is {train.freeze}, so "
            "its optimizer has the state of other parameters: set both to the same, or "
            "train.init_state = 'weights'",
        )
        require(
            step < train.steps,
            f"{where}: train.steps = {train.steps} includes the {step} steps of that run: give a "
            "larger number, or train.init_state = 'weights'",
        )
    return {
        "path": str(path.absolute()),
        "step": step,
        "manifest": digest,
        "run": theirs_id,
    }


def describe_scaling(optimizer: OptimizerConfig) -> str:
    """Describes `optimizer.scaling`, on which the sizes of a run's parameters depend."""
    return (
        f"{optimizer.scaling} (base width {optimizer.base_width}, base depth "
        f"{optimizer.base_depth})"
    )


def find_checkpoint(where: str, path: pathlib.Path, step: int, run: str) -> str:
    """Finds a checkpoint of a run. Compares only the sizes of its files with its manifest.

    Args:
      where: the first words of an error message.
      path: the folder of the run.
      step: the number of steps after which the checkpoint was saved.
      run: the id of the run.

    Returns:
      The first digits of the digest of the checkpoint's manifest, as records of parents hold them.

    Raises:
      UserError: there is no such checkpoint, or it is damaged.
    """
    saved = saved_steps(path)
    require(
        step in saved,
        f"{where}: it has no checkpoint of step {step}; saved steps: "
        f"{', '.join(map(str, saved)) or 'none'}",
    )
    folder = path / "checkpoints" / str(step)
    # The digest is read first. If another checkpoint replaces this one before `find_damage`, the
    # digest does not match, and `restore` raises an error.
    digest = manifest.digest(folder)
    damage = manifest.find_damage(folder, sizes_only=True, run=run)
    if digest is None:
        damage = damage or "it is being written or deleted"
    require(damage is None, f"{where}: {folder}: damaged: {damage}")
    return digest[:20]


def newest_complete_step(workdir: pathlib.Path, run: str) -> int | None:
    """Returns the newest step whose checkpoint in `workdir` belongs to `run` and has files of the
    right sizes; None if there is none.
    """
    for step in reversed(saved_steps(workdir)):
        folder = workdir / "checkpoints" / str(step)
        if manifest.find_damage(folder, sizes_only=True, run=run) is None:
            return step
    return None


def describe_damaged_checkpoints(init_from: str, parent: Parent) -> str:
    """Returns a description of the damaged checkpoints of the parent that are newer than the
    checkpoint in `parent`; "" if there are none, or if `train.init_from` names a step.
    """
    path, step = split_step(init_from)
    if step is not None:
        return ""
    damages = {
        step: manifest.find_damage(path / "checkpoints" / str(step), True, run_id(path))
        for step in saved_steps(path)
        if step > parent["step"]
    }
    return "".join(
        f"; step {step} is skipped: {damage}" for step, damage in damages.items() if damage
    )


def split_step(init_from: str) -> tuple[pathlib.Path, int | None]:
    """Splits RUN@STEP into (RUN, STEP). Without @STEP, or if a folder is called RUN@STEP, the
    second value is None.
    """
    match = re.fullmatch(r"(.+)@([0-9]{1,18})", init_from)
    if match is None or to_path(init_from).exists():
        return to_path(init_from), None
    return to_path(match[1]), int(match[2])


def check_structure(model: ModelConfig, init_from: str, parent: Parent | None = None) -> None:
    """Checks that `model` can take the parameters of the model in `train.init_from`.

    Args:
      model: the model of the run that begins.
      init_from: `train.init_from`.
      parent: the record of the run in `init_from`; None if it is a Hugging Face directory.

    Raises:
      UserError: the parameters have other shapes or another meaning.
    """
    compare_structure(model, source_model(init_from, parent), init_from)


def source_model(init_from: str, parent: Parent | None = None) -> ModelConfig:
    """Returns the settings of the model in `train.init_from`.

    Args:
      init_from: `train.init_from`.
      parent: the record of the run in `init_from`; None if it is a Hugging Face directory.
    """
    if parent:
        return read_config(to_path(parent["path"])).model
    require_subpackage("interop", f"train.init_from = {init_from}")
    from qwen3next_jax.interop.hf_config import read_hf_config

    return read_hf_config(init_from)


def compare_structure(model: ModelConfig, source_model: ModelConfig, init_from: str) -> None:
    """Checks that `model` can take the parameters of `source_model`, the model in
    `train.init_from`.

    Raises:
      UserError: the parameters have other shapes or another meaning.
    """
    for name in weights_differ(model, source_model):
        # The vocabulary may grow (training/vocabulary.py), but the hashes of n-grams depend on it.
        grows = name == "vocab_size" and model.vocab_size > source_model.vocab_size
        if (
            name not in NOT_STRUCTURE
            and (not grows or model.ple.layer_ids)
            and (name != "intermediate_size" or model.has_dense_mlps)
            and (name not in EXPERT_SETTINGS or model.has_experts)
        ):
            ours, theirs = (
                c.mixers if name == "layer_types" else getattr(c, name)
                for c in (model, source_model)
            )
            raise UserError(
                f"train.init_from = {init_from}: its {name} is {theirs}, model.{name} "
                f"= {ours}; set model.{name} to its value"
            )
    require(
        source_model.lora in (LoRAConfig(), model.lora),
        f"train.init_from = {init_from}: it has adapters, with model.lora = {source_model.lora}: "
        "set model.lora to the same, or begin with its export, which has them merged",
    )
    if model.mtp_depth and not source_model.mtp_depth:
        raise UserError(
            f"train.init_from = {init_from}: it has no mtp.* tensors; set model.mtp_depth = 0"
        )
