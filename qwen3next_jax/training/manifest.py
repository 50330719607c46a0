"""Digests of a checkpoint's files. Orbax reads a file with a flipped bit as if nothing had happened; these do not.

    CHECKPOINT/manifest.json    {"files": {relative path: [bytes, SHA-256]}}, written last and atomically
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib

NAME = "manifest.json"


def seal(directory: pathlib.Path) -> None:
    """Writes the manifest of a finished checkpoint."""
    files = _files(directory)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, files))
    record = {"files": {str(f.relative_to(directory)): [f.stat().st_size, d] for f, d in zip(files, digests)}}
    temporary = directory / (NAME + ".tmp")
    temporary.write_text(json.dumps(record, indent=1))
    os.replace(temporary, directory / NAME)


def find_damage(directory: pathlib.Path) -> str | None:
    """What is wrong with the checkpoint in `directory`, or None where every byte is as it was written."""
    path = directory / NAME
    if not path.exists():
        return f"it has no {NAME}: it is being written, or the run died before it was complete"
    try:
        expected = {name: (int(size), str(digest)) for name, (size, digest) in json.loads(path.read_text())["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{NAME} is damaged"
    present = {str(f.relative_to(directory)): f for f in _files(directory)}
    for name, (size, _) in expected.items():
        if name not in present:
            return f"{name} is missing"
        if (found := present[name].stat().st_size) != size:
            return f"{name} has {found} bytes instead of {size}"
    if extra := sorted(present.keys() - expected.keys()):
        return f"{extra[0]} was added to it"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for (name, (_, digest)), found in zip(expected.items(), pool.map(_digest, [present[n] for n in expected])):
            if found != digest:
                return f"{name} is not what was written (SHA-256 differs)"
    return None


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(f for f in directory.rglob("*") if f.is_file() and not f.name.startswith(NAME))


def _digest(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
