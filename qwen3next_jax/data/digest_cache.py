"""Remembers the digests of parts of files, so that a large corpus is not read at every start.

Every process that computes digests appends them to a file of its own, `digests/<id>.jsonl`. A
digest counts as long as the file has the same path, size and modification time.
"""

import json
import os
import time
import uuid

from qwen3next_jax.common import json_files
from qwen3next_jax.data.readers import Part
from qwen3next_jax.data.sources import Source, SourceFile, is_remote
from qwen3next_jax.data.store import Store

_FORMAT_1 = "content_digests.json"  # of whole files


_SMALLEST = 1 << 26  # smaller sources are hashed at every start


class DigestCache:
    """The digests of a source's files that anybody recorded in a store. Of a small source none
    are recorded.
    """

    def __init__(self, store: Store, source: Source):
        self._store = store
        self.in_use = source.size >= _SMALLEST
        self._own = f"digests/{uuid.uuid4().hex}.jsonl"
        self._known: dict[str, str] = {}
        try:
            old = json_files.read(store.path(_FORMAT_1))
        except (OSError, ValueError):
            old = {}
        for entry, digest in old.items():
            self._known[f"{entry}\0{0}\0{entry.split(chr(0))[1]}"] = digest
        for name in store.names("digests/*.jsonl"):
            for line in store.path(name).read_text(errors="replace").splitlines():
                try:
                    entry, digest = json.loads(line)
                except ValueError:  # torn by a kill
                    continue
                self._known[entry] = digest

    def get(self, file: SourceFile, part: Part) -> str:
        """The digest of a part; "" where nobody recorded it."""
        return self._known.get(_entry(file, part), "") if self.in_use else ""

    def add(self, file: SourceFile, part: Part, digest: str) -> None:
        """Records a digest, unless the file changed a moment ago: it may change again without its
        modification time showing it.
        """
        entry = _entry(file, part)
        is_new = self._known.get(entry) != digest
        if self.in_use and is_new and not is_remote(os.fspath(file.path)) and _is_settled(file):
            path = self._store.path(self._own)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as lines:
                lines.write(json.dumps([entry, digest]) + "\n")
        self._known[entry] = digest

    def forget_all(self) -> None:
        """Removes every record: one of them was found to be wrong."""
        for name in [_FORMAT_1, *self._store.names("digests/*.jsonl")]:
            self._store.path(name).unlink(missing_ok=True)
        self._known = {}


def _entry(file: SourceFile, part: Part) -> str:
    path = os.path.abspath(file.path)
    return f"{path}\0{file.size}\0{file.version}\0{part.start}\0{part.stop}"


def _is_settled(file: SourceFile) -> bool:
    return time.time_ns() - int(file.version) > 2_000_000_000
