"""Batches of rows for training and evaluation: the only module that imports grain.

Row i of the endless training stream is a pure function of i, and step s takes B rows from s·B on
(and from where `begin` says). The state to resume from is therefore one integer, the step,
whatever the number of processes that share a batch.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.config import DataConfig
from qwen3next_jax.config.registry import DATA_SOURCES, resolve
from qwen3next_jax.data import preparation, sources
from qwen3next_jax.data.preparation import HELDOUT, TRAIN, Prepared, Progress, Recipe
from qwen3next_jax.data.rows import PackedRow
from qwen3next_jax.data.tokens import Tokenizer, load_tokenizer

# "tokens", "segment_ids": int32 [B_local, T]; of synthetic tasks also "target_mask": bool [B_local,
# T], the tokens that count as targets (in text all do). Of one row: the same without B.
Batch = dict[str, np.ndarray]

_ENDLESS = 2**62  # rows


class Data(Protocol):
    """The rows of a run: what each name of `config.registry` stands for. A source subclasses this
    and says what row i is.

    Attributes:
      tokenizer: see `tokens.Tokenizer`; `tokenizer.reads_text` says whether the rows are text.
      fingerprint: hexadecimal digest of all that decides the rows. A run goes on only where it
      is the same. batch_size, sequence_length: B rows of T tokens.
      heldout_rows: number of held-out rows.
      kinds: names and dtypes of a row's arrays [T].
    """

    tokenizer: Tokenizer
    fingerprint: str
    batch_size: int
    sequence_length: int
    heldout_rows: int
    kinds: dict[str, type] = {"tokens": np.int32, "segment_ids": np.int32}
    # that the training stream mixes: weights, by digests of all that decides their rows; {}: it is
    # one
    streams: Mapping[str, float] = {}
    _first_row, _starts = 0, {}

    def __init__(
        self,
        config: DataConfig,
        sequence_length: int,
        batch_size: int,
        vocab_size: int | None = None,
        progress: Progress | None = None,
    ):
        """Args: `vocab_size` of the model; `progress` is called while the rows are prepared,
        where they have to be.
        """

    @staticmethod
    def tokenizer_of(config: DataConfig, vocab_size: int | None) -> Tokenizer:
        """The tokenizer of these rows, without the rows: a trained model is used where its data
        are not.

        Raises:
          UserError: there is none, or it does not fit the model's vocabulary.
        """

    @classmethod
    def settings(cls, config: DataConfig) -> tuple[str, ...] | None:
        """What it reads of `DataConfig` ("path", "synthetic.pairs") beside the seed: the others
        are refused where a user gives them. None: any may be read.
        """
        return None

    @staticmethod
    def check(config: DataConfig, sequence_length: int, vocab_size: int) -> None:
        """Raises: UserError: these rows cannot be made. Takes no longer than a look at the
        files.
        """

    def begin(self, row: int, starts: Mapping[str, int]) -> None:
        """From here on step 0 takes the rows from `row` on of the training stream, whose streams
        (or it, named by its fingerprint, where it is one) begin with their rows `starts` (not
        named: 0): what earlier stages have read is not read again.
        """
        self._first_row, self._starts = row + starts.get(self.fingerprint, 0), starts

    def row(self, index: int) -> Batch:
        """Row `index` of the endless training stream."""

    def heldout_row(self, index: int) -> Batch:
        """Held-out row `index`, in an order of which any beginning is a fair sample."""

    def names(self, index: int) -> list[str]:
        """Where the documents of a training row come from: "dir/part.jsonl:17", "dir/book.txt",
        "mqar:17".
        """

    def describe(self) -> dict[str, Any]:
        """What the data are, as JSON-ready figures; at least `title`, in words, and
        `bits_per_nat`: bits per byte of text for each nat per token, None where the tokens are
        no text.
        """

    def batches(self, start_step: int, share: Sequence[int] | None = None) -> Iterator[Batch]:
        """Endless batches from `start_step` on, read ahead by background threads. `share`: which
        rows of every batch to read (indices in the batch, ascending); None: all.
        """
        import grain

        share = range(self.batch_size) if share is None else share
        steps = grain.MapDataset.range(start_step, _ENDLESS // self.batch_size)
        # batches ahead; threads do not change the order
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
        iterator = iter(
            steps.map(
                lambda step: self._stack(
                    [self.row(self._first_of(step) + b) for b in share], len(share)
                )
            ).to_iter_dataset(options)
        )
        try:
            yield from iterator
        finally:
            iterator.close()

    def heldout(
        self, rows: int | None = None, share: Sequence[int] | None = None
    ) -> Iterator[Batch]:
        """The first `rows` held-out rows (None: all of them) in batches of `batch_size`, of
        which `share` is read as in `batches`. The last batch is filled up with empty rows
        (segment ids 0).
        """
        share = range(self.batch_size) if share is None else share
        count = rows or self.heldout_rows
        for start in range(0, count, self.batch_size):
            yield self._stack(
                [self.heldout_row(start + b) for b in share if start + b < count], len(share)
            )

    def document_names(self, step: int) -> list[list[str]]:
        """`names` of each of the B rows of `step`."""
        return [self.names(self._first_of(step) + b) for b in range(self.batch_size)]

    def _first_of(self, step: int) -> int:
        return self._first_row + step * self.batch_size

    def _stack(self, rows: Sequence[Batch], count: int) -> Batch:
        """Stacks `rows`, filled up with empty ones to `count`."""
        batch = {
            name: np.zeros((count, self.sequence_length), kind) for name, kind in self.kinds.items()
        }
        for b, row in enumerate(rows):
            for name, values in row.items():
                batch[name][b] = values
        return batch


def source_of(config: DataConfig) -> type[Data]:
    """What `data.source` names."""
    return resolve(DATA_SOURCES, config.source, "data.source")


def open_data(
    config: DataConfig,
    sequence_length: int,
    batch_size: int,
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> Data:
    """The rows that a `DataConfig` describes."""
    return source_of(config)(config, sequence_length, batch_size, vocab_size, progress)


class TrainData(Data):
    """Text: the rows of all sources of a `DataConfig`, mixed, shuffled anew every epoch (of
    `rows` rows). Constructing it prepares what is not prepared yet; several processes that share
    `prepared_dir` may do so at once, but spare the double work where one goes first.

    Raises:
      UserError: whatever is wrong with the files, the tokenizer or the prepared rows.
    """

    def __init__(
        self,
        config: DataConfig,
        sequence_length: int,
        batch_size: int,
        vocab_size: int | None = None,
        progress: Progress | None = None,
    ):
        import grain  # which a machine that only loads a model need not have

        self.tokenizer = self.tokenizer_of(config, vocab_size)
        self.batch_size, self.sequence_length = batch_size, sequence_length
        recipe = Recipe(sequence_length, config.heldout_fraction, config.seed)
        self._prepared = [
            preparation.prepare(source, self.tokenizer, recipe, config.prepared_dir, progress)
            for source in _files(config)
        ]
        self.rows = sum(len(p.rows[TRAIN]) for p in self._prepared)
        self.heldout_rows = sum(len(p.rows[HELDOUT]) for p in self._prepared)
        self._weights = config.weights or tuple(float(len(p.rows[TRAIN])) for p in self._prepared)
        self._heldout_order = _heldout_order(self._prepared, config.seed)
        # Where a source stands in `path` decides the order of its rows, too.
        names = [f"{i} {p.fingerprint}" for i, p in enumerate(self._prepared)]
        rows = [
            grain.MapDataset.source(p.rows[TRAIN])
            .shuffle(seed=_shuffle_seed(config.seed, i))
            .repeat()
            for i, p in enumerate(self._prepared)
        ]  # shuffled anew every epoch
        self.streams = dict(zip(names, self._weights, strict=True))
        self._stream = mix_of(self._weights).map(
            lambda at: (at[0], rows[at[0]][at[1] + self._starts.get(names[at[0]], 0)])
        )
        self.fingerprint = digests.of(
            json.dumps([[p.fingerprint for p in self._prepared], self._weights, config.seed])
        )[:20]

    @staticmethod
    def tokenizer_of(config: DataConfig, vocab_size: int | None) -> Tokenizer:
        return load_tokenizer(config.tokenizer, vocab_size)

    @classmethod
    def settings(cls, config: DataConfig) -> tuple[str, ...] | None:
        if cls is not TrainData:  # a source that extends it may read more
            return None
        return (
            "path",
            "weights",
            "text_field",
            "on_bad_text",
            "tokenizer",
            "heldout_fraction",
            "prepared_dir",
        )

    @staticmethod
    def check(config: DataConfig, sequence_length: int, vocab_size: int) -> None:
        load_tokenizer(config.tokenizer, vocab_size)
        _files(config)

    def row(self, index: int) -> Batch:
        return _text_row(self._stream[index][1])

    def heldout_row(self, index: int) -> Batch:
        source, row = self._heldout_order[index].tolist()
        return _text_row(self._prepared[source].rows[HELDOUT][row])

    def heldout(
        self, rows: int | None = None, share: Sequence[int] | None = None
    ) -> Iterator[Batch]:
        return super().heldout(min(rows or self.heldout_rows, self.heldout_rows), share)

    def names(self, index: int) -> list[str]:
        source, row = self._stream[index]
        return [sources.describe(self._prepared[source].source, *origin) for origin in row.origins]

    def describe(self) -> dict[str, Any]:
        """`documents`, `bytes` (UTF-8), `tokens` and `padding_share` are of training and
        held-out rows together.
        """
        parts = [
            {
                "source": p.source.name,
                "files": len(p.source.files),
                "directory": str(p.directory),
                "weight": weight / sum(self._weights),
                **_totals([p]),
            }
            for p, weight in zip(self._prepared, self._weights, strict=True)
        ]
        total = _totals(self._prepared)
        return {
            "title": f"{total['documents']:,} documents, {total['tokens']:,} tokens",
            "bits_per_nat": total["tokens"] / total["bytes"] / math.log(2),
            "fingerprint": self.fingerprint,
            "sequence_length": self.sequence_length,
            **total,
            "sources": parts,
        }


def _files(config: DataConfig) -> list[sources.Source]:
    """All globs are looked up before any is prepared: a mistake in the last is told at once."""
    return [
        sources.resolve(glob, config.text_field, config.on_bad_text)
        for glob in config.globs or ("",)
    ]


def _text_row(row: PackedRow) -> Batch:
    return {"tokens": row.tokens, "segment_ids": row.segment_ids}


def _totals(prepared: list[Prepared]) -> dict:
    def total(figure: str, *sides: str) -> int:
        return sum(
            getattr(p.statistics[side], figure)
            for p in prepared
            for side in sides or (TRAIN, HELDOUT)
        )

    return {
        "documents": total("documents"),
        "heldout_documents": total("documents", HELDOUT),
        "cut_documents": total("cut_documents"),
        "bytes": total("text_bytes"),
        "tokens": total("tokens"),
        "rows": total("rows", TRAIN),
        "heldout_rows": total("rows", HELDOUT),
        "padding_share": total("padding") / (total("tokens") + total("padding")),
    }


def mix_of(weights: Sequence[float]) -> Any:
    """MapDataset: row of a mix of endless streams → (number of its stream, row of that stream)."""
    import grain

    streams = [
        grain.MapDataset.range(_ENDLESS).map(lambda row, i=i: (i, row))
        for i, weight in enumerate(weights)
        if weight
    ]
    return grain.MapDataset.mix(streams, [weight for weight in weights if weight])


def _shuffle_seed(seed: int, source: int) -> int:
    # grain adds the epoch to the seed, so neighbouring seeds would replay each other's epochs; a
    # hash keeps them apart.
    return int(digests.of(f"{seed} {source}")[:8], 16)


def _heldout_order(prepared: list[Prepared], seed: int) -> np.ndarray:
    """int64 [rows, 2] (source, row): each source's rows shuffled, the sources interleaved in
    proportion to their size.
    """
    parts, places = [], []
    for i, p in enumerate(prepared):
        n = len(p.rows[HELDOUT])
        parts.append(
            np.stack(
                [np.full(n, i), np.random.default_rng(_shuffle_seed(seed, i)).permutation(n)],
                axis=1,
            )
        )
        places.append((np.arange(n) + 0.5) / n)
    return np.concatenate(parts)[np.argsort(np.concatenate(places), kind="stable")]
