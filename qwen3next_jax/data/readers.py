"""Reads documents out of files: text, JSON lines and Parquet.

`parts` cuts a file into the parts that are tokenized as one unit each; `read_part` streams the
documents of a part. Every mistake that a file can hold (not UTF-8, JSON without the field, …) is
one `UserError` that names the file and the place in it.
"""

import contextlib
import dataclasses
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

import pyarrow
import pyarrow.parquet
from etils import epath

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, as_user_error, did_you_mean, error_message, warn
from qwen3next_jax.data.sources import Source, SourceFile, content_digest, is_remote

# Larger files are tokenized in several parts: as many can work at once, and a kill costs one.
_PART_BYTES = 1 << 27


class Part(NamedTuple):
    """A part of a file, from `start` up to `stop`: bytes of JSON lines, row groups of a Parquet
    file. Any other file is one part, (0, its size).
    """

    start: int
    stop: int


class Record(NamedTuple):
    """A record of a part."""

    number: int  # 0-based line (JSON lines) or row (Parquet) of the part; 0 for text files
    text: str  # always encodable as UTF-8; "" where the record is empty or left out
    position: int  # bytes of the part read so far


@dataclasses.dataclass(frozen=True)
class Document:
    text: str  # never empty, always encodable as UTF-8
    file: int  # index into Source.files
    record: int  # 0-based line (JSONL) or row (Parquet) of the file; 0 for text files


def documents(source: Source) -> Iterator[Document]:
    """Streams the documents of `source` in the order of its files, skipping empty ones. Unless
    `on_bad_text` is "stop", a warning counts and names the documents that are not UTF-8.

    Raises:
      UserError: an unreadable file or record, or no text in the whole source.
    """
    any_text = False
    bad = BadText(source.on_bad_text)
    for index, file in enumerate(source.files):
        before = 0  # records of the parts before this one
        for part in parts(file):
            count = 0
            for record in read_part(file, part, source.text_field, bad):
                count = record.number + 1
                if record.text:
                    any_text = True
                    yield Document(record.text, index, before + record.number)
            before += count
    if bad.count:
        warn(f"{source.name}: {bad.summary()}")
    if not any_text:
        raise no_text(source, bad)


def no_text(source: Source, bad: "BadText") -> UserError:
    """The error of a source in which nobody found text."""
    which = (
        f"{source.files[0].path} is"
        if len(source.files) == 1
        else f"all {len(source.files)} files of {source.name!r} are"
    )
    return UserError(
        f"{which} empty{' but for ' + bad.summary() if bad.count else ''}: expected text"
    )


def parts(file: SourceFile) -> list[Part]:
    """The parts of a file. Those of a file of JSON lines stay the same when lines are appended to
    it, but for the last one.
    """
    name = file.path.name.lower()
    if file.size <= _PART_BYTES:
        return [Part(0, file.size)]
    with _readable(file.path):
        if name.endswith(".jsonl"):
            return _parts_at_line_ends(file)
        if name.endswith(".parquet"):
            return _parts_of_row_groups(file)
    return [Part(0, file.size)]


def _parts_at_line_ends(file: SourceFile) -> list[Part]:
    edges = [0]
    with file.path.open("rb") as stream:
        for nominal in range(_PART_BYTES, file.size, _PART_BYTES):
            stream.seek(nominal - 1)
            stream.readline()  # to the end of the line that the last byte before it belongs to
            if edges[-1] < stream.tell() < file.size:
                edges.append(stream.tell())
    return [Part(*edge) for edge in zip(edges, [*edges[1:], file.size], strict=True)]


def _parts_of_row_groups(file: SourceFile) -> list[Part]:
    with file.path.open("rb") as stream, _parquet_errors(file.path):
        metadata = pyarrow.parquet.ParquetFile(stream).metadata
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    edges, size = [0], 0
    for group, group_size in enumerate(sizes):
        if size and size + group_size > _PART_BYTES:
            edges.append(group)
            size = 0
        size += group_size
    return [Part(*edge) for edge in zip(edges, [*edges[1:], len(sizes)], strict=True)]


def kind(file: SourceFile) -> str:
    """The name of the reader that reads a file, by its ending."""
    name = file.path.name.lower()
    return next((kind for kind in _READERS if name.endswith(f".{kind}")), "text")


def is_whole(file: SourceFile, part: Part) -> bool:
    return part == (0, file.size)


def part_digest(file: SourceFile, part: Part, text_field: str) -> str:
    """SHA-256 of the bytes of a part: of JSON lines the lines, of a Parquet file the chunks of the
    column with the text. A remote object is not downloaded: its size and checksum stand for it.
    """
    if is_whole(file, part) or is_remote(os.fspath(file.path)):
        whole = content_digest(file)
        return whole if is_whole(file, part) else digests.sha256(f"{whole} {list(part)}")
    with as_user_error(f"{file.path}: cannot be read", OSError):
        if kind(file) != "parquet":
            return digests.sha256_file(file.path, part.start, part.stop - part.start)
        chunks = []
        with file.path.open("rb") as stream, _parquet_errors(file.path):
            metadata = pyarrow.parquet.ParquetFile(stream).metadata
            for group in range(part.start, part.stop):
                columns = [
                    metadata.row_group(group).column(i)
                    for i in range(metadata.row_group(group).num_columns)
                ]
                chunks += [
                    (
                        min(filter(None, (c.dictionary_page_offset, c.data_page_offset))),
                        c.total_compressed_size,
                    )
                    for c in columns
                    if c.path_in_schema == text_field
                ]
        return digests.sha256_json(
            [digests.sha256_file(file.path, start, size) for start, size in chunks]
        )


def read_part(file: SourceFile, part: Part, text_field: str, bad: "BadText") -> Iterator[Record]:
    """Streams the records of a part, empty ones included.

    Raises:
      UserError: an unreadable file or record.
    """
    read = _READERS.get(kind(file), _read_text)
    with _readable(file.path):
        yield from read(file, part, text_field, bad)


@contextlib.contextmanager
def _readable(path: epath.Path) -> Iterator[None]:
    """Turns an OSError inside the `with` block into a UserError; for a remote path, any error,
    because every store's library has its own kinds.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not is_remote(os.fspath(path)):
            raise
        raise UserError(f"{path}: cannot be read ({error_message(error)})") from error


def _parquet_errors(path: epath.Path) -> contextlib.AbstractContextManager:
    return as_user_error(f"{path}: not a readable Parquet file", pyarrow.ArrowException)


def describe(source: Source, file: int, record: int) -> str:
    """Where a document is: "dir/part.jsonl:17" (line or row, from 1) or "dir/book.txt"."""
    label = source.files[file].label
    return f"{label}:{record + 1}" if kind(source.files[file]) != "text" else label


# ---- one reader for each kind of file


class BadText:
    """Applies `data.on_bad_text` to text that is not UTF-8, and counts the documents concerned."""

    def __init__(self, policy: str):
        self.policy = policy
        self.count = 0
        self.first: list[str] = []  # where the first five are

    def mend(self, data: bytes, encoding: str, where: object, what: str) -> str:
        """The text to use for `data` at `where`, which cannot be decoded; "" to leave the document
        out. `what` says what is wrong.

        Raises:
          UserError: the policy is to stop.
        """
        if self.policy == "stop":
            raise UserError(
                f"{where}: {what}; data.on_bad_text = skip leaves such documents out, replace "
                "puts U+FFFD there"
            )
        self.count += 1
        if self.count <= 5:
            self.first.append(str(where))
        return data.decode(encoding, "replace") if self.policy == "replace" else ""

    def summary(self) -> str:
        """How many documents were not UTF-8, what was done, and where the first five are."""
        done = "bytes replaced by U+FFFD in" if self.policy == "replace" else "left out"
        return (
            f"{done} {self.count} document{'s' * (self.count > 1)} that are not UTF-8: "
            f"{', '.join(self.first)}{', …' * (self.count > 5)}"
        )


def _decoded(data: bytes, bad: BadText, where: object, start: int = 0) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return bad.mend(
            data,
            "utf-8",
            where,
            f"not UTF-8 text at byte offset {start + error.start} (0x{data[error.start]:02x}); "
            ".jsonl, .jsonl.gz and .parquet are read as such, every other file as UTF-8 text",
        )


def _read_text(file: SourceFile, part: Part, text_field: str, bad: BadText) -> Iterator[Record]:
    del part, text_field
    text = _decoded(file.path.read_bytes(), bad, str(file.path)).removeprefix("\ufeff")
    yield Record(0, text, file.size)


def _read_jsonl(file: SourceFile, part: Part, text_field: str, bad: BadText) -> Iterator[Record]:
    with file.path.open("rb") as raw:
        stream: BinaryIO = gzip.open(raw) if file.path.name.lower().endswith(".gz") else raw
        raw.seek(part.start)
        offset = part.start
        with as_user_error(
            f"{file.path}: damaged gzip file", EOFError, gzip.BadGzipFile, zlib.error
        ):
            for number, line in enumerate(stream):
                if stream is raw and offset >= part.stop:
                    return
                where = _Line(file, part, number)
                text = _decoded(line, bad, where, offset).removeprefix("\ufeff")
                text = _json_text(text, text_field, bad, where) if text.strip() else ""
                offset += len(line)
                yield Record(number, text, min(offset, part.stop) - part.start)


@dataclasses.dataclass(frozen=True)
class _Line:
    """Writes itself as FILE:LINE. Lines before the part are counted when somebody asks."""

    file: SourceFile
    part: Part
    number: int

    def __str__(self) -> str:
        before = 0
        with self.file.path.open("rb") as stream:
            while stream.tell() < self.part.start:
                before += stream.read(min(1 << 20, self.part.start - stream.tell())).count(b"\n")
        return f"{self.file.path}:{before + self.number + 1}"


def _json_text(line: str, field: str, bad: BadText, where: object) -> str:
    try:
        record = json_files.parse(line)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    if field not in record:
        raise UserError(
            f"{where}: no field {field!r}{did_you_mean(field, record)}; it has "
            f"{', '.join(map(repr, record)) or 'none'}; name the right one with data.text_field"
        )
    return _checked_text(record[field], bad, f"{where}: field {field!r}")


def _checked_text(text: object, bad: BadText, where: object) -> str:
    if not isinstance(text, str):
        raise UserError(f"{where} is of type {type(text).__name__}: expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return bad.mend(
            text.encode("utf-16-le", "surrogatepass"),
            "utf-16-le",
            where,
            f"half a surrogate pair at character {error.start}",
        )
    return text


def _read_parquet(file: SourceFile, part: Part, text_field: str, bad: BadText) -> Iterator[Record]:
    with file.path.open("rb") as stream, _parquet_errors(file.path):
        table = pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
        schema = table.schema_arrow
        if schema.names.count(text_field) != 1:
            which, hint = (
                ("two columns", "")
                if text_field in schema.names
                else ("no column", did_you_mean(text_field, schema.names))
            )
            raise UserError(
                f"{file.path}: {which} {text_field!r}{hint}; it has "
                f"{', '.join(map(repr, schema.names))}; name the right one with data.text_field"
            )
        type_ = schema.field(text_field).type
        if not (pyarrow.types.is_string(type_) or pyarrow.types.is_large_string(type_)):
            raise UserError(
                f"{file.path}: column {text_field!r} is of type {type_}: expected string"
            )
        all_groups = range(table.metadata.num_row_groups)
        groups = all_groups if is_whole(file, part) else range(part.start, part.stop)
        rows = [table.metadata.row_group(group).num_rows for group in all_groups]
        first = sum(rows[: groups.start])
        size = file.size * sum(rows[group] for group in groups) // max(sum(rows), 1)
        number, count = 0, max(sum(rows[group] for group in groups), 1)
        for batch in table.iter_batches(
            batch_size=256, row_groups=list(groups), columns=[text_field]
        ):
            for value in batch.column(0):
                where = f"{file.path}: row {first + number + 1} of column {text_field!r}"
                data = value.as_buffer()
                text = None if data is None else _decoded(data.to_pybytes(), bad, where)
                number += 1
                yield Record(number - 1, _checked_text(text, bad, where), size * number // count)


_Reader = Callable[[SourceFile, Part, str, BadText], Iterator[Record]]
# The ending of a file's name → its reader. A file with any other ending is one document of text.
_READERS: dict[str, _Reader] = {
    "jsonl": _read_jsonl,
    "jsonl.gz": _read_jsonl,
    "parquet": _read_parquet,
}
