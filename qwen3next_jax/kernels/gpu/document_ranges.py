"""Computes the offset and the length of each document of packed rows, which cuDNN's attention takes
(`cudnn.py`).

cuDNN sees R rows of L tokens with at most M documents each. However short the documents are, cuDNN
plans the work (in the backward pass also the memory) of R · M documents of L tokens. A row of T
tokens may have T documents. With L = M = T, cuDNN would plan the work of T · T tokens for each row,
which is far too much.

To plan less work, documents are divided by their length into classes (`length_classes`), and each
class is a call of its own. The call of a class reshapes the arrays to rows of L tokens, where L is
the greatest length in the class. A document may continue in the next row of L tokens, which follows
in memory. Since the documents of a class have similar lengths, few documents begin in one row of L
tokens. So M, the largest number of documents of a row, is small for all data.

B batch, T tokens of a row, R rows of L tokens with R · L = B · T, M documents of a row of L tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Documents of at most this many tokens are in no class.
SHORT = 64
_RATIO = 4  # the longest length of a class divided by the longest length of the next class


class LengthClass(NamedTuple):
    """The documents of more than `longer_than` and at most `longest` tokens."""

    longest: int
    longer_than: int

    @property
    def max_documents_per_row(self) -> int:
        """M, the largest number of documents that can begin among `longest` consecutive tokens; at
        least 2, because cuDNN takes no offsets for a single document. The first tokens of two
        documents are at least longer_than + 1 tokens apart.
        """
        return max(2, -(-self.longest // (self.longer_than + 1)))


class DocumentRanges(NamedTuple):
    """The documents of one call.

    Attributes:
      lengths: int32 [R, M], number of tokens of each document, in order; -1 after the last
        document.
      starts_in_row: int32 [R, M + 1], index in its row of each document's first token; -1 after the
        last document of the row, and in the last column.
      flat_starts: int32 [R · M], the first token of each document of all rows, in order, as an
        index among all R · L tokens; 0 after the last document.
      flat_lengths: int32 [R · M], number of tokens of each document of all rows; 0 after the last
        document.
      covered: bool [B, T], whether a token belongs to one of the documents in `lengths`.
      document_of_token: int32 [B, T], index in `flat_starts` of the document of a covered token.
      position_in_document: int32 [B, T], position of a covered token in its document.
    """

    lengths: jax.Array
    starts_in_row: jax.Array
    flat_starts: jax.Array
    flat_lengths: jax.Array
    covered: jax.Array
    document_of_token: jax.Array
    position_in_document: jax.Array


def length_classes(length: int) -> tuple[LengthClass, ...]:
    """Returns the classes of length for documents of more than SHORT tokens in rows of `length`
    tokens, the longest class first. The longest length of each class divides `length`.
    """
    classes, longest = [], length
    while longest > SHORT:
        longer_than = SHORT if longest % _RATIO else max(SHORT, longest // _RATIO)
        classes.append(LengthClass(longest, longer_than))
        longest = longer_than
    return tuple(classes)


def starts_and_lengths_by_token(segment_ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two arrays int32 [B, T] about the document of each token: the index in the row of the
    document's first token, and the number of tokens of the document (0 for padding).

    Args:
      segment_ids_BT: [B, T], which do not decrease along T; 0 marks padding at the end.
    """
    t = segment_ids_BT.shape[1]
    position = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), segment_ids_BT.shape)
    edge = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    is_first = jnp.pad(edge, ((0, 0), (1, 0)), constant_values=True)
    is_last = jnp.pad(edge, ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(is_first, position, 0), axis=1)
    end = jax.lax.cummin(jnp.where(is_last, position + 1, t), axis=1, reverse=True)
    return first, jnp.where(segment_ids_BT > 0, end - first, 0)


def ranges_of_class(first_BT: jax.Array, length_BT: jax.Array, of: LengthClass) -> DocumentRanges:
    """Returns the documents of one class.

    Args:
      first_BT, length_BT: the results of `starts_and_lengths_by_token`.
      of: the class. Its longest length divides T.
    """
    position = jnp.arange(first_BT.shape[1], dtype=jnp.int32) - first_BT
    covered = (length_BT > of.longer_than) & (length_BT <= of.longest)
    begins = (covered & (position == 0)).reshape(-1, of.longest)
    return _ranges_that_begin_at(
        begins, length_BT.reshape(begins.shape), covered, position, of.max_documents_per_row
    )


def ranges_of_shared_documents(
    segment_ids_BT: jax.Array, kv_segment_ids_BS: jax.Array
) -> tuple[DocumentRanges, DocumentRanges]:
    """Returns the documents that have both queries and keys, if the keys are tokens of the row
    before the queries. At most one document of a row has both queries and keys: the last document
    of the keys, if the first query belongs to it. The first result gives the documents' ranges
    among the queries, the second result among the keys.
    """
    last_B1 = jnp.max(kv_segment_ids_BS, axis=1, keepdims=True)  # padding at the end has the id 0
    shared_B1 = (segment_ids_BT[:, :1] == last_B1) & (last_B1 > 0)

    def ranges(ids):
        covered = (ids == last_B1) & shared_B1
        first, length = starts_and_lengths_by_token(ids)
        position = jnp.arange(ids.shape[1], dtype=jnp.int32) - first
        return _ranges_that_begin_at(
            covered & (position == 0), length, covered, position, max_documents=2
        )

    return ranges(segment_ids_BT), ranges(kv_segment_ids_BS)


def _ranges_that_begin_at(
    begins_RL, length_RL, covered, position, max_documents: int
) -> DocumentRanges:
    """Returns the documents that begin where `begins_RL` is True, at most `max_documents` in each
    row. At the first token of a document, `length_RL` has its length.
    """
    rows, width = begins_RL.shape
    row = jnp.broadcast_to(jnp.arange(rows)[:, None], begins_RL.shape)
    column = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), begins_RL.shape)
    index_in_row = jnp.where(begins_RL, jnp.cumsum(begins_RL, axis=1) - 1, max_documents)
    none = jnp.full((rows, max_documents), -1, jnp.int32)
    starts_in_row = none.at[row, index_in_row].set(column, mode="drop")
    lengths = none.at[row, index_in_row].set(length_RL, mode="drop")
    document = (jnp.cumsum(begins_RL.reshape(-1)) - 1).astype(jnp.int32)
    index_in_batch = jnp.where(begins_RL.reshape(-1), document, rows * max_documents)
    empty = jnp.zeros(rows * max_documents, jnp.int32)
    return DocumentRanges(
        lengths=lengths,
        starts_in_row=jnp.pad(starts_in_row, ((0, 0), (0, 1)), constant_values=-1),
        flat_starts=empty.at[index_in_batch].set(
            jnp.arange(rows * width, dtype=jnp.int32), mode="drop"
        ),
        flat_lengths=empty.at[index_in_batch].set(length_RL.reshape(-1), mode="drop"),
        covered=covered,
        document_of_token=document.reshape(covered.shape),
        position_in_document=position,
    )
