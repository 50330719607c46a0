"""Packs pieces of documents into rows of T tokens by best fit, with a bounded buffer.

A document of at most T tokens is cut only where a row would otherwise end with much padding; a
longer document is cut into pieces of T tokens. The method is best-fit packing after Ding et al.,
"Fewer Truncations Improve Language Modeling" (2024), https://arxiv.org/abs/2404.10830.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# Largest share of a row that may be padding. If more is left, a document is cut to fill the row.
_LARGEST_GAP = 1 / 32
_BUFFERED_TOKENS = 1 << 24


class Documents(NamedTuple):
    """Consecutive documents of one part: D documents with N tokens."""

    # [N], one document after the other, each with its end token; of any dtype (`rows.token_dtype`)
    tokens: np.ndarray
    ends: np.ndarray  # int64 [D], number of tokens up to the end of each document, inclusive
    part_index: int  # which part of the source they come from
    record_indices: np.ndarray  # int64 [D], index of each document's record in its part, from 0


class Rows(NamedTuple):
    """R packed rows of P pieces. A piece is a run of tokens of one document. The pieces of a row
    have at most T tokens in total.
    """

    tokens: np.ndarray  # [N]; each piece is a slice of this array
    row_ends_in_pieces: np.ndarray  # int64 [R], number of pieces up to the end of each row
    piece_starts: np.ndarray  # int64 [P], index in `tokens` of each piece's first token
    piece_lengths: np.ndarray  # int64 [P], number of tokens of each piece, 1 … T
    part_indices: np.ndarray  # int64 [P], `Documents.part_index` of each piece's document
    record_indices: np.ndarray  # int64 [P], `Documents.record_indices` of each piece's document


class _Pieces(NamedTuple):
    """P pieces in the buffer. `starts` and `lengths` are what `Rows` calls `piece_starts` and
    `piece_lengths`; `part_indices` and `record_indices` mean the same as in `Rows`.
    """

    starts: np.ndarray
    lengths: np.ndarray
    part_indices: np.ndarray
    record_indices: np.ndarray
    is_whole_document: np.ndarray  # bool [P]


class Packer:
    """Collects documents and yields packed rows, in an order that depends on the documents and
    the seed alone.

    Args:
      row_length: T, number of tokens of a row.
      seed: seed of the order of pieces and rows.
      buffered_tokens: number of tokens that are collected before rows are packed; at least 16 T.
      keep_whole: whether every document is one piece. If True, no document may have more than T
        tokens, and rows may end with more padding than if documents are cut.

    Attributes:
      cut_documents: number of documents that were split into more than one piece.
    """

    def __init__(
        self,
        row_length: int,
        seed: int,
        buffered_tokens: int = _BUFFERED_TOKENS,
        keep_whole: bool = False,
    ):
        self._row_length = row_length
        self._keep_whole = keep_whole
        self._random = np.random.default_rng(seed)
        self._capacity = max(buffered_tokens, 16 * row_length)
        self._tokens: list[np.ndarray] = []  # the buffered tokens, in several arrays
        # The pieces of these tokens. Their `starts` count tokens over all arrays of `_tokens`.
        self._pieces: list[_Pieces] = []
        self._buffered = 0
        self.cut_documents = 0

    def add(self, documents: Documents) -> Iterator[Rows]:
        """Adds documents. Whenever enough tokens are buffered, they are packed, and their rows are
        yielded.
        """
        first = 0
        while first < len(documents.ends):
            start = int(documents.ends[first - 1]) if first else 0
            # The rows are packed as soon as one document makes the buffer full.
            full = start + self._capacity - self._buffered
            stop = min(int(np.searchsorted(documents.ends, full)) + 1, len(documents.ends))
            end = int(documents.ends[stop - 1])
            self._buffer_documents(
                Documents(
                    documents.tokens[start:end],
                    documents.ends[first:stop] - start,
                    documents.part_index,
                    documents.record_indices[first:stop],
                )
            )
            if self._buffered >= self._capacity:
                yield self._pack_buffer(is_last=False)
            first = stop

    def finish(self) -> Iterator[Rows]:
        """Yields the rows of all documents that are still buffered."""
        if self._buffered:
            yield self._pack_buffer(is_last=True)

    def _buffer_documents(self, documents: Documents) -> None:
        """Buffers documents, cut into pieces of at most T tokens."""
        sizes = np.diff(documents.ends, prepend=0)
        counts = -(-sizes // self._row_length)  # number of pieces of each document
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        before = number * self._row_length  # tokens of the document before each piece
        whole = counts == 1
        self.cut_documents += int((~whole).sum())
        self._pieces.append(
            _Pieces(
                starts=self._buffered + np.repeat(documents.ends - sizes, counts) + before,
                lengths=np.minimum(np.repeat(sizes, counts) - before, self._row_length),
                part_indices=np.full(len(number), documents.part_index),
                record_indices=np.repeat(documents.record_indices, counts),
                is_whole_document=np.repeat(whole, counts),
            )
        )
        self._tokens.append(documents.tokens)
        self._buffered += len(documents.tokens)

    def _pack_buffer(self, is_last: bool) -> Rows:
        """Packs all buffered pieces and returns the rows in random order. Unless `is_last`, the
        pieces of the last row stay in the buffer: the last row may have a large gap, because no
        pieces were left to fill it.
        """
        tokens = np.concatenate(self._tokens)
        pieces = _Pieces(*map(np.concatenate, zip(*self._pieces, strict=True)))
        pieces, ends = self._pack_pieces(pieces)
        self._tokens, self._pieces, self._buffered = [], [], 0
        if not is_last:
            first = int(ends[-2]) if len(ends) > 1 else 0
            kept = _Pieces(*(column[first:] for column in pieces))
            pieces, ends = _Pieces(*(column[:first] for column in pieces)), ends[:-1]
            self._tokens = [
                tokens[start : start + length]
                for start, length in zip(kept.starts.tolist(), kept.lengths.tolist(), strict=True)
            ]
            self._tokens = [np.concatenate(self._tokens)]  # copies them
            self._buffered = len(self._tokens[0])
            self._pieces = [kept._replace(starts=np.cumsum(kept.lengths) - kept.lengths)]
        order = self._random.permutation(len(ends))
        sizes = np.diff(ends, prepend=0)
        new_ends = np.cumsum(sizes[order])
        shift = (ends - sizes)[order] - (new_ends - sizes[order])
        at = np.arange(len(pieces.starts)) + np.repeat(shift, sizes[order])
        return Rows(tokens, new_ends, *(column[at] for column in pieces[:4]))

    def _pack_pieces(self, pieces: _Pieces) -> tuple[_Pieces, np.ndarray]:
        """Packs pieces into rows.

        Returns:
          (the pieces in the order of the rows, some of them cut in two; number of pieces up to the
          end of each row, int64 [R]).
        """
        # The pieces are shuffled, so that the order of equally long pieces is random.
        order = self._random.permutation(len(pieces.lengths))
        # A piece of T tokens is a row of its own. Best fit takes the longest piece first, and of
        # equally long pieces the last.
        fills_row = pieces.lengths[order] == self._row_length
        full, short = order[fills_row][::-1], order[~fills_row]
        packed, ends = self._best_fit(_Pieces(*(column[short] for column in pieces)))
        columns = (np.concatenate([c[full], p]) for c, p in zip(pieces, packed, strict=True))
        return _Pieces(*columns), np.concatenate([1 + np.arange(len(full)), len(full) + ends])

    def _best_fit(self, pieces: _Pieces) -> tuple[_Pieces, np.ndarray]:
        """Packs pieces of fewer than T tokens into rows by best fit. Returns the same as
        `_pack_pieces`.
        """
        starts, lengths, whole = (
            column.tolist() for column in (pieces.starts, pieces.lengths, pieces.is_whole_document)
        )
        # A piece that is cut off another one is appended, and refers to the index in `pieces`.
        parents = list(range(len(lengths)))
        pool = _PiecesByLength(lengths)
        order, ends = [], []
        while pool:
            row = []
            gap = self._row_length
            while gap and pool:
                piece = pool.pop_longest(gap)
                if piece is None:
                    if self._keep_whole or gap <= _LARGEST_GAP * self._row_length:
                        break
                    piece = pool.pop_longest(self._row_length)
                    self.cut_documents += whole[piece]
                    whole[piece] = False
                    parents.append(parents[piece])
                    starts.append(starts[piece] + gap)
                    lengths.append(lengths[piece] - gap)
                    whole.append(False)
                    lengths[piece] = gap
                    pool.push(len(lengths) - 1, lengths[-1])
                row.append(piece)
                gap -= lengths[piece]
            if len(row) > 1:
                row = [row[i] for i in self._random.permutation(len(row)).tolist()]
            order += row
            ends.append(len(order))
        at = np.array(order, np.int64)
        parent = np.array(parents, np.int64)[at]
        packed = _Pieces(
            starts=np.array(starts, np.int64)[at],
            lengths=np.array(lengths, np.int64)[at],
            part_indices=pieces.part_indices[parent],
            record_indices=pieces.record_indices[parent],
            is_whole_document=np.array(whole, bool)[at],
        )
        return packed, np.array(ends, np.int64)


class _PiecesByLength:
    """Pieces sorted by length. Finding the longest piece of at most n tokens takes logarithmic
    time.

    Args:
      lengths: number of tokens of each piece.
    """

    def __init__(self, lengths: list[int]):
        self._by_length: dict[int, list[int]] = {}
        for piece, length in enumerate(lengths):
            self._by_length.setdefault(length, []).append(piece)
        self._lengths = sorted(self._by_length)

    def __len__(self) -> int:
        return len(self._lengths)

    def push(self, piece: int, length: int) -> None:
        if length not in self._by_length:
            self._by_length[length] = []
            bisect.insort(self._lengths, length)
        self._by_length[length].append(piece)

    def pop_longest(self, at_most: int) -> int | None:
        at = bisect.bisect_right(self._lengths, at_most) - 1
        if at < 0:
            return None
        length = self._lengths[at]
        piece = self._by_length[length].pop()
        if not self._by_length[length]:
            del self._by_length[length], self._lengths[at]
        return piece
