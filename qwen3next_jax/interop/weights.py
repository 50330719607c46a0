"""Reading the safetensors files of a directory, by tensor name, rows and columns."""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError, short_repr, as_user_error
from qwen3next_jax.interop.writing import INDEX, SINGLE

_LONGEST_NAME = 255  # bytes: file systems have no longer names
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
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
                f"{directory / INDEX}: weight_map names {short_repr(file)}: expected a "
                ".safetensors file in that directory"
            )
    return weight_map


class TensorLocation(NamedTuple):
    """Where the bytes of a tensor are.

    Attributes:
      file: the safetensors file.
      dtype: safetensors' name of it, such as "BF16".
      shape: of the tensor.
      start: the tensor's first byte in the file.
    """

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class Weights:
    """The tensors of the checkpoint in a directory.

    The constructor reads the headers of the files. `read` reads the rows and columns that are asked
    for and no other byte, by position. No file is mapped into memory: a mapped file that somebody
    cuts short ends the process.

    Args:
      directory: with safetensors files.
      tensor_name: name of a tensor in a file → the name by which it is asked for.

    Raises:
      UserError: from the constructor and from `read`, for files that are missing, truncated, not
        safetensors, or have changed since their header was read.
    """

    def __init__(
        self, directory: pathlib.Path, tensor_name: Callable[[str], str] = lambda name: name
    ):
        self.directory = directory
        self._tensor_name = tensor_name
        self._locations: dict[str, TensorLocation] = {}
        self._versions: dict[pathlib.Path, tuple[int, ...]] = {}
        self._open: dict[pathlib.Path, Any] = {}
        files = weight_files(directory)
        missing = [file.name for file in files if not file.exists()]
        if len(missing) > 1:
            raise UserError(
                f"{directory}: {len(missing)} of the {len(files)} files that {INDEX} names are "
                f"missing: {', '.join(missing)}; incomplete checkpoint; copy or download them again"
            )
        for file in files:
            self._add(file)
        if (directory / INDEX).is_file():
            self._check_index()

    def _add(self, file: pathlib.Path) -> None:
        tensors, self._versions[file] = _read_header(file)
        for stored_name, location in tensors.items():
            name = self._tensor_name(stored_name)
            if name in self._locations:
                raise UserError(
                    f"{file}: tensor {name} is in another of the files as well: expected it once"
                )
            self._locations[name] = location

    def _check_index(self) -> None:
        absent = [
            name
            for name in _weight_map(self.directory)
            if self._tensor_name(name) not in self._locations
        ]
        if absent:
            raise UserError(
                f"{self.directory}: {name_some(absent)} missing from the files that {INDEX} names; "
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
        return set(self._locations)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._locations[name].shape

    def dtype(self, name: str) -> np.dtype:
        """The dtype of the stored tensor.

        Raises:
          UserError: it is not a floating point type.
        """
        dtype = self._locations[name].dtype
        if dtype not in _FLOATS:
            raise UserError(
                f"{self.directory}: tensor {name} is {dtype}: expected one of {', '.join(_FLOATS)}"
            )
        return np.dtype(_FLOATS[dtype])

    def read(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> np.ndarray:
        """[rows, columns] of a tensor, in the stored dtype. The tensor is seen as [every dimension
        but the last, the last].
        """
        return self._read(name, self.dtype(name), rows, columns)

    def read_integers(self, name: str) -> np.ndarray:
        """A whole tensor of 64-bit integers.

        Raises:
          UserError: the stored tensor is of another dtype.
        """
        location = self._locations[name]
        if location.dtype != "I64":
            raise UserError(
                f"{self.directory}: tensor {name} is {location.dtype}: expected I64, integers"
            )
        return self._read(name, np.dtype(np.int64)).reshape(location.shape)

    def _read(
        self,
        name: str,
        dtype: np.dtype,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> np.ndarray:
        file, _, shape, start = self._locations[name]
        height, width = math.prod(shape[:-1]), math.prod(shape[-1:])
        top, bottom, _ = rows.indices(height)
        left, right, _ = columns.indices(width)
        values = np.empty((bottom - top, right - left), dtype)
        target = memoryview(values.reshape(-1).view(np.uint8))
        position = start + (top * width + left) * dtype.itemsize
        row_bytes, row_step = (right - left) * dtype.itemsize, width * dtype.itemsize
        if right - left == width:  # the rows follow each other in the file
            row_bytes = values.nbytes
        with as_user_error(f"{file}: cannot be read: restore it, or start again", OSError):
            descriptor = self._descriptor(file)
            for begin in range(0, values.nbytes, row_bytes or 1):
                if not _fill(target[begin : begin + row_bytes], descriptor, position):
                    raise self._changed(file)
                position += row_step
        return values

    def _descriptor(self, file: pathlib.Path) -> int:
        if file not in self._open:
            self._open[file] = file.open("rb", buffering=0)
            self._check_version(file, os.fstat(self._open[file].fileno()))
        return self._open[file].fileno()

    def check_unchanged(self) -> None:
        """Raises UserError where a file is another one than when its header was read."""
        for file in self._versions:
            self._check_version(file, file.stat() if file.exists() else None)

    def _check_version(self, file: pathlib.Path, found: os.stat_result | None) -> None:
        if found is None or _version(found) != self._versions[file]:
            raise self._changed(file)

    def _changed(self, file: pathlib.Path) -> UserError:
        return UserError(
            f"{file}: changed while it was read: something writes to this directory; wait until "
            "it is complete, and start again"
        )


def _fill(target: memoryview, descriptor: int, position: int) -> bool:
    """Fills `target` with the bytes of a file from `position` on; False: the file ends before."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], position + done)
        if not count:
            return False
        done += count
    return True


def _version(found: os.stat_result) -> tuple[int, ...]:
    """What is another when somebody has replaced or rewritten the file."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read_header(file: pathlib.Path) -> tuple[dict[str, TensorLocation], tuple[int, ...]]:
    """The tensors of a file by name, and the version of the file that has them."""
    try:
        with json_files.open_regular(file) as opened:
            version = _version(os.fstat(opened.fileno()))
            length = opened.read(8)
            # which checks lengths, offsets and dtypes
            with safetensors.safe_open(file, framework="np"):
                pass
            size = int.from_bytes(length, "little")
            header = json.loads(opened.read(size))
    except OSError as e:
        raise UserError(
            f"{file}: cannot be read ({e.strerror}): incomplete checkpoint; copy or download it "
            "again"
        ) from e
    except safetensors.SafetensorError as e:
        if length.startswith((b"PK\x03\x04", b"\x80\x02")):
            raise UserError(
                f"{file}: a pickle under another name, refused: expected a safetensors file"
            ) from e
        raise UserError(
            f"{file}: no valid safetensors file ({e}): truncated or damaged; copy or download it "
            "again"
        ) from e
    header.pop("__metadata__", None)
    first_tensor = len(length) + size
    locations = {}
    for name, tensor in header.items():
        start = first_tensor + tensor["data_offsets"][0]
        locations[name] = TensorLocation(file, tensor["dtype"], tuple(tensor["shape"]), start)
    return locations, version


def name_some(names: Iterable[str], limit: int = 3) -> str:
    """'3 tensors: a, b, c' or '120 tensors: a, b, c, …'."""
    names = sorted(names)
    names = [name if len(name) <= 200 else f"{name[:199]}…" for name in names]
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {some(names, limit)}"


def some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")
