"""Finds the files that the globs of `data.path` match, on local disks and in object stores.

A `Source` is one glob with the sorted files that it matches. `readers` reads the documents of a
source.
"""

import collections
import dataclasses
import functools
import glob as local_glob
import logging
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from etils import epath

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import (
    UserError,
    as_user_error,
    did_you_mean,
    error_message,
    join_first,
    require,
    warn,
)
from qwen3next_jax.common.installation import how_to_install

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
# Files that are written when Python is built or installed, so that two builds of one version have
# different ones.
_STDLIB_BUILD_SPECIFIC = re.compile(
    r"_sysconfigdata.*|config-.*|sitecustomize\.py|usercustomize\.py"
)
_REMOTE_SCHEMES = ("gs", "s3", "az", "hf")
# Properties of an object in the listings of object stores that change with its content; the best
# come first.
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
# If `data.path` is a folder without a pattern, the files with these suffixes are read.
TEXT_SUFFIXES = (
    ".txt",
    ".md",
    *(f".{kind}{packed}" for kind in ("jsonl", "ndjson", "json") for packed in ("", ".gz", ".zst")),
    ".parquet",
    ".arrow",
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


class MessagesFormat(Protocol):
    """How the conversations of a source become tokens (`conversations.ChatFormat`).

    Attributes:
      messages_field: the field of a record that holds the messages.
      identity: JSON values that, with the tokenizer, determine the tokens of every record.
    """

    messages_field: str
    identity: Mapping[str, str]

    def record_fault(self, messages: Any, objects_on_path: Sequence[Mapping[str, Any]]) -> str:
        """Returns what is wrong with the messages of a record, or with the objects on the path to
        them; "" if nothing is.
        """

    def encode(self, conversations: Sequence[Any], tokenizer: Any) -> Sequence[Any]:
        """Returns a `conversations.EncodedConversation` for each conversation."""


@dataclasses.dataclass(frozen=True)
class SourceFile:
    path: epath.Path
    # path relative to the part of the glob before its first wildcard, with "/" between folders, so
    # that it stays the same when the whole tree is moved
    relative_path: str
    # number of bytes on disk
    size: int
    # a local file's modification time, a remote object's checksum; "" if unknown
    mtime_or_checksum: str


@dataclasses.dataclass(frozen=True)
class Source:
    """One glob of `data.path`, with the files that match the glob and the settings for reading
    them.
    """

    name: str  # the glob as the user wrote it
    files: tuple[SourceFile, ...]  # sorted by label
    text_field: str
    on_bad_text: str = "stop"  # data.on_bad_text
    bad_records: str = "stop"  # data.bad_records
    bad_records_limit: float = 1.0  # data.bad_records_limit: largest share of bad records
    # Whether no file matches the glob any more, but the tokens of the files that did are prepared;
    # then the `mtime_or_checksum` of `files` is unknown.
    text_is_gone: bool = False
    # of records with messages: how they become tokens; then `text_field` is not read
    chat_format: MessagesFormat | None = None

    @property
    def size(self) -> int:
        """The number of bytes on disk."""
        return sum(file.size for file in self.files)


class NothingFound(UserError):
    """A glob matches no file."""


def find_source_of_glob(
    path: str, text_field: str, on_bad_text: str = "stop", bad_records: str = "stop"
) -> Source:
    """Finds the files of one glob.

    Args:
      path: a glob; or a folder, of which all text files are taken; or "", which stands for the
        source code of the Python standard library.
      text_field: `data.text_field` of the source.
      on_bad_text: `data.on_bad_text`.
      bad_records: `data.bad_records`.

    Raises:
      UserError: no file matches, or the package for a remote path is not installed.
    """
    if not path:
        return Source(
            STANDARD_LIBRARY, _standard_library_files(), text_field, on_bad_text, bad_records
        )
    found = _remote_files(path) if is_remote(path) else _local_files(path)
    labels = {file.relative_path for file in found}
    files = sorted(
        (file for file in found if not _is_companion(file.relative_path, labels)),
        key=lambda file: file.relative_path,
    )
    if not files:
        raise NothingFound(f"data.path {path!r} matches no file{_missing_path_hint(path)}")
    return Source(path, tuple(files), text_field, on_bad_text, bad_records)


def content_digest(file: SourceFile) -> str:
    """Returns the SHA-256 of a local file's bytes. For a remote object, returns the SHA-256 of its
    size and checksum, without a download.
    """
    if is_remote(os.fspath(file.path)):
        return digests.sha256(f"{file.size} {file.mtime_or_checksum}")
    with as_user_error(f"{file.path}: cannot be read", OSError):
        return digests.sha256_file(file.path)


# ---- finding files


def _is_companion(name: str, names: set[str]) -> bool:
    """Whether the file `name` belongs to another file and is not read by itself: it is the `.bin`
    of an `.idx` in `names`, or a file that datatrove writes beside a `.ds`. Of datatrove's files,
    `.ds.index` is read together with its `.ds`; `.ds.metadata` and `.ds.loss` are not read at all.
    """
    stem = name.removesuffix(".bin")
    datatrove = any(name.endswith(f".ds.{part}") for part in ("index", "metadata", "loss"))
    return datatrove or name.endswith(".bin") and f"{stem}.idx" in names


def is_remote(path: str) -> bool:
    return "://" in path


def _folder_before_wildcard(path: str) -> str:
    """Returns the directory before the first wildcard of a glob."""
    wildcard = _WILDCARD.search(path)
    return (path[: wildcard.start()] if wildcard else path).rpartition("/")[0]


def _local_files(path: str) -> list[SourceFile]:
    expanded = os.path.expanduser(path)
    if os.path.isdir(expanded):
        every = _distinct_files(
            _glob(os.path.join(local_glob.escape(expanded), "**", "*")), expanded
        )
        if not (
            files := [file for file in every if file.relative_path.lower().endswith(TEXT_SUFFIXES)]
        ):
            raise UserError(
                f"data.path {path!r}: a folder without text files: expected names that end in "
                f".txt, .md, .jsonl, .json, .parquet, .arrow, …; a pattern takes any, such as "
                f"{path.rstrip('/')}/**/*.log"
            )
        _warn_of_unread_files(path, every, files)
        return files
    # A file whose name contains glob characters is still found when it is named exactly.
    found = [expanded] if os.path.exists(expanded) else _glob(expanded)
    require(
        os.path.exists(expanded) or all("**" not in p or p == "**" for p in expanded.split("/")),
        f"data.path {path!r}: ** beside other characters would enter no folder: expected ** alone "
        "between slashes, such as texts/**/*.jsonl",
    )
    return _distinct_files(
        found, _folder_before_wildcard(expanded) or ("/" if expanded.startswith("/") else ".")
    )


def _warn_of_unread_files(
    path: str, every: Sequence[SourceFile], read: Sequence[SourceFile]
) -> None:
    """Warns of the files of a folder that are not read."""
    labels = {file.relative_path for file in read}
    others = collections.Counter(
        os.path.splitext(file.relative_path)[1] or "without an ending"
        for file in every
        if file.relative_path not in labels
    )
    if others:
        kinds = join_first((f"{count} {ending}" for ending, count in others.most_common()), 5)
        warn(
            f"data.path {path!r}: {sum(others.values())} of {len(every)} files are not read "
            f"({kinds}): a pattern such as {path.rstrip('/')}/**/* "
            "takes every file"
        )


def _distinct_files(found: Iterable[str], root: str) -> list[SourceFile]:
    """Returns the files among the paths `found`. If links make several paths lead to one file, the
    result has only the path with the fewest folders.
    """
    once: dict[str, str] = {}
    for name in sorted(found, key=lambda name: (name.count("/"), name)):
        once.setdefault(os.path.realpath(name), name)
    return [_local_file(name, root) for name in once.values() if os.path.isfile(name)]


def _glob(pattern: str) -> Iterator[str]:
    """Yields the paths that `glob.glob(pattern, recursive=True)` finds, but `**` enters no folder
    twice, because links may form a cycle.
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
    # gcsfs would log a traceback before the error
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    try:
        filesystem, pattern = fsspec.core.url_to_fs(path)
        found = filesystem.glob(pattern, detail=True)
    except ImportError as error:  # fsspec names the package, but not an extra of this project
        raise UserError(
            f"data.path {path!r}: {scheme}:// needs another package: {how_to_install('remote')}"
        ) from error
    except Exception as error:  # the library of every object store raises errors of its own
        raise UserError(f"data.path {path!r}: cannot be listed ({error_message(error)})") from error
    root = filesystem._strip_protocol(_folder_before_wildcard(path)).strip("/") + "/"
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


def _missing_path_hint(path: str) -> str:
    """Returns a hint for messages: the first missing folder or file of a local path, and existing
    names similar to the missing name.
    """
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
            key=lambda file: file.relative_path,
        )
    )
