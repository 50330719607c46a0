"""Writes a directory of safetensors files (an export) that appears whole or not at all. If the
writing process is killed, the complete files of weights stay on the disk. The next export to the
same place keeps the files of the killed export if both exports have the same `identity` (see
`LocalExport`), and deletes them otherwise.

The files are written into the directory `.NAME.partial`, beside the place of the final directory
NAME. The file progress.json in `.NAME.partial` records the digest of each file that is completely
on the disk. A file gets its own name only after progress.json names it. Therefore a file that
progress.json does not name is not from an export, and is left alone.

At the end, an export moves progress.json out of `.NAME.partial`, to `.NAME.progress.json`, renames
the directory to NAME, and removes `.NAME.progress.json`. So the directory NAME never holds a
progress.json. If the process is killed after it has moved progress.json and before the rename, the
next export moves progress.json back.
"""

import concurrent.futures
import contextlib
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
from qwen3next_jax.common.durable import fsync
from qwen3next_jax.common.errors import UserError, as_user_error, require, warn
from qwen3next_jax.common.locks import lock_file
from qwen3next_jax.common.storage import BucketPath, check_bucket_access

SINGLE, INDEX, DIGESTS = "model.safetensors", "model.safetensors.index.json", "SHA256SUMS"
MAX_SHARD_BYTES = 4 * 2**30
_PROGRESS = "progress.json"
# The errors that `_read_progress` may raise for a progress.json that no export wrote.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
# The name of a file of weights while the file is being written.
_INCOMPLETE = re.compile(r"model(-[0-9]+-of-[0-9]+)?\.safetensors\.tmp")
# The folder for the files that are not weights, until progress.json names them.
_OTHER_FILES = "rest.tmp"
_DTYPE_NAMES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float64": "F64",
    "int64": "I64",
}


class Tensor(NamedTuple):
    """One tensor to write.

    Attributes:
      name: the tensor's name.
      dtype: the tensor's dtype in the file.
      shape: the tensor's shape in the file.
      read_blocks: a function that yields the tensor's values in order, in arrays of consecutive
        values. The dtype of the arrays may differ from `dtype`.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    read_blocks: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensors_by_file(tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Distributes tensors over files of at most 4 GiB each. A tensor of more than 4 GiB gets a file
    of its own.

    Returns:
      File name → the tensors of the file.
    """
    files, used = [[]], 0
    for tensor in tensors:
        if files[-1] and used + tensor.nbytes > MAX_SHARD_BYTES:
            files.append([])
            used = 0
        files[-1].append(tensor)
        used += tensor.nbytes
    # Tensors with the widest elements come first, so that each tensor begins at a multiple of its
    # element size.
    files = [sorted(file, key=lambda tensor: -tensor.dtype.itemsize) for file in files]
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {
        f"model-{number:05}-of-{len(files):05}.safetensors": file
        for number, file in enumerate(files, 1)
    }


def safetensors_header(tensors: Sequence[Tensor]) -> bytes:
    """Returns the header of a safetensors file of these tensors."""
    fields = {"__metadata__": {"format": "pt"}}  # transformers insists on this entry
    end = 0
    for tensor in tensors:
        start = end
        end = start + tensor.nbytes
        fields[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class LocalExport:
    """A context manager that writes an export under a temporary name. If the `with` block ends
    without a call of `finish`, the complete files are deleted, unless `identity` is given: then the
    files are kept for the next attempt.

    Args:
      out: the path of the export.
      files: name of a file of weights → its tensors.
      identity: the digest of the weights and settings that this export writes. An export continues
        an earlier attempt with the same identity, and keeps the complete files. None: the export
        does not continue an earlier attempt.

    Raises:
      UserError: the disk is full or not writable. Every method may raise this error.
    """

    def __init__(
        self, out: pathlib.Path, files: Mapping[str, Sequence[Tensor]], identity: str | None
    ):
        self.out = out
        # If `out` is a link, the export is renamed to the link's target, because a directory cannot
        # replace a link.
        self._place = out.resolve()
        self.folder = self._place.parent / f".{self._place.name}.partial"
        # where progress.json is while the directory is renamed
        self._moved_progress = self._place.parent / f".{self._place.name}.{_PROGRESS}"
        self._files = files
        self._identity = identity
        self._complete: dict[str, dict[str, Any]] = {}  # see "files" in `_record_progress`
        self._other_files: list[str] = []
        self._lock: int | None = None
        self._is_ours = False  # whether exports wrote everything in the folder

    def __enter__(self):
        return self

    def __exit__(self, kind, *exception):
        if self._lock is None:
            return
        if self._is_ours and self.folder.exists():
            if self._identity and self._complete:
                warn(
                    f"{len(self._complete)} of {len(self._files)} files of weights are complete "
                    f"and stay in {self.folder}: the same command continues from there"
                )
            else:
                with contextlib.suppress(OSError):  # such as a file that somebody put there
                    ours = self._files_written_by_exports([*self._complete, *self._other_files])
                    self._remove_files(sorted(ours, key=lambda name: name == _PROGRESS))
                    self.folder.rmdir()
                    self._moved_progress.unlink(missing_ok=True)
        os.close(self._lock)

    def begin(self) -> list[str]:
        """Creates the temporary folder of the export, or continues in the folder of an earlier
        attempt.

        Returns:
          The names of the files that are already complete.

        Raises:
          UserError: `out` exists and is not empty, another process exports to `out`, the folder has
            files that no export wrote, or the disk has too little space.
        """
        require_empty_folder(self.out)
        with _write_errors_as_user_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        require(
            lock_file(self._lock, self.folder),
            f"{self.out}: another export is writing there, in {self.folder}: wait for it, or give "
            "another folder",
        )
        require_empty_folder(self.out)  # another export may have ended meanwhile
        with _write_errors_as_user_errors(self.folder):
            self._restore_moved_progress_file()
            self._complete, others = self._find_complete_files()
            self._is_ours = True
            # The old progress.json is kept: it names the files that are not weights until a new one
            # replaces it.
            self._remove_files(others - {_PROGRESS})
            self._record_progress()
            free = shutil.disk_usage(self.folder).free
        needed = sum(
            len(safetensors_header(tensors)) + sum(tensor.nbytes for tensor in tensors)
            for name, tensors in self._files.items()
            if name not in self._complete
        )
        require(
            needed <= free,
            f"{self.out}: {_format_bytes(needed)} are to be written, and its disk has "
            f"{_format_bytes(free)} free: make room, or give a folder on another disk",
        )
        return list(self._complete)

    def write(self, name: str, blocks: Iterable[np.ndarray]) -> None:
        """Writes the file of weights `name`. `blocks` yields the values of the file's tensors in
        order.
        """
        path = self.folder / f"{name}.tmp"
        digest, size = hashlib.sha256(), 0
        begin = np.frombuffer(safetensors_header(self._files[name]), np.uint8)
        with _write_errors_as_user_errors(path), path.open("wb", buffering=0) as file:
            for block in itertools.chain([begin], blocks):
                rest = memoryview(np.ascontiguousarray(block).reshape(-1).view(np.uint8))
                digest.update(rest)
                size += len(rest)
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
            self._complete[name] = {"bytes": size, "sha256": digest.hexdigest()}
            self._record_progress()
            path.rename(self.folder / name)

    def finish(self, write_other_files: Callable[[pathlib.Path], None]) -> None:
        """Completes the export: writes the index of the tensors, calls
        `write_other_files(directory)` to write the files that are not weights, writes SHA256SUMS,
        and renames the directory.
        """
        with _write_errors_as_user_errors(self.folder):
            if len(self._files) > 1:
                self._write_index()
            self._add_other_files(write_other_files)
            for file in self._write_checksums():
                fsync(file)
            (self.folder / _PROGRESS).rename(self._moved_progress)
            self.folder.rename(self._place)
            fsync(self._place.parent)
            self._moved_progress.unlink()

    def _write_index(self) -> None:
        weight_map = {
            tensor.name: name for name, tensors in self._files.items() for tensor in tensors
        }
        total = sum(tensor.nbytes for tensors in self._files.values() for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(self.folder / INDEX, index)

    def _add_other_files(self, write_other_files: Callable[[pathlib.Path], None]) -> None:
        folder = self.folder / _OTHER_FILES
        folder.mkdir()
        write_other_files(folder)
        self._other_files = sorted(path.name for path in folder.iterdir())
        self._record_progress()
        for name in self._other_files:
            (folder / name).rename(self.folder / name)
        folder.rmdir()

    def _write_checksums(self) -> list[pathlib.Path]:
        """Writes SHA256SUMS. Returns the paths of SHA256SUMS and of all files that SHA256SUMS
        names.
        """
        files = [file for file in sorted(self.folder.rglob("*")) if file.is_file()]
        files.remove(self.folder / _PROGRESS)
        lines = []
        for file in files:
            name = file.relative_to(self.folder).as_posix()
            known = self._complete.get(name)
            digest = known["sha256"] if known else digests.sha256_file(file)
            lines.append(f"{digest}  {name}\n")
        (self.folder / DIGESTS).write_text("".join(lines))
        return [*files, self.folder / DIGESTS]

    def _restore_moved_progress_file(self) -> None:
        """Moves progress.json back into the folder, if an earlier attempt was killed after it had
        moved progress.json out.

        Raises:
          UserError: no export wrote the file that is in the place of the moved progress.json.
        """
        if not self._moved_progress.exists():
            return
        with as_user_error(
            f"{self._moved_progress}: in the way of an export, and not written by one: move it "
            "away, or give another folder",
            *_UNREADABLE,
        ):
            _read_progress(self._moved_progress)
        if (self.folder / _PROGRESS).exists():  # a later attempt has begun since
            self._moved_progress.unlink()
        else:
            self._moved_progress.rename(self.folder / _PROGRESS)

    def _find_complete_files(self) -> tuple[dict[str, dict[str, Any]], set[str]]:
        """Finds the complete files in the folder of an earlier attempt.

        Returns:
          (complete, others). complete: name → record in progress.json, for each file of weights
          that has the recorded size and digest; {} if the attempt had another identity. others: the
          names of all other files.

        Raises:
          UserError: the folder has no readable progress.json, or a file that progress.json does not
            account for.
        """
        present = {path.name for path in self.folder.iterdir()}
        if present <= {f"{_PROGRESS}.tmp"}:  # killed before its first file
            return {}, present
        in_the_way = f"{self.folder}: in the way of an export, and not the rest of one"
        advice = "move it away, or give another folder"
        try:
            identity, recorded, other_files = _read_progress(self.folder / _PROGRESS)
        except _UNREADABLE as error:
            raise UserError(f"{in_the_way} (no {_PROGRESS} that can be read): {advice}") from error
        foreign = sorted(present - self._files_written_by_exports([*recorded, *other_files]))
        require(
            not foreign,
            f"{in_the_way}: {_PROGRESS} does not name its {', '.join(foreign[:3])}: {advice}",
        )
        if not self._identity or identity != self._identity:
            return {}, present

        def is_complete(name: str) -> bool:
            file, expected = self.folder / name, recorded[name]
            return (
                file.is_file()
                and file.stat().st_size == expected["bytes"]
                and digests.sha256_file(file) == expected["sha256"]
            )

        names = [name for name in self._files if name in recorded]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            answers = list(pool.map(is_complete, names))
        complete = {name: recorded[name] for name, good in zip(names, answers, strict=True) if good}
        return complete, present - complete.keys()

    def _files_written_by_exports(self, recorded: Iterable[str]) -> set[str]:
        """Returns the names of the files in the folder that an export wrote. `recorded` holds the
        names in the export's progress.json.
        """
        ours = {*recorded, _PROGRESS, f"{_PROGRESS}.tmp", _OTHER_FILES, INDEX, DIGESTS}
        present = {path.name for path in self.folder.iterdir()}
        return {name for name in present if name in ours or _INCOMPLETE.fullmatch(name)}

    def _remove_files(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _record_progress(self) -> None:
        write_json(
            self.folder / f"{_PROGRESS}.tmp",
            {"identity": self._identity, "files": self._complete, "rest": self._other_files},
        )
        (self.folder / f"{_PROGRESS}.tmp").rename(self.folder / _PROGRESS)


def _read_progress(file: pathlib.Path) -> tuple[str | None, dict[str, dict[str, Any]], set[str]]:
    """Reads the progress.json of an earlier attempt at the export.

    Returns:
      (identity, record of each file of weights, names of the files that are not weights).

    Raises:
      Exception: no export wrote the file; the error is one of `_UNREADABLE`.
    """
    record = json_files.read(file)
    if record.keys() != {"identity", "files", "rest"}:
        raise ValueError("of something else")
    recorded = {
        str(name): {"bytes": values["bytes"], "sha256": values["sha256"]}
        for name, values in record["files"].items()
    }
    return record["identity"], recorded, {str(name) for name in record["rest"]}


def _write_errors_as_user_errors(path: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    return as_user_error(f"{path}: cannot be written: make room, or give another folder", OSError)


def require_empty_folder(out: pathlib.Path | BucketPath) -> None:
    """Raises UserError unless `out` is an empty directory, or can be created. If `out` is in a
    bucket, the function only checks that the bucket can be used.
    """
    if isinstance(out, BucketPath):  # `BucketExport.begin` may continue an earlier export
        check_bucket_access(f"{out}", out)
        return
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


def _format_bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"
