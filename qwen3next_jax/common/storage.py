"""Paths of folders and files, in a bucket (gs://BUCKET/… or s3://BUCKET/…) or in a file system.

`to_path` returns a `pathlib.Path` or a `BucketPath`, which has the methods of `pathlib.Path` that
make sense in a bucket. A bucket has no folders, only objects whose names hold "/". The functions of
this module take either kind of path, so their callers need not know whether a path is in a bucket.

A bucket has no rename, no append and no locks. `runs.store` says how a run uses renames, appends
and locks on a file system, and what it does in a bucket instead.
"""

import contextlib
import dataclasses
import errno
import fnmatch
import hashlib
import io
import os
import pathlib
import posixpath
import shutil
import sys
import types
from collections.abc import Iterator
from typing import Any

from qwen3next_jax.common import digests
from qwen3next_jax.common.durable import fsync
from qwen3next_jax.common.errors import ExitCode, UserError, require, require_path, short_repr
from qwen3next_jax.common.object_stores import (
    ABSENT,
    AccessForbidden,
    FileInfo,
    ObjectStore,
    StoreError,
    StoreUnavailable,
    VersionConflict,
    open_store,
    with_retries,
)

SCHEMES = ("gs://", "s3://")
PATIENCE = 60.0  # seconds for which a request is repeated, unless a run says otherwise


def with_patience(path: "pathlib.Path | BucketPath", seconds: float) -> Any:
    """Returns a path in a bucket with `seconds` as its patience (`BucketPath`); any other path
    unchanged.
    """
    return path.with_patience(seconds) if isinstance(path, BucketPath) else path


def is_bucket(path: str | os.PathLike) -> bool:
    """Whether `path` is in a bucket."""
    return os.fspath(path).startswith(SCHEMES)


def to_path(path: str | os.PathLike, where: str = "") -> "pathlib.Path | BucketPath":
    """Returns a path of a file system or of a bucket. `where` begins the message of an error, such
    as "--workdir=".

    Raises:
      UserError: `path` is empty or no path, is a URL of another kind, or names no bucket.
    """
    if isinstance(path, (pathlib.Path, BucketPath)):
        return path
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    # An empty path would be the current folder.
    require(
        isinstance(text, str) and text != "",
        f"{where}{short_repr(path)}: expected the path of a folder or a file"
        + ("" if path == "" else f", not {type(path).__name__}"),
    )
    if not is_bucket(text):
        require(
            "://" not in text,
            f"{where}{text}: expected a local folder, one of a file system that is mounted, "
            "gs://BUCKET/… or s3://BUCKET/…",
        )
        return pathlib.Path(text)
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    require(bool(bucket.strip()), f"{where}{text}: expected {scheme}://BUCKET/FOLDER")
    key = posixpath.normpath("/" + key).strip("/")
    require_path(where + text, f"{scheme}://{bucket}/{key}")
    return BucketPath(scheme, bucket, key)


@dataclasses.dataclass(frozen=True, order=True)
class BucketPath:
    """An object in a bucket, or the folder of all objects whose keys begin with `key` and "/".

    The methods of a `BucketPath` do what the methods of `pathlib.Path` with the same names do,
    unless their docstrings say otherwise. A request that the store refuses for the moment (429,
    5xx), or does not answer, is repeated for `patience_seconds`; after this time the method raises
    `StoreUnavailable`, an OSError.
    """

    scheme: str
    bucket: str
    key: str
    patience_seconds: float = dataclasses.field(default=PATIENCE, compare=False)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")

    def __repr__(self) -> str:
        return f"BucketPath({str(self)!r})"

    def __fspath__(self) -> str:
        return str(self)

    def __truediv__(self, name: str | os.PathLike) -> "BucketPath":
        key = posixpath.normpath(posixpath.join("/", self.key, os.fspath(name))).strip("/")
        return dataclasses.replace(self, key=key)

    # ---- names

    @property
    def name(self) -> str:
        return posixpath.basename(self.key)

    @property
    def stem(self) -> str:
        return pathlib.PurePosixPath(self.key).stem

    @property
    def suffix(self) -> str:
        return pathlib.PurePosixPath(self.key).suffix

    @property
    def parent(self) -> "BucketPath":
        return dataclasses.replace(self, key=posixpath.dirname(self.key))

    def with_name(self, name: str) -> "BucketPath":
        return self.parent / name

    def with_suffix(self, suffix: str) -> "BucketPath":
        return self.parent / (self.stem + suffix)

    def relative_to(self, other: "BucketPath") -> pathlib.PurePosixPath:
        """Returns the rest of this path after the folder `other`."""
        if (self.scheme, self.bucket) != (other.scheme, other.bucket):
            raise ValueError(f"{self} is not in {other}")
        return pathlib.PurePosixPath("/" + self.key).relative_to("/" + other.key)

    def absolute(self) -> "BucketPath":
        return self

    def resolve(self) -> "BucketPath":
        return self

    def expanduser(self) -> "BucketPath":
        return self

    def with_patience(self, seconds: float) -> "BucketPath":
        """Returns this path with `seconds` as its `patience_seconds`."""
        return dataclasses.replace(self, patience_seconds=seconds)

    # ---- what there is

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return self.file_info() is not None

    def is_dir(self) -> bool:
        """Whether any object is in this folder."""
        return bool(self._list_folder(deep=True, limit=1)[0])

    def file_info(self) -> FileInfo | None:
        """Returns the size and the version of the object, as the store reports them; None if there
        is no such object.
        """
        if not self.key:
            return None
        try:
            return self._request_with_retries(lambda store: store.stat(self.key))
        except FileNotFoundError:
            return None

    def stat(self) -> Any:
        """Returns st_size, st_mtime, st_mtime_ns and, as st_ino, the version of the object."""
        entry = self.file_info()
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return stat_result_of(entry)

    def iterdir(self) -> Iterator["BucketPath"]:
        """Yields the objects and folders directly in this folder; nothing if it does not exist."""
        entries, folders = self._list_folder(deep=False)
        for key in sorted([entry.key for entry in entries] + [f.rstrip("/") for f in folders]):
            yield dataclasses.replace(self, key=key)

    def file_infos(self) -> dict["BucketPath", FileInfo]:
        """Returns every object in this folder and in the folders in it."""
        found, _ = self._list_folder(deep=True)
        return {dataclasses.replace(self, key=entry.key): entry for entry in found}

    def rglob(self, pattern: str) -> Iterator["BucketPath"]:
        """Yields the objects whose names match; never a folder."""
        yield from (path for path in self.file_infos() if fnmatch.fnmatchcase(path.name, pattern))

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        """Yields the objects and folders in this folder whose names match. A pattern with "/" finds
        only objects.
        """
        if "/" not in pattern:
            yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))
            return
        parts = pattern.split("/")
        fixed = [part for part in parts[:-1]]
        while fixed and any(set(part) & set("*?[") for part in fixed):
            fixed.pop()
        base, rest = self / "/".join(fixed), parts[len(fixed) :]
        for path in base.file_infos():
            names = path.relative_to(base).parts
            if len(names) == len(rest) and all(map(fnmatch.fnmatchcase, names, rest)):
                yield path

    # ---- content

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Returns the bytes of the object from number `start` up to, but not including, number
        `stop`; to the end if `stop` is None.
        """
        return self._request_with_retries(lambda store: store.read(self.key, start, stop))

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def open(self, mode: str = "r", errors: str = "strict") -> Any:
        """Returns the content as a file for reading; the whole object is read at once."""
        if mode == "rb":
            return io.BytesIO(self.read_bytes())
        require(mode == "r", f"{self}: a bucket has no files that can be opened for writing")
        return io.StringIO(self.read_text(errors=errors), newline=None)

    def write_bytes(self, data: bytes) -> None:
        """Writes the object whole, or not at all."""
        self.write(data)

    def write_text(self, text: str, encoding: str = "utf-8", errors: str = "strict") -> None:
        self.write(text.encode(encoding, errors))

    def write(self, data: bytes, replaces: str | None = None) -> str:
        """Writes the object whole, or not at all, and returns its version.

        Args:
          replaces: the version that the object must have; ABSENT if it may not exist; None: any.

        Raises:
          VersionConflict: another process has written the object.
        """

        def attempt(store: ObjectStore, number: int) -> str:
            try:
                return store.write(self.key, data, replaces)
            except VersionConflict:
                # The answer to an attempt before may have been lost after it had succeeded.
                entry = self.file_info() if number else None
                if entry is None or entry.size != len(data) or self.read_bytes() != data:
                    raise
                return entry.version

        store = open_store(self.scheme, self.bucket)
        return with_retries(lambda number: attempt(store, number), self.patience_seconds)

    def upload(self, file: pathlib.Path) -> None:
        """Writes the object with the content of a local file, whole or not at all."""
        self._request_with_retries(lambda store: store.upload(self.key, str(file)))

    def read_blocks(self, size: int) -> Iterator[bytes]:
        """Yields the content in blocks of `size` bytes."""
        for start in range(0, self.stat().st_size, size):
            yield self.read_bytes(start, start + size)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._request_with_retries(lambda store: store.delete(self.key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a folder is there once an object is in it."""

    def remove_tree(self) -> None:
        """Deletes every object in this folder."""
        for path in self.file_infos():
            path.unlink(missing_ok=True)

    def _list_folder(
        self, deep: bool, limit: int | None = None
    ) -> tuple[list[FileInfo], list[str]]:
        prefix = self.key + "/" if self.key else ""
        try:
            return self._request_with_retries(lambda store: store.list(prefix, deep, limit))
        except FileNotFoundError:  # the bucket
            return [], []

    def _request_with_retries(self, function: Any) -> Any:
        store = open_store(self.scheme, self.bucket)
        return with_retries(lambda _: function(store), self.patience_seconds)


def stat_result_of(entry: FileInfo) -> Any:
    """Returns the size, the modification time and, as st_ino, the version of an object, in fields
    named as in the result of `os.stat`.
    """
    return types.SimpleNamespace(
        st_size=entry.size,
        st_mtime=entry.modified,
        st_mtime_ns=int(entry.modified * 1e9),
        st_ino=entry.version,
    )


def check_bucket_access(where: str, path: pathlib.Path | BucketPath) -> None:
    """Checks, by one request, that the bucket of `path` exists and that this process may list it.
    Does nothing for a path of a file system.

    Raises:
      UserError: begins with `where`.
    """
    if not isinstance(path, BucketPath):
        return
    name = f"{path.scheme}://{path.bucket}"
    prefix = path.key + "/" if path.key else ""
    try:
        path._request_with_retries(lambda store: store.list(prefix, True, 1))
    except FileNotFoundError as error:
        raise UserError(
            f"{where}: there is no bucket {name}: create it, or name another"
        ) from error
    except AccessForbidden as error:
        raise UserError(
            f"{where}: this process may not read {name} ({error.strerror}): give its account the "
            "right to read and write objects there, or other credentials"
        ) from error
    except StoreUnavailable as error:
        raise UserError(
            f"{where}: {name} did not answer within {path.patience_seconds:g} s ({error.strerror})",
            ExitCode.STORAGE,
        ) from error


def write_text_atomically(
    path: pathlib.Path | BucketPath, text: str, errors: str = "strict"
) -> None:
    """Writes a text file that appears whole or not at all, as UTF-8."""
    if isinstance(path, BucketPath):
        path.write_text(text, errors=errors)
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8", errors=errors)
    fsync(temporary)  # without this, a power failure may leave an empty file
    os.replace(temporary, path)


def remove_tree(folder: pathlib.Path | BucketPath) -> None:
    """Deletes a folder with all that is in it, as far as possible. There need not be one."""
    if isinstance(folder, BucketPath):
        folder.remove_tree()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def files_in(folder: pathlib.Path | BucketPath) -> dict[str, FileInfo]:
    """Returns the files in a folder and in the folders in it, sorted: path relative to `folder` →
    `FileInfo`. In a bucket, one listing request finds all files. The version of a local file is its
    inode and its modification time.
    """
    if isinstance(folder, BucketPath):
        entries = sorted(folder.file_infos().items())
    else:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        entries = [(path, _file_info_of_local_file(path)) for path in paths]
    return {str(path.relative_to(folder)): entry for path, entry in entries}


def folders_with_file(folder: pathlib.Path | BucketPath, name: str) -> list[Any]:
    """Returns the folders in `folder` that hold a file `name`; in a bucket, by one listing."""
    if isinstance(folder, BucketPath):
        return [path.parent for path in folder.glob(f"*/{name}")]
    # `pathlib.Path.glob` passes over a folder that this process may not read.
    folders = folder.iterdir() if folder.is_dir() else ()
    return [path for path in folders if (path / name).exists()]


def _file_info_of_local_file(path: pathlib.Path) -> FileInfo:
    stat = path.stat()
    version = f"{stat.st_ino}-{stat.st_mtime_ns}"
    return FileInfo(str(path), stat.st_size, version, "", stat.st_mtime)


def sha256_of(path: pathlib.Path | BucketPath, start: int = 0, stop: int | None = None) -> str:
    """Returns the SHA-256 of the bytes of a file from number `start` up to, but not including,
    number `stop`; to the end if `stop` is None.
    """
    if isinstance(path, BucketPath):
        return digests.sha256(path.read_bytes(start, stop))
    return digests.sha256_file(path, start, sys.maxsize if stop is None else stop - start)


def md5_of(path: pathlib.Path | BucketPath) -> str:
    """Returns the MD5 of a file, the checksum that object stores keep, in hexadecimal digits."""
    if isinstance(path, BucketPath):
        return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    return digests.md5_file(path)


@contextlib.contextmanager
def local_copy(path: pathlib.Path | BucketPath) -> Iterator[pathlib.Path]:
    """Yields the path of a local file with the content of `path`: `path` itself if it is local."""
    if not isinstance(path, BucketPath):
        yield path
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / path.name
        copy.write_bytes(path.read_bytes())
        yield copy


__all__ = [
    "ABSENT",
    "BucketPath",
    "VersionConflict",
    "FileInfo",
    "PATIENCE",
    "StoreError",
    "StoreUnavailable",
    "check_bucket_access",
    "files_in",
    "folders_with_file",
    "is_bucket",
    "local_copy",
    "md5_of",
    "remove_tree",
    "sha256_of",
    "stat_result_of",
    "to_path",
    "with_patience",
    "write_text_atomically",
]
