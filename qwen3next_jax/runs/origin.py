"""With what the model of a run began, through all runs before it: a Hugging Face directory, whose
form an export has, or random weights.

`run.json` holds it as "source" from the beginning of the run on, so that no run before it has to
stay: null for random weights, else

    path     of the Hugging Face directory
    form     the value of `model.hf_form` that stands for what it is written as
    files    of a run that began with the directory itself: see `stamp_hf`
"""

import pathlib
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config import Config
from qwen3next_jax.runs import manifest
from qwen3next_jax.runs.folder import config_of, read_run, run_id, trained_run
from qwen3next_jax.runs.preflight import Parent, names_run


class Origin(NamedTuple):
    """directory: the Hugging Face directory, which may be gone; None: random weights. form: of
    it; "" where no record says.
    """

    directory: pathlib.Path | None
    form: str = ""


def began_with(path: str | pathlib.Path) -> Origin:
    """With what the model in `path`, a run or a Hugging Face directory, began.

    Raises:
      UserError: only a run before it could say, which is gone, or its path holds something else.
    """
    folder, seen = pathlib.Path(path), set()
    if not (folder / "run.json").exists():
        return Origin(folder)
    while True:
        record = read_run(folder)
        if "source" in record:
            source = record["source"]
            return Origin(pathlib.Path(source["path"]), source["form"]) if source else Origin(None)
        # a record of older code
        if not (parent := record.get("parent")):
            init_from = config_of(record, folder).train.init_from
            return Origin(pathlib.Path(init_from) if init_from else None)
        seen.add(folder.resolve())
        child, folder = folder, pathlib.Path(parent["path"])
        require(
            folder.resolve() not in seen and _is_parent(folder, parent),
            f"{folder}: not there, or no longer the run that {child} began with, and an export "
            "has the form of the Hugging Face directory that its model began with: give "
            "--source=DIR, or --form",
        )


def find_source(config: Config, parent: Parent | None, files: str) -> dict[str, Any]:
    """{"source": …} as the run.json of a new run holds it; {} where nobody knows any more.

    Args:
      parent: the run that it begins with, if it begins with one.
      files: `stamp_hf` of the Hugging Face directory that it begins with, if it does.
    """
    init_from = config.train.init_from
    if not init_from:
        return {"source": None}
    if parent is None:
        from qwen3next_jax.interop.hf_config import read_hf_config

        path, form = str(pathlib.Path(init_from).absolute()), read_hf_config(init_from).hf_form
        return {"source": {"path": path, "form": form, "files": files}}
    try:
        origin = began_with(parent["path"])
    except UserError:
        return {}
    directory, form = origin
    return {"source": directory and {"path": str(directory.absolute()), "form": form}}


def stamp_of_files(config: Config) -> str:
    """`stamp_hf` of the Hugging Face directory that a run begins with; "" where it begins with
    none.
    """
    init_from = config.train.init_from
    if not init_from or names_run(init_from):
        return ""
    from qwen3next_jax.interop.huggingface import stamp_hf

    return stamp_hf(init_from)


def check_recorded_files(workdir: pathlib.Path, files: str) -> None:
    """Raises UserError where the run in `workdir` began with a Hugging Face directory of which
    `files` is not the stamp. A run that has a checkpoint does not look at it again.
    """
    record = trained_run(workdir) if files else None
    recorded = ((record or {}).get("source") or {}).get("files", files)
    require(
        recorded == files,
        f"{workdir}: the files of the Hugging Face directory that its run began with were replaced "
        "since (other sizes or times), and it has no checkpoint of its own yet: put them back, "
        "give another --workdir, or start anew with --restart",
    )


def check_files(init_from: str, files: str) -> None:
    """Raises UserError unless `stamp_hf` of the Hugging Face directory `init_from` is `files`."""
    from qwen3next_jax.interop.huggingface import stamp_hf

    require(
        stamp_hf(init_from) == files,
        f"train.init_from = {init_from}: its files were replaced since this run began with them "
        "(other sizes or times): put them back, or begin a new --workdir",
    )


def _is_parent(folder: pathlib.Path, parent: Parent) -> bool:
    """Whether `folder` still holds the run that `parent` was taken from, whose checkpoint may be
    gone. A record without an id is told by the checkpoint alone.
    """
    if "run" in parent:
        return run_id(folder) == parent["run"]
    digest = manifest.digest(folder / "checkpoints" / str(parent["step"])) or ""
    return digest[:20] == parent["manifest"]
