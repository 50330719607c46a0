"""Checks of the values of flags, made before anything is loaded or computed."""

import pathlib
from collections.abc import Sequence

from qwen3next_jax.common.errors import UserError, require_path, similar_folder_hint
from qwen3next_jax.common.storage import check_bucket_access, is_bucket, to_path
from qwen3next_jax.config import ModelConfig


def check_model(flag: str, path: str | pathlib.Path) -> ModelConfig:
    """Reads the model's settings from the run or the Hugging Face directory at `path`.

    Raises:
      UserError: `path` is neither a run nor a Hugging Face directory. This error is raised before
        anything is loaded.
    """
    require_path(f"--{flag}={path}", path)
    folder = to_path(path, f"--{flag}=")
    if not (folder / "run.json").exists() and not (folder / "config.json").exists():
        reason = "it has neither run.json nor config.json" if folder.exists() else "no such folder"
        raise UserError(
            f"--{flag}={path}: not the folder of a run, nor a Hugging Face directory ({reason})"
            f"{similar_folder_hint(folder)}"
        )
    if (folder / "run.json").exists():
        from qwen3next_jax.runs.record import read_config

        return read_config(folder).model
    from qwen3next_jax.interop.hf_config import read_hf_config

    return read_hf_config(path)


def check_writable(flag: str, path: str) -> None:
    """Checks the path of a file for results before the results are computed.

    Raises:
      UserError: the path is a folder, or its folder does not exist.
    """
    require_path(f"--{flag}={path}", path)
    if is_bucket(path):
        check_bucket_access(f"--{flag}={path}", to_path(path, f"--{flag}="))
        return
    if path and (pathlib.Path(path).is_dir() or not pathlib.Path(path).absolute().parent.is_dir()):
        reason = (
            "a folder: expected the name of a file"
            if pathlib.Path(path).is_dir()
            else "there is no such folder"
        )
        raise UserError(f"--{flag}={path}: {reason}")


def positive_integers(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    """Reads the numbers of a comma-separated flag.

    Raises:
      UserError: a value is not a positive number.
    """
    if not values or not all(
        value.strip().isdecimal() and 0 < len(value) < 10 and int(value) for value in values
    ):
        raise UserError(
            f"--{flag}={','.join(values)}: expected positive numbers separated by commas"
        )
    return tuple(int(value) for value in values)
