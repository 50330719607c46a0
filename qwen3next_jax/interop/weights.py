"""Reading and writing the safetensors files of a directory, by tensor name, one tensor at a time."""

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np
import safetensors
from safetensors.numpy import save_file

from qwen3next_jax import jsonfile
from qwen3next_jax.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 4 * 2**30
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_FLOATS = ("F64", "F32", "F16", "BF16")


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
      UserError: no such file, or not a JSON object.
    """
    try:
        return jsonfile.read(file)
    except OSError as e:
        raise UserError(f"{file}: cannot be read ({e.strerror}): expected a Hugging Face model directory with it") from e
    except ValueError as e:
        raise UserError(f"{file}: {e}: damaged, or no such file of a Hugging Face directory; copy or download it again") from e


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
        raise UserError(f"{directory / pickles[0]}: a pickle can run code when it is read, so it is refused: expected "
                        f"{SINGLE}; convert it with transformers' save_pretrained")
    raise UserError(f"{directory}: no weights: expected {SINGLE} or {INDEX}")


def _weight_map(directory: pathlib.Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{directory / INDEX}: no weight_map: expected one from tensor names to file names")
    for file in weight_map.values():
        # Anything but a plain name could make the reader leave the directory.
        if not isinstance(file, str) or pathlib.PurePath(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{directory / INDEX}: weight_map names {file!r}: expected a .safetensors file in that directory")
    return weight_map


class Weights:
    """The tensors of the checkpoint in a directory; headers are read at once, tensors when asked for.

    Raises:
      UserError: from the constructor and from `read`, for files that are missing, truncated, or no safetensors.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self._file_of: dict[str, Any] = {}
        files = weight_files(directory)
        if len(missing := [file.name for file in files if not file.exists()]) > 1:
            raise UserError(f"{directory}: {len(missing)} of the {len(files)} files that {INDEX} names are missing: {some(missing)}; "
                            "incomplete checkpoint; copy or download them again")
        for file in files:
            handle = _open(file)
            for name in handle.keys():
                if name in self._file_of:
                    raise UserError(f"{file}: tensor {name} is in another of the files as well: expected it once")
                self._file_of[name] = handle
        if (directory / INDEX).is_file():
            absent = [name for name in _weight_map(directory) if name not in self._file_of]
            if absent:
                raise UserError(f"{directory}: {name_some(absent)} missing from the files that {INDEX} names; copy or "
                                "download them again")

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        dtype = self._file_of[name].get_slice(name).get_dtype()
        if dtype not in _FLOATS:
            raise UserError(f"{self.directory}: tensor {name} is {dtype}: expected one of {', '.join(_FLOATS)}")
        return self._file_of[name].get_tensor(name)


def _open(file: pathlib.Path):
    try:
        with jsonfile.open_regular(file) as f:
            start = f.read(4)
        return safetensors.safe_open(file, framework="np")
    except OSError as e:
        raise UserError(f"{file}: cannot be read ({e.strerror}): incomplete checkpoint; copy or download it again") from e
    except safetensors.SafetensorError as e:
        if start.startswith((b"PK\x03\x04", b"\x80\x02")):
            raise UserError(f"{file}: a pickle under another name, refused: expected a safetensors file") from e
        raise UserError(f"{file}: no valid safetensors file ({e}): truncated or damaged; copy or download it again") from e


def name_some(names: Iterable[str], limit: int = 3) -> str:
    """'3 tensors: a, b, c' or '120 tensors: a, b, c, …'."""
    names = sorted(names)
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {some(names, limit)}"


def some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def write_weights(tensors: Iterable[tuple[str, np.ndarray]], sizes: dict[str, int], directory: pathlib.Path) -> None:
    """Writes `tensors` as one safetensors file, or as shards of at most 4 GiB and their index.

    Args:
      tensors: names and contiguous arrays; held in memory one shard at a time.
      sizes: bytes of every tensor, in the same order, from which the shards are planned.
    """
    shard_of, used, shard = {}, 0, 1
    for name, size in sizes.items():
        if used and used + size > MAX_SHARD_BYTES:
            shard, used = shard + 1, 0
        shard_of[name], used = shard, used + size
    count = shard
    files = {i: SINGLE if count == 1 else f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)}
    pending, current = {}, 1
    for name, tensor in tensors:
        if shard_of[name] != current:
            _save(pending, directory / files[current])
            pending, current = {}, shard_of[name]
        pending[name] = tensor
    _save(pending, directory / files[current])
    if count > 1:
        weight_map = {name: files[i] for name, i in shard_of.items()}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _save(tensors: dict[str, np.ndarray], file: pathlib.Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})  # transformers insists on this entry
    file.chmod(0o644)  # safetensors 0.8 writes files that only their owner can read
