"""Reading the safetensors files of a directory, by tensor name, rows and columns."""

import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError, short, told
from qwen3next_jax.interop.writing import INDEX, SINGLE

_LONGEST_NAME = 255  # bytes: file systems have no longer names
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# A dense layer of Kimi Linear, as transformers saves it; it reads the released name, `mlp`, as
# well.
_DENSE_AS_MIXTURE = re.compile(r"(layers\.\d+)\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
      UserError: no such file, or not a JSON object.
    """
    try:
        return json_files.read(file)
    except OSError as e:
        raise UserError(
            f"{file}: cannot be read ({e.strerror}): expected a Hugging Face model directory with "
            "it"
        ) from e
    except ValueError as e:
        raise UserError(
            f"{file}: {e}: damaged, or no such file of a Hugging Face directory; copy or download "
            "it again"
        ) from e


def weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files that make up the checkpoint in `directory`.

    Raises:
      UserError: there are none, they are pickles, or the index is not one.
    """
    if (directory / INDEX).is_file():
        return [directory / name for name in sorted(set(_weight_map(directory).values()))]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    pickles = sorted(f.name for f in directory.iterdir() if f.suffix in _PICKLES)
    if pickles:
        raise UserError(
            f"{directory / pickles[0]}: a pickle can run code when it is read, so it is refused: "
            f"expected {SINGLE}; convert it with transformers' save_pretrained"
        )
    raise UserError(f"{directory}: no weights: expected {SINGLE} or {INDEX}")


def is_file_name(name: str) -> bool:
    """Whether a file may have this name, and a message may show it."""
    return name.isprintable() and len(name.encode()) <= _LONGEST_NAME


def _weight_map(directory: pathlib.Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            f"{directory / INDEX}: no weight_map: expected one from tensor names to file names"
        )
    for file in weight_map.values():
        # Anything but a plain name could make the reader leave the directory.
        if (
            not isinstance(file, str)
            or pathlib.PurePath(file).name != file
            or not file.endswith(".safetensors")
            or not is_file_name(file)
        ):
            raise UserError(
                f"{directory / INDEX}: weight_map names {short(file)}: expected a .safetensors "
                "file in that directory"
            )
    return weight_map


class Stored(NamedTuple):
    """Where a tensor lies: `start` is the byte of its file at which it begins."""

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class Weights:
    """The tensors of the checkpoint in a directory. Headers are read at once; of tensors, the
    rows and columns that are asked for, and no other byte: never through a mapping of the file,
    which ends the process where somebody cuts the file short.

    Attributes:
      bytes_read: of tensors, so far.

    Raises:
      UserError: from the constructor and from `read`, for files that are missing, truncated, no
      safetensors, or other ones than before.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory, self.bytes_read = directory, 0
        self._stored: dict[str, Stored] = {}
        # of every file, what changes when somebody changes it
        self._marks: dict[pathlib.Path, tuple[int, ...]] = {}
        self._open: dict[pathlib.Path, Any] = {}
        files = weight_files(directory)
        if len(missing := [file.name for file in files if not file.exists()]) > 1:
            raise UserError(
                f"{directory}: {len(missing)} of the {len(files)} files that {INDEX} names are "
                f"missing: {', '.join(missing)}; incomplete checkpoint; copy or download them again"
            )
        for file in files:
            tensors, self._marks[file] = _read_header(file)
            for name, tensor in (
                (_DENSE_AS_MIXTURE.sub(r"\1.mlp.", name), tensor)
                for name, tensor in tensors.items()
            ):
                if name in self._stored:
                    raise UserError(
                        f"{file}: tensor {name} is in another of the files as well: expected it "
                        "once"
                    )
                self._stored[name] = tensor
        if (directory / INDEX).is_file():
            absent = [
                name
                for name in _weight_map(directory)
                if _DENSE_AS_MIXTURE.sub(r"\1.mlp.", name) not in self._stored
            ]
            if absent:
                raise UserError(
                    f"{directory}: {name_some(absent)} missing from the files that {INDEX} names; "
                    "copy or download them again"
                )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for file in self._open.values():
            file.close()
        self._open.clear()

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def read(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> np.ndarray:
        """[rows, columns] of a tensor seen as [every dimension but the last, the last], in the
        dtype that is stored.
        """
        path, dtype, shape, start = self._stored[name]
        if dtype not in _FLOATS:
            raise UserError(
                f"{self.directory}: tensor {name} is {dtype}: expected one of {', '.join(_FLOATS)}"
            )
        dtype = np.dtype(_FLOATS[dtype])
        height, width = math.prod(shape[:-1]), math.prod(shape[-1:])
        (top, bottom, _), (left, right, _) = rows.indices(height), columns.indices(width)
        block = np.empty((bottom - top, right - left), dtype)
        first, step = start + (top * width + left) * dtype.itemsize, width * dtype.itemsize
        # Row by row where the columns are not all of them.
        size = block.nbytes if right - left == width else (right - left) * dtype.itemsize
        target = memoryview(block.reshape(-1).view(np.uint8))
        with told(f"{path}: cannot be read: restore it, or start again", OSError):
            descriptor = self._descriptor(path)
            for row, begin in enumerate(range(0, block.nbytes, size or 1)):
                done = 0
                while done < size:
                    count = os.preadv(
                        descriptor, [target[begin + done : begin + size]], first + row * step + done
                    )
                    if not count:
                        raise self._changed(path)
                    done += count
        self.bytes_read += block.nbytes
        return block

    def _descriptor(self, path: pathlib.Path) -> int:
        if path not in self._open:
            self._open[path] = path.open("rb", buffering=0)
            self._check(path, os.fstat(self._open[path].fileno()))
        return self._open[path].fileno()

    def check_unchanged(self) -> None:
        """Raises UserError where a file is another one than when its header was read."""
        for path in self._marks:
            self._check(path, path.stat() if path.exists() else None)

    def _check(self, path: pathlib.Path, found: os.stat_result | None) -> None:
        if found is None or _mark(found) != self._marks[path]:
            raise self._changed(path)

    def _changed(self, path: pathlib.Path) -> UserError:
        return UserError(
            f"{path}: changed while it was read: something writes to this directory; wait until "
            "it is complete, and start again"
        )


def _mark(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read_header(path: pathlib.Path) -> tuple[dict[str, Stored], tuple[int, ...]]:
    """(its tensors by name, the mark of the file)."""
    try:
        with json_files.open_regular(path) as file:
            mark, start = _mark(os.fstat(file.fileno())), file.read(8)
            # which checks lengths, offsets and dtypes
            with safetensors.safe_open(path, framework="np"):
                pass
            size = int.from_bytes(start, "little")
            fields = json.loads(file.read(size))
    except OSError as e:
        raise UserError(
            f"{path}: cannot be read ({e.strerror}): incomplete checkpoint; copy or download it "
            "again"
        ) from e
    except safetensors.SafetensorError as e:
        if start.startswith((b"PK\x03\x04", b"\x80\x02")):
            raise UserError(
                f"{path}: a pickle under another name, refused: expected a safetensors file"
            ) from e
        raise UserError(
            f"{path}: no valid safetensors file ({e}): truncated or damaged; copy or download it "
            "again"
        ) from e
    fields.pop("__metadata__", None)
    return {
        name: Stored(
            path, tensor["dtype"], tuple(tensor["shape"]), 8 + size + tensor["data_offsets"][0]
        )
        for name, tensor in fields.items()
    }, mark


def name_some(names: Iterable[str], limit: int = 3) -> str:
    """'3 tensors: a, b, c' or '120 tensors: a, b, c, …'."""
    names = sorted(names)
    names = [name if len(name) <= 200 else f"{name[:199]}…" for name in names]
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {some(names, limit)}"


def some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
