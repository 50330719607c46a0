"""Turns a source into shards of packed rows, once, and reads them back.

`pipeline` calls `prepare`, which writes `<prepared_dir>/<fingerprint>/`: ArrayRecord shards of
training and held-out rows (their records carry checksums) and, last, `metadata.json`. The
directory gets its final name in one rename. So a killed preparation never looks finished, and two
preparations may run at once (the slower one discards its work). Before the rename the files are
digested again: if one changed in between, its rows would not match the fingerprint.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from qwen3next_jax.common import digests, json_files
from qwen3next_jax.common.errors import UserError, error_message, as_user_error
from qwen3next_jax.data import sources
from qwen3next_jax.data.packing import Packer, Row
from qwen3next_jax.data.rows import RowReader, RowWriter, Shard
from qwen3next_jax.data.sources import Document, Source
from qwen3next_jax.data.tokens import Tokenizer

_FORMAT = 1  # raise it when the same input no longer gives the same rows
METADATA, _DIGESTS = "metadata.json", "content_digests.json"
_REREAD_SIZE = 1 << 26  # smaller sources are hashed at every start
_BATCH_CHARACTERS = 1 << 23  # tokenized at once
TRAIN, HELDOUT = "train", "heldout"

Progress = Callable[[str, int, int], None]  # (source name, bytes read, bytes in all)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts over one split of a source."""

    documents: int = 0
    cut_documents: int = 0  # documents that were split into more than one piece
    text_bytes: int = 0  # UTF-8
    tokens: int = 0  # with one end-of-document token per document
    rows: int = 0
    padding: int = 0  # tokens


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The finished rows of one source."""

    source: Source
    fingerprint: str
    directory: pathlib.Path
    statistics: dict[str, Statistics]  # of TRAIN and HELDOUT
    rows: dict[str, RowReader]  # of TRAIN and HELDOUT


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything besides the text and the tokenizer that determines the rows."""

    row_length: int
    heldout_fraction: float
    seed: int


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    recipe: Recipe,
    prepared_dir: str | os.PathLike,
    progress: Progress | None = None,
) -> Prepared:
    """The rows of `source`; prepares them if that was not done before.

    Args:
      prepared_dir: rows are read from it at random, so it should be on a local or fast disk.
      progress: called after each batch of documents.

    Raises:
      UserError: unreadable input, too little text, or prepared rows that are damaged.
    """
    parent = pathlib.Path(prepared_dir).expanduser()
    contents = content_digests(source, parent)
    key = fingerprint(source, contents, tokenizer, recipe)
    directory = parent / key
    if not directory.exists():
        _prepare(source, contents, tokenizer, recipe, directory, progress or (lambda *_: None))
    content = read_metadata(directory)
    # Rows that older code prepared do not record their fingerprint, but these inputs to it.
    recorded = {"tokenizer": tokenizer.fingerprint, "files": len(source.files)}
    for name, wanted in (recorded | dataclasses.asdict(recipe)).items():
        if content.get(name, wanted) != wanted:
            raise _renamed(directory, f"{name} = {content[name]!r}, not {wanted!r}")
    statistics = {split: Statistics(**counts) for split, counts in content["statistics"].items()}
    rows = {
        split: RowReader(
            directory, [Shard(**shard) for shard in shards], content["dtype"], content["row_length"]
        )
        for split, shards in content["shards"].items()
    }
    return Prepared(source, key, directory, statistics, rows)


def fingerprint(source: Source, contents: list[str], tokenizer: Tokenizer, recipe: Recipe) -> str:
    """Digest (20 hexadecimal digits) of everything that determines the rows: files, the
    digests of their `contents`, tokenizer, recipe, format.
    """
    parts = {
        "format": _FORMAT,
        "files": [
            (file.label, file.size, digest)
            for file, digest in zip(source.files, contents, strict=True)
        ],
        "text_field": source.text_field,
        **({} if source.on_bad_text == "stop" else {"on_bad_text": source.on_bad_text}),
        "tokenizer": tokenizer.fingerprint,
        **dataclasses.asdict(recipe),
    }
    return digests.sha256(json.dumps(parts))[:20]


def split_documents(source: Source, heldout_fraction: float) -> Iterator[tuple[str, Document]]:
    """Streams `(TRAIN or HELDOUT, document)`. A hash of the text chooses the split, so equal texts
    are in the same split.

    Neither split stays empty. If no hash falls into the held-out share (few documents), the end
    of the document with the smallest hash is held out: `heldout_fraction` of all text, at most
    the whole document.
    """
    counts, characters = {TRAIN: 0, HELDOUT: 0}, 0
    smallest: tuple[float, Document] | None = (
        None  # yielded last, when it is known whether both splits have documents
    )
    for document in sources.documents(source):
        characters += len(document.text)
        candidate = (_unit_hash(document.text), document)
        if smallest is None or candidate[0] < smallest[0]:
            smallest, candidate = candidate, smallest
        if candidate is not None:
            split = HELDOUT if candidate[0] < heldout_fraction else TRAIN
            counts[split] += 1
            yield split, candidate[1]
    assert smallest is not None  # sources.documents raises when there is none
    value, document = smallest
    if value < heldout_fraction and counts[TRAIN]:
        yield HELDOUT, document
    elif counts[HELDOUT]:
        yield TRAIN, document
    else:
        yield from _cut_in_two(
            document, round(heldout_fraction * characters), source, whole=counts[TRAIN] > 0
        )


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def _cut_in_two(
    document: Document, heldout: int, source: Source, whole: bool
) -> Iterator[tuple[str, Document]]:
    size, heldout = len(document.text), max(heldout, 1)
    if whole and heldout >= size:
        yield HELDOUT, document
        return
    if size < 2:
        raise UserError(
            f"{source.name!r} holds a single document of {size} character: too little to train on "
            "and to hold out; expected at least 2 characters"
        )
    cut = size - min(heldout, size - 1)
    yield TRAIN, dataclasses.replace(document, text=document.text[:cut])
    yield HELDOUT, dataclasses.replace(document, text=document.text[cut:])


# ---- writing


def _prepare(
    source: Source,
    contents: list[str],
    tokenizer: Tokenizer,
    recipe: Recipe,
    directory: pathlib.Path,
    progress: Progress,
) -> None:
    unwritable = f"data.prepared_dir {str(directory.parent)!r}: cannot be written to"
    with as_user_error(unwritable, OSError):
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory)
        temporary = (
            directory.parent
            / f".{directory.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        )
        temporary.mkdir()
    try:
        content = {"fingerprint": directory.name}
        content |= _write_rows(source, tokenizer, recipe, temporary, progress)
        _check_unchanged(source, contents, directory.parent)
        (temporary / METADATA).write_text(
            json.dumps(content | {"digest": digests.sha256_json(content)}, indent=1) + "\n"
        )
        temporary.rename(directory)
    except OSError as error:
        # where it exists, another process finished the same rows first
        if not (directory / METADATA).exists():
            raise UserError(f"{unwritable} ({error_message(error)})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_unchanged(source: Source, contents: list[str], prepared_dir: pathlib.Path) -> None:
    """Raises UserError if a file has changed since its digest in `contents` was taken: its rows
    would be those of other content.
    """
    now = (
        sources.resolve(source.name, source.text_field).files
        if sources.is_remote(source.name)
        else source.files
    )
    after = {file.label: sources.content_digest(file) for file in now}
    for file, digest in zip(source.files, contents, strict=True):
        if after.get(file.label) != digest:
            # the cached digest may be stale: a file can change and keep its size and time
            (prepared_dir / _DIGESTS).unlink(missing_ok=True)
            raise UserError(
                f"{file.path}: changed while it was being prepared; its rows were discarded: start "
                "again when the file no longer changes"
            )


def _remove_abandoned(directory: pathlib.Path) -> None:
    """Removes the temporary folders of killed preparations on this machine."""
    prefix = f".{directory.name}.{socket.gethostname()}."
    for leftover in directory.parent.glob(f"{prefix}*"):
        process = leftover.name.removeprefix(prefix).split(".")[0]
        if process.isdecimal() and not _is_alive(int(process)):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:  # a process of another user is alive, too
        return not isinstance(error, ProcessLookupError)
    return True


def _write_rows(
    source: Source,
    tokenizer: Tokenizer,
    recipe: Recipe,
    directory: pathlib.Path,
    progress: Progress,
) -> dict:
    length = recipe.row_length
    # uint16 halves the shards for vocabularies that fit.
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    writers = {split: RowWriter(directory, split, dtype, length) for split in (TRAIN, HELDOUT)}
    packers = {split: Packer(length, recipe.seed) for split in (TRAIN, HELDOUT)}
    counts = {split: dataclasses.asdict(Statistics()) for split in (TRAIN, HELDOUT)}

    def write(split: str, rows: Iterable[Row]) -> None:
        for row in rows:
            writers[split].write(row)
            counts[split]["rows"] += 1
            counts[split]["padding"] += length - sum(len(piece.tokens) for piece in row)

    read = 0
    for batch in _batched(split_documents(source, recipe.heldout_fraction)):
        encoded = tokenizer.encode_documents([document.text for _, document in batch])
        for (split, document), tokens in zip(batch, encoded, strict=True):
            counts[split]["documents"] += 1
            counts[split]["text_bytes"] += len(document.text.encode())
            counts[split]["tokens"] += len(tokens)
            write(split, packers[split].add(tokens, document.file, document.record))
        # the split yields one document late, after others that were read later
        read = max(read, *(document.bytes_read for _, document in batch))
        progress(source.name, read, source.size)
    for split, packer in packers.items():
        write(split, packer.finish())
        counts[split]["cut_documents"] = packer.cut_documents
    shards = {
        split: [dataclasses.asdict(shard) for shard in writer.close()]
        for split, writer in writers.items()
    }
    return {
        "format": _FORMAT,
        "source": source.name,
        "files": len(source.files),
        "dtype": dtype.name,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        **dataclasses.asdict(recipe),
        "statistics": counts,
        "shards": shards,
    }


def _batched(stream: Iterable[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    batch, characters = [], 0
    for split, document in stream:
        batch.append((split, document))
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# ---- reading


def read_metadata(directory: pathlib.Path) -> dict:
    """The content of `directory`/metadata.json, without its digest.

    Raises:
      UserError: it is damaged, or was written for a folder of another name.
    """
    path = directory / METADATA
    try:
        content = json_files.read(path)
        intact = content.pop("digest") == digests.sha256_json(content)
    except (OSError, ValueError, KeyError):
        intact = False
    if not intact:
        raise UserError(f"{path} is damaged: delete {directory} to have it prepared again")
    if content.get("fingerprint", directory.name) != directory.name:
        raise _renamed(directory, f"the rows of {content['fingerprint']}")
    return content


def _renamed(directory: pathlib.Path, holds: str) -> UserError:
    return UserError(
        f"{directory}: it holds, by its {METADATA}, {holds}: the folder was renamed or copied; "
        "give it its name back, or delete it to have the rows prepared again"
    )


def content_digests(source: Source, prepared_dir: pathlib.Path) -> list[str]:
    """Digest of every file's content. For a large corpus the digests are cached in `prepared_dir`
    by path, size and modification time, so that unchanged files are not read again.
    """
    cache_path = prepared_dir / _DIGESTS
    if source.size < _REREAD_SIZE or sources.is_remote(source.name):
        return [sources.content_digest(file) for file in source.files]
    try:
        cache = json_files.read(cache_path)
    except (OSError, ValueError):
        cache = {}
    found: list[str] = []
    new: dict[str, str] = {}
    for file in source.files:
        entry = f"{os.path.abspath(file.path)}\0{file.size}\0{file.version}"
        digest = cache.get(entry) or sources.content_digest(file)
        found.append(digest)
        # A file changed a moment ago may change again without its modification time showing it.
        if entry not in cache and time.time_ns() - int(file.version) > 2_000_000_000:
            new[entry] = digest
    if new:
        cache_path.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache_path.with_name(f".{cache_path.name}.{uuid.uuid4().hex[:8]}")
        temporary.write_text(json.dumps(cache | new))
        temporary.replace(cache_path)
    return found
