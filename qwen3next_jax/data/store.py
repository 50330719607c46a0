"""The folder of prepared data. A file or folder appears in it whole or not at all, so that any
number of processes, on any hosts, may prepare into it at once and be killed at any time.

Names are relative to the folder. What is being written lies in `.partial/` under a name that
nobody else uses, and gets its own name in one rename. Only this module knows that the folder is
a local one (or one of a file system that is mounted).
"""

import contextlib
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

from qwen3next_jax.common import digests, durable, json_files
from qwen3next_jax.common.errors import UserError, error_message

# Something in `.partial/` to which nobody has written for so long belongs to a killed process.
LEASE_SECONDS = 3600
_PARTIAL = ".partial"


class Store:
    """The folder of prepared data, `data.prepared_dir`. It can be pickled."""

    def __init__(self, root: str | os.PathLike):
        self.root = pathlib.Path(root).expanduser()

    def path(self, name: str) -> pathlib.Path:
        """Where the file or folder `name` lies."""
        return self.root / name

    def exists(self, name: str) -> bool:
        return self.path(name).exists()

    def names(self, pattern: str) -> list[str]:
        """The names that match a glob, sorted."""
        return sorted(p.relative_to(self.root).as_posix() for p in self.root.glob(pattern))

    def read_record(self, name: str) -> dict[str, Any]:
        """The content that `write_record` wrote under `name`.

        Raises:
          FileNotFoundError: there is no such file.
          UserError: it is damaged.
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

    def write_record(self, name: str, content: dict[str, Any]) -> None:
        """Writes a JSON file that carries a digest of its content."""
        with self.new_file(name) as path:
            write_json(path, content)

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[pathlib.Path]:
        """A path to write a file to. The file gets its name at the end of the `with` block; in
        place of an older one, if there is one.

        Raises:
          UserError: the disk is full, or the folder cannot be written to.
        """
        with self._partial() as path:
            yield path
            durable.fsync(path)
            self.path(name).parent.mkdir(parents=True, exist_ok=True)
            path.replace(self.path(name))

    @contextlib.contextmanager
    def new_folder(self, name: str) -> Iterator[pathlib.Path]:
        """A folder to write files to. It gets its name at the end of the `with` block; where one
        of that name appeared meanwhile, that one stays.

        Raises:
          UserError: the disk is full, or the folder cannot be written to.
        """
        with self._partial() as path:
            path.mkdir()
            yield path
            for file in path.iterdir():
                durable.fsync(file)
            try:
                path.rename(self.path(name))
            except OSError:
                if not self.exists(name):
                    raise

    @contextlib.contextmanager
    def _partial(self) -> Iterator[pathlib.Path]:
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
            _remove(path)

    def remove_leftovers(self) -> None:
        """Removes what killed processes, of this host or another, left unfinished."""
        leftovers = [
            path
            for pattern in (f"{_PARTIAL}/*", ".*.*.*.*")  # the second: of format 1
            for path in self.root.glob(pattern)
        ]
        if not leftovers:
            return
        try:
            with self._partial() as probe:
                probe.touch()
                now = probe.stat().st_mtime  # by the clock that stamps the leftovers, too
        except UserError:  # a folder that may only be read
            return
        for path in leftovers:
            # They may vanish at any time.
            with contextlib.suppress(OSError):
                written = [path.stat().st_mtime, *(p.stat().st_mtime for p in path.glob("*"))]
                if now - max(written) > LEASE_SECONDS:
                    _remove(path)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes JSON that carries a digest of its content."""
    path.write_text(json.dumps(content | {"digest": digests.sha256_json(content)}, indent=1) + "\n")
