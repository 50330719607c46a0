"""Compares the files of an exported directory with the digests in its SHA256SUMS file. The check is
needed because the safetensors format has no checksums, so a reader does not notice a flipped bit.
"""

import concurrent.futures
import hashlib
import os
import pathlib
from collections.abc import Iterator

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, short_repr
from qwen3next_jax.common.storage import BucketPath
from qwen3next_jax.interop.weights import is_file_name, weight_files
from qwen3next_jax.interop.writing import DIGESTS

_BLOCK = 1 << 26  # bytes that are read from a bucket at once


def require_undamaged(directory: pathlib.Path, process: int = 0, processes: int = 1) -> None:
    """Checks this process's share of a directory's files against the digests in the directory's
    SHA256SUMS. `compare_with_checksums` explains the arguments.

    Raises:
      UserError: a file is missing or differs from its digest; SHA256SUMS does not name a file of
        weights, names a file that is not allowed, or cannot be read.
    """
    for name, problem in compare_with_checksums(directory, process, processes):
        if problem:
            raise UserError(
                f"{directory / name}: {problem}: damaged, or changed after export; copy it again, "
                f"or delete {DIGESTS} if the change is intended"
            )


def compare_with_checksums(
    directory: pathlib.Path, process: int = 0, processes: int = 1
) -> Iterator[tuple[str, str | None]]:
    """Compares the files of a Hugging Face directory with the digests in the directory's
    SHA256SUMS, on all cores. Yields nothing if the directory has no SHA256SUMS.

    Args:
      directory: the exported directory.
      process: the index of this process, from 0.
      processes: the number of processes that share the work. Each process compares one in
        `processes` of the files.

    Yields:
      (file name, problem). The problem is a phrase for a message, or None if the file has the
      recorded digest. There is a pair for each file of this process's share of the names in
      SHA256SUMS, for each file of weights that SHA256SUMS does not name, and for each name that
      SHA256SUMS may not contain.

    Raises:
      UserError: SHA256SUMS cannot be read.
    """
    if not (directory / DIGESTS).exists():
        return
    recorded = _read_checksums(directory / DIGESTS)
    for name in list(recorded):
        if problem := _name_problem(name):
            del recorded[name]
            yield DIGESTS, f"it names {short_repr(name)}, {problem}"
    for file in weight_files(directory):
        if file.name not in recorded:
            yield file.name, f"{DIGESTS} does not name it"
    names = sorted(recorded)[process::processes]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found_digests = pool.map(_digest_if_file, (directory / name for name in names))
        for name, digest in zip(names, found_digests, strict=True):
            yield name, _digest_problem(digest, recorded[name])


def _read_checksums(file: pathlib.Path) -> dict[str, str]:
    """Reads the lines `DIGEST  NAME` of a SHA256SUMS file, and returns file name → digest."""
    try:
        with json_files.open_regular_file(file) as opened:
            text = opened.read().decode(errors="replace")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    # Some tools write a * before the name of a file that they read in binary mode.
    return {words[1].lstrip("*"): words[0] for words in lines if len(words) == 2}


def _name_problem(name: str) -> str | None:
    """Returns why SHA256SUMS may not name the file `name`; None if it may."""
    path = pathlib.PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        return "which is outside this folder"
    if not all(map(is_file_name, path.parts)):
        return "which is not a valid file name"
    return None


def _digest_if_file(file: pathlib.Path) -> str | None:
    """Returns the SHA-256 digest of a file, in hexadecimal; None if there is no such file."""
    if not isinstance(file, BucketPath):
        return digests.sha256_file(file) if os.path.isfile(file) else None
    if not file.is_file():
        return None
    digest = hashlib.sha256()
    for block in file.read_blocks(_BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _digest_problem(digest: str | None, recorded: str) -> str | None:
    """Returns a phrase that says how a file's digest (None: there is no file) contradicts the
    recorded digest; None if the digests agree.
    """
    if digest is None:
        return f"missing, although {DIGESTS} names it"
    if digest != recorded:
        return f"SHA-256 is {digest[:12]}…, {DIGESTS} says {recorded[:12]}…"
    return None
