"""What can be told of a start before JAX is loaded and before anything is read at length: a
mistake should cost a second.

train.py asks this first where there is one process; `train` asks it again, of all processes
together.
"""

import dataclasses
import importlib
import pathlib
import re
from typing import Any

from qwen3next_jax.common.errors import UserError, require, require_path, as_user_error
from qwen3next_jax.common.rooms import require_room
from qwen3next_jax.config import Config, DataConfig, ModelConfig, TelemetryConfig, TrainConfig
from qwen3next_jax.config.compatibility import weights_differ
from qwen3next_jax.data.pipeline import source_of
from qwen3next_jax.data.synthetic import TaskTokens
from qwen3next_jax.data.tokens import load_tokenizer, same_tokens
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.folder import (
    check_settings,
    config_of,
    is_trained,
    read_config,
    read_run,
    restart_has_begun,
    run_id,
    saved_steps,
    trained_run,
)
from qwen3next_jax.training.stages import resolve_stages

# Of the run that another one begins with, as run.json holds it: path, step, manifest (digest of
# that checkpoint's), run (its id, where it has one).
Parent = dict[str, Any]
OF_EXPERTS = {
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
}
# Model settings that may differ from those of `train.init_from`: they change no parameter's shape
# or meaning. `weights_differ` adds those that the model's modules leave free.
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
}


def check(
    config: Config, workdir: pathlib.Path, restart: bool = False, records: bool = True
) -> None:
    """Looks at the folder of the run, the packages that show it (where this process `records` the
    run), the source of its data (a tokenizer, the globs of `data.path`) and what
    `train.init_from` names.

    Raises:
      UserError: one of them is not as it should be.
    """
    # deeper than anything that a run writes, so that no save fails for its path
    require_path(f"--workdir={workdir}", workdir.absolute() / "checkpoints" / ("0" * 200))
    if records:
        _check_packages(config.telemetry)
    restart = restart or restart_has_begun(workdir)
    if not restart:
        check_settings(workdir, config)
    config = with_tokenizer(config, workdir, restart)
    # a run that goes on needs it no more
    if config.train.init_from and (restart or not saved_steps(workdir)):
        init_from = config.train.init_from
        check_structure(config.model, init_from, find_parent(config, workdir, restart))
        compare_tokens(config.data, config.model.vocab_size, init_from)
    for data, length in dict.fromkeys(
        (stage.data, stage.sequence_length) for stage in resolve_stages(config)
    ):
        source_of(data).check(data, length, config.model.vocab_size)


def with_tokenizer(config: Config, workdir: pathlib.Path, restart: bool = False) -> Config:
    """`config` with the tokenizer for which data.tokenizer = "" stands: a run that goes on keeps
    its own, one that begins with a model takes that model's, any other takes bytes.

    Raises:
      UserError: the model in `train.init_from` brings none.
    """
    if config.data.tokenizer or config.data.source != "text":
        return config
    if before := None if restart else trained_run(workdir):
        name, own = read_config(workdir).data.tokenizer or "bytes", workdir / "tokenizer"
        if own.exists() and not _gives(name, before["tokenizer"]):
            name = str(own)
    else:
        name = tokenizer_of_model(config.train.init_from)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=name))


def _gives(name: str, fingerprint: str) -> bool:
    """Whether `name` is still that of the tokenizer with this fingerprint."""
    try:
        return load_tokenizer(name).fingerprint == fingerprint
    except UserError:
        return False


def tokenizer_of_model(init_from: str) -> str:
    """The data.tokenizer with which the model that `train.init_from` names was trained; "bytes"
    where it names none.

    Raises:
      UserError: what it names is not there, or a Hugging Face directory without a tokenizer.json.
    """
    if not init_from:
        return "bytes"
    _check_is_there(init_from)
    path, _ = _split(init_from)
    if names_run(init_from):
        own, name = path / "tokenizer", read_config(path).data.tokenizer
        return str(own) if own.exists() else name or "bytes"
    file = path / "tokenizer.json"
    require(
        file.exists(),
        f"train.init_from = {init_from}: it brings no tokenizer.json: set data.tokenizer to that "
        "of its model ('bytes', or the path of a tokenizer.json)",
    )
    saved_bytes = same_tokens(load_tokenizer(str(file)).fingerprint, load_tokenizer("").fingerprint)
    return "bytes" if saved_bytes else str(file)


def compare_tokens(data: DataConfig, vocab_size: int, init_from: str) -> str:
    """How the ids of the model in `train.init_from` and those of the data go together, in words.
    `data`: after `with_tokenizer`.

    Raises:
      UserError: both stand for text, and not for the same.
    """
    path, _ = _split(init_from)
    ours = source_of(data).tokenizer_of(data, vocab_size)
    if (path / "run.json").exists():
        theirs = read_run(path)["tokenizer"]
        of_text = theirs != TaskTokens(read_config(path).model.vocab_size).fingerprint
        copy = f" (a copy is in {path / 'tokenizer'}, unless it is bytes)"
    else:
        file = path / "tokenizer.json"
        theirs, copy = load_tokenizer(str(file)).fingerprint if file.exists() else "", f" ({file})"
        of_text = bool(theirs)
    if same_tokens(ours.fingerprint, theirs):
        return f"its tokenizer ({data.tokenizer})" if ours.reads_text else "its ids"
    require(
        not of_text or not ours.reads_text,
        f"train.init_from = {init_from}: it was trained with another tokenizer than "
        f"data.tokenizer = {data.tokenizer!r} (fingerprint {theirs[:12]}, here "
        f"{ours.fingerprint[:12]}), so that its weights know other ids: leave data.tokenizer out, "
        f"or give its own{copy}",
    )
    what = data.tokenizer if ours.reads_text else f"ids of {data.source}"
    if not theirs:
        return f"{what} (it brings no tokenizer to compare with)"
    return f"OTHER TOKENS than it was trained on ({what})"


def _check_packages(telemetry: TelemetryConfig) -> None:
    for wanted, setting, package, extra in (
        (telemetry.tensorboard, "telemetry.tensorboard = True", "tensorboardX", "tensorboard"),
        (telemetry.wandb, f"telemetry.wandb = {telemetry.wandb!r}", "wandb", "wandb"),
    ):
        if wanted:
            how = f"pip install 'qwen3next-jax[{extra}]', or leave the setting out"
            with as_user_error(f"{setting} needs the package {package}: {how}", ImportError):
                importlib.import_module(package)


def names_run(init_from: str) -> bool:
    """Whether `train.init_from` is a run, not a Hugging Face directory."""
    path, step = _split(init_from)
    return step is not None or (path / "run.json").exists()


def _check_is_there(init_from: str) -> None:
    """Raises UserError unless `train.init_from` names a folder that may be a run, or a Hugging
    Face directory.
    """
    where = f"train.init_from = {init_from}"
    require_path(where, init_from)
    path, step = _split(init_from)
    if step is not None and "://" not in init_from:
        require(path.is_dir(), f"{where}: there is no folder {path}")
        return
    found = "has neither run.json nor config.json" if path.is_dir() else "is no folder here"
    require(
        (path / "run.json").exists() or (path / "config.json").exists(),
        f"{where}: it {found}: expected a run (RUN or RUN@STEP) or a Hugging Face directory, "
        "either local or on a mounted file system",
    )


def steps_of_parent(train: TrainConfig) -> int:
    """Steps that a run has behind it when it begins: those of the run that `train.init_from`
    names, where it takes over the whole state. 0 where that has no checkpoint.
    """
    if not train.init_from or train.init_state != "all":
        return 0
    require_path(f"train.init_from = {train.init_from!r}", train.init_from)
    path, step = _split(train.init_from)
    return max(saved_steps(path), default=0) if step is None else step


def find_parent(config: Config, workdir: pathlib.Path, restart: bool = False) -> Parent | None:
    """The run that `train.init_from` names; None where it names none, and where the run in
    `workdir` has a checkpoint of its own. A run that was killed before its first one begins with
    the step that it began with, whatever its parent has saved since.

    Raises:
      UserError: it is not there, has no such step, or cannot be gone on with as
      `train.init_state` says. Of a checkpoint's files
        the sizes are looked at; their digests when it is read.
    """
    train, where = config.train, f"train.init_from = {config.train.init_from}"
    if not train.init_from or not restart and saved_steps(workdir):
        return None
    _check_is_there(train.init_from)
    path, step = _split(train.init_from)
    if not names_run(train.init_from):
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
    record, saved = read_run(path), saved_steps(path)
    theirs, theirs_id = config_of(record, path), record.get("id", "")
    begun = read_run(workdir).get("parent", {}) if not restart and is_trained(workdir) else {}
    if step is None:
        step = begun.get("step")
    if step is None:
        step = next(
            (
                s
                for s in reversed(saved)
                if manifest.find_damage(path / "checkpoints" / str(s), True, theirs_id) is None
            ),
            None,
        )
        require(
            step is not None,
            f"{where}: it has no whole checkpoint yet (its checkpoint.every = "
            f"{theirs.checkpoint.every})",
        )
    require(
        step in saved,
        f"{where}: it has no checkpoint of step {step}; saved steps: "
        f"{', '.join(map(str, saved)) or 'none'}",
    )
    folder = path / "checkpoints" / str(step)
    # The digest comes first: what is found whole after it is what it names, or is refused when
    # the weights are read.
    digest = manifest.digest(folder)
    damage = manifest.find_damage(folder, sizes_only=True, run=theirs_id)
    if digest is None:
        damage = damage or "it is being written or removed"
    require(damage is None, f"{where}: {folder}: damaged: {damage}")
    if train.init_state == "all":
        require(
            theirs.optimizer.name == config.optimizer.name,
            f"{where}: its optimizer.name is {theirs.optimizer.name!r}, here it is "
            f"{config.optimizer.name!r}, which cannot go on with "
            "that one's state: set the one to the other, or train.init_state = 'weights'",
        )
        require(
            step < train.steps,
            f"{where}: train.steps = {train.steps} is the total, of which {step} are taken: give "
            "more, or train.init_state = 'weights'",
        )
    return {
        "path": str(path.absolute()),
        "step": step,
        "manifest": digest[:20],
        # a record of older code lacks it, and goes on without
        **({"run": theirs_id} if theirs_id and (not begun or "run" in begun) else {}),
    }


def passed_over(init_from: str, parent: Parent) -> str:
    """What to say of newer checkpoints of `parent` that are damaged, where `train.init_from`
    names no step and so means the newest one; else nothing.
    """
    path, step = _split(init_from)
    if step is not None:
        return ""
    found = {
        step: manifest.find_damage(path / "checkpoints" / str(step), True, run_id(path))
        for step in saved_steps(path)
        if step > parent["step"]
    }
    return "".join(
        f"; step {step} is passed over: {damage}" for step, damage in found.items() if damage
    )


def _split(init_from: str) -> tuple[pathlib.Path, int | None]:
    """RUN@STEP → (RUN, STEP); (RUN, None) where no step is named, or a folder has that very
    name.
    """
    named = re.fullmatch(r"(.+)@([0-9]{1,18})", init_from)
    if named is None or pathlib.Path(init_from).exists():
        return pathlib.Path(init_from), None
    return pathlib.Path(named[1]), int(named[2])


def check_structure(model: ModelConfig, init_from: str, parent: Parent | None = None) -> None:
    """Raises UserError unless the model of `parent`, or the one in the Hugging Face directory
    `init_from`, has the structure of `model`.
    """
    if parent:
        found_model = read_config(pathlib.Path(parent["path"])).model
    else:
        require_room("interop", f"train.init_from = {init_from}")
        from qwen3next_jax.interop.hf_config import read_hf_config

        found_model = read_hf_config(init_from)
    compare_structure(model, found_model, init_from)


def compare_structure(model: ModelConfig, found_model: ModelConfig, init_from: str) -> None:
    """Raises UserError unless `found_model`, that of `train.init_from`, has the structure of
    `model`.
    """
    for name in weights_differ(model, found_model):
        if (
            name not in NOT_STRUCTURE
            and (name != "intermediate_size" or model.has_dense_mlps)
            and (name not in OF_EXPERTS or model.has_experts)
        ):
            wanted, found = (
                c.mixers if name == "layer_types" else getattr(c, name)
                for c in (model, found_model)
            )
            raise UserError(
                f"train.init_from = {init_from}: its {name} is {found}, model.{name} "
                f"= {wanted}; set the one in the config to the other"
            )
    if model.mtp_depth and not found_model.mtp_depth:
        raise UserError(
            f"train.init_from = {init_from}: it has no mtp.* tensors; set model.mtp_depth = 0"
        )
