"""Reads single chunks of rows from a shard in a bucket, without downloading the whole shard.

ArrayRecord's own reader, which verifies the hash of every chunk, needs a local file. So each shard
gets a local sparse file of the shard's size, which takes no space on the disk. Before a chunk is
read, its bytes are downloaded and written at their position in the local file; after the chunk is
read, its bytes are freed again. The index at the end of the shard says where each chunk is.

An ArrayRecord file that `rows` writes is a Riegeli file with one record per chunk. Near the end, it
has an index: a chunk with the offsets of all chunks. (https://github.com/google/riegeli,
riegeli_format.md; https://github.com/google/array_record, array_record_writer.cc)

    blocks of 64 KiB, each of which begins with 24 bytes that are not part of any chunk
    chunk: header of 40 bytes (hash, size, hash, type and number of records, decoded size), data
    the last block: a chunk whose record holds the offset of the index
"""

import collections
import ctypes
import os
import pathlib
import struct
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from qwen3next_jax.common.storage import BucketPath

_BLOCK, _BLOCK_HEADER = 1 << 16, 24
_CHUNK_HEADER = struct.Struct("<QQQQQ")
_MAGIC = 0x71930E704FDAE05E  # of ArrayRecord's last chunk
_TAIL = 1 << 20  # bytes of a shard that are read first; they hold the index of some 100,000 chunks
_PAGE = 4096
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_CACHE_BYTES = 1 << 28  # of chunks in the memory of this process


class RemoteShard:
    """An open shard in a bucket. A RemoteShard has the methods of ArrayRecord's reader that `rows`
    calls.

    Attributes:
      head: the first bytes of the shard, at most `_PAGE`.

    Raises:
      ValueError: the shard has no index that can be read. StoreError: the bucket does not answer.
    """

    def __init__(self, path: BucketPath, size: int, open_reader: Callable[[pathlib.Path], Any]):
        """Reads the index.

        Args:
          path: the shard.
          size: the number of bytes of the shard.
          open_reader: opens a local ArrayRecord file.
        """
        self._path, self._lock = path, threading.Lock()
        start = max(size - _TAIL, 0)
        tail = path.read_bytes(start, size)
        index = _offset_of_index(tail, size)
        if index < start:
            start, tail = index, path.read_bytes(index, start) + tail
        self._places = _chunk_offsets(tail, start, index)
        folder = tempfile.TemporaryDirectory(prefix="qwen3next-shard-")
        try:
            local = pathlib.Path(folder.name) / "shard"
            with local.open("wb") as file:
                file.truncate(size)
            self._file = os.open(local, os.O_RDWR)
            self.head = path.read_bytes(0, min(_PAGE, size))
            os.pwrite(self._file, self.head, 0)
            os.pwrite(self._file, tail[index - start :], index)
            self._reader = open_reader(local)
            self._index = index
            self._chunks = self._reader.num_records()
        finally:
            folder.cleanup()  # the open file stays

    def __del__(self):
        if hasattr(self, "_file"):
            os.close(self._file)

    def num_records(self) -> int:
        return self._chunks

    def read(self, positions: list[int]) -> list[bytes]:
        """Returns the chunks at these positions.

        Raises:
          IndexError, RuntimeError: a chunk is damaged or does not exist.
          StoreError: the bucket does not answer.
        """
        return [self._read_chunk(position) for position in positions]

    def _read_chunk(self, position: int) -> bytes:
        if (chunk := _cache.get((self._path, position))) is not None:
            return chunk
        start, stop = self._places[position], self._places[position + 1]
        data = self._path.read_bytes(start, stop)
        with self._lock:
            os.pwrite(self._file, data, start)
            try:
                (chunk,) = self._reader.read([position])
            finally:
                self._free_pages(start, stop)
        _cache.put((self._path, position), chunk)
        return chunk

    def _free_pages(self, start: int, stop: int) -> None:
        """Frees the pages of the local file that hold the bytes `start` … `stop` - 1, except the
        pages of the file's header and index.
        """
        start, stop = start // _PAGE * _PAGE, -(-stop // _PAGE) * _PAGE
        stop = min(stop, self._index // _PAGE * _PAGE)
        if start < _PAGE:  # the file's own header is there
            start = _PAGE
        if start < stop:
            _libc.fallocate(
                self._file,
                _PUNCH_HOLE,
                ctypes.c_int64(start),
                ctypes.c_int64(stop - start),
            )


_libc = ctypes.CDLL(None)


class _ChunkCache:
    """A cache of the chunks that this process read last, from all of its shards. The cache mainly
    serves evaluations, because every evaluation reads the same held-out rows.
    """

    def __init__(self, size: int):
        self._size, self._used = size, 0
        self._kept: collections.OrderedDict[tuple, bytes] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple) -> bytes | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: tuple, chunk: bytes) -> None:
        with self._lock:
            if key not in self._kept:
                self._used += len(chunk)
                self._kept[key] = chunk
            while self._used > self._size:
                self._used -= len(self._kept.popitem(last=False)[1])


_cache = _ChunkCache(_CACHE_BYTES)


def _offset_of_index(tail: bytes, size: int) -> int:
    """Returns the offset of the index in a shard of `size` bytes, whose last bytes are `tail`."""
    if size % _BLOCK or size < 2 * _BLOCK:
        raise ValueError(f"{size} bytes are no ArrayRecord file")
    records = _chunk_records(tail, size - len(tail), size - _BLOCK)
    fields = _protobuf_fields(records[0])
    if fields.get(2) != _MAGIC or not 0 < fields.get(1, 0) < size:
        raise ValueError("it does not end as an ArrayRecord file")
    return fields[1]


def _chunk_offsets(tail: bytes, start: int, index: int) -> list[int]:
    """Returns the offset of each chunk in the shard, followed by the offset of the end of the last
    chunk.

    Args:
      tail: the bytes of the shard from `start` on.
      index: the offset of the index in the shard.
    """
    _, *chunks = _chunk_records(tail, start, index)  # the first record describes the file
    entries = [_protobuf_fields(chunk) for chunk in chunks]
    if any(entry.get(3, 0) != 1 for entry in entries):
        raise ValueError("it has chunks of several rows")
    return [entry.get(1, 0) for entry in entries] + [index]


def _chunk_records(tail: bytes, start: int, place: int) -> list[bytes]:
    """Returns the records of the chunk at the offset `place` of a shard. `tail` holds the shard's
    bytes from `start` on.
    """
    header, place = _without_block_headers(tail, start, place, _CHUNK_HEADER.size)
    _, size, _, kind, _ = _CHUNK_HEADER.unpack(header)
    if kind & 0xFF != ord("r") or size > len(tail):
        raise ValueError("it has no index where it should be")
    data, _ = _without_block_headers(tail, start, place, size)
    compression, length = data[:1], 0
    length, at = _read_varint(data, 1)
    sizes = _decompressed(compression, data[at : at + length])
    values = _decompressed(compression, data[at + length :])
    records, at, begin = [], 0, 0
    while at < len(sizes):
        count, at = _read_varint(sizes, at)
        records.append(values[begin : begin + count])
        begin += count
    return records


def _without_block_headers(tail: bytes, start: int, place: int, count: int) -> tuple[bytes, int]:
    """Returns (the first `count` bytes from `place` on that are not in headers of blocks, the place
    after the last of these bytes).
    """
    parts = []
    while count:
        if place % _BLOCK == 0:
            place += _BLOCK_HEADER
        here = min(count, _BLOCK - place % _BLOCK)
        part = tail[place - start : place - start + here]
        if place < start or len(part) != here:
            raise ValueError("it is cut short")
        parts.append(part)
        place, count = place + here, count - here
    return b"".join(parts), place


def _decompressed(compression: bytes, data: bytes) -> bytes:
    if compression == b"\0" or not data:
        return data
    if compression != b"z":
        raise ValueError("its index is compressed by another method than zstd")
    import pyarrow

    size, at = _read_varint(data, 0)
    return pyarrow.Codec("zstd").decompress(data[at:], size).to_pybytes()


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads a Protocol Buffers varint at `at`. Returns (its value, the position after it)."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("its index is damaged")
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def _protobuf_fields(message: bytes) -> dict[int, int]:
    """Decodes a Protocol Buffers message of integers. Returns number of a field → its value."""
    found, at = {}, 0
    while at < len(message):
        key, at = _read_varint(message, at)
        if key & 7:
            raise ValueError("its index is damaged")
        found[key >> 3], at = _read_varint(message, at)
    return found
