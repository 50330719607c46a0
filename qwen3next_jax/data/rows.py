"""The shard format: one ArrayRecord record per packed row. `preparation` writes the shards and
`pipeline` reads their rows in random order; every read verifies a checksum.

A record is a little-endian uint32 n, then n piece lengths, n source file indices and n record
numbers (uint32 each), then the tokens (uint16 or uint32, as the metadata says). Padding is not
stored. ArrayRecord keeps a hash of every chunk and verifies it when reading, so a damaged byte
is an error and never a different token.
"""

import bisect
import dataclasses
import itertools
import pathlib
from typing import Any, NamedTuple

import numpy as np

from qwen3next_jax.common.errors import UserError, error_message, as_user_error
from qwen3next_jax.data.packing import Row

_SHARD_BYTES = 1 << 28  # uncompressed
_INTEGER = np.dtype("<u4")


@dataclasses.dataclass(frozen=True)
class Shard:
    file: str  # name within the directory
    rows: int
    size: int  # bytes on disk


class PackedRow(NamedTuple):
    """One stored row of T tokens: pieces of documents one after the other, then padding (0)."""

    tokens: np.ndarray  # int32 [T]
    segment_ids: np.ndarray  # int32 [T]: 1, 2, … by piece, 0 where there is padding
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
        # opened as readers will open it, which shows that no row was lost
        _open_shard(self._path, shard).close()
        self._shards.append(shard)


class RowReader:
    """Random access to the rows of one split; safe to use from several threads.

    Raises:
      UserError: a shard is missing, of the wrong size, or (when a row of it is read) damaged.
    """

    def __init__(self, directory: pathlib.Path, shards: list[Shard], dtype: str, row_length: int):
        self._directory, self._shards = directory, shards
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._row_length = row_length
        self._ends = list(itertools.accumulate(shard.rows for shard in shards))
        self._readers = [_open_shard(directory / shard.file, shard) for shard in shards]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> PackedRow:
        shard = bisect.bisect_right(self._ends, index)
        position = index - (self._ends[shard - 1] if shard else 0)
        path = self._directory / self._shards[shard].file
        try:
            (record,) = self._readers[shard].read([position])
        except (RuntimeError, IndexError, ValueError) as error:
            raise _damaged(
                path, f"row {position} cannot be read: {error_message(error)}"
            ) from error
        return self._decode(record, path, position)

    def _decode(self, record: bytes, path: pathlib.Path, position: int) -> PackedRow:
        pieces = int(np.frombuffer(record, _INTEGER, 1)[0])
        lengths, files, numbers = (
            np.frombuffer(record, _INTEGER, 3 * pieces, offset=4)
            .reshape(3, pieces)
            .astype(np.int64)
        )
        stored = np.frombuffer(record, self._dtype, offset=4 + 12 * pieces)
        if len(stored) != lengths.sum() or len(stored) > self._row_length:
            raise _damaged(
                path, f"row {position} holds {len(stored)} tokens instead of {lengths.sum()}"
            )
        tokens_T = np.zeros(self._row_length, np.int32)
        segment_ids_T = np.zeros(self._row_length, np.int32)
        tokens_T[: len(stored)] = stored
        segment_ids_T[: len(stored)] = np.repeat(np.arange(1, pieces + 1, dtype=np.int32), lengths)
        return PackedRow(
            tokens_T, segment_ids_T, list(zip(files.tolist(), numbers.tolist(), strict=True))
        )


def _array_record() -> Any:
    """The ArrayRecord library. It is imported late, because a machine that only loads a model
    may not have it.
    """
    from array_record.python import array_record_module

    return array_record_module


def _open_shard(path: pathlib.Path, shard: Shard) -> Any:
    if not path.exists():
        raise _damaged(path, "it is missing")
    if path.stat().st_size != shard.size:
        raise _damaged(path, f"it has {path.stat().st_size} bytes instead of {shard.size}")
    reader = _array_record().ArrayRecordReader(
        str(path), "readahead_buffer_size:0,max_parallelism:0", file_reader_buffer_size=1 << 15
    )
    if reader.num_records() != shard.rows:
        raise _damaged(path, f"it has {reader.num_records()} readable rows instead of {shard.rows}")
    return reader


def _damaged(path: pathlib.Path, what: str) -> UserError:
    return UserError(
        f"shard {path} is damaged ({what}): delete {path.parent} to have it prepared again"
    )
