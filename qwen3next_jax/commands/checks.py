"""Checks the values of flags before anything is loaded or computed."""

import pathlib
from collections.abc import Sequence

from qwen3next_jax.common.errors import UserError, require_path, similar_folder_hint
from qwen3next_jax.common.storage import check_bucket_access, is_bucket, to_path
from qwen3next_jax.config import ModelConfig


def check_and_read_model_config(flag: str, path: str | pathlib.Path) -> ModelConfig:
    """Checks that `path`, the value of the flag `flag`, is the folder of a run or a Hugging Face
    directory, and returns the settings of its model. Loads no parameters.

    Raises:
      UserError: `path` is neither a run nor a Hugging Face directory.
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


def check_result_file(flag: str, path: str) -> None:
    """Checks the path of the file into which the command will write its results.

    Raises:
      UserError: the path is a folder, or the folder of the file does not exist.
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


def parse_positive_integers(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    """Returns the numbers in the texts `values`, the value of the comma-separated flag `flag`.

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
