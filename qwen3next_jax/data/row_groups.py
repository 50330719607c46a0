"""Packs units into rows: a folder of shards for each group of consecutive units.

The folder `rows/<key>/` holds ArrayRecord shards of training and held-out rows (their records
carry checksums) and `metadata.json`. The key is a digest of the units' contents and of the recipe,
so a group is packed again only where its units or the recipe changed.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.data import store as stores
from qwen3next_jax.data.packing import Packer, Row
from qwen3next_jax.data.rows import RowWriter
from qwen3next_jax.data.store import Store
from qwen3next_jax.data.units import Unit, open_unit

_FORMAT = 2  # raise it when the same units no longer give the same rows
METADATA = "metadata.json"
TRAIN, HELDOUT = "train", "heldout"
# A group ends with the unit with which it reaches so many tokens. Groups are packed by several
# workers at once; an appended file costs the last one.
_GROUP_TOKENS = 1 << 28


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything besides the tokens that determines the rows."""

    row_length: int
    heldout_fraction: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts over one split of a source."""

    documents: int = 0
    cut_documents: int = 0  # documents that were split into more than one piece
    text_bytes: int = 0  # UTF-8
    tokens: int = 0  # with one end-of-document token per document
    rows: int = 0
    padding: int = 0  # tokens

    def __add__(self, other: "Statistics") -> "Statistics":
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return Statistics(*(a + b for a, b in zip(mine, others, strict=True)))


@dataclasses.dataclass(frozen=True)
class Divided:
    """The document of a small source that is divided between the splits, so that neither is
    empty, whatever its hash.

    Attributes:
      unit, document: which one: index of the unit in the source or group, and in the unit.
      train_tokens: its first tokens, without the end token, which are trained on; the others are
        held out. 0: none of them, all of its tokens: none is held out.
      train_bytes: of UTF-8 text that they stand for.
    """

    unit: int
    document: int
    train_tokens: int
    train_bytes: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Consecutive units of a source that are packed together."""

    first: int  # index of the first unit in the source
    units: tuple[Unit, ...]
    divided: Divided | None  # with the index of the unit in the group

    @property
    def tokens(self) -> int:
        return sum(unit.tokens for unit in self.units)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return np.dtype(self.units[0].dtype).itemsize


def groups(units: Sequence[Unit], divided: Divided | None) -> list[Group]:
    """The groups of a source's units, in the order of the units."""
    found, first, tokens = [], 0, 0
    for i, unit in enumerate(units):
        tokens += unit.tokens
        if tokens >= _GROUP_TOKENS or i + 1 == len(units):
            inside = divided is not None and first <= divided.unit <= i
            own = dataclasses.replace(divided, unit=divided.unit - first) if inside else None
            found.append(Group(first, tuple(units[first : i + 1]), own))
            first, tokens = i + 1, 0
    return found


def group_key(group: Group, recipe: Recipe) -> str:
    """Digest of everything that decides the rows of a group: 20 hexadecimal digits."""
    parts = {
        "format": _FORMAT,
        "units": [unit.content for unit in group.units],
        "divided": group.divided and dataclasses.astuple(group.divided),
        **dataclasses.asdict(recipe),
    }
    return digests.sha256_json(parts)[:20]


def folder_name(key: str) -> str:
    return f"rows/{key}"


def pack_group(
    group: Group, recipe: Recipe, store: Store, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Writes the rows of a group, unless somebody has finished them.

    Args:
      progress: called with the number of tokens packed so far.

    Raises:
      UserError: a unit is damaged, or the folder cannot be written to.
    """
    key = group_key(group, recipe)
    if store.exists(folder_name(key)):
        return
    store.path("rows").mkdir(parents=True, exist_ok=True)
    with store.new_folder(folder_name(key)) as directory:
        length = recipe.row_length
        dtype = np.dtype(group.units[0].dtype)
        writers = {side: RowWriter(directory, side, dtype, length) for side in (TRAIN, HELDOUT)}
        packers = {side: Packer(length, recipe.seed) for side in (TRAIN, HELDOUT)}
        counts = {side: dataclasses.asdict(Statistics()) for side in (TRAIN, HELDOUT)}

        def write(side: str, rows: Iterable[Row]) -> None:
            for row in rows:
                writers[side].write(row)
                counts[side]["rows"] += 1
                counts[side]["padding"] += length - sum(len(piece.tokens) for piece in row)

        done, reported = 0, 0
        for document in _documents(group, recipe, store):
            counts[document.side]["documents"] += 1
            counts[document.side]["text_bytes"] += document.text_bytes
            counts[document.side]["tokens"] += len(document.tokens)
            write(
                document.side,
                packers[document.side].add(document.tokens, document.unit, document.record),
            )
            done += len(document.tokens)
            if done - reported > 1 << 20:
                progress(done)
                reported = done
        for side, packer in packers.items():
            write(side, packer.finish())
            counts[side]["cut_documents"] = packer.cut_documents
        shards = {
            side: [dataclasses.asdict(shard) for shard in writer.close()]
            for side, writer in writers.items()
        }
        content = {
            "format": _FORMAT,
            "fingerprint": key,
            "units": [unit.key for unit in group.units],
            "dtype": dtype.name,
            **dataclasses.asdict(recipe),
            "statistics": counts,
            "shards": shards,
        }
        stores.write_json(directory / METADATA, content)


@dataclasses.dataclass(frozen=True)
class _Document:
    side: str
    tokens: np.ndarray  # with the end token
    text_bytes: int
    unit: int  # index in the group
    record: int  # number in the part that the unit was made of


def _documents(group: Group, recipe: Recipe, store: Store) -> Iterator[_Document]:
    for number, unit in enumerate(group.units):
        tokens, table = open_unit(store, unit)
        start = 0
        for i, (end, hash_, text_bytes, record) in enumerate(table.tolist()):
            side = HELDOUT if hash_ / 2**64 < recipe.heldout_fraction else TRAIN
            document = _Document(side, tokens[start:end], text_bytes, number, record)
            if group.divided and (group.divided.unit, group.divided.document) == (number, i):
                yield from _both_sides(document, group.divided)
            else:
                yield document
            start = end


def _both_sides(document: _Document, divided: Divided) -> Iterator[_Document]:
    end = document.tokens[-1:]
    train, heldout = np.split(document.tokens[:-1], [divided.train_tokens])
    parts = [(TRAIN, train, divided.train_bytes)]
    parts.append((HELDOUT, heldout, document.text_bytes - divided.train_bytes))
    for side, tokens, text_bytes in parts:
        if len(tokens):
            yield dataclasses.replace(
                document, side=side, tokens=np.append(tokens, end), text_bytes=text_bytes
            )


def read_metadata(directory: pathlib.Path) -> dict:
    """The content of `directory`/metadata.json, without its digest.

    Raises:
      UserError: it is damaged, or was written for a folder of another name.
    """
    try:
        content = Store(directory).read_record(METADATA)
    except (FileNotFoundError, UserError):
        raise UserError(
            f"{directory / METADATA} is damaged: delete {directory} to have it prepared again"
        ) from None
    if content.get("fingerprint", directory.name) != directory.name:
        raise renamed(directory, f"the rows of {content['fingerprint']}")
    return content


def renamed(directory: pathlib.Path, holds: str) -> UserError:
    """The error of a folder that `holds` the rows of another one."""
    return UserError(
        f"{directory}: it holds, by its {METADATA}, {holds}: the folder was renamed or copied; "
        "give it its name back, or delete it to have the rows prepared again"
    )
