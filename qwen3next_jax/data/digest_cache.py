"""Records the digests of parts of files, so that a large corpus is not read again at every start.

Every `DigestCache` appends the new digests to a file of its own, `digests/<id>.jsonl`. A recorded
digest is valid as long as the corpus file has the same path, size and modification time.
"""

import contextlib
import json
import os
import pathlib
import time
import uuid

from qwen3next_jax.common import json_files
from qwen3next_jax.common.storage import BucketPath
from qwen3next_jax.data import readers, token_files
from qwen3next_jax.data.readers import Part
from qwen3next_jax.data.sources import Source, SourceFile, is_remote
from qwen3next_jax.data.store import Store

_SMALLEST = 1 << 26  # bytes; the digests of a smaller source are computed at every start


class DigestCache:
    """The digests of a source's files that any process has recorded in a store. A source of fewer
    than `_SMALLEST` bytes gets no records.
    """

    def __init__(self, store: Store, source: Source):
        self._store = store
        self.in_use = source.size >= _SMALLEST
        self._own = f"digests/{uuid.uuid4().hex}.jsonl"
        self._known: dict[str, str] = {}
        self._recorded = ""  # what this process recorded in a bucket
        known = []
        for name in store.names_matching("digests/*.jsonl"):
            for line in store.path(name).read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):  # its process was killed as it wrote
                    known.append(json_files.parse(line, list))
        for pair in known:
            if len(pair) == 2 and all(isinstance(text, str) for text in pair):
                self._known[pair[0]] = pair[1]

    def get(self, file: SourceFile, part: Part) -> str:
        """Returns the recorded digest of a part; "" if there is none."""
        return self._known.get(_cache_key(file, part), "") if self.in_use else ""

    def add(self, file: SourceFile, part: Part, digest: str) -> None:
        """Records a digest, unless the file was modified in the last two seconds, because the file
        may then change again and keep its modification time.
        """
        entry = _cache_key(file, part)
        is_new = self._known.get(entry) != digest
        if self.in_use and is_new and not is_remote(os.fspath(file.path)) and _is_settled(file):
            self._append_line(json.dumps([entry, digest]) + "\n")
        self._known[entry] = digest

    def _append_line(self, line: str) -> None:
        path = self._store.path(self._own)
        if isinstance(path, BucketPath):  # nothing can be appended there
            self._recorded += line
            path.write_text(self._recorded)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as lines:
            lines.write(line)

    def forget_all(self) -> None:
        """Removes all recorded digests. Call it when a recorded digest turns out to be wrong."""
        for name in self._store.names_matching("digests/*.jsonl"):
            self._store.path(name).unlink(missing_ok=True)
        self._known = {}


def content_identity(source: Source) -> list | None:
    """Returns JSON values that change when the content of the source's files changes.

    For a source of fewer than `_SMALLEST` bytes, the values are digests of the files' content. For
    a larger source, the values are the sizes and modification times of the files. Returns None if a
    file of a large source was modified in the last two seconds, because such a file may change
    again and keep its size and modification time.
    """
    if source.size < _SMALLEST:
        return [
            [file.relative_path, readers.part_digest(file, Part(0, file.size), source.text_field)]
            for file in source.files
        ]
    if not all(is_remote(os.fspath(file.path)) or _is_settled(file) for file in source.files):
        return None
    if not all(file.mtime_or_checksum for file in source.files):
        return None
    return [_cache_key(file, Part(0, file.size)) for file in source.files]


def _cache_key(file: SourceFile, part: Part) -> str:
    path = os.path.abspath(file.path)
    beside = ""
    if not is_remote(os.fspath(file.path)):
        for other in token_files.companion_files(pathlib.Path(file.path)):
            stat = other.stat()
            beside += f"\0{stat.st_size}\0{stat.st_mtime_ns}"
    return f"{path}\0{file.size}\0{file.mtime_or_checksum}\0{part.start}\0{part.stop}{beside}"


def _is_settled(file: SourceFile) -> bool:
    return time.time_ns() - int(file.mtime_or_checksum) > 2_000_000_000
