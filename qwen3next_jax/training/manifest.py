"""Digests of a folder's files. Orbax reads a file with a flipped bit as if nothing had happened; these do not.

    FOLDER/manifest.json    {"piece": bytes, "files": {relative path: [bytes, [SHA-256 of each piece]]}}

It is written last and atomically, when everything it names is on the disk. Files are digested in pieces, so that the
cores share the largest one, too, and nothing but a piece's buffer is in memory.
"""

import concurrent.futures
import json
import os
import pathlib

from qwen3next_jax import digests, jsonfile

NAME = "manifest.json"
PIECE = 1 << 25  # bytes


def seal(directory: pathlib.Path) -> int:
    """Writes the manifest of a finished folder. → bytes of its files."""
    files = {str(f.relative_to(directory)): f for f in _files(directory)}
    for file in files.values():
        _flush(file)  # else, after a power failure, the manifest could be there and its files not
    sizes = {name: file.stat().st_size for name, file in files.items()}
    pieces = {name: [] for name in files}
    for name, _, digest in _digests(directory, sizes, PIECE):
        pieces[name].append(digest)
    temporary = directory / (NAME + ".tmp")
    temporary.write_text(json.dumps({"piece": PIECE, "files": {n: [sizes[n], pieces[n]] for n in files}}, indent=1))
    _flush(temporary)
    os.replace(temporary, directory / NAME)
    _flush(directory)
    return sum(sizes.values())


def find_damage(directory: pathlib.Path, sizes_only: bool = False) -> str | None:
    """What is wrong with the folder, or None where every byte (`sizes_only`: every size) is as it was written."""
    try:
        return _find_damage(directory, sizes_only)
    except OSError as error:  # a bad sector, or a run that deletes it meanwhile
        return f"it cannot be read: {error}"


def _find_damage(directory: pathlib.Path, sizes_only: bool) -> str | None:
    path = directory / NAME
    if not path.exists():
        return f"it has no {NAME}: it is being written, or the run died before it was complete"
    try:
        record = jsonfile.read(path)
        piece = int(record["piece"])
        sizes = {name: int(size) for name, (size, _) in record["files"].items()}
        expected = [digest for _, of_pieces in record["files"].values() for digest in of_pieces]
        # One digest for each piece: fewer would leave bytes unread.
        whole = piece > 0 and all(len(d) == len(_pieces(size, piece)) for size, d in record["files"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        return f"{NAME} is damaged"
    present = {str(f.relative_to(directory)): f for f in _files(directory)}
    for name, size in sizes.items():
        if name not in present:
            return f"{name} is missing"
        if (found := present[name].stat().st_size) != size:
            return f"{name} has {found} bytes instead of {size}"
    if extra := sorted(present.keys() - sizes.keys()):
        return f"{extra[0]} was added to it"
    if not sizes_only:
        for (name, start, digest), right in zip(_digests(directory, sizes, piece), expected, strict=True):
            if digest != right:
                where = f" in bytes {start} … {min(start + piece, sizes[name])}" if sizes[name] > piece else ""
                return f"{name} is not what was written (SHA-256 differs{where})"
    return None


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(f for f in directory.rglob("*") if f.is_file() and not f.name.startswith(NAME))


def _pieces(size: int, piece: int) -> range:
    return range(0, max(size, 1), piece)  # an empty file has one, too


def _digests(directory: pathlib.Path, sizes: dict[str, int], piece: int):
    """Yields (name, start, SHA-256) of every piece, in order; one thread a core reads ahead."""
    pieces = [(name, start) for name, size in sizes.items() for start in _pieces(size, piece)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda p: digests.of_file(directory / p[0], p[1], piece), pieces)
        try:
            for (name, start), digest in zip(pieces, found, strict=True):
                yield name, start, digest
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _flush(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
