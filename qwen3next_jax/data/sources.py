"""Documents on disk: globs of text, JSONL and Parquet files, local or gs://, read as a stream.

A `Source` is one glob of `data.path` and the sorted files it matches. Every mistake that the
files can hold (nothing matches, not UTF-8, JSON without the field, …) becomes one `UserError`
that names the file and the place in it.
"""

import contextlib
import dataclasses
import functools
import glob as local_glob
import gzip
import os
import pathlib
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import pyarrow
import pyarrow.parquet
from etils import epath

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, did_you_mean, error_message, as_user_error, warn

STANDARD_LIBRARY = "Python standard library"
_STDLIB_SKIPPED_DIRECTORIES = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "_bundled",
}
# Written when Python is built or installed, so they differ between two builds of one version.
_STDLIB_BUILD_SPECIFIC = re.compile(
    r"_sysconfigdata.*|config-.*|sitecustomize\.py|usercustomize\.py"
)
_REMOTE_SCHEMES = ("gs", "s3", "az", "hf")
# Properties by which the object stores' listings tell one content from another, best first.
_REMOTE_VERSIONS = (
    "md5Hash",
    "crc32c",
    "ETag",
    "etag",
    "mtime",
    "updated",
    "LastModified",
    "last_modified",
    "created",
)
_WILDCARD = re.compile(r"[*?\[]")
# Where `data.path` is a folder without a pattern, files with these suffixes are read.
TEXT_SUFFIXES = (
    ".txt",
    ".md",
    ".jsonl",
    ".jsonl.gz",
    ".parquet",
    ".py",
    ".rst",
    ".tex",
    ".org",
    ".html",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".java",
    ".js",
    ".ts",
    ".go",
    ".rs",
    ".rb",
    ".sh",
    ".jl",
    ".hs",
    ".scala",
    ".kt",
    ".swift",
    ".lua",
    ".sql",
)


@dataclasses.dataclass(frozen=True)
class SourceFile:
    path: epath.Path
    # relative to the fixed part of the glob, "/"-separated: moving the whole tree does not change
    # it
    label: str
    # bytes on disk
    size: int
    # changes with the content: a local file's modification time, a remote object's checksum
    version: str


@dataclasses.dataclass(frozen=True)
class Source:
    """One glob of `data.path`, resolved."""

    name: str  # the glob as the user wrote it
    files: tuple[SourceFile, ...]  # sorted by label
    text_field: str
    on_bad_text: str = "stop"  # data.on_bad_text

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.size for file in self.files)


@dataclasses.dataclass(frozen=True)
class Document:
    text: str  # never empty, always encodable as UTF-8
    file: int  # index into Source.files
    record: int  # 0-based line (JSONL) or row (Parquet); 0 for text files
    bytes_read: int  # bytes on disk of the source read so far, for progress displays


def resolve(path: str, text_field: str, on_bad_text: str = "stop") -> Source:
    """Finds the files of one glob, or the text files of a folder; `""` is the Python standard
    library's own source.

    Raises:
      UserError: nothing matches, or gs:// support is not installed.
    """
    if not path:
        return Source(STANDARD_LIBRARY, _standard_library_files(), text_field, on_bad_text)
    files = sorted(
        _remote_files(path) if is_remote(path) else _local_files(path), key=lambda file: file.label
    )
    if not files:
        raise UserError(f"data.path {path!r} matches no file{_nearest_hint(path)}")
    return Source(path, tuple(files), text_field, on_bad_text)


def documents(source: Source) -> Iterator[Document]:
    """Streams the documents of `source` in the order of its files, skipping empty ones. Unless
    `on_bad_text` is "stop", a warning counts and names the documents that are not UTF-8.

    Raises:
      UserError: an unreadable file or record, or no text in the whole source.
    """
    done = 0  # bytes of the files before this one
    any_text = False
    bad = BadText(source.on_bad_text)
    for index, file in enumerate(source.files):
        read = _reader(file.path.name.lower())
        with _readable(file.path):
            for record, text, position in read(file, source.text_field, bad):
                if text:
                    any_text = True
                    yield Document(text, index, record, done + position)
        done += file.size
    if bad.count:
        warn(f"{source.name}: {bad.summary()}")
    if not any_text:
        which = (
            f"{source.files[0].path} is"
            if len(source.files) == 1
            else f"all {len(source.files)} files of {source.name!r} are"
        )
        raise UserError(
            f"{which} empty{' but for ' + bad.summary() if bad.count else ''}: expected text"
        )


def _reader(name: str) -> Callable:
    """The function that reads a file of this lower-case name."""
    if name.endswith(".parquet"):
        return _read_parquet
    if name.endswith((".jsonl", ".jsonl.gz")):
        return _read_jsonl
    return _read_text


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


def describe(source: Source, file: int, record: int) -> str:
    """Where a document is: "dir/part.jsonl:17" (line or row, from 1) or "dir/book.txt"."""
    label = source.files[file].label
    return (
        f"{label}:{record + 1}"
        if label.lower().endswith((".jsonl", ".jsonl.gz", ".parquet"))
        else label
    )


def content_digest(file: SourceFile) -> str:
    """SHA-256 of a local file's bytes. A remote object is not downloaded: the digest is taken of
    its size and checksum.
    """
    if is_remote(os.fspath(file.path)):
        return digests.sha256(f"{file.size} {file.version}")
    with as_user_error(f"{file.path}: cannot be read", OSError):
        return digests.sha256_file(file.path)


# ---- finding files


def is_remote(path: str) -> bool:
    return "://" in path


def _fixed_part(path: str) -> str:
    """The directory before the first wildcard."""
    wildcard = _WILDCARD.search(path)
    return (path[: wildcard.start()] if wildcard else path).rpartition("/")[0]


def _local_files(path: str) -> list[SourceFile]:
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        every = _files(_glob(os.path.join(local_glob.escape(expanded), "**", "*")), expanded)
        if not (files := [file for file in every if file.label.lower().endswith(TEXT_SUFFIXES)]):
            raise UserError(
                f"data.path {path!r}: a folder without text files: expected names that end in "
                f"{', '.join(TEXT_SUFFIXES[:6])}, …; a pattern takes any, such as "
                f"{path.rstrip('/')}/**/*.log"
            )
        return files
    # A file whose name contains glob characters is still found when it is named exactly.
    found = [expanded] if os.path.exists(expanded) else _glob(expanded)
    return _files(found, _fixed_part(expanded) or ("/" if expanded.startswith("/") else "."))


def _files(found: Iterable[str], root: str) -> list[SourceFile]:
    """The files among `found`. A file that links lead to as well is taken once, by its shortest
    name.
    """
    once: dict[str, str] = {}
    for name in sorted(found, key=lambda name: (name.count("/"), name)):
        once.setdefault(os.path.realpath(name), name)
    return [_local_file(name, root) for name in once.values() if os.path.isfile(name)]


def _glob(pattern: str) -> Iterator[str]:
    """As `glob.glob(pattern, recursive=True)`, except that `**` enters no folder twice, because
    links may form a cycle.
    """
    parts = pattern.split("/")
    if "**" not in parts:
        yield from local_glob.glob(pattern)
        return
    first = parts.index("**")
    head, tail = "/".join(parts[:first]), "/".join(parts[first + 1 :]) or "*"
    entered: set[str] = set()
    for root in local_glob.glob(head) if head else ["/" if pattern.startswith("/") else "."]:
        for folder, inner, _ in os.walk(root, followlinks=True):
            new = os.path.realpath(folder) not in entered
            entered.add(os.path.realpath(folder))
            inner[:] = sorted(name for name in inner if new and not name.startswith("."))
            if new:
                yield from _glob(os.path.join(local_glob.escape(folder), tail))


def _local_file(path: str, root: str) -> SourceFile:
    stat = os.stat(path)
    label = os.path.relpath(path, root).replace(os.sep, "/")
    return SourceFile(epath.Path(path), label, stat.st_size, str(stat.st_mtime_ns))


def _remote_files(path: str) -> list[SourceFile]:
    import fsspec  # comes with etils[epath]; epath's own glob refuses "**"

    scheme = path.split("://")[0]
    if scheme not in _REMOTE_SCHEMES:
        raise UserError(
            f"data.path {path!r}: expected a local path or one of {', '.join(_REMOTE_SCHEMES)}"
        )
    with (
        as_user_error(f"data.path {path!r}: {scheme}:// needs another package", ImportError),
        # every store's library has its own errors
        as_user_error(f"data.path {path!r}: cannot be listed", Exception),
    ):
        filesystem, pattern = fsspec.core.url_to_fs(path)
        found = filesystem.glob(pattern, detail=True)
    root = filesystem._strip_protocol(_fixed_part(path)).strip("/") + "/"
    return [
        SourceFile(
            epath.Path(f"{scheme}://{name}"),
            name.removeprefix(root),
            info["size"],
            next((str(info[key]) for key in _REMOTE_VERSIONS if info.get(key)), ""),
        )
        for name, info in (
            (name.lstrip("/"), info) for name, info in found.items() if info["type"] == "file"
        )
    ]


def _nearest_hint(path: str) -> str:
    """Names the first part of a local path that does not exist, with the closest existing name."""
    if is_remote(path):
        return "; check the bucket's and the objects' names"
    parent = pathlib.Path("/" if os.path.isabs(path) else ".")
    for part in pathlib.Path(os.path.expanduser(path)).parts:
        if _WILDCARD.search(part):
            return f"; {parent} exists but holds nothing that matches"
        if not (parent / part).exists():
            names = [p.name for p in parent.iterdir()] if parent.is_dir() else []
            return f": there is no {part!r} in {parent.resolve()}{did_you_mean(part, names)}"
        parent = parent / part
    return ": it is there, but is no regular file"


@functools.cache
def _standard_library_files() -> tuple[SourceFile, ...]:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [
            d
            for d in subdirectories
            if d not in _STDLIB_SKIPPED_DIRECTORIES and not _STDLIB_BUILD_SPECIFIC.fullmatch(d)
        ]
        files += [
            pathlib.Path(directory, name)
            for name in names
            if name.endswith(".py") and not _STDLIB_BUILD_SPECIFIC.fullmatch(name)
        ]
    if not files:
        raise UserError(f"{root} holds no Python source to train on: give texts with data.path")
    return tuple(
        sorted(
            (_local_file(os.fspath(file), os.fspath(root)) for file in files),
            key=lambda file: file.label,
        )
    )


# ---- reading files: each yields (record number, text, bytes of the file read so far); the
# text is "" where `bad` leaves a document out


class BadText:
    """Applies `data.on_bad_text` to text that is not UTF-8, and counts the documents concerned."""

    def __init__(self, policy: str):
        self.policy = policy
        self.count = 0
        self.first: list[str] = []  # where the first five are

    def mend(self, data: bytes, encoding: str, where: str, what: str) -> str:
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
            self.first.append(where)
        return data.decode(encoding, "replace") if self.policy == "replace" else ""

    def summary(self) -> str:
        """How many documents were not UTF-8, what was done, and where the first five are."""
        done = "bytes replaced by U+FFFD in" if self.policy == "replace" else "left out"
        return (
            f"{done} {self.count} document{'s' * (self.count > 1)} that are not UTF-8: "
            f"{', '.join(self.first)}{', …' * (self.count > 5)}"
        )


def _decoded(data: bytes, bad: BadText, where: str, start: int = 0) -> str:
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


def _read_text(file: SourceFile, text_field: str, bad: BadText) -> Iterator[tuple[int, str, int]]:
    del text_field
    yield 0, _decoded(file.path.read_bytes(), bad, str(file.path)).removeprefix("\ufeff"), file.size


def _read_jsonl(file: SourceFile, text_field: str, bad: BadText) -> Iterator[tuple[int, str, int]]:
    with file.path.open("rb") as raw:
        stream: BinaryIO = gzip.open(raw) if file.path.name.lower().endswith(".gz") else raw
        offset = 0
        with as_user_error(
            f"{file.path}: damaged gzip file", EOFError, gzip.BadGzipFile, zlib.error
        ):
            for record, line in enumerate(stream):
                where = f"{file.path}:{record + 1}"
                if line.strip() and (
                    text := _decoded(line, bad, where, offset).removeprefix("\ufeff")
                ):
                    yield record, _json_text(text, text_field, bad, where), min(offset, file.size)
                offset += len(line)


def _json_text(line: str, field: str, bad: BadText, where: str) -> str:
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


def _checked_text(text: object, bad: BadText, where: str) -> str:
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


def _read_parquet(
    file: SourceFile, text_field: str, bad: BadText
) -> Iterator[tuple[int, str, int]]:
    with (
        file.path.open("rb") as stream,
        as_user_error(f"{file.path}: not a readable Parquet file", pyarrow.ArrowException),
    ):
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
        kind = schema.field(text_field).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise UserError(
                f"{file.path}: column {text_field!r} is of type {kind}: expected string"
            )
        record, rows = 0, max(table.metadata.num_rows, 1)
        for batch in table.iter_batches(batch_size=256, columns=[text_field]):
            for value in batch.column(0):
                where = f"{file.path}: row {record + 1} of column {text_field!r}"
                data = value.as_buffer()
                text = None if data is None else _decoded(data.to_pybytes(), bad, where)
                yield record, _checked_text(text, bad, where), file.size * record // rows
                record += 1
