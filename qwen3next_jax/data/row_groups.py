"""Packs tokenized parts into rows: a folder of shards for each group of consecutive parts.

The folder `rows/<key>/` holds the file `metadata.json` and ArrayRecord shards of training and
held-out rows; the shards have checksums. The key is a digest of the parts' contents and of the
recipe, so a group is packed again only if its parts or the recipe change.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError, short_repr
from qwen3next_jax.data import store as stores
from qwen3next_jax.data.packing import Documents, Packer, Rows
from qwen3next_jax.data.rows import RowWriter, Shard, shard_name, token_dtype
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.tokenized_parts import TokenizedPart, open_part_tokens, open_part_weights
from qwen3next_jax.data.tokens import Tokenizer

_FORMAT = 3  # raise it when the same parts no longer give the same rows, or the same metadata
_WHOLE_FORMAT = 2  # the same for parts whose documents are kept whole
METADATA = "metadata.json"
TRAIN, HELDOUT = "train", "heldout"
# A group ends with the part at which it reaches this number of tokens. Several workers can pack
# groups at once, and a file that is added at the end of a source changes only the last group.
_GROUP_TOKENS = 1 << 28
_TOKENS_AT_ONCE = 1 << 20  # tokens of a part that are handed to the packers at once


@dataclasses.dataclass(frozen=True)
class RowRecipe:
    """The settings that, together with the tokens, determine the rows.

    Attributes:
      row_length: T, number of tokens of a row.
      heldout_fraction: share of the documents that are held out.
      seed: seed of the order of pieces and rows.
    """

    row_length: int
    heldout_fraction: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts over the rows of one split of a source. `ignored`, `dropped`, `left_out` and `endless`
    are 0 unless the source has conversations.
    """

    documents: int = 0
    # documents that were split into more than one piece; conversations that are longer than a row
    cut_documents: int = 0
    text_bytes: int = 0  # of UTF-8 text, without that of the `ignored` tokens
    tokens: int = 0  # including one end-of-document token per document
    rows: int = 0
    padding: int = 0  # tokens of padding
    ignored: int = 0  # tokens with the loss weight 0
    # tokens that are not in the rows: the ends of long conversations, and all of the `left_out`
    dropped: int = 0
    # conversations that are in no row, because no token of theirs that fits counts in the loss
    left_out: int = 0
    # whole conversations in which no end token counts in the loss
    endless: int = 0

    def __add__(self, other: "Statistics") -> "Statistics":
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return Statistics(*(a + b for a, b in zip(mine, others, strict=True)))


@dataclasses.dataclass(frozen=True)
class DocumentInBothSplits:
    """The document of a small source that is divided between the training and the held-out split,
    whatever its hash says, so that neither split is empty.

    Attributes:
      part_index: index of the document's part among the parts of the source that hold documents.
        For `Group.document_in_both_splits`, the index counts from the first part of the group.
      document_index: index of the document in its part.
      train_token_count: the first `train_token_count` tokens of the document, not counting the end
        token, are trained on; all later tokens are held out. `train_token_count` may be 0 or the
        number of all tokens.
      train_byte_count: number of bytes of UTF-8 text that the first `train_token_count` tokens
        stand for.
    """

    part_index: int
    document_index: int
    train_token_count: int
    train_byte_count: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Consecutive tokenized parts of a source that are packed together."""

    first_part: int  # index of the first part, among the parts of the source that hold documents
    parts: tuple[TokenizedPart, ...]
    document_in_both_splits: (
        DocumentInBothSplits | None
    )  # its `part_index` is the index in the group
    # whether a document longer than a row loses its end instead of being divided between rows
    truncate_documents: bool = False

    @property
    def token_count(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def token_itemsize(self) -> int:
        """The number of bytes of one token."""
        return np.dtype(self.parts[0].dtype).itemsize

    @property
    def has_loss_weights(self) -> bool:
        """Whether a part has loss weights."""
        return any(part.weights for part in self.parts)


def group_parts(
    parts: Sequence[TokenizedPart],
    divided: DocumentInBothSplits | None,
    truncate_documents: bool = False,
) -> list[Group]:
    """Returns the groups of a source's parts, in the order of the parts.

    Args:
      parts: the parts of the source that hold documents.
      divided: the divided document of the source; None if there is none.
      truncate_documents: as in `Group`.
    """
    found, first, tokens = [], 0, 0
    for i, part in enumerate(parts):
        tokens += part.tokens
        if tokens >= _GROUP_TOKENS or i + 1 == len(parts):
            inside = divided is not None and first <= divided.part_index <= i
            own = (
                dataclasses.replace(divided, part_index=divided.part_index - first)
                if inside
                else None
            )
            found.append(Group(first, tuple(parts[first : i + 1]), own, truncate_documents))
            first, tokens = i + 1, 0
    return found


def group_key(group: Group, recipe: RowRecipe) -> str:
    """Returns a digest of everything that determines a group's rows, 20 hexadecimal digits."""
    parts = {
        "format": _FORMAT,
        # the parts; another name would give the rows of every run another digest
        "units": [part.identity for part in group.parts],
        "divided": group.document_in_both_splits
        and dataclasses.astuple(group.document_in_both_splits),
        **dataclasses.asdict(recipe),
        **({"keep_whole": _WHOLE_FORMAT} if group.truncate_documents else {}),
    }
    return digests.sha256_json(parts)[:20]


def group_folder_name(key: str) -> str:
    return f"rows/{key}"


def write_group_rows(
    group: Group,
    recipe: RowRecipe,
    store: Store,
    tokenizer: Tokenizer,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes the rows of a group, unless they exist already.

    Args:
      group: the parts.
      recipe: the recipe of the rows.
      store: where the parts are, and where the rows are written.
      tokenizer: the tokenizer of the parts.
      progress: called with the number of tokens packed so far.

    Raises:
      UserError: a part is damaged, or the folder cannot be written to.
    """
    key = group_key(group, recipe)
    if store.exists(group_folder_name(key)):
        return
    store.path("rows").mkdir(parents=True, exist_ok=True)
    with store.new_folder(group_folder_name(key)) as directory:
        length = recipe.row_length
        dtype = np.dtype(group.parts[0].dtype)
        stored = token_dtype(dtype.name, group.has_loss_weights)
        writers = {side: RowWriter(directory, side, stored, length) for side in (TRAIN, HELDOUT)}
        packers = {
            side: Packer(length, recipe.seed, keep_whole=group.truncate_documents)
            for side in (TRAIN, HELDOUT)
        }
        counts = {side: Statistics() for side in (TRAIN, HELDOUT)}

        def write(side: str, packed: Iterable[Rows]) -> None:
            for rows in packed:
                writers[side].write(rows)
                padding = length * len(rows.row_ends_in_pieces) - int(rows.piece_lengths.sum())
                counts[side] += Statistics(rows=len(rows.row_ends_in_pieces), padding=padding)

        done = 0
        for side, documents, text_bytes, is_part in _documents_of_group(group, recipe, store):
            done += len(documents.tokens)
            if group.truncate_documents:
                documents, found = cut_conversations_to_row(documents, length, tokenizer)
                # A part of a divided conversation may lack its end, which the other part has.
                counts[side] += dataclasses.replace(found, endless=0) if is_part else found
            else:
                counts[side] += Statistics(
                    documents=len(documents.ends),
                    text_bytes=text_bytes,
                    tokens=len(documents.tokens),
                )
            write(side, packers[side].add(documents))
            progress(done)
        for side, packer in packers.items():
            write(side, packer.finish())
            counts[side] += Statistics(cut_documents=packer.cut_documents)
        shards = {
            side: [dataclasses.asdict(shard) for shard in writer.close()]
            for side, writer in writers.items()
        }
        content = {
            "format": _FORMAT,
            "fingerprint": key,
            "parts": [part.key for part in group.parts],
            "dtype": dtype.name,
            **({"weighted": True} if group.has_loss_weights else {}),
            "rows_per_record": writers[TRAIN].rows_per_chunk,
            **dataclasses.asdict(recipe),
            "statistics": {side: dataclasses.asdict(found) for side, found in counts.items()},
            "shards": shards,
        }
        stores.write_json_with_digest(directory / METADATA, content)


# (split, documents of this split, number of bytes of their UTF-8 text, whether they are a part of
# the divided document)
_Split = tuple[str, Documents, int, bool]


def _documents_of_group(group: Group, recipe: RowRecipe, store: Store) -> Iterator[_Split]:
    """Yields the documents of a group, several at a time. Within a split, the documents keep their
    order.
    """
    for number, part in enumerate(group.parts):
        tokens, table = open_part_tokens(store, part)
        weights = open_part_weights(store, part)
        divided = (
            group.document_in_both_splits
            if group.document_in_both_splits and group.document_in_both_splits.part_index == number
            else None
        )
        ends = table["end"].astype(np.int64)
        edges = [0]
        while edges[-1] < len(table):
            start = int(ends[edges[-1] - 1]) if edges[-1] else 0
            stop = int(np.searchsorted(ends, start + _TOKENS_AT_ONCE))
            edges.append(min(max(stop, edges[-1] + 1), len(table)))
        if divided:
            edges = sorted({*edges, divided.document_index, divided.document_index + 1})
        for first, stop in zip(edges, edges[1:]):
            start = int(ends[first - 1]) if first else 0
            some = table[first:stop]
            end = int(ends[stop - 1])
            own = np.asarray(tokens[start:end])
            if group.has_loss_weights:
                own = with_loss_weights(own, 1 if weights is None else weights[start:end])
            if divided and divided.document_index == first:
                yield from _pieces_of_divided_document(own, some[0], number, divided)
            else:
                yield from _documents_by_split(own, some, start, number, recipe.heldout_fraction)


def cut_conversations_to_row(
    documents: Documents, row_length: int, tokenizer: Tokenizer
) -> tuple[Documents, Statistics]:
    """Cuts conversations to the length of a row: each keeps its first `row_length` tokens. A
    conversation is left out if none of its first `row_length` tokens counts in the loss.

    Args:
      documents: the conversations; their tokens have weights.
      row_length: T, number of tokens of a row.
      tokenizer: the tokenizer of the parts.

    Returns:
      (the conversations that are left, counts over the conversations).
    """
    sizes = np.diff(documents.ends, prepend=0)
    owner = np.repeat(np.arange(len(sizes)), sizes)  # of each token: its conversation
    position = np.arange(len(documents.tokens)) - (documents.ends - sizes)[owner]
    fits = position < row_length
    # The first token of a conversation is not predicted; in the end of a divided one it may count.
    tokens = documents.tokens.copy()
    tokens["weight"][position == 0] = 0
    counts = tokens["weight"] > 0

    def holders(which: np.ndarray) -> np.ndarray:
        return np.bincount(owner[which], minlength=len(sizes)) > 0

    has_target = holders(counts & fits)
    is_cut = sizes > row_length
    stays = fits & has_target[owner]
    lengths = np.minimum(sizes, row_length)[has_target]
    found = Documents(
        tokens[stays],
        np.cumsum(lengths),
        documents.part_index,
        documents.record_indices[has_target],
    )
    ends = holders(counts & (tokens["token"] == tokenizer.eos_id))
    return found, Statistics(
        documents=len(lengths),
        cut_documents=int(is_cut.sum()),
        text_bytes=int(tokenizer.token_byte_counts[tokens["token"][counts & stays]].sum()),
        tokens=len(found.tokens),
        ignored=int((stays & ~counts).sum()),
        dropped=int((~stays).sum()),
        left_out=int((~has_target).sum()),
        endless=int((has_target & ~is_cut & ~ends).sum()),
    )


def describe_long_conversations(counts: Statistics, row_length: int) -> str:
    """Returns a phrase about the conversations that are longer than a row of `row_length` tokens;
    "" if no conversation is longer.
    """
    if not counts.dropped:
        return ""
    left_out = ""
    if counts.left_out:
        left_out = f"; {counts.left_out:,} have no target in it and are left out"
    return (
        f"{counts.cut_documents:,} of {counts.documents + counts.left_out:,} conversations are "
        f"longer than a row of {row_length:,} tokens{left_out}; {counts.dropped:,} tokens are "
        "dropped"
    )


def with_loss_weights(tokens: np.ndarray, weights: np.ndarray | int) -> np.ndarray:
    """Returns tokens and their loss weights as one array of `rows.token_dtype`."""
    found = np.empty(len(tokens), token_dtype(tokens.dtype.name, True))
    found["token"], found["weight"] = tokens, weights
    return found


def _documents_by_split(
    tokens: np.ndarray, table: np.ndarray, start: int, part: int, heldout_fraction: float
) -> Iterator[_Split]:
    """Yields consecutive documents of a part: first the documents to train on, then the held-out
    ones.

    Args:
      tokens: the documents' tokens.
      table: the documents' entries, of the dtype `tokenized_parts.DOCUMENT`.
      start: number of the part's tokens before the first of these documents.
      part: index of the part in its group.
      heldout_fraction: as in `RowRecipe`.
    """
    ends = table["end"].astype(np.int64) - start
    sizes = np.diff(ends, prepend=0)
    is_heldout = table["hash"] / 2**64 < heldout_fraction
    # The documents are copied in runs of consecutive documents of one split.
    edges = [0, *(1 + np.flatnonzero(np.diff(is_heldout))).tolist(), len(table)]
    at = np.concatenate([[0], ends])[edges].tolist()
    runs = [tokens[a:b] for a, b in zip(at, at[1:])]
    for split, chosen in ((TRAIN, ~is_heldout), (HELDOUT, is_heldout)):
        if chosen.any():
            first = 0 if chosen[0] else 1
            documents = Documents(
                np.concatenate(runs[first::2]),
                np.cumsum(sizes[chosen]),
                part,
                table["record"][chosen].astype(np.int64),
            )
            yield split, documents, int(table["bytes"][chosen].sum()), False


def _pieces_of_divided_document(
    tokens: np.ndarray, entry: np.void, part: int, divided: DocumentInBothSplits
) -> Iterator[_Split]:
    """Yields the two pieces of a divided document.

    Args:
      tokens: the document's tokens, with the end token.
      entry: the document's entry, of the dtype `tokenized_parts.DOCUMENT`.
      part: index of the document's part in the group.
      divided: where the document is divided.
    """
    train, heldout = np.split(tokens[:-1], [divided.train_token_count])
    heldout_bytes = int(entry["bytes"]) - divided.train_byte_count
    for split, piece, text_bytes in (
        (TRAIN, train, divided.train_byte_count),
        (HELDOUT, heldout, heldout_bytes),
    ):
        if len(piece):
            with_end = np.append(piece, tokens[-1:])
            records = np.array([entry["record"]], np.int64)
            ends = np.array([len(with_end)], np.int64)
            yield split, Documents(with_end, ends, part, records), text_bytes, True


def read_group_metadata(directory: pathlib.Path) -> dict:
    """Returns the content of `directory`/metadata.json, without its digest.

    Raises:
      UserError: the file is damaged, or was written for a folder with another name.
    """
    try:
        content = Store(directory).read_json(METADATA)
    except (FileNotFoundError, UserError):
        raise UserError(
            f"{directory / METADATA} is damaged: delete {directory} to have it prepared again"
        ) from None
    if content.get("fingerprint") != directory.name:
        raise UserError(
            f"{directory}: it holds, by its {METADATA}, the rows of {content.get('fingerprint')}: "
            "the folder was renamed or copied; give it its name back, or delete it to have the "
            "rows prepared again"
        )
    if fault := _metadata_fault(content):
        raise UserError(
            f"{directory / METADATA} is damaged ({fault}): delete {directory} to have it prepared "
            "again"
        )
    return content


def _metadata_fault(content: dict) -> str:
    """Returns what is wrong with the content of a metadata.json; "" if the content is right. The
    digest of the content has been checked, so a fault comes from another program or from a bug in
    this module.
    """
    for name in ("row_length", "rows_per_record"):
        value = content.get(name)
        if type(value) is not int or not 1 <= value <= _LONGEST:
            return f"{name} = {short_repr(value)}"
    if content.get("dtype") not in ("uint16", "uint32"):
        return f"dtype = {short_repr(content.get('dtype'))}"
    if type(content.get("weighted", False)) is not bool:
        return f"weighted = {short_repr(content['weighted'])}"
    known = {field.name for field in dataclasses.fields(Statistics)}
    for side in (TRAIN, HELDOUT):
        try:
            counts, shards = content["statistics"][side], content["shards"][side]
            rows = [shard["rows"] for shard in shards]
            numbers = [*counts.values(), *rows]
            numbers += [shard[name] for shard in shards for name in ("size", "head")]
            names = [shard["file"] for shard in shards]
            fields = [shard.keys() == _SHARD_FIELDS for shard in shards]
        except (KeyError, TypeError, AttributeError, IndexError):
            return f"no statistics or shards of {side}"
        if not counts.keys() <= known or "rows" not in counts or not all(fields):
            return f"the statistics or shards of {side} have other entries"
        if any(type(number) is not int or not 0 <= number < 2**62 for number in numbers):
            return f"a count of {side} is no number, or too large"
        if names != [shard_name(side, i) for i in range(len(names))]:
            return f"its shards of {side} are {short_repr(names)}"
        if sum(rows) != counts["rows"]:
            return f"{counts['rows']} rows of {side}, {sum(rows)} in its shards"
    return ""


_LONGEST = 1 << 30  # tokens of a row
_SHARD_FIELDS = {field.name for field in dataclasses.fields(Shard)}
