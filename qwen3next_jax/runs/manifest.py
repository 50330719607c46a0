"""Digests of a folder's files. Orbax reads a file with a flipped bit as if nothing had happened;
these do not.

    FOLDER/manifest.json    {"run": ID, "step": N, "piece": bytes, "files": {relative path:
    [bytes, [SHA-256 of each piece]]}}

A checkpoint's names its run (the id in run.json) and its step, so that a folder that was renamed
or copied is not taken for another step's, nor for another run's. It is written last and
atomically, when everything it names is on the disk. Files are digested in pieces, so that the
cores share the largest one, too, and nothing but a piece's buffer is in memory.
"""

import concurrent.futures
import json
import os
import pathlib

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.durable import fsync

NAME = "manifest.json"
PIECE = 1 << 25  # bytes


def write_manifest(directory: pathlib.Path, step: int | None = None, run: str | None = None) -> int:
    """Writes the manifest of a finished folder, for a checkpoint with its `step` and the id of
    its `run`. → bytes of its files.
    """
    files = {str(f.relative_to(directory)): f for f in _files(directory)}
    for file in files.values():
        fsync(file)  # else, after a power failure, the manifest could be there and its files not
    sizes = {name: file.stat().st_size for name, file in files.items()}
    pieces = {name: [] for name in files}
    for name, _, digest in _digests(directory, sizes, PIECE):
        pieces[name].append(digest)
    of = ({"run": run} if run else {}) | ({} if step is None else {"step": step})
    record = of | {"piece": PIECE, "files": {n: [sizes[n], pieces[n]] for n in files}}
    temporary = directory / (NAME + ".tmp")
    temporary.write_text(json.dumps(record, indent=1))
    fsync(temporary)
    os.replace(temporary, directory / NAME)
    fsync(directory)
    return sum(sizes.values())


def find_damage(
    directory: pathlib.Path, sizes_only: bool = False, run: str | None = None
) -> str | None:
    """What is wrong with the folder, or None where every byte (`sizes_only`: every size) is as
    it was written. `run`: the id of the run whose checkpoint it should be, "" of a run of older
    code, which has none; None: whosever.
    """
    try:
        return _find_damage(directory, sizes_only, run)
    except OSError as error:  # a bad sector, or a run that deletes it meanwhile
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
        # One digest for each piece: fewer would leave bytes unread.
        whole = record.keys() - {"run", "step"} == {"piece", "files"} and piece > 0
        whole = whole and all(
            len(d) == len(_pieces(size, piece)) for size, d in record["files"].values()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        return f"{NAME} is damaged"
    if run is not None and record.get("run", "") != run:
        theirs, ours = (str(one or "of older code")[:13] for one in (record.get("run"), run))
        return f"it is a checkpoint of another run ({theirs}; this one is {ours})"
    if "step" in record and str(record["step"]) != directory.name:
        return f"it holds step {record['step']}, by its {NAME}: the folder was renamed or copied"
    present = {str(f.relative_to(directory)): f for f in _files(directory)}
    for name, size in sizes.items():
        if name not in present:
            return f"{name} is missing"
        if (found := present[name].stat().st_size) != size:
            return f"{name} has {found} bytes instead of {size}"
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
    """Of the manifest, and so of every byte that it names; None where there is none to read."""
    try:
        return digests.sha256_file(directory / NAME)
    except OSError:
        return None


def file_stats(directory: pathlib.Path) -> list[tuple] | None:
    """Which files lie in the folder: another list once one of them was replaced, rewritten or
    removed; None where the folder is gone. It reads no file.
    """
    try:
        found = [(f, f.stat()) for f in sorted(directory.rglob("*"))]
    except OSError:  # it is being removed
        return None
    return [(str(f), s.st_ino, s.st_size, s.st_mtime_ns) for f, s in found] or None


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(f for f in directory.rglob("*") if f.is_file() and not f.name.startswith(NAME))


def _pieces(size: int, piece: int) -> range:
    return range(0, max(size, 1), piece)  # an empty file has one, too


def _digests(directory: pathlib.Path, sizes: dict[str, int], piece: int):
    """Yields (name, start, SHA-256) of every piece, in order; one thread a core reads ahead."""
    pieces = [(name, start) for name, size in sizes.items() for start in _pieces(size, piece)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda p: digests.sha256_file(directory / p[0], p[1], piece), pieces)
        try:
            for (name, start), digest in zip(pieces, found, strict=True):
                yield name, start, digest
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
