"""Tokenized parts. A tokenized part holds the tokens of a part of a file (`readers.file_parts`).
Each tokenized part is made once; all preparations that need its tokens share it.

A tokenized part whose key begins with "ab" consists of the file `tokens/ab/<key>.tokens` and of its
manifest `tokens/ab/<key>.json`, which is written last. The key is a digest of everything that
determines the tokens: the part's bytes, the settings for reading the file, the tokenizer, and the
versions of the tokenizer's libraries. The key does not depend on the path of the source file, the
row length, the seed, the held-out fraction, or the process that makes the part.

The file of tokens holds the tokens of one document after the other, as little-endian uint16 or
uint32, and then a table with one `DOCUMENT` entry per document.

A part with conversations has a third file, `tokens/ab/<key>.weights`: the loss weight of each
token, as little-endian float32. In a part without a file of weights, every token has the weight 1.
"""

import array
import contextlib
import dataclasses
import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError, WrittenByOlderVersion, require
from qwen3next_jax.data import readers, token_files
from qwen3next_jax.data.readers import BadRecords, Part, Record
from qwen3next_jax.data.sources import MessagesFormat, SourceFile
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.text import Text, batches_by_size, byte_count, is_blank, text_pieces
from qwen3next_jax.data.tokens import DifferentIds, Tokenizer, miscounted_bytes

FORMAT = 5  # raise it when the same text no longer gives the same part
_BATCH_CHARACTERS = 1 << 20  # number of characters tokenized at once

DOCUMENT = np.dtype(
    [
        ("end", "<u8"),  # number of the part's tokens up to this document's end token, inclusive
        ("hash", "<u8"),  # hash of the text; it decides whether the document is held out
        # number of bytes of the text as UTF-8; in a part with weights, only of the tokens whose
        # weight is above 0
        ("bytes", "<u8"),
        ("record", "<u8"),  # number of the document's record in the part, see readers.Record
    ]
)


@dataclasses.dataclass(frozen=True)
class TokenizeJob:
    """A part of a file that is to be tokenized.

    Attributes:
      file: the file.
      part: the part.
      text_field: the field (of JSON) or column (of Parquet and Arrow) that holds the text.
      on_bad_text: `data.on_bad_text`.
      bad_records: `data.bad_records`.
      digest: `readers.part_digest` of the part; "" before the digest is computed.
      chat_format: how the conversations of the part become tokens; None: the part has no
        conversations.
    """

    file: SourceFile
    part: Part
    text_field: str
    on_bad_text: str = "stop"
    bad_records: str = "stop"
    digest: str = ""
    chat_format: MessagesFormat | None = None

    @property
    def holds_texts(self) -> bool:
        """Whether the file holds documents of text; False for conversations and for files of
        tokens.
        """
        return not self.chat_format and not token_files.token_format(self.file.path.name.lower())

    @property
    def size(self) -> int:
        """The number of bytes of the part on disk. For a part of a Parquet file, this is an
        estimate.
        """
        if readers.covers_whole_file(self.file, self.part):
            return self.file.size
        if readers.file_format(self.file) == "parquet":  # its parts are counted in row groups
            return readers._PART_BYTES
        return self.part.stop - self.part.start


@dataclasses.dataclass(frozen=True)
class TokenizedPart:
    """The manifest of a tokenized part."""

    key: str
    dtype: str  # name of the tokens' dtype
    documents: int
    tokens: int  # number of tokens, including one end-of-document token per document
    text_bytes: int  # sum of the `bytes` of its documents
    miscounted_bytes: int  # sum over its documents, see tokens.miscounted_bytes
    records: int  # number of lines or rows of the part, including empty ones
    smallest: tuple[int, int]  # (hash, index) of the document with the smallest hash
    largest_hash: int
    empty: int  # number of documents without text: empty, or white space alone
    bad: dict[str, int]  # kind of fault → number of records with it, see readers.BadRecords
    bad_first: tuple[tuple[int, str], ...]  # (record, kind of fault) of the first five bad records
    content: str  # SHA-256 of the file with the tokens
    weights: str = ""  # SHA-256 of the file with the weights; "": there is none

    @property
    def identity(self) -> str:
        """A digest of the tokens and loss weights of the documents."""
        return digests.sha256(f"{self.content} {self.weights}") if self.weights else self.content

    @property
    def size(self) -> int:
        """The number of bytes of the part's file `tokens/ab/<key>.tokens`."""
        return self.tokens * np.dtype(self.dtype).itemsize + self.documents * DOCUMENT.itemsize


class FileChanged(UserError):
    """A file changed while it was being read."""


def part_key(job: TokenizeJob, tokenizer: Tokenizer) -> str:
    """Returns the key of the tokenized part of `job`. `job.digest` must be known."""
    kind = readers.file_format(job.file)
    parts: dict[str, Any] = {
        "format": FORMAT,
        "content": job.digest,
        "kind": kind,
        "text_field": job.text_field if kind != "text" else "",
        "on_bad_text": job.on_bad_text,
        "bad_records": job.bad_records,
        "tokenizer": tokenizer.fingerprint,
        "parse_tokens": sorted(tokenizer.parse_tokens),
        "libraries": {**tokenizer.library_versions, "unicodedata": unicodedata.unidata_version},
    }
    if job.chat_format:
        parts |= {"text_field": "", "chat": job.chat_format.identity, "libraries": {}}
    return digests.sha256_json(parts)[:32]


def _file_name_in_store(key: str, suffix: str) -> str:
    return f"tokens/{key[:2]}/{key}.{suffix}"  # 256 folders keep each folder small


def find_part_by_key(store: Store, key: str) -> TokenizedPart | None:
    """Returns the part with this key; None if it is not finished.

    Raises:
      UserError: the part's manifest is damaged.
    """
    name = _file_name_in_store(key, "json")
    try:
        content = store.read_json(name)
    except FileNotFoundError:
        return None
    if "miscounted_bytes" not in content:
        raise WrittenByOlderVersion(store.path(name))
    if content.get("key") != key:
        raise UserError(
            f"{store.path(name)}: it is the manifest of {content.get('key')}: it was renamed; "
            "delete it to have it prepared again"
        )
    try:
        content["smallest"] = tuple(content["smallest"])
        content["bad_first"] = tuple((number, kind) for number, kind in content["bad_first"])
        part = TokenizedPart(**content)
        is_valid = part.dtype in ("uint16", "uint32") and 0 <= part.documents <= part.tokens
    except (KeyError, TypeError, ValueError):
        is_valid = False
    require(is_valid, f"{store.path(name)} is damaged: delete it to have it prepared again")
    return part


def find_part_of_job(store: Store, job: TokenizeJob, tokenizer: Tokenizer) -> TokenizedPart | None:
    """Returns the tokenized part of `job`, or None if it is not finished. `job.digest` must be
    known.
    """
    part = find_part_by_key(store, part_key(job, tokenizer))
    if part is None and tokenizer.slower_tokenizer:
        part = find_part_by_key(store, part_key(job, tokenizer.slower_tokenizer))
    return part


def tokenize_part(
    job: TokenizeJob,
    tokenizer: Tokenizer,
    store: Store,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[str, TokenizedPart]:
    """Tokenizes the part of `job`, unless this has been done already.

    Args:
      job: the part to tokenize.
      tokenizer: the tokenizer.
      store: where the part is written.
      progress: called with the number of bytes of the part read so far.

    Returns:
      (digest of the part, tokenized part).

    Raises:
      UserError: the input cannot be read.
      FileChanged: the part changed while it was being read.
    """
    if not job.digest:
        digest = readers.part_digest(job.file, job.part, job.text_field)
        job = dataclasses.replace(job, digest=digest)
    if part := find_part_of_job(store, job, tokenizer):
        return job.digest, part
    try:
        return job.digest, _write_tokenized_part(job, tokenizer, store, progress)
    except DifferentIds:
        assert tokenizer.slower_tokenizer
        return job.digest, _write_tokenized_part(job, tokenizer.slower_tokenizer, store, progress)


def _write_tokenized_part(
    job: TokenizeJob, tokenizer: Tokenizer, store: Store, progress: Callable[[int], None]
) -> TokenizedPart:
    key = part_key(job, tokenizer)
    bad = BadRecords(job.on_bad_text, job.bad_records)
    # If all ids fit into uint16, the file is half as large.
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    ends, hashes, sizes, numbers = (array.array("Q") for _ in range(4))
    content = hashlib.sha256()
    count = records = empty = miscounted = 0
    with contextlib.ExitStack() as files:
        # The manifest of a part is written after both files.
        weights = (
            files.enter_context(_open_weights_writer(store, _file_name_in_store(key, "weights")))
            if job.chat_format
            else None
        )
        path = files.enter_context(store.new_file(_file_name_in_store(key, "tokens")))
        with path.open("wb") as file:

            def write(data: bytes) -> None:
                content.update(data)
                file.write(data)

            for batch in encoded_documents(job, tokenizer, bad):
                records, empty = batch.records_read, empty + batch.blank_texts
                for document in batch.documents:
                    of_tokens, conversation = 0, []
                    for ids in document.token_pieces:
                        if weights:
                            conversation.extend(ids.tolist())
                        count += len(ids)
                        of_tokens += int(tokenizer.token_byte_counts[ids].sum())
                        write(ids.astype(dtype).tobytes())
                    if weights:
                        weights.write(document.loss_weights)
                        # Special tokens have no bytes here, but the template writes them. So the
                        # text that the tokens stand for is compared, without the last end token.
                        said = tokenizer.decode(conversation[:-1])
                        miscounted += miscounted_bytes(byte_count(said), byte_count(document.text))
                    else:
                        miscounted += miscounted_bytes(of_tokens, document.counted_bytes)
                    ends.append(count)
                    hashes.append(text_hash(document.text))
                    sizes.append(document.counted_bytes)
                    numbers.append(document.record_index)
                progress(batch.bytes_read)
            table = np.zeros(len(ends), DOCUMENT)
            for field, values in zip(DOCUMENT.names, (ends, hashes, sizes, numbers), strict=True):
                table[field] = values
            write(table.tobytes())
        if readers.part_digest(job.file, job.part, job.text_field) != job.digest:
            raise FileChanged(
                f"{job.file.path}: changed while it was being prepared; its tokens were "
                "discarded: start again when the file no longer changes"
            )
    smallest = int(table["hash"].argmin()) if len(table) else 0
    part = TokenizedPart(
        key=key,
        dtype=dtype.name,
        documents=len(table),
        tokens=count,
        text_bytes=sum(sizes),
        miscounted_bytes=miscounted,
        records=records,
        smallest=(hashes[smallest], smallest) if len(table) else (2**64, 0),
        largest_hash=max(hashes, default=-1),
        empty=empty,
        bad=dict(bad.counts),
        bad_first=tuple(bad.first),
        content=content.hexdigest(),
        weights=weights.digest.hexdigest() if weights else "",
    )
    manifest = dataclasses.asdict(part)
    if not part.weights:  # a part of texts has none
        del manifest["weights"]
    store.write_json(_file_name_in_store(key, "json"), manifest)
    return part


class _WeightsWriter(NamedTuple):
    """Writes the file with a part's loss weights, and computes its digest."""

    file: BinaryIO
    digest: Any

    def write(self, weights: np.ndarray) -> None:
        data = weights.astype("<f4").tobytes()
        self.digest.update(data)
        self.file.write(data)


@contextlib.contextmanager
def _open_weights_writer(store: Store, name: str) -> Iterator[_WeightsWriter]:
    with store.new_file(name) as path, path.open("wb") as file:
        yield _WeightsWriter(file, hashlib.sha256())
        file.flush()


class _EncodedDocument(NamedTuple):
    record_index: int  # index of its record in the part, from 0
    text: Text
    token_pieces: Iterable[np.ndarray]  # the ids with the end token, integers [n], in pieces
    counted_bytes: int  # as `DOCUMENT` has them
    loss_weights: np.ndarray | None = None  # loss weight of each token; None: all are 1


class _EncodedBatch(NamedTuple):
    documents: list[_EncodedDocument]
    records_read: int  # number of records of the part read so far
    blank_texts: int  # number of records in this batch whose text is blank; they are left out
    bytes_read: int  # number of bytes of the part read so far


def encoded_documents(
    job: TokenizeJob, tokenizer: Tokenizer, bad: BadRecords
) -> Iterator[_EncodedBatch]:
    """Yields the documents of a part, with their texts and tokens, in batches. The text of a
    document in a file of tokens is made by decoding its tokens. So the same documents are held out,
    whether they are read from a file of tokens or from a file of text.
    """
    if job.chat_format:
        yield from _encoded_conversations(job, job.chat_format, tokenizer, bad)
        return
    if token_files.token_format(job.file.path.name.lower()):
        end = np.array([tokenizer.eos_id], np.int32)
        for number, (ids, position) in enumerate(token_files.read_token_file(job.file, tokenizer)):
            text = tokenizer.decode(ids)
            # Special tokens have no text. A document of special tokens alone stays.
            if len(ids) and not (text and is_blank(text)):
                document = _EncodedDocument(number, text, (ids, end), byte_count(text))
                yield _EncodedBatch([document], number + 1, blank_texts=0, bytes_read=position)
            else:
                yield _EncodedBatch([], number + 1, blank_texts=1, bytes_read=position)
        return
    for batch in _batch_records(readers.read_records(job.file, job.part, job.text_field, bad)):
        texts = [record for record in batch if record.text is not None]
        filled = [record for record in texts if not is_blank(record.text)]
        short = [record.text for record in filled if isinstance(record.text, str)]
        tokens_of_short = iter(tokenizer.encode_documents(short))
        documents = []
        for record in filled:
            is_short = isinstance(record.text, str)
            tokens = (
                [next(tokens_of_short)] if is_short else tokenizer.encode_long_text(record.text)
            )
            documents.append(
                _EncodedDocument(record.index_in_part, record.text, tokens, byte_count(record.text))
            )
        empty = len(texts) - len(filled)
        yield _EncodedBatch(documents, batch[-1].index_in_part + 1, empty, batch[-1].bytes_read)


def _encoded_conversations(
    job: TokenizeJob, chat_format: MessagesFormat, tokenizer: Tokenizer, bad: BadRecords
) -> Iterator[_EncodedBatch]:
    """Yields the conversations of a part in batches, for `encoded_documents`."""
    for batch in _batch_records(readers.read_conversations(job.file, job.part, chat_format, bad)):
        filled = [record for record in batch if record.text]
        messages = [json.loads(record.text) for record in filled]
        documents = []
        encoded = chat_format.encode(messages, tokenizer)
        for record, one in zip(filled, encoded, strict=True):
            if one.fault:
                where = readers.RecordPlace(job.file, job.part, record.index_in_part)
                bad.leave_out(record.index_in_part, where, "no conversation", one.fault)
            else:
                counted = int(tokenizer.token_byte_counts[one.tokens[one.loss_weights > 0]].sum())
                documents.append(
                    _EncodedDocument(
                        record.index_in_part, one.text, [one.tokens], counted, one.loss_weights
                    )
                )
        yield _EncodedBatch(documents, batch[-1].index_in_part + 1, 0, batch[-1].bytes_read)


def text_hash(text: Text) -> int:
    """Returns a hash of 64 bits that decides, with `data.heldout_fraction`, whether a document is
    held out. Texts that differ only in white space or Unicode composition have the same hash.
    """
    digest = hashlib.blake2b(digest_size=8)
    is_first, after_space = True, False
    for piece in _nfc_pieces(text):
        words = " ".join(piece.split())
        if words and not is_first and (after_space or piece[0].isspace()):
            digest.update(b" ")
        digest.update(words.encode())
        is_first = is_first and not words
        after_space = piece[-1].isspace() if words else after_space or bool(piece)
    return int.from_bytes(digest.digest(), "big")


_ASCII = re.compile(r"[\0-\x7f]")


def _nfc_pieces(text: Text) -> Iterator[str]:
    """Yields a text in Unicode's composed form, NFC, in pieces. A long text is cut before ASCII
    characters, because no character before an ASCII character composes with it.
    """
    held: list[str] = []
    for piece in text_pieces(text):
        if boundary := _ASCII.search(piece):
            yield unicodedata.normalize("NFC", "".join([*held, piece[: boundary.start()]]))
            held, piece = [], piece[boundary.start() :]
        held.append(piece)
    yield unicodedata.normalize("NFC", "".join(held))


def _batch_records(records: Iterable[Record]) -> Iterator[list[Record]]:
    return batches_by_size(records, lambda record: len(record.text or ""), _BATCH_CHARACTERS)


def stored_part_keys(store: Store) -> tuple[list[str], list[str]]:
    """Returns (keys of the parts that have a manifest, keys of the parts that have tokens but no
    manifest), both sorted.
    """
    manifests, tokens = (
        [
            name.rpartition("/")[2].removesuffix(f".{suffix}")
            for name in store.names_matching(pattern)
        ]
        for suffix, pattern in ((s, f"tokens/*/*.{s}") for s in ("json", "tokens"))
    )
    return manifests, sorted(set(tokens) - set(manifests))


def open_part_tokens(store: Store, part: TokenizedPart) -> tuple[np.ndarray, np.ndarray]:
    """Opens the file of a part's tokens.

    Returns:
      (tokens [part.tokens], as a memory map; table of `DOCUMENT` entries [part.documents]).

    Raises:
      UserError: the file is missing, or its bytes do not have the digest in the manifest.
    """
    path = store.path(_file_name_in_store(part.key, "tokens"))
    manifest = store.path(_file_name_in_store(part.key, "json"))
    remedy = f"delete {manifest} to have it prepared again"
    if not path.exists():
        raise UserError(f"{path} is missing: {remedy}")
    if path.stat().st_size != part.size:
        raise UserError(
            f"{path} is damaged (it has {path.stat().st_size} bytes instead of {part.size}): "
            f"{remedy}"
        )
    # The memory map of a downloaded file stays valid after its name is gone.
    with store.local_copy_of(_file_name_in_store(part.key, "tokens")) as local:
        if digests.sha256_file(local) != part.content:
            raise UserError(f"{path} is damaged (its bytes have another digest): {remedy}")
        if not part.documents:
            return np.zeros(0, part.dtype), np.zeros(0, DOCUMENT)
        dtype = np.dtype(part.dtype).newbyteorder("<")
        tokens = np.memmap(local, dtype, "r", shape=(part.tokens,))
        table = np.fromfile(local, DOCUMENT, offset=part.tokens * dtype.itemsize)
        return tokens, table


def open_part_weights(store: Store, part: TokenizedPart) -> np.ndarray | None:
    """Opens the loss weights of a part's tokens, float32 [part.tokens], as a memory map. Returns
    None if the part has no file of weights: all weights are 1.

    Raises:
      UserError: the file is missing, or its bytes do not have the digest in the manifest.
    """
    if not part.weights:
        return None
    path = store.path(_file_name_in_store(part.key, "weights"))
    remedy = f"delete {store.path(_file_name_in_store(part.key, 'json'))} to have it prepared again"
    if not path.exists():
        raise UserError(f"{path} is missing: {remedy}")
    with store.local_copy_of(_file_name_in_store(part.key, "weights")) as local:
        if digests.sha256_file(local) != part.weights:
            raise UserError(f"{path} is damaged (its bytes have another digest): {remedy}")
        if not part.tokens:
            return np.zeros(0, np.float32)
        return np.memmap(local, "<f4", "r", shape=(part.tokens,))
