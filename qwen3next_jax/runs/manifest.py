"""Manifests: SHA-256 digests of all files of a folder. Orbax does not notice a flipped bit in a
file; a manifest does.

    FOLDER/manifest.json    {"run": ID, "step": N, "piece": bytes,
                             "files": {relative path: [bytes, [SHA-256 of each piece]]}}

The manifest of a checkpoint names its run (the id in run.json) and its step, so a renamed or copied
folder is not mistaken for another step or another run. The manifest is written atomically after all
other files are on the disk. Digests are computed over pieces of files, so that several cores can
share the work for a large file.
"""

import concurrent.futures
import json
import os
import pathlib

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.durable import fsync

NAME = "manifest.json"
PIECE = 1 << 25  # size of a piece in bytes


def write_manifest(directory: pathlib.Path, step: int | None = None, run: str | None = None) -> int:
    """Writes the manifest of a complete folder.

    Args:
      step: the step of a checkpoint; None if the folder is not a checkpoint.
      run: the id of the checkpoint's run; None or "" if the run has no id.

    Returns:
      The size of all files in bytes.
    """
    files = {str(f.relative_to(directory)): f for f in _files(directory)}
    for file in files.values():
        fsync(file)  # without this, a power failure could leave a manifest without its files
    sizes = {name: file.stat().st_size for name, file in files.items()}
    pieces = {name: [] for name in files}
    for name, _, digest in _digests(directory, sizes, PIECE):
        pieces[name].append(digest)
    identity = ({"run": run} if run else {}) | ({} if step is None else {"step": step})
    record = identity | {"piece": PIECE, "files": {n: [sizes[n], pieces[n]] for n in files}}
    temporary = directory / (NAME + ".tmp")
    temporary.write_text(json.dumps(record, indent=1))
    fsync(temporary)
    os.replace(temporary, directory / NAME)
    fsync(directory)
    return sum(sizes.values())


def find_damage(
    directory: pathlib.Path, sizes_only: bool = False, run: str | None = None
) -> str | None:
    """Compares a folder with its manifest.

    Args:
      sizes_only: whether to compare only the sizes of files, not their content.
      run: the id of the run to which the checkpoint must belong; "" for a run of older code, which
        has no id; None accepts any run.

    Returns:
      A description of the first damage found; None if the folder is as it was written.
    """
    try:
        return _find_damage(directory, sizes_only, run)
    except OSError as error:  # a bad sector, or a run that deletes the folder meanwhile
        return f"it cannot be read: {error}"


def _find_damage(directory: pathlib.Path, sizes_only: bool, run: str | None) -> str | None:
    path = directory / NAME
    if not path.exists():
        return f"it has no {NAME}: it is being written, or the run died before it was complete"
    try:
        record = json_files.read(path)
        piece = int(record["piece"])
        sizes = {name: int(size) for name, (size, _) in record["files"].items()}
        expected = [digest for _, of_pieces in record["files"].values() for digest in of_pieces]
        # Every piece needs a digest; otherwise some bytes would not be verified.
        is_valid = record.keys() - {"run", "step"} == {"piece", "files"} and piece > 0
        is_valid = is_valid and all(
            len(d) == len(_pieces(size, piece)) for size, d in record["files"].values()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        return f"{NAME} is damaged"
    if run is not None and record.get("run", "") != run:
        theirs, ours = (str(value or "of older code")[:13] for value in (record.get("run"), run))
        return f"it is a checkpoint of another run ({theirs}; this one is {ours})"
    if "step" in record and str(record["step"]) != directory.name:
        return f"it holds step {record['step']}, by its {NAME}: the folder was renamed or copied"
    present = {str(f.relative_to(directory)): f for f in _files(directory)}
    for name, size in sizes.items():
        if name not in present:
            return f"{name} is missing"
        if (actual_size := present[name].stat().st_size) != size:
            return f"{name} has {actual_size} bytes instead of {size}"
    if extra := sorted(present.keys() - sizes.keys()):
        return f"{extra[0]} was added to it"
    if not sizes_only:
        for (name, start, digest), right in zip(
            _digests(directory, sizes, piece), expected, strict=True
        ):
            if digest != right:
                where = (
                    f" in bytes {start} … {min(start + piece, sizes[name])}"
                    if sizes[name] > piece
                    else ""
                )
                return f"{name} is not what was written (SHA-256 differs{where})"
    return None


def digest(directory: pathlib.Path) -> str | None:
    """Returns the SHA-256 digest of the manifest file; None if there is no manifest. The manifest
    has the digests of all other files, so its own digest identifies the content of the folder.
    """
    try:
        return digests.sha256_file(directory / NAME)
    except OSError:
        return None


def file_stats(directory: pathlib.Path) -> list[tuple] | None:
    """Returns path, inode, size in bytes and modification time of each file in the folder, without
    reading any file. The list changes if a file is replaced, rewritten or removed. Returns None if
    there is no folder.
    """
    try:
        stats = [(f, f.stat()) for f in sorted(directory.rglob("*"))]
    except OSError:  # it is being removed
        return None
    return [(str(f), s.st_ino, s.st_size, s.st_mtime_ns) for f, s in stats] or None


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(f for f in directory.rglob("*") if f.is_file() and not f.name.startswith(NAME))


def _pieces(size: int, piece: int) -> range:
    """Returns the offset of the first byte of each piece of a file; an empty file has one piece."""
    return range(0, max(size, 1), piece)


def _digests(directory: pathlib.Path, sizes: dict[str, int], piece: int):
    """Yields (name, offset of the first byte, SHA-256) of every piece of the files in `sizes`, in
    order. One thread per core reads and digests pieces.
    """
    pieces = [(name, start) for name, size in sizes.items() for start in _pieces(size, piece)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda p: digests.sha256_file(directory / p[0], p[1], piece), pieces)
        try:
            for (name, start), digest in zip(pieces, results, strict=True):
                yield name, start, digest
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
