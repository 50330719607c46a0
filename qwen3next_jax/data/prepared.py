"""The finished rows of a source, and the index from which a process opens these rows.

To find the rows of a corpus of 15 trillion tokens without an index, a process would read a manifest
for each of some 450,000 parts and 56,000 folders of rows. The index is one file of some tens of
bytes per shard. The index holds the content of the manifests of parts and rows, and the size and
modification time of every file that holds rows. An index is used only if it begins with a digest of
its name and content, and if all files with rows still have the recorded size and time. Without a
usable index, `preparation` reads the manifests, reports their faults, and writes the index anew.
"""

import concurrent.futures
import dataclasses
import io
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.common.storage import BucketPath
from qwen3next_jax.data import digest_cache, row_groups, tokenized_parts
from qwen3next_jax.data.row_groups import HELDOUT, METADATA, TRAIN, RowRecipe, Statistics
from qwen3next_jax.data.rows import RowReader, ShardTable
from qwen3next_jax.data.sources import Source
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.tokens import Tokenizer

_FORMAT = 4  # of the index
# Share of the bytes by which tokens may differ from the texts: some tokenizers compose accents
# (NFC), which changes a few bytes.
_MISCOUNTED = 1e-3
_AT_ONCE = 4096  # files whose size and time one thread asks for
_THREADS = 16  # a network file system answers several requests at once

# of a bucket: path of each object → its entry, by one request; None for a local folder
Listing = Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True)
class PreparedSource:
    """The finished rows of one source.

    Attributes:
      source: the source.
      fingerprint: hexadecimal digest of everything that determines the rows.
      statistics: TRAIN or HELDOUT → counts over the rows of this split.
      rows: TRAIN or HELDOUT → the rows of this split.
      bad_counts: kind of fault → number of records with it, see `readers.BadRecords`.
      first_bad_places: where the first five bad records are, such as "part.jsonl:17".
      record_count: number of records, including empty and bad records.
      empty_documents: number of documents that are left out because they are empty or hold only
        white space.
      miscounted_bytes: the sum of `tokens.miscounted_bytes` over the documents.
    """

    source: Source
    fingerprint: str
    statistics: dict[str, Statistics]
    rows: dict[str, RowReader]
    bad_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    first_bad_places: Sequence[str] = ()
    record_count: int = 0
    empty_documents: int = 0
    miscounted_bytes: int = 0

    @property
    def token_bytes_match_text(self) -> bool:
        """Whether the tokens stand for as many bytes as the texts have, which is the condition for
        computing bits per byte of text from tokens.
        """
        text_bytes = sum(counts.text_bytes for counts in self.statistics.values())
        return self.miscounted_bytes <= _MISCOUNTED * text_bytes

    @property
    def total_statistics(self) -> Statistics:
        """Counts over the rows of both splits."""
        return self.statistics[TRAIN] + self.statistics[HELDOUT]

    @property
    def long_conversations_note(self) -> str:
        """Describes the conversations that are longer than a row; "" if there are none."""
        return row_groups.describe_long_conversations(
            self.total_statistics, self.rows[TRAIN].row_length
        )

    @property
    def row_folders(self) -> list[pathlib.Path]:
        """The folders that hold the rows."""
        table = self.rows[TRAIN].table
        return [table.folder_path(i) for i in range(len(table.folders))]

    @property
    def common_row_folder(self) -> pathlib.Path:
        """The folder that holds all rows of the source, directly or in subfolders."""
        table = self.rows[TRAIN].table
        return table.folder_path(0) if len(table.folders) == 1 else table.root


def index_name(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    recipe: RowRecipe,
    corpora: Mapping[int, str],
) -> str | None:
    """Returns the name that the index of a run's sources has in the store.

    Args:
      sources: the sources.
      tokenizer: the tokenizer of the sources' parts.
      recipe: the recipe of the rows.
      corpora: index of each source whose text is gone → digest of its tokens.

    Returns:
      The name, which is a digest of everything that determines the rows of all sources. None if a
      file of a large source was modified in the last two seconds, because the file may change again
      and keep its size and modification time.
    """
    parts = []
    for i, source in enumerate(sources):
        content = corpora[i] if i in corpora else digest_cache.content_identity(source)
        if content is None:
            return None
        parts.append(
            [
                source.name,
                content,
                source.text_field,
                source.on_bad_text,
                source.bad_records,
                *([source.chat_format.identity] if source.chat_format else []),
            ]
        )
    key = {
        "format": _FORMAT,
        "parts": tokenized_parts.FORMAT,
        "sources": parts,
        "tokenizer": tokenizer.fingerprint,
        "parse_tokens": sorted(tokenizer.parse_tokens),
        "libraries": dict(tokenizer.library_versions),
        **dataclasses.asdict(recipe),
    }
    return f"indexes/{digests.sha256_json(key)[:20]}.index"


def write_index(store: Store, name: str, prepared: Sequence[PreparedSource]) -> None:
    """Writes the index of rows that were just opened.

    Raises:
      UserError: the folder cannot be written to.
    """
    headers, arrays, listed = [], {}, _list_bucket_rows(store)
    for i, one in enumerate(prepared):
        tables = {side: one.rows[side].table for side in (TRAIN, HELDOUT)}
        for side, table in tables.items():
            found = _sizes_and_times(table.shard_paths(), listed)
            if found is None:
                return  # another process has removed a file
            arrays[f"{i}.{side}.shard_ends"] = table.folder_shard_ends
            arrays[f"{i}.{side}.rows"] = table.rows_per_shard
            arrays[f"{i}.{side}.heads"] = table.shard_heads
            arrays[f"{i}.{side}.files"] = found
        found = _sizes_and_times(_metadata_paths(table), listed)
        if found is None:
            return
        arrays[f"{i}.metadata"] = found
        arrays[f"{i}.folders"] = table.folders
        arrays[f"{i}.rows_per_chunk"] = table.rows_per_chunk
        arrays[f"{i}.part_ends"], arrays[f"{i}.origins"] = (
            table.folder_part_ends,
            table.part_origins,
        )
        headers.append(
            {
                "fingerprint": one.fingerprint,
                "dtype": table.dtype,
                **({"weighted": True} if table.has_loss_weights else {}),
                "statistics": {side: dataclasses.asdict(s) for side, s in one.statistics.items()},
                "bad": dict(one.bad_counts),
                "bad_places": list(one.first_bad_places),
                "records": one.record_count,
                "empty": one.empty_documents,
                "miscounted_bytes": one.miscounted_bytes,
            }
        )
    arrays["header"] = np.frombuffer(json.dumps(headers).encode(), np.uint8)
    content = io.BytesIO()
    np.savez(content, **arrays)
    with store.new_file(name) as path:
        path.write_bytes(_digest_prefix(name, content.getvalue()) + content.getvalue())


def open_rows_from_index(
    store: Store, name: str, sources: Sequence[Source], recipe: RowRecipe
) -> list[PreparedSource] | None:
    """Opens the rows of all sources from their index.

    Returns:
      The rows of each source; None if the index is missing or damaged, or if a file with rows is
      missing or has changed since the index was written.
    """
    try:
        headers, arrays = read_index_arrays(store, name)
    except (OSError, ValueError):
        return None
    listed = _list_bucket_rows(store)
    found = [
        _open_indexed_source(store, arrays, i, source, recipe, header, listed)
        for i, (source, header) in enumerate(zip(sources, headers, strict=True))
    ]
    return None if None in found else found


def read_index_arrays(
    store: Store, name: str
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Reads the index that `write_index` wrote to the file `name`. Returns the header of each
    source, and the arrays.

    Raises:
      OSError: the file does not exist, or cannot be read.
      ValueError: the file is damaged, or was written under another name.
    """
    sealed = store.path(name).read_bytes()
    content = sealed[len(_digest_prefix("", b"")) :]
    if not sealed.startswith(_digest_prefix(name, content)):
        raise ValueError("its name or its bytes are not those that were written: delete it")
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    return json.loads(arrays.pop("header").tobytes()), arrays


def _digest_prefix(name: str, content: bytes) -> bytes:
    """Returns the first bytes of an index: a digest of its name and its content."""
    return digests.sha256(name.encode() + b"\n" + content).encode() + b"\n"


def _open_indexed_source(
    store: Store,
    arrays: Mapping[str, np.ndarray],
    i: int,
    source: Source,
    recipe: RowRecipe,
    header: Mapping,
    listed: Listing,
) -> PreparedSource | None:
    shared = {
        "folders": arrays[f"{i}.folders"],
        "rows_per_chunk": arrays[f"{i}.rows_per_chunk"],
        "folder_part_ends": arrays[f"{i}.part_ends"],
        "part_origins": arrays[f"{i}.origins"],
    }
    rows = {}
    for side in (TRAIN, HELDOUT):
        files = arrays[f"{i}.{side}.files"]
        table = ShardTable(
            root=store.path("rows"),
            split=side,
            dtype=header["dtype"],
            has_loss_weights=header.get("weighted", False),
            folder_shard_ends=arrays[f"{i}.{side}.shard_ends"],
            rows_per_shard=arrays[f"{i}.{side}.rows"],
            shard_bytes=files[:, 0],
            shard_heads=arrays[f"{i}.{side}.heads"],
            **shared,
        )
        if not _files_are_unchanged(table.shard_paths(), files, listed):
            return None
        rows[side] = RowReader(table, recipe.row_length)
    if not _files_are_unchanged(_metadata_paths(table), arrays[f"{i}.metadata"], listed):
        return None
    return PreparedSource(
        source,
        header["fingerprint"],
        {side: Statistics(**counts) for side, counts in header["statistics"].items()},
        rows,
        header["bad"],
        header["bad_places"],
        header["records"],
        header["empty"],
        header["miscounted_bytes"],
    )


def _metadata_paths(table: ShardTable) -> Iterator[str]:
    return (f"{table.root}/{name.decode()}/{METADATA}" for name in table.folders.tolist())


def _files_are_unchanged(paths: Iterable[str], before: np.ndarray, listed: Listing) -> bool:
    now = _sizes_and_times(paths, listed)
    return now is not None and np.array_equal(now, before)


def _list_bucket_rows(store: Store) -> Listing:
    """Lists the files with rows of a store in a bucket: path → entry. Returns None for a local
    store.
    """
    root = store.path("rows")
    if not isinstance(root, BucketPath):
        return None
    return {str(path): entry for path, entry in root.file_infos().items()}


def _sizes_and_times(paths: Iterable[str], listed: Listing) -> np.ndarray | None:
    """Returns int64 [n, 2], the size in bytes and the modification time in nanoseconds of each
    file; None if a file does not exist. For a bucket, the sizes come from `listed`, and a digest of
    each object's version takes the place of its time.
    """
    if listed is not None:
        entries = [listed.get(path) for path in paths]
        if None in entries:
            return None
        numbers = [(e.size, int(digests.sha256(str(e.version))[:15], 16)) for e in entries]
        return np.array(numbers, np.int64).reshape(-1, 2)
    batches = itertools.batched(paths, _AT_ONCE)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(_local_sizes_and_times, batches))
    return None if None in found else np.array(sum(found, []), np.int64).reshape(-1, 2)


def _local_sizes_and_times(paths: Sequence[str]) -> list[tuple[int, int]] | None:
    try:
        stats = [os.stat(path) for path in paths]
    except FileNotFoundError:
        return None
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]
