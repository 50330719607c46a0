"""The format of shards, which hold one ArrayRecord record per packed row. `row_groups` writes the
shards, and `pipeline` reads their rows in random order.

A record holds, in little-endian order:

    n                             uint32, number of pieces of documents in the row
    lengths of the pieces         uint32 [n], in tokens
    indices of the pieces' units  uint32 [n] (in format 1: indices of source files)
    numbers of their records      uint32 [n], see `readers.Record`
    tokens                        uint16 or uint32, as the metadata says; padding is not stored

ArrayRecord stores a hash of every chunk and verifies it at every read, so a damaged byte is an
error and never a different token.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import resource
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qwen3next_jax.common.errors import UserError, error_message, as_user_error
from qwen3next_jax.common.storage import BucketPath, StoreError
from qwen3next_jax.data.packing import Row
from qwen3next_jax.data.remote_shard import RemoteShard

_SHARD_BYTES = 1 << 28  # uncompressed
_MOST_OPEN = 256  # shards; an open shard takes some 200 KB of memory
_INTEGER = np.dtype("<u4")


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    file: str  # name within the directory
    rows: int
    size: int  # bytes on disk


class PackedRow(NamedTuple):
    """One stored row of T tokens: pieces of documents one after the other, then padding (0)."""

    tokens: np.ndarray  # int32 [T]
    segment_ids: np.ndarray  # int32 [T]: 1 in the first piece, 2 in the second, …; 0 in padding
    origins: list[tuple[int, int]]  # (file index, record number) of each piece's document


class RowWriter:
    """Writes the rows of one split into numbered shards."""

    def __init__(self, directory: pathlib.Path, prefix: str, dtype: np.dtype, row_length: int):
        self._directory, self._prefix = directory, prefix
        self._dtype = dtype.newbyteorder("<")
        self._rows_per_shard = max(1, _SHARD_BYTES // (dtype.itemsize * row_length))
        self._writer = None
        self._shards: list[Shard] = []
        self._in_shard = 0

    def write(self, row: Row) -> None:
        if self._writer is None:
            self._path = self._directory / f"{self._prefix}-{len(self._shards):05d}.array_record"
            self._writer = _array_record().ArrayRecordWriter(str(self._path), "group_size:1,zstd:1")
            self._in_shard = 0
        header = [
            len(row),
            *(len(p.tokens) for p in row),
            *(p.file for p in row),
            *(p.record for p in row),
        ]
        tokens = np.concatenate([piece.tokens for piece in row]).astype(self._dtype)
        with as_user_error(f"{self._path}: cannot be written", RuntimeError):
            self._writer.write(np.array(header, _INTEGER).tobytes() + tokens.tobytes())
        self._in_shard += 1
        if self._in_shard == self._rows_per_shard:
            self._finish_shard()

    def close(self) -> list[Shard]:
        """Finishes the last shard and returns all shards."""
        if self._writer is not None:
            self._finish_shard()
        return self._shards

    def _finish_shard(self) -> None:
        with as_user_error(f"{self._path}: cannot be written", RuntimeError):
            self._writer.close()
        self._writer = None
        shard = Shard(self._path.name, self._in_shard, self._path.stat().st_size)
        # Opening the shard as a reader does checks that it holds all rows.
        _open_shard(self._path, shard).close()
        self._shards.append(shard)


@dataclasses.dataclass(frozen=True)
class RowFolder:
    """The shards of one split in one folder of prepared rows.

    Attributes:
      directory: the folder.
      dtype: name of the tokens' dtype.
      shards: the shards, in the order of the rows.
      origins: (index of its file, number of the file's records before it) of each unit from which
        the folder was packed; () in format 1, whose rows name files instead of units.
    """

    directory: pathlib.Path
    dtype: str
    shards: tuple[Shard, ...]
    origins: tuple[tuple[int, int], ...] = ()


class RowReader:
    """Gives random access to the rows of one split. Several threads may use a reader at once.

    A shard is opened when a row of it is read. All readers together keep at most `_MOST_OPEN`
    shards open: those that were read last.

    Raises:
      UserError: a shard is missing, or has the wrong size. When a row is read: its shard is
        damaged, or the system lets this process open no more files.
    """

    def __init__(self, folders: Sequence[RowFolder], row_length: int):
        self._folders = list(folders)
        self._row_length = row_length
        counts = [len(folder.shards) for folder in folders]
        self._first_shard = np.cumsum([0, *counts])  # [folders + 1]
        rows = [shard.rows for folder in folders for shard in folder.shards]
        self._ends = np.cumsum(rows, dtype=np.int64)  # [shards]
        for folder in folders:
            if isinstance(folder.directory, BucketPath):
                _check_sizes_in_bucket(folder)
                continue
            for shard in folder.shards:
                _check_size(folder.directory / shard.file, shard)
        raise_file_limit()
        self._number = next(_reader_numbers)
        weakref.finalize(self, _close_shards, self._number)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> PackedRow:
        number = int(np.searchsorted(self._ends, index, "right"))
        position = int(index - (self._ends[number - 1] if number else 0))
        at = int(np.searchsorted(self._first_shard, number, "right")) - 1
        folder = self._folders[at]
        shard = folder.shards[number - int(self._first_shard[at])]
        path = folder.directory / shard.file
        reader = _opened((self._number, number), lambda: _open_shard(path, shard))
        try:
            (record,) = reader.read([position])
        except StoreError as error:
            raise UserError(
                f"shard {path}: row {position} cannot be read: {error_message(error)}",
                error.exit_code,
            ) from error
        except (RuntimeError, IndexError, ValueError) as error:
            raise _damaged(
                path, f"row {position} cannot be read: {error_message(error)}"
            ) from error
        return self._decode(record, folder, path, position)

    def _decode(
        self, record: bytes, folder: RowFolder, path: pathlib.Path, position: int
    ) -> PackedRow:
        pieces = int(np.frombuffer(record, _INTEGER, 1)[0])
        lengths, files, numbers = (
            np.frombuffer(record, _INTEGER, 3 * pieces, offset=4)
            .reshape(3, pieces)
            .astype(np.int64)
        )
        dtype = np.dtype(folder.dtype).newbyteorder("<")
        stored = np.frombuffer(record, dtype, offset=4 + 12 * pieces)
        if len(stored) != lengths.sum() or len(stored) > self._row_length:
            raise _damaged(
                path, f"row {position} holds {len(stored)} tokens instead of {lengths.sum()}"
            )
        tokens_T = np.zeros(self._row_length, np.int32)
        segment_ids_T = np.zeros(self._row_length, np.int32)
        tokens_T[: len(stored)] = stored
        segment_ids_T[: len(stored)] = np.repeat(np.arange(1, pieces + 1, dtype=np.int32), lengths)
        origins = list(zip(files.tolist(), numbers.tolist(), strict=True))
        if folder.origins:
            origins = [
                (folder.origins[unit][0], folder.origins[unit][1] + record)
                for unit, record in origins
            ]
        return PackedRow(tokens_T, segment_ids_T, origins)


# (number of the reader, index of the shard) → the open shard; the shard read last is the last entry
_open: collections.OrderedDict[tuple[int, int], Any] = collections.OrderedDict()
_open_lock = (
    threading.RLock()
)  # reentrant: a reader may be collected, and close its shards, at any time
_reader_numbers = itertools.count()


def _opened(key: tuple[int, int], open_it: Callable[[], Any]) -> Any:
    """Returns the open shard `key`. Opens it if necessary, and then drops the shards that were read
    longest ago. A dropped shard closes when the last thread that reads it has finished.
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


def _close_shards(reader: int) -> None:
    with _open_lock:
        for key in list(_open):
            if key[0] == reader:
                del _open[key]


@functools.cache
def raise_file_limit() -> None:
    """Lets this process open as many files as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _array_record() -> Any:
    """Returns the ArrayRecord library. It is imported late, because a machine that only loads a
    model may not have it.
    """
    from array_record.python import array_record_module

    return array_record_module


def _check_size(path: pathlib.Path, shard: Shard) -> None:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    if size != shard.size:
        raise _damaged(path, f"it has {size} bytes instead of {shard.size}")


def _check_sizes_in_bucket(folder: RowFolder) -> None:
    """Checks the sizes of all shards of a folder by one listing."""
    sizes = {path.name: entry.size for path, entry in folder.directory.entries().items()}
    for shard in folder.shards:
        path = folder.directory / shard.file
        if shard.file not in sizes:
            raise _damaged(path, "it is missing")
        if sizes[shard.file] != shard.size:
            raise _damaged(path, f"it has {sizes[shard.file]} bytes instead of {shard.size}")


def _open_shard(path: pathlib.Path | BucketPath, shard: Shard) -> Any:
    if isinstance(path, BucketPath):
        try:
            reader = RemoteShard(path, shard.size, open_array_record)
        except ValueError as error:
            raise _damaged(path, str(error)) from error
        if reader.num_records() != shard.rows:
            raise _damaged(path, f"it has {reader.num_records()} rows instead of {shard.rows}")
        return reader
    _check_size(path, shard)
    reader = open_array_record(path)
    rows = reader.num_records()
    if rows != shard.rows:
        # ArrayRecord finds no rows in a file that it could not open.
        try:
            path.open("rb").close()
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise UserError(
                f"shard {path} cannot be opened ({error_message(error)}); this process may open "
                f"{limit} files: raise the limit with ulimit -n"
            ) from error
        raise _damaged(path, f"it has {rows} readable rows instead of {shard.rows}")
    return reader


def open_array_record(path: pathlib.Path) -> Any:
    """Opens a local ArrayRecord file for random access."""
    return _array_record().ArrayRecordReader(
        str(path), "readahead_buffer_size:0,max_parallelism:0", file_reader_buffer_size=1 << 15
    )


def _damaged(path: pathlib.Path, what: str) -> UserError:
    return UserError(
        f"shard {path} is damaged ({what}): delete {path.parent} to have it prepared again"
    )
