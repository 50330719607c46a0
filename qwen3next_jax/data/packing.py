"""Packs pieces of documents into rows of T tokens by best fit, with a bounded buffer.

A document of at most T tokens is cut only where a row would otherwise end with much padding; a
longer document is cut into pieces of T tokens. The method is best-fit packing after Ding et al.,
"Fewer Truncations Improve Language Modeling" (2024), https://arxiv.org/abs/2404.10830.
"""

import bisect
import dataclasses
from collections.abc import Iterator

import numpy as np

# Largest share of a row that may be padding. If more is left, a document is cut to fill the row.
_LARGEST_GAP = 1 / 32
_BUFFERED_TOKENS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of tokens of one document."""

    tokens: np.ndarray  # int32 [n], 1 ≤ n ≤ T
    file: int  # `file` of `Packer.add`
    record: int  # `record` of `Packer.add`
    whole: bool  # whether the piece is a whole document

    def cut(self, length: int) -> tuple["Piece", "Piece"]:
        """Returns two pieces: the first `length` tokens, and the tokens after them."""
        return (
            dataclasses.replace(self, tokens=self.tokens[:length], whole=False),
            dataclasses.replace(self, tokens=self.tokens[length:], whole=False),
        )


Row = list[Piece]  # the pieces of one row in order, at most T tokens in total


class Packer:
    """Collects documents and yields packed rows, in an order that depends on the documents and
    the seed alone.

    Args:
      row_length: T, number of tokens of a row.
      seed: seed of the order of pieces and rows.
      buffered_tokens: number of tokens that are collected before rows are packed; at least 16 T.

    Attributes:
      cut_documents: number of documents that were split into more than one piece.
    """

    def __init__(self, row_length: int, seed: int, buffered_tokens: int = _BUFFERED_TOKENS):
        self._row_length = row_length
        self._random = np.random.default_rng(seed)
        self._capacity = max(buffered_tokens, 16 * row_length)
        self._pieces: list[Piece] = []
        self._buffered = 0
        self.cut_documents = 0

    def add(self, tokens: np.ndarray, file: int, record: int) -> Iterator[Row]:
        """Adds one document. Packs and yields rows when enough tokens are buffered.

        Args:
          tokens: int [n], the document's tokens with its end token.
          file: where the document comes from (the index of a unit, or of a source file in format
            1); the pieces keep it.
          record: number of the document's record there; the pieces keep it.
        """
        whole = len(tokens) <= self._row_length
        self.cut_documents += not whole
        for start in range(0, len(tokens), self._row_length):
            self._pieces.append(
                Piece(tokens[start : start + self._row_length], file, record, whole)
            )
        self._buffered += len(tokens)
        if self._buffered >= self._capacity:
            rows = self._pack()
            last = rows.pop()  # no pieces were left to fill it: the only row with such a gap
            self._pieces = last
            self._buffered = sum(len(piece.tokens) for piece in last)
            yield from self._shuffled(rows)

    def finish(self) -> Iterator[Row]:
        """Yields the rows of all documents that are still buffered."""
        rows = self._pack()
        self._pieces = []
        self._buffered = 0
        yield from self._shuffled(rows)

    def _shuffled(self, items: list) -> list:
        return [items[i] for i in self._random.permutation(len(items))]

    def _pack(self) -> list[Row]:
        # The pieces are shuffled, so that the order of equally long pieces is random.
        pool = _Pool(self._shuffled(self._pieces))
        rows = []
        while pool:
            row = []
            gap = self._row_length
            while gap and pool:
                piece = pool.pop_longest(gap)
                if piece is None:
                    if gap <= _LARGEST_GAP * self._row_length:
                        break
                    longest = pool.pop_longest(self._row_length)
                    self.cut_documents += longest.whole
                    piece, rest = longest.cut(gap)
                    pool.push(rest)
                row.append(piece)
                gap -= len(piece.tokens)
            rows.append(self._shuffled(row))
        return rows


class _Pool:
    """Pieces sorted by length. Finding the longest piece of at most n tokens takes logarithmic
    time.
    """

    def __init__(self, pieces: list[Piece]):
        self._by_length: dict[int, list[Piece]] = {}
        self._lengths: list[int] = []  # ascending
        for piece in pieces:
            self.push(piece)

    def __len__(self) -> int:
        return len(self._lengths)

    def push(self, piece: Piece) -> None:
        n = len(piece.tokens)
        if n not in self._by_length:
            self._by_length[n] = []
            bisect.insort(self._lengths, n)
        self._by_length[n].append(piece)

    def pop_longest(self, at_most: int) -> Piece | None:
        at = bisect.bisect_right(self._lengths, at_most) - 1
        if at < 0:
            return None
        n = self._lengths[at]
        piece = self._by_length[n].pop()
        if not self._by_length[n]:
            del self._by_length[n], self._lengths[at]
        return piece
