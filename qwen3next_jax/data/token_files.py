"""Reads documents from files of tokens that other codebases wrote.

    Megatron-LM  `.idx`, with a `.bin` beside it
    datatrove    `.ds`, with a `.ds.index` beside it
    OLMo         `.npy`, with or without NumPy's header
    llm.c        `.bin`
    levanter     `shard_ledger.json`, with the folder `input_ids` beside it: two arrays in zarr's
                 format 3, `data` and `offsets`. `offsets[0]` is the number of documents;
                 `offsets[i]`, with i > 0, is the position in `data` where document i - 1 ends.

The indices of Megatron-LM, datatrove and levanter say where documents end. In files of OLMo and
llm.c, the end token marks the end of each document.
"""

import pathlib
import tokenize
from collections.abc import Iterator

import numpy as np

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError, as_user_error, error_message, require
from qwen3next_jax.data.sources import SourceFile, is_remote
from qwen3next_jax.data.tokens import Tokenizer

_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# A file of llm.c begins with a header of 256 int32. First int32 of the header → dtype of the
# tokens.
_LLM_C_MAGIC = {20240520: "<u2", 20240801: "<u4"}
_LEDGER = "shard_ledger.json"
_READ_AT_ONCE = 1 << 24  # tokens
_MOST = 1 << 48  # tokens or documents of a file


def token_format(name: str) -> str:
    """Returns the name of the format of a file of tokens; "" for a file of another kind. `name`:
    the file's name in lower case.
    """
    if name == _LEDGER:
        return "levanter"
    endings = {".idx": "megatron", ".ds": "datatrove", ".npy": "olmo", ".bin": "llm.c"}
    return next((kind for ending, kind in endings.items() if name.endswith(ending)), "")


def companion_path(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the companion of a file of tokens: the second file or folder that is needed to read
    the file; None if the file is read alone.
    """
    if path.name.endswith(".idx"):
        return path.with_suffix(".bin")
    if path.name == _LEDGER:
        return path.parent / "input_ids"
    return path.with_name(path.name + ".index") if path.name.endswith(".ds") else None


def companion_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that are read together with a file of tokens: the file `companion_path` or,
    if `companion_path` is a folder, all files in the folder, sorted.
    """
    other = companion_path(path)
    if other is None:
        return []
    if other.is_dir():
        return sorted(file for file in other.rglob("*") if file.is_file())
    return [other] if other.exists() else []


def read_token_file(file: SourceFile, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yields (ids of a document without its end token, bytes of the file read so far) for every
    document: int32 [n], int.

    Raises:
      UserError: the file's content contradicts its name, the file is cut short, or it holds ids
        that the tokenizer does not have.
    """
    path = pathlib.Path(file.path)
    require(not is_remote(str(file.path)), f"{path}: files of tokens are read from a local disk")
    other = companion_path(path)
    require(other is None or other.exists(), f"{path}: {other} is missing beside it")
    reader = {
        "megatron": _open_megatron,
        "datatrove": _open_datatrove,
        "olmo": _open_olmo,
        "llm.c": _open_llm_c,
    }
    reader["levanter"] = _open_levanter
    with as_user_error(f"{path}: cannot be read", OSError):
        tokens, ends = reader[token_format(path.name.lower())](path, tokenizer)
    pieces = (
        _split_at_end_tokens(path, tokens, tokenizer)
        if ends is None
        else _split_at_ends(tokens, ends)
    )
    for ids, stop in pieces:
        bad = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
        if len(bad):
            raise UserError(
                f"{path}: token {stop - len(ids) + bad[0]} has id {ids[bad[0]]}: the tokenizer "
                f"has {tokenizer.vocab_size} ids: name in data.tokenizer the one that wrote it"
            )
        if len(ids) and ids[-1] == tokenizer.eos_id:
            ids = ids[:-1]
        if (ids == tokenizer.eos_id).any():
            raise UserError(
                f"{path}: the end token {tokenizer.eos_id} stands inside of a document that ends "
                f"with token {stop - 1}: name in data.tokenizer the one that wrote it"
            )
        yield ids.astype(np.int32), file.size * stop // len(tokens)


def _check_document_ends(path: pathlib.Path, ends: np.ndarray, tokens: int) -> None:
    """Raises a UserError unless the ends of the documents are in order and the last is `tokens`."""
    is_ordered = bool((ends >= 0).all() and (ends[1:] >= ends[:-1]).all())
    require(
        len(ends) > 0 and int(ends[-1]) == tokens and is_ordered,
        f"{path}: the ends of its {len(ends)} documents do not divide its {tokens} tokens: it is "
        "damaged, or names no documents",
    )


def _split_at_ends(tokens: np.ndarray, ends: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    start = 0
    for stop in ends.tolist():
        yield tokens[start:stop], stop
        start = stop


def _split_at_end_tokens(
    path: pathlib.Path, tokens: np.ndarray, tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, int]]:
    start = 0
    for first in range(0, len(tokens), _READ_AT_ONCE):
        ends = np.flatnonzero(tokens[first : first + _READ_AT_ONCE] == tokenizer.eos_id) + first
        for stop in (ends + 1).tolist():
            yield tokens[start:stop], stop
            start = stop
    require(
        start > 0,
        f"{path}: the end token {tokenizer.eos_id} is not in it, so nothing says where its "
        "documents end: name in data.tokenizer the one that wrote it",
    )
    if start < len(tokens):
        yield tokens[start:], len(tokens)


def _memory_map(path: pathlib.Path, dtype: str, offset: int = 0) -> np.ndarray:
    size, item = path.stat().st_size - offset, np.dtype(dtype).itemsize
    require(
        size > 0 and size % item == 0,
        f"{path}: {size} bytes are no whole number of tokens of {item} bytes: it is empty or cut "
        "short, or of another type",
    )
    return np.memmap(path, dtype, "r", offset)


def _open_megatron(path: pathlib.Path, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    del tokenizer
    data = path.read_bytes()
    require(data[:9] == _MEGATRON_MAGIC, f"{path}: not an index of Megatron-LM")
    dtype = _MEGATRON_DTYPES.get(data[17] if len(data) > 33 else -1)
    require(dtype is not None, f"{path}: it says that its tokens are of a type that is no integer")
    sequences, documents = np.frombuffer(data, "<u8", 2, 18).tolist()
    need = 34 + 12 * sequences + 8 * documents
    require(len(data) >= need, f"{path}: cut short: {len(data)} bytes instead of {need}")
    lengths = np.frombuffer(data, "<i4", sequences, 34).astype(np.int64)
    firsts = np.frombuffer(data, "<i8", documents, 34 + 12 * sequences)
    tokens = _memory_map(path.with_suffix(".bin"), dtype)
    in_all = int(lengths.sum())
    require(
        len(tokens) == in_all,
        f"{path.with_suffix('.bin')}: {len(tokens)} tokens; its index names {in_all}",
    )
    require(
        bool((lengths >= 0).all() and (firsts >= 0).all() and (firsts <= sequences).all()),
        f"{path}: damaged: it has a sequence of less than 0 tokens, or a document that begins "
        f"before the first or after the last of its {sequences} sequences",
    )
    require(
        not len(firsts) or firsts[0] == 0,
        f"{path}: damaged: no document begins at its first sequence; expected every token in one",
    )
    after = np.concatenate([[0], np.cumsum(lengths)])
    ends = after[firsts[firsts > 0]]
    _check_document_ends(path, ends, in_all)
    return tokens, ends


def _open_datatrove(path: pathlib.Path, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    tokens = _memory_map(path, "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    ends = np.fromfile(path.with_name(path.name + ".index"), "<u8").astype(np.int64)
    require(
        len(ends) > 0 and int(ends[-1]) == len(tokens),
        f"{path}: {len(tokens)} tokens of {tokens.itemsize} bytes; its index ends at "
        f"{ends[-1] if len(ends) else 'nothing'}: it is cut short, or of another tokenizer",
    )
    _check_document_ends(path, ends, len(tokens))
    return tokens, ends


class _LevanterArray:
    """An array of a cache of levanter, integers [n]. Slices have to be taken in order.

    Args:
      folder: the array's folder.

    Attributes:
      length: number of entries, which `set_checked_length` sets.

    Raises:
      UserError: the folder holds no array of integers [n], or its data are damaged. Damage raises
        the error when a slice is read.
    """

    def __init__(self, folder: pathlib.Path):
        import tensorstore  # takes a while, and only these files need it

        self._folder, self.length = folder, 0
        self._start, self._block = 0, np.zeros(0, np.int64)
        store = {"driver": "file", "path": f"{folder.absolute()}/"}
        with as_user_error(f"{folder}: not an array of levanter", ValueError, OSError):
            self._array = tensorstore.open(
                {"driver": "zarr3", "kvstore": store}, open=True
            ).result()
        require(
            self._array.rank == 1 and self._array.dtype.numpy_dtype.kind in "ui",
            f"{folder}: it holds {self._array.dtype.name} {list(self._array.shape)}: expected "
            "integers [n]",
        )
        layout = self._array.chunk_layout
        (self._in_file,), (in_chunk,) = layout.write_chunk.shape, layout.read_chunk.shape
        require(
            0 < in_chunk <= _READ_AT_ONCE and self._in_file // in_chunk <= _READ_AT_ONCE,
            f"{folder}: {self._in_file} entries in a file, {in_chunk} in a chunk: expected chunks "
            f"of at most {_READ_AT_ONCE}, and at most as many in a file",
        )

    def set_checked_length(self, length: int) -> None:
        """Sets the number of entries, and raises UserError unless the folder has files for all
        entries. The check is needed because TensorStore returns zeros for a missing file. (For a
        chunk that is missing in a file, zeros are right: TensorStore does not write chunks of
        zeros.)
        """
        require(
            0 < length <= self._array.shape[0],
            f"{self._folder}: damaged: {length} of {self._array.shape[0]} entries are in use",
        )
        encoding = self._array.spec().to_json()["metadata"].get("chunk_key_encoding", {})
        is_v2 = encoding.get("name") == "v2"
        separator = encoding.get("configuration", {}).get("separator", "/")
        for number in range(-(-length // self._in_file)):
            name = str(number) if is_v2 else f"c{separator}{number}"
            require(
                (self._folder / name).is_file(),
                f"{self._folder / name}: missing, with the entries from "
                f"{number * self._in_file} on",
            )
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, entries: slice) -> np.ndarray:
        if entries.stop > self._start + len(self._block):
            end = min(max(entries.start + _READ_AT_ONCE, entries.stop), self.length)
            with as_user_error(f"{self._folder}: damaged", ValueError, OSError, MemoryError):
                self._block = self._array[entries.start : end].read().result()
            self._start = entries.start
        return self._block[entries.start - self._start : entries.stop - self._start]


def _open_levanter(path: pathlib.Path, tokenizer: Tokenizer) -> tuple[_LevanterArray, np.ndarray]:
    del tokenizer
    with as_user_error(f"{path}: not a ledger of levanter", ValueError):
        finished = json_files.read(path).get("is_finished", True)
    require(bool(finished), f"{path}: the cache is not finished, by what it says")
    folder = path.parent / "input_ids"
    offsets, data = _LevanterArray(folder / "offsets"), _LevanterArray(folder / "data")
    offsets.set_checked_length(1)
    documents = int(offsets[0:1][0])
    require(
        0 < documents < _MOST, f"{folder / 'offsets'}: damaged, or empty: {documents} documents"
    )
    offsets.set_checked_length(documents + 1)
    ends = offsets[1 : documents + 1]
    last = int(ends[-1])
    require(
        0 < last < _MOST and bool((ends >= 0).all() and (ends[1:] >= ends[:-1]).all()),
        f"{path}: its {documents} offsets end at {last}: damaged, or empty",
    )
    data.set_checked_length(last)
    return data, ends.astype(np.int64)


# What NumPy raises for a header that is no header: it reads one as a Python literal.
_HEADER_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
)


def _open_olmo(path: pathlib.Path, tokenizer: Tokenizer) -> tuple[np.ndarray, None]:
    with path.open("rb") as file:
        has_header = file.read(6) == b"\x93NUMPY"
    if not has_header:
        tokens = _memory_map(path, "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        require(
            tokens.itemsize == 4 or len(tokens) < 16 or bool(tokens[1:_READ_AT_ONCE:2].any()),
            f"{path}: every second token of 2 bytes is 0, so that its tokens seem to have 4: "
            f"expected uint16, as {tokenizer.vocab_size} ids fit in, or a file of numpy.save, "
            "which names their type",
        )
        return tokens, None
    try:
        tokens = np.load(path, mmap_mode="r")
    except _HEADER_ERRORS as error:
        raise UserError(f"{path}: not a NumPy file ({error_message(error)})") from error
    require(
        tokens.ndim == 1 and tokens.dtype.kind in "ui",
        f"{path}: {tokens.dtype} {list(tokens.shape)}: expected integers [n]",
    )
    return tokens, None


def _open_llm_c(path: pathlib.Path, tokenizer: Tokenizer) -> tuple[np.ndarray, None]:
    del tokenizer
    header = np.fromfile(path, "<i4", 3)
    dtype = _LLM_C_MAGIC.get(int(header[0]) if len(header) == 3 else 0)
    require(
        dtype is not None,
        f"{path}: neither a .bin of llm.c (by its first bytes), nor one of Megatron-LM (there is "
        f"no {path.with_suffix('.idx').name} beside it)",
    )
    tokens = _memory_map(path, dtype, 1024)
    require(
        len(tokens) == header[2],
        f"{path}: {len(tokens)} tokens; its header names {header[2]}: cut short",
    )
    return tokens, None
