"""Writes a directory of safetensors files to a bucket. `BucketExport` has the methods of
`writing.LocalExport`.

Each file of weights is written on the local disk, uploaded, and then removed from the disk.
progress.json in the bucket names the complete files, which a later export with the same identity
skips. config.json is uploaded after all other files: if the export is killed, its folder has no
config.json, and readers refuse it.
"""

import hashlib
import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, as_user_error, require
from qwen3next_jax.common.storage import BucketPath
from qwen3next_jax.interop.writing import DIGESTS, INDEX, Tensor, safetensors_header, write_json

_PROGRESS = "progress.json"
_LAST = "config.json"


class BucketExport:
    """A context manager that writes an export to a bucket.

    Args:
      out: the folder of the export.
      files: name of a file of weights → its tensors.
      identity: the digest of the weights and settings that this export writes; None: the export
        does not continue an earlier export.

    Raises:
      UserError: the bucket or the local disk cannot be written to.
    """

    def __init__(
        self, out: BucketPath, files: Mapping[str, Sequence[Tensor]], identity: str | None
    ):
        self._out, self._files, self._identity = out, files, identity
        self._complete: dict[str, str] = {}  # name of a file of weights → SHA-256

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *exception):
        self._folder.cleanup()

    def begin(self) -> list[str]:
        """Begins a new export, or continues an earlier export.

        Returns:
          The names of the files that are already complete.

        Raises:
          UserError: the folder is not empty, and its progress.json does not record an export with
            this `identity`.
        """
        present = {str(path.relative_to(self._out)) for path in self._out.file_infos()}
        if present:
            progress = self._read_progress()
            require(
                progress.get("identity") is not None and progress["identity"] == self._identity,
                f"{self._out}: already there: expected a new or empty folder; choose another, or "
                "remove it first",
            )
            self._complete = {
                name: digest
                for name, digest in progress["files"].items()
                if name in present and name in self._files
            }
        self._record_progress()
        return list(self._complete)

    def write(self, name: str, blocks: Iterable[np.ndarray]) -> None:
        """Writes the file of weights `name`. `blocks` yields the values of the file's tensors in
        order.
        """
        path, digest = pathlib.Path(self._folder.name) / name, hashlib.sha256()
        begin = np.frombuffer(safetensors_header(self._files[name]), np.uint8)
        with as_user_error(f"{self._out / name}: cannot be written", OSError):
            with path.open("wb") as file:
                for block in itertools.chain([begin], blocks):
                    data = memoryview(np.ascontiguousarray(block).reshape(-1).view(np.uint8))
                    digest.update(data)
                    file.write(data)
            (self._out / name).upload(path)
            path.unlink()
            self._complete[name] = digest.hexdigest()
            self._record_progress()

    def finish(self, write_other_files: Callable[[pathlib.Path], None]) -> None:
        """Writes the index, calls `write_other_files(directory)` to write the files that are not
        weights, and writes SHA256SUMS.
        """
        folder = pathlib.Path(self._folder.name)
        if len(self._files) > 1:
            tensors = [(name, tensor) for name, file in self._files.items() for tensor in file]
            total = sum(tensor.nbytes for _, tensor in tensors)
            weight_map = {tensor.name: name for name, tensor in tensors}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(folder / INDEX, index)
        write_other_files(folder)
        others = sorted(path for path in folder.iterdir() if path.is_file())
        known = self._complete | {path.name: digests.sha256_file(path) for path in others}
        lines = [f"{digest}  {name}\n" for name, digest in sorted(known.items())]
        (folder / DIGESTS).write_text("".join(lines))
        with as_user_error(f"{self._out}: cannot be written", OSError):
            for path in sorted([*others, folder / DIGESTS], key=lambda path: path.name == _LAST):
                (self._out / path.name).upload(path)
            (self._out / _PROGRESS).unlink(missing_ok=True)

    def _read_progress(self) -> dict[str, Any]:
        try:
            record = json_files.read(self._out / _PROGRESS)
            return {"identity": record["identity"], "files": dict(record["files"])}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}

    def _record_progress(self) -> None:
        record = {"identity": self._identity, "files": self._complete}
        try:
            (self._out / _PROGRESS).write_text(json.dumps(record))
        except OSError as error:
            raise UserError(f"{self._out}: cannot be written to ({error.strerror})") from error
