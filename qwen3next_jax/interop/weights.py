"""Reads tensors, or ranges of their rows and columns, from a directory of safetensors files."""

import json
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, as_user_error, short_repr
from qwen3next_jax.common.storage import BucketPath, to_path
from qwen3next_jax.interop.families.fields import note_once
from qwen3next_jax.interop.writing import INDEX, SINGLE

_READ_AT_ONCE = 1 << 26  # bytes of a bucket
_MAX_NAME_BYTES = 255  # of the longest file name that common file systems accept
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_FLOAT_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in `file`.

    Raises:
      UserError: the file does not exist, or does not hold a JSON object.
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
            f"{file}: {e}: the file is damaged, or does not belong to a Hugging Face directory; "
            "copy or download it again"
        ) from e


def weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths of the safetensors files of the checkpoint in `directory`.

    Raises:
      UserError: there are no weights, the weights are pickles, or the index is not valid.
    """
    if (directory / INDEX).is_file():
        names = sorted(set(_weight_map(directory).values()))
        if (directory / SINGLE).is_file() and SINGLE not in names:
            note_once(
                f"{directory}: the weights are read from what {INDEX} "
                f"names, not from {SINGLE}, which transformers would read"
            )
        return [directory / name for name in names]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    pickles = sorted(f.name for f in directory.iterdir() if f.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise UserError(
            f"{directory / pickles[0]}: a pickle can run code when it is read, so it is refused: "
            f"expected {SINGLE}; convert it with transformers' save_pretrained"
        )
    raise UserError(f"{directory}: no weights: expected {SINGLE} or {INDEX}")


def is_file_name(name: str) -> bool:
    """Whether `name` is short enough for file systems, and has only characters that can be printed,
    so that a message can show it on one line.
    """
    return name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES


def _weight_map(directory: pathlib.Path) -> dict[str, str]:
    """Returns the map from tensor names to file names in the directory's index. Raises UserError if
    the index is not valid, or names a file outside of the directory.
    """
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            f"{directory / INDEX}: no weight_map: expected a map from tensor names to file names"
        )
    for file in weight_map.values():
        # Any other path could make the reader open files outside of the directory.
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
    """Where the values of a tensor are stored.

    Attributes:
      file: the safetensors file.
      dtype: the dtype's name in the file's header, such as "BF16".
      shape: the tensor's shape.
      first_byte: the position of the tensor's first byte in the file.
    """

    file: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    first_byte: int


class Weights:
    """The tensors of the checkpoint in a directory.

    The constructor reads the headers of the files. `read` then reads only the bytes of the
    requested rows and columns. `read` does not map files into memory: if another program truncated
    a mapped file, the operating system would kill this process.

    Args:
      directory: a directory with safetensors files.
      tensor_name: function from a tensor's name in the file to the name that the methods of this
        class use.

    Raises:
      UserError: a file is missing, truncated, not a safetensors file, or changed since its header
        was read. The constructor and `read` raise this error.
    """

    def __init__(
        self, directory: pathlib.Path, tensor_name: Callable[[str], str] = lambda name: name
    ):
        self.directory = directory
        self._tensor_name = tensor_name
        self._locations: dict[str, TensorLocation] = {}
        self._file_identities: dict[pathlib.Path, tuple[int, ...]] = {}
        self._open_files: dict[pathlib.Path, Any] = {}
        files = weight_files(directory)
        missing = [file.name for file in files if not file.exists()]
        if len(missing) > 1:
            raise UserError(
                f"{directory}: {len(missing)} of the {len(files)} files that {INDEX} names are "
                f"missing: {', '.join(missing)}; incomplete checkpoint; copy or download them again"
            )
        for file in files:
            self._add_tensors(file)
        if (directory / INDEX).is_file():
            self._check_index()

    def _add_tensors(self, file: pathlib.Path) -> None:
        """Reads the header of `file` and records its tensors."""
        tensors, self._file_identities[file] = _read_header(file)
        for stored_name, location in tensors.items():
            name = self._tensor_name(stored_name)
            if name in self._locations:
                other = self._locations[name].file
                if other != file:
                    raise UserError(
                        f"{file}: tensor {name} is also in {other.name}: expected it once"
                    )
                names = [one for one in tensors if self._tensor_name(one) == name]
                raise UserError(
                    f"{file}: {' and '.join(names)} are two names of the same tensor: expected one "
                    "of them"
                )
            self._locations[name] = location

    def _check_index(self) -> None:
        """Raises UserError if the index names a tensor that no file holds."""
        absent = [
            name
            for name in _weight_map(self.directory)
            if self._tensor_name(name) not in self._locations
        ]
        if absent:
            raise UserError(
                f"{self.directory}: {count_and_names(absent)} missing from the files that {INDEX} "
                "names; copy or download them again"
            )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._locations)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the stored tensor."""
        return self._locations[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of the stored tensor.

        Raises:
          UserError: the dtype is not a floating-point type.
        """
        dtype = self._locations[name].dtype
        if dtype not in _FLOAT_DTYPES:
            raise UserError(
                f"{self.directory}: tensor {name} is {dtype}: expected one of "
                f"{', '.join(_FLOAT_DTYPES)}"
            )
        return np.dtype(_FLOAT_DTYPES[dtype])

    def read(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> np.ndarray:
        """Reads `rows` and `columns` of a tensor, as an array [rows, columns] of the stored dtype.

        The columns are the tensor's last dimension; all earlier dimensions, flattened, are the
        rows.

        Raises:
          UserError: the tensor is not of a floating-point type, or the file changed or cannot be
            read.
        """
        return self._read_as(name, self.dtype(name), rows, columns)

    def read_integers(self, name: str) -> np.ndarray:
        """Reads a whole tensor of 64-bit integers. The result has the shape of the stored tensor.

        Raises:
          UserError: the stored tensor is of another dtype.
        """
        location = self._locations[name]
        if location.dtype != "I64":
            raise UserError(
                f"{self.directory}: tensor {name} is {location.dtype}: expected I64, integers"
            )
        return self._read_as(name, np.dtype(np.int64)).reshape(location.shape)

    def _read_as(
        self,
        name: str,
        dtype: np.dtype,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> np.ndarray:
        """Reads `rows` and `columns` of a tensor as an array [rows, columns]. `dtype` has to be the
        stored dtype.
        """
        if isinstance(self.directory, BucketPath):
            return self._read_from_bucket(name, dtype, rows, columns)
        file, _, shape, tensor_start = self._locations[name]
        height, width = math.prod(shape[:-1]), math.prod(shape[-1:])
        top, bottom, _ = rows.indices(height)
        left, right, _ = columns.indices(width)
        values = np.empty((bottom - top, right - left), dtype)
        buffer = memoryview(values.reshape(-1).view(np.uint8))
        position = tensor_start + (top * width + left) * dtype.itemsize
        row_bytes, row_step = (right - left) * dtype.itemsize, width * dtype.itemsize
        if right - left == width:  # whole rows are contiguous in the file: read them at once
            row_bytes = values.nbytes
        with as_user_error(f"{file}: cannot be read: restore it, or start again", OSError):
            descriptor = self._open_descriptor(file)
            for begin in range(0, values.nbytes, row_bytes or 1):
                if not _fill_buffer(buffer[begin : begin + row_bytes], descriptor, position):
                    raise self._changed_error(file)
                position += row_step
        return values

    def _read_from_bucket(
        self, name: str, dtype: np.dtype, rows: slice, columns: slice
    ) -> np.ndarray:
        """Does the work of `_read_as` for an object in a bucket: downloads blocks of whole rows,
        and keeps only the columns `columns`.
        """
        file, _, shape, tensor_start = self._locations[name]
        height, width = math.prod(shape[:-1]), math.prod(shape[-1:])
        top, bottom, _ = rows.indices(height)
        left, right, _ = columns.indices(width)
        values = np.empty((bottom - top, right - left), dtype)
        step = max(_READ_AT_ONCE // max(width * dtype.itemsize, 1), 1)
        for first in range(top, bottom, step):
            last = min(first + step, bottom)
            start, stop = (tensor_start + row * width * dtype.itemsize for row in (first, last))
            data = file.read_bytes(start, stop)
            if len(data) != stop - start:
                raise self._changed_error(file)
            block = np.frombuffer(data, dtype).reshape(last - first, width)
            values[first - top : last - top] = block[:, left:right]
        return values

    def _open_descriptor(self, file: pathlib.Path) -> int:
        if file not in self._open_files:
            self._open_files[file] = file.open("rb", buffering=0)
            self._check_same_file(file, os.fstat(self._open_files[file].fileno()))
        return self._open_files[file].fileno()

    def check_unchanged(self) -> None:
        """Raises UserError if a file was replaced or rewritten since its header was read."""
        for file in self._file_identities:
            self._check_same_file(file, file.stat() if file.exists() else None)

    def _check_same_file(self, file: pathlib.Path, status: os.stat_result | None) -> None:
        if status is None or _file_identity(status) != self._file_identities[file]:
            raise self._changed_error(file)

    def _changed_error(self, file: pathlib.Path) -> UserError:
        return UserError(
            f"{file}: changed while it was read: something writes to this directory; wait until "
            "it is complete, and start again"
        )


def _fill_buffer(buffer: memoryview, descriptor: int, position: int) -> bool:
    """Fills `buffer` with the bytes of a file from `position` on. Returns False if the file ends
    before the buffer is full.
    """
    bytes_read = 0
    while bytes_read < len(buffer):
        count = os.preadv(descriptor, [buffer[bytes_read:]], position + bytes_read)
        if not count:
            return False
        bytes_read += count
    return True


def _file_identity(status: os.stat_result) -> tuple[int, ...]:
    """Returns values that identify a state of a file: its device, inode, size and modification
    time. If the file is replaced or rewritten, at least one of the values changes, unless the file
    is rewritten in place with the same size and its modification time is set back. For an object in
    a bucket, `status` comes from `storage.stat_result_of`, which puts the object's version in place
    of the inode.
    """
    return getattr(status, "st_dev", 0), status.st_ino, status.st_size, status.st_mtime_ns


def _read_header(file: pathlib.Path) -> tuple[dict[str, TensorLocation], tuple[int, ...]]:
    """Returns (name → location of each tensor in a file, the file's identity (`_file_identity`)).

    Raises:
      UserError: the file cannot be read, or is not a valid safetensors file.
    """
    length = b""
    try:
        if isinstance(file, BucketPath):
            identity, length, text = _header_in_bucket(file)
        else:
            with json_files.open_regular_file(file) as opened:
                identity = _file_identity(os.fstat(opened.fileno()))
                length = opened.read(8)
                # `safe_open` checks lengths, offsets and dtypes.
                with safetensors.safe_open(file, framework="np"):
                    pass
                text = opened.read(int.from_bytes(length, "little"))
        size, header = len(text), json.loads(text)
    except OSError as e:
        raise UserError(
            f"{file}: cannot be read ({e.strerror}): incomplete checkpoint; copy or download it "
            "again"
        ) from e
    except safetensors.SafetensorError as e:
        if length.startswith((b"PK\x03\x04", b"\x80\x02")):
            raise UserError(
                f"{file}: a pickle under another name, which is refused: expected a safetensors "
                "file"
            ) from e
        raise UserError(
            f"{file}: not a valid safetensors file ({e}): truncated or damaged; copy or download "
            "it again"
        ) from e
    header.pop("__metadata__", None)
    first_tensor = len(length) + size
    locations = {}
    for name, tensor in header.items():
        start = first_tensor + tensor["data_offsets"][0]
        locations[name] = TensorLocation(file, tensor["dtype"], tuple(tensor["shape"]), start)
    return locations, identity


def _header_in_bucket(file: BucketPath) -> tuple[tuple[int, ...], bytes, bytes]:
    """Returns (identity of an object, length of the object's header as 8 bytes, header).
    `safe_open` checks the header in a sparse local file, which has the object's size but holds only
    the header.
    """
    status = file.stat()
    length = file.read_bytes(0, 8)
    end = 8 + int.from_bytes(length, "little")
    # An impossible length is not refused here: `safe_open` reports it.
    text = file.read_bytes(8, end) if end <= min(status.st_size, json_files.MAX_BYTES) else b""
    with tempfile.NamedTemporaryFile() as local:
        local.write(length + text)
        local.flush()
        local.truncate(status.st_size)
        with safetensors.safe_open(local.name, framework="np"):
            pass
    return _file_identity(status), length, text


def count_and_names(names: Iterable[str], limit: int = 3) -> str:
    """Returns the number of names and the first `limit` names in alphabetical order, such as '3
    tensors: a, b, c' or '120 tensors: a, b, c, …'.
    """
    names = sorted(names)
    names = [name if len(name) <= 200 else f"{name[:199]}…" for name in names]
    count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
    return f"{count}: {', '.join(names[:limit])}{', …' if len(names) > limit else ''}"


def modification_digest(path: str | os.PathLike) -> str:
    """Returns a digest that changes when a file of the model in a Hugging Face directory is
    replaced. The digest is computed from the names, sizes and modification times of config.json and
    the files of weights, without reading the files.

    Raises:
      UserError: config.json or a file of weights does not exist.
    """
    directory = to_path(path)
    files = [directory / "config.json", *weight_files(directory)]
    with as_user_error(f"{directory}: its files cannot be looked at", OSError):
        found = [(file.name, file.stat()) for file in files]
    return digests.sha256_json([(name, stat.st_size, stat.st_mtime_ns) for name, stat in found])
