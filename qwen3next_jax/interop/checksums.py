"""The SHA256SUMS file of an export: whether the directory still holds what was written.

safetensors alone does not notice a flipped bit.
"""

import concurrent.futures
import os
import pathlib
from collections.abc import Iterator

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, short_repr
from qwen3next_jax.interop.weights import is_file_name, weight_files
from qwen3next_jax.interop.writing import DIGESTS


def require_undamaged(directory: pathlib.Path, process: int = 0, processes: int = 1) -> None:
    """Raises UserError where a file is not the one that SHA256SUMS names; see `verify_hf`."""
    for name, damage in verify_hf(directory, process, processes):
        if damage:
            raise UserError(
                f"{directory / name}: {damage}: damaged, or changed after export; copy it again, "
                f"or delete {DIGESTS} if the change is meant"
            )


def verify_hf(
    directory: pathlib.Path, process: int = 0, processes: int = 1
) -> Iterator[tuple[str, str | None]]:
    """Compares the files of a Hugging Face directory with its SHA256SUMS, on all cores. Nothing is
    compared where there is no such file.

    Args:
      directory: the export.
      process: the number of this process.
      processes: how many processes share the work: each digests its part of the files.

    Yields:
      (file, what is wrong with it or None) of every file that SHA256SUMS names, and of every
      weight file that it does not name.
    """
    if not (directory / DIGESTS).exists():
        return
    recorded = _recorded(directory / DIGESTS)
    for name in list(recorded):
        if wrong := _wrong_name(name):
            del recorded[name]
            yield DIGESTS, f"it names {short_repr(name)}, {wrong}"
    for file in weight_files(directory):
        if file.name not in recorded:
            yield file.name, f"{DIGESTS} does not name it"
    names = sorted(recorded)[process::processes]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        digests_of_files = pool.map(_digest, (directory / name for name in names))
        for name, digest in zip(names, digests_of_files, strict=True):
            yield name, _damage(digest, recorded[name])


def _recorded(file: pathlib.Path) -> dict[str, str]:
    """File name → digest, of the lines `DIGEST  NAME`."""
    try:
        with json_files.open_regular(file) as opened:
            text = opened.read().decode(errors="replace")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    return {words[1].lstrip("*"): words[0] for words in lines if len(words) == 2}


def _wrong_name(name: str) -> str | None:
    path = pathlib.PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        return "which is outside this folder"
    if not all(map(is_file_name, path.parts)):
        return "which is no name of a file"
    return None


def _digest(file: pathlib.Path) -> str | None:
    return digests.sha256_file(file) if os.path.isfile(file) else None


def _damage(digest: str | None, recorded: str) -> str | None:
    if digest is None:
        return f"missing, although {DIGESTS} names it"
    if digest != recorded:
        return f"SHA-256 is {digest[:12]}…, {DIGESTS} says {recorded[:12]}…"
    return None
