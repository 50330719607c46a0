"""A directory of safetensors files that appears whole or not at all, and that goes on where it
was when its writer was killed.

It grows beside its place, as `.NAME.partial`, file by file; a file counts once it is complete,
on the disk, and in progress.json with its digest. At the end it is renamed. progress.json names
every file before it gets its name: what it does not name is somebody else's, and stays.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.durable import to_disk
from qwen3next_jax.common.errors import UserError, require, told, warn

SINGLE, INDEX, DIGESTS = "model.safetensors", "model.safetensors.index.json", "SHA256SUMS"
MAX_SHARD_BYTES = 4 * 2**30
_PROGRESS = "progress.json"
_HALF = re.compile(r"model(-[0-9]+-of-[0-9]+)?\.safetensors\.tmp")  # a file of weights, written now
_REST = "rest.tmp"  # folder of what is written beside weights, until progress.json names it
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


class Tensor(NamedTuple):
    """One tensor to write. `blocks()` gives its values in order and in pieces, perhaps of
    another dtype.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def files_of(tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """File name → its tensors: one file, or as many as it takes for each to have at most 4 GiB
    (or one tensor).
    """
    files, used = [[]], 0
    for tensor in tensors:
        if files[-1] and used + tensor.nbytes > MAX_SHARD_BYTES:
            files, used = [*files, []], 0
        files[-1].append(tensor)
        used += tensor.nbytes
    # Wide elements first, so that each tensor begins at a multiple of its element.
    files = [sorted(file, key=lambda tensor: -tensor.dtype.itemsize) for file in files]
    return {
        SINGLE if len(files) == 1 else f"model-{i:05}-of-{len(files):05}.safetensors": file
        for i, file in enumerate(files, 1)
    }


def header(tensors: Sequence[Tensor]) -> bytes:
    fields, end = {"__metadata__": {"format": "pt"}}, 0  # transformers insists on this entry
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        fields[tensor.name] = {
            "dtype": _NAMES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Unfinished:
    """The directory `out` while it grows. Leaving the `with` block before `finish` keeps its
    complete files where `identity` is given, and else removes it.

    Args:
      identity: of what is written: files that an earlier attempt of the same identity completed
      are kept.

    Raises:
      UserError: from any of it, where the disk does not take it.
    """

    def __init__(
        self, out: pathlib.Path, files: Mapping[str, Sequence[Tensor]], identity: str | None
    ):
        # of a link the folder that it names: no directory takes a link's place
        self.out, self._place = out, out.resolve()
        self.folder = self._place.parent / f".{self._place.name}.partial"
        self._files, self._identity = files, identity
        self._done: dict[str, dict[str, Any]] = {}
        self._rest: list[str] = []
        self._lock: int | None = None
        self._ours = False  # whether what is in the folder is an export's

    def __enter__(self):
        return self

    def __exit__(self, kind, *exception):
        if self._lock is None:
            return
        if self._ours and self.folder.exists():
            if self._identity and self._done:
                warn(
                    f"{len(self._done)} of {len(self._files)} files of weights are complete and "
                    f"kept in {self.folder}: the same command goes on from there"
                )
            else:
                with contextlib.suppress(OSError):  # such as a file that somebody put there
                    own = self._own([*self._done, *self._rest])
                    self._remove(sorted(own, key=lambda name: name == _PROGRESS))
                    self.folder.rmdir()
        os.close(self._lock)

    def begin(self) -> list[str]:
        """Makes room. → the files that are there already."""
        require_new(self.out)
        with _writable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        with told(
            f"{self.out}: another export is writing there, in {self.folder}: wait for it, or give "
            "another folder",
            OSError,
        ):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        require_new(self.out)  # an export that ended meanwhile
        with _writable(self.folder):
            self._done, left = self._kept()
            self._ours = True
            self._remove(left - {_PROGRESS})  # which names the rest of them until it is replaced
            self._note()
            needed = sum(
                len(header(tensors)) + sum(tensor.nbytes for tensor in tensors)
                for name, tensors in self._files.items()
                if name not in self._done
            )
            free = shutil.disk_usage(self.folder).free
        require(
            needed <= free,
            f"{self.out}: {_bytes(needed)} are to be written, and its disk has {_bytes(free)} "
            "free: make room, or give a folder on another disk",
        )
        return list(self._done)

    def write(self, name: str, blocks: Iterable[np.ndarray]) -> None:
        """Writes the file `name`, whose tensors' values are in `blocks`."""
        path, digest, size = self.folder / f"{name}.tmp", hashlib.sha256(), 0
        with _writable(path), path.open("wb", buffering=0) as file:
            for block in itertools.chain(
                [np.frombuffer(header(self._files[name]), np.uint8)], blocks
            ):
                rest = memoryview(np.ascontiguousarray(block).reshape(-1).view(np.uint8))
                digest.update(rest)
                size += len(rest)
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
            self._done[name] = {"bytes": size, "sha256": digest.hexdigest()}
            self._note()
            path.rename(self.folder / name)

    def finish(self, write_rest: Callable[[pathlib.Path], None]) -> None:
        """Adds the index, what `write_rest(directory)` writes, and SHA256SUMS; gives the
        directory its name.
        """
        with _writable(self.folder):
            if len(self._files) > 1:
                weight_map = {
                    tensor.name: name for name, tensors in self._files.items() for tensor in tensors
                }
                total = sum(tensor.nbytes for tensors in self._files.values() for tensor in tensors)
                write_json(
                    self.folder / INDEX,
                    {"metadata": {"total_size": total}, "weight_map": weight_map},
                )
            (self.folder / _REST).mkdir()
            write_rest(self.folder / _REST)
            self._rest = sorted(path.name for path in (self.folder / _REST).iterdir())
            self._note()
            for name in self._rest:
                (self.folder / _REST / name).rename(self.folder / name)
            (self.folder / _REST).rmdir()
            found = {
                file.relative_to(self.folder).as_posix(): file
                for file in sorted(self.folder.rglob("*"))
                if file.is_file()
            }
            del found[_PROGRESS]
            sums = {
                name: self._done[name]["sha256"] if name in self._done else digests.of_file(file)
                for name, file in found.items()
            }
            (self.folder / DIGESTS).write_text(
                "".join(f"{digest}  {name}\n" for name, digest in sums.items())
            )
            for file in (*found.values(), self.folder / DIGESTS):
                to_disk(file)
            self.folder.rename(self._place)
            # only now: without it a folder that is still in progress could not be gone on with
            (self._place / _PROGRESS).unlink()
            to_disk(self._place.parent)

    def _kept(self) -> tuple[dict[str, dict[str, Any]], set[str]]:
        """What progress.json tells of files that are as it says; the names of the others.

        Raises:
          UserError: something in the folder is not of an export.
        """
        present = {path.name for path in self.folder.iterdir()}
        if present <= {f"{_PROGRESS}.tmp"}:  # killed before its first file
            return {}, present
        in_the_way = f"{self.folder}: in the way of an export, and not the rest of one"
        advice = "move it away, or give another folder"
        try:
            record = json_files.read(self.folder / _PROGRESS)
            recorded = {
                str(name): (file["bytes"], file["sha256"]) for name, file in record["files"].items()
            }
            rest = {str(name) for name in record.get("rest", [])}
            if record.keys() - {"rest"} != {"identity", "files"}:
                raise ValueError("of something else")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{in_the_way} (no {_PROGRESS} that can be read): {advice}") from error
        foreign = sorted(present - self._own([*recorded, *rest]))
        require(
            not foreign,
            f"{in_the_way}: {_PROGRESS} does not name its {', '.join(foreign[:3])}: {advice}",
        )
        if not self._identity or record["identity"] != self._identity:
            return {}, present

        def whole(name: str) -> bool:
            file, (size, digest) = self.folder / name, recorded[name]
            return (
                file.is_file() and file.stat().st_size == size and digests.of_file(file) == digest
            )

        names = [name for name in self._files if name in recorded]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            kept = {
                name: record["files"][name]
                for name, good in zip(names, pool.map(whole, names))
                if good
            }
        return kept, present - kept.keys()

    def _own(self, recorded: Iterable[str]) -> set[str]:
        """What in the folder is of the export that recorded these names."""
        own = {*recorded, _PROGRESS, f"{_PROGRESS}.tmp", _REST, INDEX, DIGESTS}
        present = {path.name for path in self.folder.iterdir()}
        return {name for name in present if name in own or _HALF.fullmatch(name)}

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _note(self) -> None:
        write_json(
            self.folder / f"{_PROGRESS}.tmp",
            {"identity": self._identity, "files": self._done, "rest": self._rest},
        )
        (self.folder / f"{_PROGRESS}.tmp").rename(self.folder / _PROGRESS)


def _writable(path: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    return told(f"{path}: cannot be written: make room, or give another folder", OSError)


def require_new(out: pathlib.Path) -> None:
    """Raises UserError unless `out` is missing or an empty directory, in a place that takes one."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(
            f"{out}: already there: expected a new or empty directory; choose another, or remove "
            "it first"
        )
    place = next(str(folder) for folder in out.absolute().parents if os.path.exists(folder))
    require(
        os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK),
        f"{out}: cannot be written: {place} is "
        f"{'read-only' if os.path.isdir(place) else 'a file'}; give another folder",
    )


def write_json(file: pathlib.Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"
