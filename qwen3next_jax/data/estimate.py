"""Estimates the size of a source from its first documents, for a dry run."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from qwen3next_jax.data import readers
from qwen3next_jax.data.packing import Documents
from qwen3next_jax.data.readers import BadRecords
from qwen3next_jax.data.row_groups import (
    cut_conversations_to_row,
    describe_long_conversations,
    with_loss_weights,
)
from qwen3next_jax.data.sources import Source
from qwen3next_jax.data.tokenized_parts import TokenizeJob, encoded_documents
from qwen3next_jax.data.tokens import Tokenizer

_SAMPLE_BYTES = 1 << 20  # of files


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The size of a source, extrapolated from its first documents.

    Attributes:
      tokens: the number of tokens.
      documents: the number of documents.
      long_conversation_notes: for each row length, a text that says how many of the source's first
        conversations are longer than a row; "" if none is longer.
    """

    tokens: float
    documents: float
    long_conversation_notes: tuple[str, ...] = ()


def estimate_size(
    source: Source, tokenizer: Tokenizer, row_lengths: Sequence[int] = ()
) -> Estimate:
    """Estimates the size of a source. Reads about the first megabyte of the source's files, or more
    if the first document is longer.

    Raises:
      UserError: the documents cannot be read, or the source holds no document.
    """
    tokens = documents = size = 0
    long: tuple[str, ...] = ()
    counts: collections.Counter[str] = collections.Counter()
    for file, part in ((f, part) for f in source.files for part in readers.file_parts(f)):
        job = TokenizeJob(file, part, source.text_field, chat_format=source.chat_format)
        bad = BadRecords(source.on_bad_text, source.bad_records)
        position = 0
        for batch in encoded_documents(job, tokenizer, bad):
            position = batch.bytes_read
            tokens += sum(len(piece) for one in batch.documents for piece in one.token_pieces)
            documents += len(batch.documents)
            if batch.documents and source.chat_format and not long:
                long = tuple(
                    _describe_long_conversations(batch.documents, tokenizer, n) for n in row_lengths
                )
            if documents and size + position >= _SAMPLE_BYTES:
                break
        counts += bad.counts
        size += position
        if documents and size >= _SAMPLE_BYTES:
            break
    if not documents:
        raise readers.no_text_error(source, counts)
    factor = source.size / max(size, 1)
    return Estimate(tokens * factor, documents * factor, long)


def _describe_long_conversations(
    conversations: Sequence, tokenizer: Tokenizer, row_length: int
) -> str:
    """Returns a text that says how many of `conversations` are longer than a row; "" if none is
    longer.
    """
    tokens = [with_loss_weights(c.token_pieces[0], c.loss_weights) for c in conversations]
    ends = np.cumsum([len(own) for own in tokens])
    documents = Documents(np.concatenate(tokens), ends, 0, np.zeros_like(ends))
    _, counts = cut_conversations_to_row(documents, row_length, tokenizer)
    fit = describe_long_conversations(counts, row_length)
    return f"; of the first ones, {fit}" if fit else ""
