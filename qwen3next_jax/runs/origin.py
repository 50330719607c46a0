"""Finds the origin of a run's model. A run may begin with the weights of another run, its parent,
and the parent may also have a parent, and so on. The first of these runs began with a Hugging Face
directory or with random weights: that is the origin. An export of the run has the file format of
the Hugging Face directory.

The key "source" of `run.json` records the origin, so the folders of the parents need not be kept.
It is null for random weights; otherwise it has these keys:

    path     the path of the Hugging Face directory
    form     its format, a value of `model.hf_form`
    files    `interop.huggingface.stamp_hf` of the directory, a digest of the names, sizes and times
             of its files; only if the run itself began with the directory
"""

import pathlib
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.runs.folder import config_of, read_run, run_id, trained_run
from qwen3next_jax.runs.preflight import Parent, is_run


class Origin(NamedTuple):
    """The origin of a model.

    Attributes:
      directory: the Hugging Face directory, which may no longer exist; None for random weights.
      form: the format of the directory, a value of `model.hf_form`; "" if none is recorded.
    """

    directory: pathlib.Path | None
    form: str = ""


def find_origin(path: str | pathlib.Path) -> Origin:
    """Finds the origin of the model in `path`, a run or a Hugging Face directory."""
    folder = to_path(path)
    if not (folder / "run.json").exists():
        return Origin(folder)
    source = read_run(folder)["source"]
    return Origin(to_path(source["path"]), source["form"]) if source else Origin(None)


def find_base(workdir: str | pathlib.Path) -> pathlib.Path | None:
    """Finds the Hugging Face directory with the matrices that the adapters of a run (`model.lora`)
    adapt: that with which the run began, or its parent if the parent has the same adapters.

    Returns:
      The directory, which may no longer exist; None if the run began with random weights, or with a
      parent that had changed the matrices, or that is no longer there.

    Raises:
      UserError: the vocabulary grew when the run began, so no directory has its embedding.
    """
    folder = to_path(workdir)
    record = read_run(folder)
    tokens = config_of(record, folder).model.vocab_size
    while parent := record.get("parent"):
        folder = to_path(parent["path"])
        if run_id(folder) != parent["run"]:
            return None
        record = read_run(folder)
        theirs = config_of(record, folder).model
        _require_same_vocabulary(folder, theirs.vocab_size, tokens)
        if not theirs.lora.rank:
            return None
    if not (source := record["source"]):
        return None
    path = to_path(source["path"])
    if (path / "config.json").exists():
        from qwen3next_jax.interop.hf_config import read_hf_config

        _require_same_vocabulary(path, read_hf_config(path).vocab_size, tokens)
    return path


def _require_same_vocabulary(base: pathlib.Path, theirs: int, ours: int) -> None:
    require(
        theirs == ours,
        f"--adapter: the run has a vocabulary of {ours:,}, its base {base} one of {theirs:,}, so "
        "PEFT would load the adapters beside an embedding without the new tokens: leave --adapter "
        "out, which exports the merged weights",
    )


def find_source(init_from: str, parent: Parent | None, files: str) -> dict[str, Any]:
    """Finds the origin of a new run. Returns it as {"source": …} for run.json.

    Args:
      init_from: `train.init_from`.
      parent: the record of the run in `init_from`; None if `init_from` names no run.
      files: `stamp_hf` of the Hugging Face directory in `init_from`; "" if `init_from` names none.
    """
    if not init_from:
        return {"source": None}
    if parent is None:
        from qwen3next_jax.interop.hf_config import read_hf_config

        path, form = str(to_path(init_from).absolute()), read_hf_config(init_from).hf_form
        return {"source": {"path": path, "form": form, "files": files}}
    directory, form = find_origin(parent["path"])
    return {"source": directory and {"path": str(directory.absolute()), "form": form}}


def stamp_init_from(init_from: str) -> str:
    """Returns `stamp_hf` of the Hugging Face directory `init_from`; "" if `init_from` is "" or a
    run.
    """
    if not init_from or is_run(init_from):
        return ""
    from qwen3next_jax.interop.huggingface import stamp_hf

    return stamp_hf(init_from)


def check_recorded_files(workdir: pathlib.Path, files: str) -> None:
    """Checks that the files of a Hugging Face directory have not been replaced since the run in
    `workdir` began with them.

    Args:
      files: the present `stamp_hf` of the directory; "" skips the check, because the run has a
        checkpoint or does not begin with a Hugging Face directory.

    Raises:
      UserError: the files were replaced since the run began.
    """
    record = trained_run(workdir) if files else None
    recorded = ((record and record["source"]) or {}).get("files", files)
    require(
        recorded == files,
        f"{workdir}: its run began with files of a Hugging Face directory that were replaced since "
        "(their sizes or times differ), and it has no checkpoint yet: put them back, "
        "give another --workdir, or start anew with --restart",
    )


def check_files(init_from: str, files: str) -> None:
    """Raises UserError unless `stamp_hf` of the Hugging Face directory `init_from` is `files`."""
    from qwen3next_jax.interop.huggingface import stamp_hf

    require(
        stamp_hf(init_from) == files,
        f"train.init_from = {init_from}: its files were replaced since this run began with them "
        "(their sizes or times differ): put them back, or give another --workdir",
    )
