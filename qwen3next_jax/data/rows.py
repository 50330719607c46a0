"""The format of shards, which hold packed rows in ArrayRecord files. `row_groups` writes the
shards, and `pipeline` reads their rows in random order.

A row consists of, in little-endian order:

    n                             uint32, number of pieces of documents in the row
    lengths of the pieces         uint32 [n], in tokens
    indices of the pieces' parts  uint32 [n]
    numbers of their records      uint32 [n], see `readers.Record`
    tokens                        uint16 or uint32, as the metadata says; padding is not stored

If the folder's metadata say `weighted`, each token is followed by its loss weight, a float32
(`token_dtype`); otherwise every token has the weight 1.

A chunk of a shard, which ArrayRecord calls a record, holds `rows_per_record` rows, one after the
other. `rows_per_record` is in the folder's metadata. Only the last chunk of a shard may hold fewer
than `rows_per_record` rows.

ArrayRecord stores a hash of every chunk and verifies it at every read, so a damaged byte is an
error and never a different token.
"""

import collections
import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import pathlib
import resource
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError, as_user_error, error_message
from qwen3next_jax.common.storage import BucketPath, StoreError, files_in
from qwen3next_jax.data.packing import Rows

_SHARD_BYTES = 1 << 28  # uncompressed
# So many bytes at the beginning of a shard hold a hash of its first rows. By them, another shard of
# the same size is noticed: ArrayRecord fills files up to whole blocks of 64 KiB.
_HEAD_BYTES = 1 << 12
_MOST_OPEN = 256  # shards; an open shard takes some 200 KB of memory
_INTEGER = np.dtype("<u4")
# Number of tokens in a chunk of short rows. With one row in each chunk, writing would take twice
# the CPU time; with larger chunks, reading one row would take longer.
_CHUNK_TOKENS = 1 << 12


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    file: str  # name within the directory
    rows: int
    size: int  # bytes on disk
    head: int  # `_head_digest` of its first `_HEAD_BYTES` bytes


def token_dtype(name: str, weighted: bool) -> np.dtype:
    """Returns the dtype of a stored token.

    Args:
      name: name of the dtype of the tokens' ids.
      weighted: whether each token has a loss weight. If True, the dtype has the fields "token" and
        "weight".
    """
    ids = np.dtype(name).newbyteorder("<")
    return np.dtype([("token", ids), ("weight", "<f4")]) if weighted else ids


class PackedRow(NamedTuple):
    """One stored row of T tokens: pieces of documents one after the other, then padding (0)."""

    tokens: np.ndarray  # int32 [T]
    segment_ids: np.ndarray  # int32 [T]: 1 in the first piece, 2 in the second, …; 0 in padding
    document_origins: list[tuple[int, int]]  # (file index, record number) of each piece's document
    loss_weights: np.ndarray | None = None  # float32 [T], 0 in padding; None: every token has 1


class RowWriter:
    """Writes the rows of one split into numbered shards.

    Args:
      directory: the folder of the shards.
      split: the split.
      dtype: `token_dtype` of the tokens in the shards.
      row_length: T, number of tokens of a row.

    Attributes:
      rows_per_chunk: number of rows of each chunk, except the last chunk of a shard.
    """

    def __init__(self, directory: pathlib.Path, split: str, dtype: np.dtype, row_length: int):
        self._directory, self._split = directory, split
        self._dtype = dtype
        most = max(1, _SHARD_BYTES // (dtype.itemsize * row_length))
        self.rows_per_chunk = min(max(1, _CHUNK_TOKENS // row_length), most)
        self._rows_per_shard = most - most % self.rows_per_chunk
        self._writer = None
        self._shards: list[Shard] = []
        self._in_shard = 0
        # Pieces of the bytes of the chunk that is not complete yet, and the number of its rows.
        self._waiting: list[memoryview] = []
        self._in_chunk = 0

    def write(self, rows: Rows) -> None:
        """Writes rows, in their order.

        Raises:
          UserError: the folder cannot be written to.
        """
        for row in _encode_rows(rows, self._dtype):
            self._waiting += row
            self._in_chunk += 1
            self._in_shard += 1
            if self._in_chunk == self.rows_per_chunk:
                self._write_chunk()
            if self._in_shard == self._rows_per_shard:
                self._finish_shard()

    def _write_chunk(self) -> None:
        if self._writer is None:
            self._path = self._directory / shard_name(self._split, len(self._shards))
            self._writer = _array_record_module().ArrayRecordWriter(
                str(self._path), "group_size:1,zstd:1"
            )
        with as_user_error(f"{self._path}: cannot be written", RuntimeError):
            self._writer.write(b"".join(self._waiting))
        self._waiting, self._in_chunk = [], 0

    def close(self) -> list[Shard]:
        """Finishes the last shard and returns all shards."""
        if self._in_shard:
            self._finish_shard()
        return self._shards

    def _finish_shard(self) -> None:
        if self._waiting:
            self._write_chunk()
        with as_user_error(f"{self._path}: cannot be written", RuntimeError):
            self._writer.close()
        self._writer = None
        head = _head_digest(_read_head(self._path))
        shard = Shard(self._path.name, self._in_shard, self._path.stat().st_size, head)
        # Opening the shard as a reader does checks that it holds all rows.
        _open_shard(self._path, shard, self.rows_per_chunk).close()
        self._shards.append(shard)
        self._in_shard = 0


def _encode_rows(rows: Rows, dtype: np.dtype) -> Iterator[list[memoryview]]:
    """Yields the stored bytes of each row, in pieces."""
    counts = np.diff(rows.row_ends_in_pieces, prepend=0)  # pieces of each row
    headers = np.empty(len(counts) + 3 * len(rows.piece_lengths), _INTEGER)
    header_ends = np.cumsum(1 + 3 * counts)
    header_starts = header_ends - 1 - 3 * counts
    headers[header_starts] = counts
    # index in `headers` of each piece's length
    at = (
        1
        + np.arange(len(rows.piece_lengths))
        + np.repeat(header_starts - rows.row_ends_in_pieces + counts, counts)
    )
    for i, column in enumerate((rows.piece_lengths, rows.part_indices, rows.record_indices)):
        headers[at + i * np.repeat(counts, counts)] = column
    tokens = np.ascontiguousarray(rows.tokens, dtype).view(np.uint8).data
    starts = (rows.piece_starts * dtype.itemsize).tolist()
    stops = ((rows.piece_starts + rows.piece_lengths) * dtype.itemsize).tolist()
    pieces = [tokens[start:stop] for start, stop in zip(starts, stops, strict=True)]
    header_bytes = headers.view(np.uint8).data
    first = 0
    for start, stop, end in zip(
        (_INTEGER.itemsize * header_starts).tolist(),
        (_INTEGER.itemsize * header_ends).tolist(),
        rows.row_ends_in_pieces.tolist(),
        strict=True,
    ):
        yield [header_bytes[start:stop], *pieces[first:end]]
        first = end


@dataclasses.dataclass(frozen=True, eq=False)
class ShardTable:
    """The shards of one split of a source, which may lie in several folders.

    A source may have several hundred thousand shards, so a `ShardTable` consists of arrays. It has
    S shards in F folders, packed from P parts.

    Attributes:
      root: the folder that holds the F folders.
      split: the split; the names of its shards begin with it.
      dtype: name of the dtype of the tokens' ids.
      folders: bytes [F], names of the folders, in the order of the rows.
      rows_per_chunk: int64 [F], number of rows of each chunk in the folder's shards.
      folder_shard_ends: int64 [F], number of shards up to the end of each folder.
      rows_per_shard: int64 [S], number of rows of each shard.
      shard_bytes: int64 [S], number of bytes of each shard.
      shard_heads: int64 [S], `Shard.head` of each shard.
      folder_part_ends: int64 [F], number of parts up to the end of each folder.
      part_origins: int64 [P, 2], for each part: the index of its file, and the number of the file's
        records before the part. `part_origins` is [0, 2] if the origins of rows are not needed.
      has_loss_weights: whether each token has a loss weight.
    """

    root: pathlib.Path
    split: str
    dtype: str
    folders: np.ndarray
    rows_per_chunk: np.ndarray
    folder_shard_ends: np.ndarray
    rows_per_shard: np.ndarray
    shard_bytes: np.ndarray
    shard_heads: np.ndarray
    folder_part_ends: np.ndarray
    part_origins: np.ndarray
    has_loss_weights: bool = False

    @classmethod
    def from_metadata(
        cls,
        split: str,
        directories: Sequence[pathlib.Path],
        metadata: Sequence[Mapping[str, Any]],
        part_ends: Sequence[int],
        origins: Sequence[tuple[int, int]],
    ) -> "ShardTable":
        """Returns the table of the shards in `directories`, which have the same parent folder.

        Args:
          split: the split.
          directories: the folders, at least one.
          metadata: the content of each folder's metadata.json.
          part_ends: see the attribute `folder_part_ends`.
          origins: see the attribute `part_origins`.
        """
        shards = [[Shard(**shard) for shard in content["shards"][split]] for content in metadata]
        flat = [shard for folder_shards in shards for shard in folder_shards]
        assert all(
            shard.file == shard_name(split, i)
            for folder_shards in shards
            for i, shard in enumerate(folder_shards)
        )
        return cls(
            directories[0].parent,
            split,
            metadata[0]["dtype"],
            np.array([directory.name.encode() for directory in directories]),
            np.array([content["rows_per_record"] for content in metadata], np.int64),
            np.cumsum([len(folder_shards) for folder_shards in shards], dtype=np.int64),
            np.array([shard.rows for shard in flat], np.int64),
            np.array([shard.size for shard in flat], np.int64),
            np.array([shard.head for shard in flat], np.int64),
            np.array(part_ends, np.int64),
            np.array(origins, np.int64).reshape(-1, 2),
            metadata[0].get("weighted", False),
        )

    def folder_path(self, folder: int) -> pathlib.Path:
        return self.root / self.folders[folder].decode()

    def folder_of_shard(self, shard: int) -> int:
        """Returns the index of the folder that holds a shard."""
        return int(np.searchsorted(self.folder_shard_ends, shard, "right"))

    def path_and_shard(self, number: int) -> tuple[pathlib.Path, Shard]:
        """Returns the path of shard `number`, counted over all folders, and its description."""
        folder = self.folder_of_shard(number)
        first = int(self.folder_shard_ends[folder - 1]) if folder else 0
        name = shard_name(self.split, number - first)
        numbers = (self.rows_per_shard, self.shard_bytes, self.shard_heads)
        shard = Shard(name, *(int(of_shard[number]) for of_shard in numbers))
        return self.folder_path(folder) / name, shard

    def shard_paths(self) -> Iterator[str]:
        """Yields the paths of all shards in order."""
        first = 0
        for name, end in zip(self.folders.tolist(), self.folder_shard_ends.tolist(), strict=True):
            for i in range(end - first):
                yield f"{self.root}/{name.decode()}/{shard_name(self.split, i)}"
            first = end

    def check_shard_files(self) -> None:
        """Raises a UserError if a shard is missing or has the wrong size."""
        sizes: dict[str, int] = {}
        for i in range(len(self.folders)):
            folder = self.folder_path(i)
            sizes |= {str(folder / name): entry.size for name, entry in files_in(folder).items()}
        for number in range(len(self.rows_per_shard)):
            path, shard = self.path_and_shard(number)
            if (size := sizes.get(str(path))) is None:
                raise _damaged_shard_error(path, "it is missing")
            if size != shard.size:
                raise _damaged_shard_error(path, f"it has {size} bytes instead of {shard.size}")


def shard_name(split: str, number: int) -> str:
    """Returns the name of shard `number`, counted within its folder."""
    return f"{split}-{number:05d}.array_record"


class RowReader:
    """Gives random access to the rows of one split. Several threads may use a reader at once.

    A shard is opened when one of its rows is read. All readers of this process together keep the
    `_MOST_OPEN` shards open that were read last.

    Args:
      table: the shards.
      row_length: T, number of tokens of a row.

    Raises:
      UserError: raised when a row is read, if its shard is missing or damaged, or if the system
        lets this process open no more files.
    """

    def __init__(self, table: ShardTable, row_length: int):
        self.table = table
        self.row_length = row_length
        self._ends = np.cumsum(table.rows_per_shard)  # [S]
        raise_open_file_limit()
        self._number = next(_reader_numbers)
        weakref.finalize(self, _close_shards_of_reader, self._number)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> PackedRow:
        number = int(np.searchsorted(self._ends, index, "right"))
        position = int(index - (self._ends[number - 1] if number else 0))
        path, shard = self.table.path_and_shard(number)
        per_chunk = int(self.table.rows_per_chunk[self.table.folder_of_shard(number)])
        reader = _cached_shard((self._number, number), lambda: _open_shard(path, shard, per_chunk))
        try:
            (chunk,) = reader.read([position // per_chunk])
            return self._decode_row(chunk, number, path, position, position % per_chunk)
        except StoreError as error:
            raise UserError(
                f"shard {path}: row {position} cannot be read: {error_message(error)}",
                error.exit_code,
            ) from error
        except (RuntimeError, IndexError, ValueError) as error:
            raise _damaged_shard_error(
                path, f"row {position} cannot be read: {error_message(error)}"
            ) from error

    def _decode_row(
        self, chunk: bytes, number: int, path: pathlib.Path, position: int, in_chunk: int
    ) -> PackedRow:
        dtype = token_dtype(self.table.dtype, self.table.has_loss_weights)
        offset = 0
        for _ in range(in_chunk):  # skips the rows that stand before this one
            pieces = int.from_bytes(chunk[offset : offset + 4], "little")
            length = int(np.frombuffer(chunk, _INTEGER, pieces, offset + 4).sum())
            offset += 4 + 12 * pieces + dtype.itemsize * length
        pieces = int(np.frombuffer(chunk, _INTEGER, 1, offset)[0])
        lengths, parts, records = (
            np.frombuffer(chunk, _INTEGER, 3 * pieces, offset + 4)
            .reshape(3, pieces)
            .astype(np.int64)
        )
        stored = np.frombuffer(chunk, dtype, int(lengths.sum()), offset + 4 + 12 * pieces)
        if len(stored) > self.row_length:
            raise _damaged_shard_error(
                path, f"row {position} holds {len(stored)} tokens, more than {self.row_length}"
            )
        tokens_T = np.zeros(self.row_length, np.int32)
        segment_ids_T = np.zeros(self.row_length, np.int32)
        weights_T = None
        if self.table.has_loss_weights:
            weights_T = np.zeros(self.row_length, np.float32)
            weights_T[: len(stored)] = stored["weight"]
            stored = stored["token"]
        tokens_T[: len(stored)] = stored
        segment_ids_T[: len(stored)] = np.repeat(np.arange(1, pieces + 1, dtype=np.int32), lengths)
        files = parts
        if len(self.table.part_origins):
            folder = self.table.folder_of_shard(number)
            first_part = int(self.table.folder_part_ends[folder - 1]) if folder else 0
            files, before = self.table.part_origins[first_part + parts].T
            records = before + records
        origins = list(zip(files.tolist(), records.tolist(), strict=True))
        return PackedRow(tokens_T, segment_ids_T, origins, weights_T)


# (number of the reader, index of the shard) → the open shard; the shard read last is the last entry
_open: collections.OrderedDict[tuple[int, int], Any] = collections.OrderedDict()
_open_lock = (
    threading.RLock()
)  # reentrant: a reader may be collected, and close its shards, at any time
_reader_numbers = itertools.count()


def _cached_shard(key: tuple[int, int], open_it: Callable[[], Any]) -> Any:
    """Returns the open shard `key`. A shard that is not open is opened with `open_it`. Then, if
    more than `_MOST_OPEN` shards are open, the shards that were read longest ago are dropped. A
    dropped shard closes when the last thread that reads from it has finished.
    """
    with _open_lock:
        if key in _open:
            _open.move_to_end(key)
            return _open[key]
    shard = open_it()
    with _open_lock:
        _open[key] = shard
        while len(_open) > _MOST_OPEN:
            _open.popitem(last=False)
    return shard


def _close_shards_of_reader(reader: int) -> None:
    with _open_lock:
        for key in list(_open):
            if key[0] == reader:
                del _open[key]


@functools.cache
def raise_open_file_limit() -> None:
    """Lets this process open as many files as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _array_record_module() -> Any:
    """Returns the ArrayRecord library. The library is imported late, because a machine that only
    loads a model may lack ArrayRecord.
    """
    from array_record.python import array_record_module

    return array_record_module


def _check_shard_size(path: pathlib.Path, shard: Shard) -> None:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        raise _damaged_shard_error(path, "it is missing") from None
    if size != shard.size:
        raise _damaged_shard_error(path, f"it has {size} bytes instead of {shard.size}")


def _read_head(path: pathlib.Path) -> bytes:
    """Returns the first `_HEAD_BYTES` bytes of a shard.

    Raises:
      UserError: the shard cannot be opened, such as because too many files are open.
    """
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        advice = "expected a file that this process may read"
        if error.errno == errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            advice = f"this process may open {limit} files: raise the limit with ulimit -n"
        raise UserError(
            f"shard {path} cannot be opened ({error_message(error)}); {advice}"
        ) from error


def _head_digest(head: bytes) -> int:
    """Returns the first 60 bits of the SHA-256 of a shard's first `_HEAD_BYTES` bytes. `head`: at
    least these bytes, or the whole of a shorter shard.
    """
    return int(digests.sha256(head[:_HEAD_BYTES])[:15], 16)


def _check_head(path: pathlib.Path | BucketPath, shard: Shard, head: bytes) -> None:
    if _head_digest(head) != shard.head:
        raise _damaged_shard_error(path, "it begins with other rows: it may be another shard")


def _open_shard(path: pathlib.Path | BucketPath, shard: Shard, rows_per_chunk: int) -> Any:
    expected = -(-shard.rows // rows_per_chunk)
    if isinstance(path, BucketPath):
        from qwen3next_jax.data.remote_shard import RemoteShard

        try:
            reader = RemoteShard(path, shard.size, open_array_record)
        except ValueError as error:
            raise _damaged_shard_error(path, str(error)) from error
        _check_head(path, shard, reader.head)
        if (chunks := reader.num_records()) != expected:
            raise _damaged_shard_error(path, f"it has {chunks} chunks instead of {expected}")
        return reader
    _check_shard_size(path, shard)
    _check_head(path, shard, _read_head(path))
    reader = open_array_record(path)
    chunks = reader.num_records()
    if chunks != expected:
        _read_head(path)  # ArrayRecord finds no records in a file that it could not open
        raise _damaged_shard_error(path, f"it has {chunks} readable chunks instead of {expected}")
    return reader


def open_array_record(path: pathlib.Path) -> Any:
    """Opens a local ArrayRecord file for random access."""
    return _array_record_module().ArrayRecordReader(
        str(path), "readahead_buffer_size:0,max_parallelism:0", file_reader_buffer_size=1 << 15
    )


def _damaged_shard_error(path: pathlib.Path, what: str) -> UserError:
    return UserError(
        f"shard {path} is damaged ({what}): delete {path.parent} to have it prepared again"
    )
