"""The folder of prepared data. Files and folders appear in this folder whole or not at all. So any
number of processes, on any hosts, may write prepared data at once, and may be killed at any time.

In this module, names are relative to the folder of prepared data. A file or folder is written in
`.partial/`, under a name that no other process uses, and then gets its own name in one rename.

Files for a bucket are written on the local disk and then uploaded. Buckets make every object appear
whole. A folder in a bucket counts as present once it has its `metadata.json`, which is uploaded
last.
"""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

from qwen3next_jax.common import digests, durable, json_files
from qwen3next_jax.common.errors import UserError, error_message
from qwen3next_jax.common.storage import BucketPath, local_copy, to_path

# If nothing was written to an entry of `.partial/` for so many seconds, its process is assumed to
# have been killed.
LEASE_SECONDS = 3600
_PARTIAL = ".partial"
_LAST = "metadata.json"  # the file of a folder that is uploaded last


class Store:
    """The folder of prepared data, `data.prepared_dir`. A `Store` can be pickled."""

    def __init__(self, root: str | os.PathLike):
        self.root = to_path(root).expanduser()

    def path(self, name: str) -> pathlib.Path | BucketPath:
        """Returns the path of the file or folder `name`."""
        return self.root / name

    def exists(self, name: str) -> bool:
        path = self.path(name)
        if isinstance(path, BucketPath):
            return path.is_file() or (path / _LAST).is_file()
        return path.exists()

    def names_matching(self, pattern: str) -> list[str]:
        """Returns the names that match a glob, sorted."""
        return sorted(p.relative_to(self.root).as_posix() for p in self.root.glob(pattern))

    def local_copy_of(self, name: str) -> contextlib.AbstractContextManager[pathlib.Path]:
        """Yields a local path of the file `name`, downloaded if the store is in a bucket."""
        return local_copy(self.path(name))

    def read_json(self, name: str) -> dict[str, Any]:
        """Returns the content that `write_json` wrote to the file `name`.

        Raises:
          FileNotFoundError: there is no such file.
          UserError: the file is damaged or cannot be read.
        """
        path = self.path(name)
        try:
            content = json_files.read(path)
            intact = content.pop("digest") == digests.sha256_json(content)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(str(path)) from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error_message(error)})") from error
        except (ValueError, KeyError):
            intact = False
        if not intact:
            raise UserError(f"{path} is damaged: delete it to have it prepared again")
        return content

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Writes a JSON file with `content` and a digest of `content`."""
        with self.new_file(name) as path:
            write_json_with_digest(path, content)

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[pathlib.Path]:
        """Yields a path to which the `with` block writes a file. At the end of the block, the file
        gets the name `name`, and replaces an older file of this name.

        Raises:
          UserError: the disk is full, or the folder cannot be written to.
        """
        if isinstance(self.root, BucketPath):
            with tempfile.TemporaryDirectory() as folder:
                yield (path := pathlib.Path(folder) / "file")
                self._upload(path, self.root / name)
            return
        with self._new_partial_path() as path:
            yield path
            durable.fsync(path)
            self.path(name).parent.mkdir(parents=True, exist_ok=True)
            path.replace(self.path(name))

    @contextlib.contextmanager
    def new_folder(self, name: str) -> Iterator[pathlib.Path]:
        """Yields the path of a folder into which the `with` block writes files. At the end of the
        block, the folder gets the name `name`. If another process has made a folder of this name in
        the meantime, that folder stays and the new folder is removed.

        Raises:
          UserError: the disk is full, or the folder cannot be written to.
        """
        if isinstance(self.root, BucketPath):
            with tempfile.TemporaryDirectory() as folder:
                yield (path := pathlib.Path(folder))
                if self.exists(name):
                    return
                for file in sorted(path.iterdir(), key=lambda file: file.name == _LAST):
                    self._upload(file, self.root / name / file.name)
            return
        with self._new_partial_path() as path:
            path.mkdir()
            yield path
            for file in path.iterdir():
                durable.fsync(file)
            try:
                path.rename(self.path(name))
            except OSError:
                if not self.exists(name):
                    raise

    def _upload(self, file: pathlib.Path, target: BucketPath) -> None:
        try:
            target.write_bytes(file.read_bytes())
        except OSError as error:
            raise UserError(
                f"data.prepared_dir {str(self.root)!r}: cannot be written to "
                f"({error_message(error)})"
            ) from error

    @contextlib.contextmanager
    def _new_partial_path(self) -> Iterator[pathlib.Path]:
        path = self.root / _PARTIAL / uuid.uuid4().hex
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield path
        except OSError as error:
            raise UserError(
                f"data.prepared_dir {str(self.root)!r}: cannot be written to "
                f"({error_message(error)})"
            ) from error
        finally:
            _remove_path(path)

    def remove_leftovers(self) -> None:
        """Removes the unfinished files and folders of killed processes, whatever their host."""
        if isinstance(self.root, BucketPath):  # there are none
            return
        leftovers = list(self.root.glob(f"{_PARTIAL}/*"))
        if not leftovers:
            return
        try:
            with self._new_partial_path() as probe:
                probe.touch()
                now = (
                    probe.stat().st_mtime
                )  # by the clock of the file system, as the leftovers' times
        except UserError:  # the folder is read-only
            return
        for path in leftovers:
            # Another process may remove a leftover at any time.
            with contextlib.suppress(OSError):
                written = [path.stat().st_mtime, *(p.stat().st_mtime for p in path.glob("*"))]
                if now - max(written) > LEASE_SECONDS:
                    _remove_path(path)


def _remove_path(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def write_json_with_digest(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a JSON file with `content` and a digest of `content` to `path`."""
    path.write_text(json.dumps(content | {"digest": digests.sha256_json(content)}, indent=1) + "\n")
