"""Finds the base model of a run: the Hugging Face directory with whose weights training began. A
run that began with the weights of another run, its parent, has the parent's base model. run.json
records the base model, so the folders of the parents need not be kept.
"""

import pathlib

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.storage import BucketPath, to_path
from qwen3next_jax.runs.record import BaseModel, read_record, run_id


def find_base_model(path: str | pathlib.Path) -> BaseModel | None:
    """Finds the base model of the model in `path`, which is a run or a Hugging Face directory. A
    Hugging Face directory is its own base model.

    Returns:
      The base model, whose directory may no longer exist; None if training began with random
      weights.
    """
    folder = to_path(path)
    if not (folder / "run.json").exists():
        return BaseModel(str(folder), form="")
    return read_record(folder).source


def find_adapter_base(workdir: str | pathlib.Path) -> pathlib.Path | BucketPath | None:
    """Finds the Hugging Face directory with the matrices to which the adapters of a run
    (`model.lora`) belong. The run began with this directory, or the parent of the run began with it
    and has the same adapters.

    Returns:
      The directory, which may no longer exist; None if the run began with random weights, if the
      parent of the run had trained the matrices, or if the parent's folder is gone.

    Raises:
      UserError: the vocabulary grew when the run began, so the directory does not have the run's
        embedding.
    """
    folder = to_path(workdir)
    record = read_record(folder)
    tokens = record.read_config(folder).model.vocab_size
    while parent := record.parent:
        folder = to_path(parent.path)
        if run_id(folder) != parent.run:
            return None
        record = read_record(folder)
        parent_model = record.read_config(folder).model
        _require_same_vocabulary(folder, parent_model.vocab_size, tokens)
        if not parent_model.lora.rank:
            return None
    if not record.source:
        return None
    path = to_path(record.source.path)
    if (path / "config.json").exists():
        from qwen3next_jax.interop.hf_config import read_hf_config

        _require_same_vocabulary(path, read_hf_config(path).vocab_size, tokens)
    return path


def _require_same_vocabulary(
    base_path: pathlib.Path | BucketPath, base_size: int, run_size: int
) -> None:
    require(
        base_size == run_size,
        f"--adapter: the run has a vocabulary of {run_size:,}, its base {base_path} one of "
        f"{base_size:,}, so PEFT would load the adapters beside an embedding without the new "
        "tokens: leave --adapter out, which exports the merged weights",
    )
