"""Reads documents from files of text, JSON, Parquet and Arrow.

`file_parts` cuts a file into parts; `tokenized_parts` tokenizes each part by itself. `read_records`
streams the records of a part. A record is a line of JSON, a row of Parquet, or a whole file of
text; it holds a document or a conversation.

For a fault in a file, such as bytes that are not UTF-8 or JSON without the field, the reader raises
a `UserError` that names the file and the place of the fault, unless the settings say to leave out
or mend faulty records.
"""

import codecs
import collections
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet
from etils import epath

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, as_user_error, error_message, warn
from qwen3next_jax.data import fields, token_files
from qwen3next_jax.data.sources import MessagesFormat, Source, SourceFile, content_digest, is_remote
from qwen3next_jax.data.text import LONG, Text, is_blank, is_long_text, text_of_long_json

# Larger files are tokenized in several parts. Several workers can then tokenize one file, and when
# a preparation is killed, only the parts that are being tokenized are lost.
_PART_BYTES = 1 << 27


class Part(NamedTuple):
    """A part of a file: the bytes `start` … `stop` - 1 of a file of JSON lines, or the row groups
    `start` … `stop` - 1 of a Parquet file. A file that is not cut is the part (0, its size in
    bytes).
    """

    start: int
    stop: int


class Record(NamedTuple):
    """A record of a part."""

    # which line (of JSON lines), element (of a JSON array) or row of the part this is, from 0; 0 in
    # a file of text
    index_in_part: int
    # always encodable as UTF-8; None if the line is blank or the record is left out; the messages
    # of a conversation as JSON
    text: Text | None
    bytes_read: int  # number of bytes of the part read so far


@dataclasses.dataclass(frozen=True)
class Document:
    text: str  # never blank, always encodable as UTF-8
    file_index: int  # index in `Source.files`
    index_in_file: int  # as `Record.index_in_part`, but counted in the whole file


def read_documents(source: Source) -> Iterator[Document]:
    """Yields the documents of `source` that are not blank, in the order of its files. If there are
    bad records, a warning says how many.

    Raises:
      UserError: a file or record cannot be read, or the whole source holds no text.
    """
    any_text = False
    counts: collections.Counter[str] = collections.Counter()
    first: list[str] = []
    for index, file in enumerate(source.files):
        before = 0  # records of the parts before this one
        for part in file_parts(file):
            count = 0
            bad = BadRecords(source.on_bad_text, source.bad_records)
            for record in read_records(file, part, source.text_field, bad):
                count = record.index_in_part + 1
                if record.text is not None and not is_blank(record.text):
                    any_text = True
                    text = record.text if isinstance(record.text, str) else record.text.decode()
                    yield Document(text, index, before + record.index_in_part)
            counts += bad.counts
            first += [document_name(source, index, before + number) for number, _ in bad.first]
            before += count
    if counts:
        warn(f"{source.name}: {describe_bad_records(counts, first[:5])}")
    if not any_text:
        raise no_text_error(source, counts)


def describe_bad_records(counts: Mapping[str, int], first: Sequence[str] = ()) -> str:
    """Returns a phrase for messages: the number of all bad records, the number of each kind, and,
    if `first` is given, where the first bad records are.

    Args:
      counts: kind of fault → number of records with it.
      first: places of the first bad records.
    """
    what = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
    summary = f"{sum(counts.values()):,} bad records ({what})"
    if not first:
        return summary
    places = [*first, "…"] if sum(counts.values()) > len(first) else first
    return f"{summary}: {', '.join(places)}"


def no_text_error(source: Source, bad: Mapping[str, int]) -> UserError:
    """Returns the error for a source without text. `bad`: kind of fault → number of bad records."""
    which = (
        f"{source.files[0].path} is"
        if len(source.files) == 1
        else f"all {len(source.files)} files of {source.name!r} are"
    )
    but = f" but for {describe_bad_records(bad)}" if bad else ""
    return UserError(f"{which} empty or blank{but}: expected text")


def file_parts(file: SourceFile) -> list[Part]:
    """Returns the parts of a file in order. If lines are appended to a file of JSON lines, all
    parts of the file except its last part stay the same.
    """
    name = file.path.name.lower()
    if file.size <= _PART_BYTES:
        return [Part(0, file.size)]
    with _read_errors_as_user_errors(file.path):
        if name.endswith((".jsonl", ".ndjson")):
            return _parts_at_line_ends(file)
        if name.endswith(".parquet"):
            return _parts_of_row_groups(file)
    return [Part(0, file.size)]


def _parts_at_line_ends(file: SourceFile) -> list[Part]:
    edges = [0]
    with file.path.open("rb") as stream:
        for nominal in range(_PART_BYTES, file.size, _PART_BYTES):
            stream.seek(nominal - 1)
            stream.readline()  # goes to the end of the line that contains the byte before `nominal`
            if edges[-1] < stream.tell() < file.size:
                edges.append(stream.tell())
    return [Part(*edge) for edge in zip(edges, [*edges[1:], file.size], strict=True)]


def _parts_of_row_groups(file: SourceFile) -> list[Part]:
    with file.path.open("rb") as stream, _parquet_errors_as_user_errors(file.path):
        metadata = pyarrow.parquet.ParquetFile(stream).metadata
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    edges, size = [0], 0
    for group, group_size in enumerate(sizes):
        if size and size + group_size > _PART_BYTES:
            edges.append(group)
            size = 0
        size += group_size
    return [Part(*edge) for edge in zip(edges, [*edges[1:], len(sizes)], strict=True)]


def file_format(file: SourceFile) -> str:
    """Returns the format of a file by the ending of its name, such as "jsonl.gz", "parquet" or
    "megatron"; "text" for any other ending.
    """
    name = file.path.name.lower()
    tokens = token_files.token_format(name)
    return tokens or next((kind for kind in _READERS if name.endswith(f".{kind}")), "text")


def covers_whole_file(file: SourceFile, part: Part) -> bool:
    return part == (0, file.size)


def part_digest(file: SourceFile, part: Part, text_field: str) -> str:
    """Returns a digest of a part's content.

    For a whole file, the digest is the SHA-256 of its bytes; for a part of a file of JSON lines,
    the SHA-256 of the part's bytes; for a part of a Parquet file, a digest of the column
    `text_field` alone. The digest of a file of tokens also covers its companion files
    (`token_files.companion_files`). For a remote object, the digest is computed from its size and
    checksum, without a download.

    Raises:
      UserError: the file cannot be read.
    """
    if covers_whole_file(file, part) or is_remote(os.fspath(file.path)):
        whole = content_digest(file)
        for other in token_files.companion_files(pathlib.Path(file.path)):
            whole = digests.sha256(f"{whole} {digests.sha256_file(other)}")
        return whole if covers_whole_file(file, part) else digests.sha256(f"{whole} {list(part)}")
    with as_user_error(f"{file.path}: cannot be read", OSError):
        if file_format(file) != "parquet":
            return digests.sha256_file(file.path, part.start, part.stop - part.start)
        chunks = []
        with file.path.open("rb") as stream, _parquet_errors_as_user_errors(file.path):
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


def read_records(
    file: SourceFile, part: Part, text_field: str, bad: "BadRecords"
) -> Iterator[Record]:
    """Yields the records of a part, including empty records. The object `bad` decides what happens
    to bad records, and counts the bad records.

    Raises:
      UserError: the file or a record cannot be read.
    """
    read = _READERS.get(file_format(file), _read_text_file)
    with _read_errors_as_user_errors(file.path):
        yield from read(file, part, text_field, bad)


def read_conversations(
    file: SourceFile, part: Part, form: MessagesFormat, bad: "BadRecords"
) -> Iterator[Record]:
    """Yields the records of a part of a JSON file. The text of a record is its messages as JSON. A
    record whose messages are no conversation is a bad record.

    Raises:
      UserError: the file is no JSON file, or the file or a record cannot be read.
    """
    read = _READERS.get(file_format(file))
    if read not in (_read_json_file, _read_json_lines):
        raise UserError(
            f"{file.path}: data.messages_field = {form.messages_field!r} reads conversations from "
            ".jsonl and .json files: expected such a file"
        )
    with _read_errors_as_user_errors(file.path):
        yield from read(file, part, form.messages_field, bad, form)


@contextlib.contextmanager
def _read_errors_as_user_errors(path: epath.Path) -> Iterator[None]:
    """Turns an OSError inside the `with` block into a UserError. For a remote path, every error
    becomes a UserError, because the library of each object store raises other kinds of errors.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not is_remote(os.fspath(path)):
            raise
        raise UserError(f"{path}: cannot be read ({error_message(error)})") from error


def _parquet_errors_as_user_errors(path: epath.Path) -> contextlib.AbstractContextManager:
    return as_user_error(f"{path}: not a readable Parquet file", *_ARROW_ERRORS)


# Of a damaged file. pyarrow raises UnicodeDecodeError for a name that is not UTF-8.
_ARROW_ERRORS = (pyarrow.ArrowException, MemoryError, UnicodeDecodeError)


def document_name(source: Source, file: int, record: int) -> str:
    """Returns the name of a document in messages: its file and its line or row, from 1, such as
    "dir/part.jsonl:17"; for a file of text, the file alone, such as "dir/book.txt".

    Args:
      source: the source of the document.
      file: index of the file in the source.
      record: number of the record in the file, from 0.
    """
    label = source.files[file].relative_path
    return f"{label}:{record + 1}" if file_format(source.files[file]) != "text" else label


# ---- one reader for each kind of file


class BadRecords:
    """Decides what happens to the bad records of a part, by `data.bad_records` and
    `data.on_bad_text`, and counts the bad records.

    Attributes:
      counts: kind of fault, such as "not UTF-8: left out" → number of records with it.
      first: (number of the record, kind of fault) of the first five bad records.
    """

    def __init__(self, on_bad_text: str, bad_records: str):
        self._on_bad_text, self._bad_records = on_bad_text, bad_records
        self.counts: collections.Counter[str] = collections.Counter()
        self.first: list[tuple[int, str]] = []

    def leave_out(self, number: int, where: object, kind: str, what: str) -> None:
        """Counts a bad record, which is left out of the data.

        Args:
          number: number of the record in the part.
          where: place of the record, for the message.
          kind: short name of the fault.
          what: what is wrong, for the message.

        Raises:
          UserError: `data.bad_records` is "stop".
        """
        if self._bad_records == "stop":
            raise UserError(f"{where}: {what}; data.bad_records = skip leaves such records out")
        self._count(number, f"{kind}: left out")

    def mended_text(
        self, number: int, where: object, data: bytes, encoding: str, what: str
    ) -> str | None:
        """Returns the mended text of a record whose text is not valid; None if the record is left
        out.

        Args:
          number: number of the record in the part.
          where: place of the record, for the message.
          data: the text's bytes, some of which are not valid in `encoding`.
          encoding: the encoding of `data`.
          what: what is wrong, for the message.

        Raises:
          UserError: neither `data.on_bad_text` nor `data.bad_records` allows a record with invalid
            text.
        """
        if self._on_bad_text == "replace":
            self._count(number, "not UTF-8: bytes replaced by U+FFFD")
            return data.decode(encoding, "replace")
        if "skip" not in (self._on_bad_text, self._bad_records):
            raise UserError(
                f"{where}: {what}; data.on_bad_text = skip leaves such documents out, replace "
                "puts U+FFFD there"
            )
        self._count(number, "not UTF-8: left out")
        return None

    def _count(self, number: int, kind: str) -> None:
        self.counts[kind] += 1
        if len(self.first) < 5:
            self.first.append((number, kind))


@dataclasses.dataclass(frozen=True)
class RecordPlace:
    """The place of a record. `str(place)` describes the place for messages. It reads the
    file to find the number of the record, so it is called only for bad records.
    """

    file: SourceFile
    part: Part
    index_in_part: int
    field: str = ""

    def __str__(self) -> str:
        if file_format(self.file) == "text":
            return str(self.file.path)
        number = _records_before_part(self.file, self.part) + self.index_in_part + 1
        if file_format(self.file) in ("parquet", "arrow"):
            return f"{self.file.path}: row {number} of column {self.field!r}"
        where = f"{self.file.path}:{number}"
        return f"{where}: field {self.field!r}" if self.field else where


def _records_before_part(file: SourceFile, part: Part) -> int:
    """Returns the number of lines or rows of the file before the part."""
    with file.path.open("rb") as stream:
        if file_format(file) == "parquet":
            metadata = pyarrow.parquet.ParquetFile(stream).metadata
            return sum(metadata.row_group(i).num_rows for i in range(part.start))
        if not part.start:
            return 0
        count = 0
        while stream.tell() < part.start:
            count += stream.read(min(1 << 20, part.start - stream.tell())).count(b"\n")
        return count


def _decode_or_mend(data: bytes, bad: BadRecords, where: RecordPlace, start: int = 0) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = (
            f"not UTF-8 text at byte offset {start + error.start} (0x{data[error.start]:02x}); "
            f"files that end in {', '.join(f'.{kind}' for kind in _READERS)} are read as such, "
            "every other file as UTF-8 text"
        )
        return bad.mended_text(where.index_in_part, where, data, "utf-8", what)


def _valid_or_mended_text(text: object, bad: BadRecords, where: RecordPlace) -> str | None:
    """Returns `text`, mended if necessary; None if the record is left out."""
    if not isinstance(text, str):
        if isinstance(text, dict):
            what = fields.describe_object_fault(text, where.field)
        else:
            kind_of = "null" if text is None else f"of type {type(text).__name__}"
            what = f"is {kind_of}: expected a string"
        bad.leave_out(where.index_in_part, where, "no text", what)
        return None
    if "\0" in text:
        what = f"character {text.index(chr(0))} is NUL, which is no text"
        bad.leave_out(where.index_in_part, where, "NUL", what)
        return None
    if not text.isascii() and (half := _HALF_PAIR.search(text)):
        what = f"half a surrogate pair at character {half.start()}"
        data = text.encode("utf-16-le", "surrogatepass")
        return bad.mended_text(where.index_in_part, where, data, "utf-16-le", what)
    return text


_HALF_PAIR = re.compile("[\ud800-\udfff]")  # the JSON reader makes one character of a whole pair


def _read_text_file(
    file: SourceFile, part: Part, text_field: str, bad: BadRecords
) -> Iterator[Record]:
    del text_field
    where = RecordPlace(file, part, 0)
    data = file.path.read_bytes()
    if is_long_text(data):
        yield Record(0, data.removeprefix(codecs.BOM_UTF8), file.size)
        return
    if data.startswith(_LFS_POINTER) and len(data) < _LONGEST_LFS_POINTER:
        what = "it is a pointer of Git LFS instead of a text: git lfs pull gets the text"
        bad.leave_out(0, where, "Git LFS pointer", what)
        yield Record(0, None, file.size)
        return
    text = _decode_or_mend(data, bad, where)
    if text is not None:
        text = _valid_or_mended_text(text.removeprefix("\ufeff"), bad, where)
    yield Record(0, text, file.size)


# How the file begins that stands in a Git repository in place of a file of Git LFS, and the number
# of bytes below which such a file stays, as Git LFS specifies.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:"
_LONGEST_LFS_POINTER = 1024


def _read_json_lines(
    file: SourceFile,
    part: Part,
    field: str,
    bad: BadRecords,
    form: MessagesFormat | None = None,
) -> Iterator[Record]:
    """Yields the records of JSON lines. The text of a record is the text in `field` or, if `form`
    is given, the messages in `field`.
    """
    with file.path.open("rb") as raw:
        raw.seek(part.start)
        stream, is_compressed = _decompressed_stream(raw, file)
        offset = part.start
        number = -1
        try:
            # `enumerate` would keep the line in memory until the next one.
            for line in stream:
                number += 1
                if not is_compressed and offset >= part.stop:
                    return
                where = RecordPlace(file, part, number)
                text = _text_of_json_line(line, field, bad, where, offset, form)
                offset += len(line)
                del line  # frees memory: a line may be large
                position = raw.tell() if is_compressed else offset
                yield Record(number, text, min(position, part.stop) - part.start)
        except _DECOMPRESSION_ERRORS as error:
            if not is_compressed:
                raise
            what = f"damaged {_compression_of(file)} file ({error_message(error)})"
            bad.leave_out(
                number + 1, RecordPlace(file, part, number + 1), "damaged compression", what
            )


def _text_of_json_line(
    line: bytes,
    field: str,
    bad: BadRecords,
    where: RecordPlace,
    offset: int,
    form: MessagesFormat | None,
) -> Text | None:
    if len(line) >= LONG and not form:
        long_text = text_of_long_json(line, field)
        if long_text is not None:
            return long_text
    text = _decode_or_mend(line, bad, where, offset)
    if text is None:
        return None
    return _text_of_json_record(text.removeprefix("\ufeff"), field, bad, where, form)


_DECOMPRESSION_ERRORS = (EOFError, OSError, zlib.error)  # gzip and pyarrow raise OSError


def _decompressed_stream(raw: Any, file: SourceFile) -> tuple[Any, bool]:
    """Returns (stream of uncompressed lines, whether `raw` is compressed)."""
    ending = _compression_of(file)
    if ending == "gzip":
        return gzip.open(raw), True
    if ending == "zstd":
        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), 1 << 20), True
    return raw, False


def lacks_zstd_checksum(file: SourceFile) -> bool:
    """Whether a local file is a zstd frame that has no checksum (RFC 8878, 3.1.1). Without a
    checksum, damage in the file may cause no error.
    """
    if _compression_of(file) != "zstd" or is_remote(os.fspath(file.path)):
        return False
    with _read_errors_as_user_errors(file.path), file.path.open("rb") as stream:
        start = stream.read(5)
    return len(start) == 5 and start[:4] == b"\x28\xb5\x2f\xfd" and not start[4] & 4


def looks_like_json_lines(file: SourceFile, text_field: str) -> bool:
    """Whether a local file, which by its name is one text, begins with a line of JSON that has the
    field `text_field`.
    """
    if file_format(file) != "text" or is_remote(os.fspath(file.path)):
        return False
    with _read_errors_as_user_errors(file.path), file.path.open("rb") as stream:
        line = stream.readline(LONG)
    try:
        found = fields.find_field(json_files.parse(line.removeprefix(codecs.BOM_UTF8)), text_field)
    except ValueError:
        return False
    return isinstance(found.value, str)


def _compression_of(file: SourceFile) -> str:
    name = file.path.name.lower()
    if name.endswith(".gz"):
        return "gzip"
    return "zstd" if name.endswith(".zst") else ""


def _read_json_file(
    file: SourceFile,
    part: Part,
    field: str,
    bad: BadRecords,
    form: MessagesFormat | None = None,
) -> Iterator[Record]:
    """Yields the records of a .json file, which holds either JSON lines or one array of records.
    The arguments are those of `_read_json_lines`.
    """
    with file.path.open("rb") as raw:
        stream, is_compressed = _decompressed_stream(raw, file)
        try:
            first = stream.read(1 << 12)
            if first.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
                yield from _read_json_array(file, part, first + stream.read(), field, bad, form)
                return
        except _DECOMPRESSION_ERRORS as error:
            if not is_compressed:
                raise
            what = f"damaged {_compression_of(file)} file ({error_message(error)})"
            bad.leave_out(0, RecordPlace(file, part, 0), "damaged compression", what)
            return
    yield from _read_json_lines(file, part, field, bad, form)


def _read_json_array(
    file: SourceFile,
    part: Part,
    data: bytes,
    field: str,
    bad: BadRecords,
    form: MessagesFormat | None,
) -> Iterator[Record]:
    where = RecordPlace(file, part, 0)
    content = _decode_or_mend(data, bad, where)
    del data
    if content is None:
        return
    decode = json.JSONDecoder().raw_decode
    number, position = 0, content.index("[") + 1
    while (found := _NEXT_ELEMENT.match(content, position)) and found[1] != "]":
        where = RecordPlace(file, part, number)
        try:
            _, end = decode(content, found.start(1))
        except (ValueError, RecursionError) as error:
            what = f"not JSON from element {number + 1} of the array on ({error})"
            bad.leave_out(number, where, "broken JSON", what)
            return
        text = _text_of_json_record(content[found.start(1) : end], field, bad, where, form)
        number, position = number + 1, end
        yield Record(number - 1, text, file.size * end // len(content))
    if not found:
        what = f"not JSON: the array breaks off after element {number}"
        bad.leave_out(number, RecordPlace(file, part, number), "broken JSON", what)
    elif content[found.end() :].strip():
        what = (
            f"not JSON: the array ends after element {number}, and more follows: expected one "
            "array in a file"
        )
        bad.leave_out(number, RecordPlace(file, part, number), "broken JSON", what)


_NEXT_ELEMENT = re.compile(r"\s*(?:,\s*)?([^\s,])")


_ONE_RECORD_A_LINE = "expected JSON lines, with one record a line, or an array of records"


def _text_of_json_record(
    line: str, field: str, bad: BadRecords, where: RecordPlace, form: MessagesFormat | None
) -> str | None:
    if not line.strip():
        return None
    try:
        record = json_files.parse(line)
    except ValueError as error:
        cause = error.__cause__
        breaks_off = isinstance(cause, json.JSONDecodeError) and cause.pos >= len(line.rstrip())
        hint = ": the record breaks off at the end of the line: " + _ONE_RECORD_A_LINE
        bad.leave_out(
            where.index_in_part, where, "broken JSON", f"{error}{hint if breaks_off else ''}"
        )
        return None
    found = fields.find_field(record, field)
    if found.fault:
        setting = "messages_field" if form else "text_field"
        what = f"{found.fault}; name the right one with data.{setting}"
        bad.leave_out(where.index_in_part, where, "no such field", what)
        return None
    value, where = found.value, dataclasses.replace(where, field=field)
    if form:
        if fault := form.record_fault(value, found.objects_on_path):
            bad.leave_out(where.index_in_part, where, "no conversation", fault)
            return None
        value = json.dumps(value, ensure_ascii=False)
    return _valid_or_mended_text(value, bad, where)


def _read_parquet(
    file: SourceFile, part: Part, text_field: str, bad: BadRecords
) -> Iterator[Record]:
    with file.path.open("rb") as stream, _parquet_errors_as_user_errors(file.path):
        table = pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
        _check_text_column(file, table.schema_arrow, text_field)
        rows = [
            table.metadata.row_group(group).num_rows
            for group in range(table.metadata.num_row_groups)
        ]
        groups = range(len(rows)) if covers_whole_file(file, part) else range(part.start, part.stop)
        count = max(sum(rows[group] for group in groups), 1)
        size = file.size * count // max(sum(rows), 1)
        number = 0
        # One row group at a time: pyarrow cannot join dictionaries of several inside a struct.
        for batch in itertools.chain.from_iterable(
            table.iter_batches(batch_size=256, row_groups=[group], columns=[text_field])
            for group in groups
        ):
            for text in _column_texts(
                file, part, number, fields.column_at(batch, text_field), text_field, bad
            ):
                number += 1
                yield Record(number - 1, text, size * number // count)


def _read_arrow(file: SourceFile, part: Part, text_field: str, bad: BadRecords) -> Iterator[Record]:
    """Reads a file in Arrow's IPC format: in the stream format, which the library `datasets`
    writes, or in the file format, which has a footer.
    """
    with (
        file.path.open("rb") as stream,
        as_user_error(f"{file.path}: not a readable Arrow file", *_ARROW_ERRORS, OSError),
    ):
        number = 0
        for batch in _arrow_batches(file, stream, text_field):
            if batch is None:
                what = "no end marker after it: the file was cut short, or is still being written"
                bad.leave_out(
                    number, RecordPlace(file, part, number, text_field), "cut short", what
                )
                return
            for text in _column_texts(
                file, part, number, fields.column_at(batch, text_field), text_field, bad
            ):
                number += 1
                yield Record(number - 1, text, min(stream.tell(), file.size))


def _arrow_batches(
    file: SourceFile, stream: Any, text_field: str
) -> Iterator[pyarrow.RecordBatch | None]:
    """Yields the batches of a file in Arrow's IPC format. A file in Arrow's stream format may hold
    several streams one after the other. If a stream has no end marker, the function yields None
    after the stream's last batch, and ends.
    """
    has_footer = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if has_footer:
        table = pyarrow.ipc.open_file(stream)
        _check_text_column(file, table.schema, text_field)
        yield from (table.get_batch(i) for i in range(table.num_record_batches))
        return
    end = 0
    while not end or end < file.size:
        reader = pyarrow.ipc.open_stream(stream)
        _check_text_column(file, reader.schema, text_field)
        last = stream.tell()
        for batch in reader:
            last = stream.tell()
            yield batch
        # pyarrow takes the end of the file for the end of the stream, too.
        end = stream.tell()
        stream.seek(last)
        if stream.read(end - last) not in _ARROW_ENDS:
            yield None
            return


# The end marker of a stream, and that of Arrow before version 0.15.
_ARROW_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")


def _column_texts(
    file: SourceFile,
    part: Part,
    number: int,
    column: pyarrow.Array,
    text_field: str,
    bad: BadRecords,
) -> Iterator[Text | None]:
    """Yields the texts of a column, and None for a record that is left out. The first row of the
    column is record `number` of the part.

    Raises:
      pyarrow.ArrowInvalid: the column is damaged.
    """
    _check_text_offsets(column)
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pyarrow.types.is_string_view(column.type):
        column = column.cast(pyarrow.large_string())
    for i, value in enumerate(column):
        where = RecordPlace(file, part, number + i, text_field)
        if not value.is_valid:
            yield _valid_or_mended_text(None, bad, where)
            continue
        data = value.as_buffer().to_pybytes()
        if is_long_text(data):
            yield data
            continue
        text = _decode_or_mend(data, bad, where)
        yield None if text is None else _valid_or_mended_text(text, bad, where)


def _check_text_offsets(column: pyarrow.Array) -> None:
    """Raises pyarrow.ArrowInvalid unless all texts of a column lie in the column's buffers. Without
    this check, pyarrow would read memory beyond the buffers. The texts are not decoded.
    """
    if pyarrow.types.is_dictionary(column.type):
        _check_text_offsets(column.dictionary)
        indices = column.indices
        indices.validate(full=True)
        inside = pyarrow.compute.and_(
            pyarrow.compute.greater_equal(indices, 0),
            pyarrow.compute.less(indices, len(column.dictionary)),
        )
        if pyarrow.compute.all(inside).as_py() is False:
            raise pyarrow.ArrowInvalid("an index beyond its dictionary")
        return
    binary = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }
    column.view(binary[column.type]).validate(full=True)


def _check_text_column(file: SourceFile, schema: pyarrow.Schema, text_field: str) -> None:
    type_, fault = fields.column_type(schema, text_field)
    if type_ is None:
        raise UserError(f"{file.path}: {fault}; name the right one with data.text_field")
    value = type_.value_type if pyarrow.types.is_dictionary(type_) else type_
    if value not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        raise UserError(f"{file.path}: column {text_field!r} is of type {type_}: expected string")


_Reader = Callable[[SourceFile, Part, str, BadRecords], Iterator[Record]]
# The ending of a file's name → its reader. A file with any other ending is one document of text.
_READERS: dict[str, _Reader] = {
    **{f"jsonl{packed}": _read_json_lines for packed in ("", ".gz", ".zst")},
    **{f"ndjson{packed}": _read_json_lines for packed in ("", ".gz", ".zst")},
    **{f"json{packed}": _read_json_file for packed in ("", ".gz", ".zst")},
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
