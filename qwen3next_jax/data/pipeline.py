"""Batches of packed rows for training and evaluation: the only module that imports grain.

Row i of the endless training stream is a pure function of i, and step s takes rows [s·B, (s + 1)·B). The state to resume
from is therefore one integer, the step, whatever the number of processes that share a batch.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence

import grain
import numpy as np

from qwen3next_jax.config import DataConfig
from qwen3next_jax.data import preparation, sources, synthetic
from qwen3next_jax.data.preparation import HELDOUT, TRAIN, Prepared, Progress, Recipe
from qwen3next_jax.data.rows import PackedRow
from qwen3next_jax.data.tokens import TaskTokens, load_tokenizer

# "tokens", "segment_ids": int32 [B_local, T]; of synthetic tasks also "target_mask": bool [B_local, T], the tokens that
# count as targets (in text all do).
Batch = dict[str, np.ndarray]

_ENDLESS = 2**62  # rows
_PREFETCH = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # batches ahead; threads do not change the order


def open_data(config: DataConfig, sequence_length: int, batch_size: int, vocab_size: int,
              progress: Progress | None = None) -> "TrainData | SyntheticData":
    """What `data.source` names: prepared text, or a task made on the fly."""
    if config.source == "text":
        return TrainData(config, sequence_length, batch_size, vocab_size, progress)
    return SyntheticData(config, sequence_length, batch_size, vocab_size)


class TrainData:
    """The rows of all sources of a `DataConfig`, mixed, shuffled anew every epoch, in batches.

    Constructing it prepares what is not prepared yet. Several processes that share `prepared_dir` may do so at once; to
    spare the double work let one go first.

    Attributes:
      tokenizer: see `tokens.Tokenizer`.
      fingerprint: hexadecimal digest of the stream: documents, tokenizer, row length, weights, seed.
      rows: number of training rows (an epoch, over all sources).
      heldout_rows: number of held-out rows.

    Raises:
      UserError: whatever is wrong with the files, the tokenizer or the prepared rows.
    """

    def __init__(self, config: DataConfig, sequence_length: int, batch_size: int, vocab_size: int | None = None,
                 progress: Progress | None = None):
        """Args: `vocab_size` of the model, to check the tokenizer against; `progress` is called during preparation."""
        self.tokenizer = load_tokenizer(config.tokenizer, vocab_size)
        self.batch_size, self.sequence_length = batch_size, sequence_length
        recipe = Recipe(sequence_length, config.heldout_fraction, config.seed)
        # All globs are looked up before any is prepared: a mistake in the last is told at once.
        found = [sources.resolve(glob, config.text_field, config.on_bad_text) for glob in config.globs or ("",)]
        self._prepared = [preparation.prepare(source, self.tokenizer, recipe, config.prepared_dir, progress)
                          for source in found]
        self.rows = sum(len(p.rows[TRAIN]) for p in self._prepared)
        self.heldout_rows = sum(len(p.rows[HELDOUT]) for p in self._prepared)
        self._weights = config.weights or tuple(float(len(p.rows[TRAIN])) for p in self._prepared)
        self._stream = _endless(self._prepared, self._weights, config.seed)
        self._heldout_order = _heldout_order(self._prepared, config.seed)
        parts = [[p.fingerprint for p in self._prepared], self._weights, config.seed]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]

    def batches(self, start_step: int, share: Sequence[int] | None = None) -> Iterator[Batch]:
        """Endless batches from `start_step` on, read ahead by background threads.

        `share`: which rows of every batch to read (indices in the batch, ascending); None: all.
        """
        share = range(self.batch_size) if share is None else share
        yield from _read_ahead(_Steps(lambda i: _text_row(self._stream[i][1]), self.batch_size, share), start_step)

    def heldout(self, rows: int | None = None, share: Sequence[int] | None = None) -> Iterator[Batch]:
        """The first `rows` held-out rows (None: all of them) in a fixed order, in batches of `batch_size`, of which `share`
        is read as in `batches`.

        The order is shuffled and takes from every source in proportion to its size, so that any beginning of it is a
        fair sample. The last batch is filled up with empty rows (segment ids 0).
        """
        order = self._heldout_order[:rows]
        share = range(self.batch_size) if share is None else share
        for start in range(0, len(order), self.batch_size):
            chosen = [order[start + b].tolist() for b in share if start + b < len(order)]
            rows = [_text_row(self._prepared[source].rows[HELDOUT][row]) for source, row in chosen]
            yield _stack(rows, len(share), self.sequence_length, _TEXT)

    def document_names(self, step: int) -> list[list[str]]:
        """For each of the B rows of `step`, where its documents come from: "dir/part.jsonl:17", "dir/book.txt"."""
        names = []
        for i in range(step * self.batch_size, (step + 1) * self.batch_size):
            source, row = self._stream[i]
            names.append([sources.describe(self._prepared[source].source, *origin) for origin in row.origins])
        return names

    def describe(self) -> dict:
        """What the data is, as JSON-ready figures.

        `documents`, `bytes` (UTF-8), `tokens` and `padding_share` are of training and held-out rows together.
        """
        parts = [{"source": p.source.name, "files": len(p.source.files), "directory": str(p.directory),
                  "weight": weight / sum(self._weights), **_totals([p])}
                 for p, weight in zip(self._prepared, self._weights, strict=True)]
        return {"fingerprint": self.fingerprint, "sequence_length": self.sequence_length, **_totals(self._prepared),
                "sources": parts}


class SyntheticData:
    """The rows of a task, made on the fly: the interface of `TrainData`, without text.

    Raises:
      UserError: rows or vocabulary are too small for the task.
    """

    def __init__(self, config: DataConfig, sequence_length: int, batch_size: int, vocab_size: int):
        self.tokenizer = TaskTokens(vocab_size)
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.heldout_rows = 1024
        make = [synthetic.TaskRows(config.source, sequence_length, vocab_size, config.synthetic, config.seed, split)
                for split in (synthetic.TRAIN_SPLIT, synthetic.HELDOUT_SPLIT)]
        self._rows, self._heldout = make
        self._task = config.source
        parts = [config.source, dataclasses.asdict(config.synthetic), sequence_length, vocab_size, config.seed]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]

    def batches(self, start_step: int, share: Sequence[int] | None = None) -> Iterator[Batch]:
        """As `TrainData.batches`."""
        share = range(self.batch_size) if share is None else share
        yield from _read_ahead(_Steps(lambda i: _task_row(self._rows[i]), self.batch_size, share), start_step)

    def heldout(self, rows: int | None = None, share: Sequence[int] | None = None) -> Iterator[Batch]:
        """As `TrainData.heldout`; None: 1024 rows."""
        share = range(self.batch_size) if share is None else share
        count = rows or self.heldout_rows
        for start in range(0, count, self.batch_size):
            rows_here = [_task_row(self._heldout[start + b]) for b in share if start + b < count]
            yield _stack(rows_here, len(share), self.sequence_length, _TASK)

    def document_names(self, step: int) -> list[list[str]]:
        """As `TrainData.document_names`: "mqar:17" is row 17 of the task."""
        return [[f"{self._task}:{i}"] for i in range(step * self.batch_size, (step + 1) * self.batch_size)]

    def describe(self) -> dict:
        """As `TrainData.describe`; a task has no documents and no bytes, and does not end."""
        return {"fingerprint": self.fingerprint, "sequence_length": self.sequence_length, "documents": 0, "bytes": 0,
                "tokens": 0, "padding_share": 0.0, "sources": [{"source": self._task}]}


def _task_row(row: synthetic.TaskRow) -> Batch:
    return {"tokens": row.tokens, "segment_ids": np.ones_like(row.tokens), "target_mask": row.targets}


def _totals(prepared: list[Prepared]) -> dict:
    statistics = [s for p in prepared for s in p.statistics.values()]
    rows = sum(s.rows for s in statistics)
    tokens = sum(s.tokens for s in statistics)
    padding = sum(s.padding for s in statistics)
    return {
        "documents": sum(s.documents for s in statistics),
        "heldout_documents": sum(p.statistics[HELDOUT].documents for p in prepared),
        "cut_documents": sum(s.cut_documents for s in statistics),
        "bytes": sum(s.text_bytes for s in statistics),
        "tokens": tokens,
        "rows": rows - sum(p.statistics[HELDOUT].rows for p in prepared),
        "heldout_rows": sum(p.statistics[HELDOUT].rows for p in prepared),
        "padding_share": padding / (tokens + padding),
    }


def _endless(prepared: list[Prepared], weights: tuple[float, ...], seed: int) -> grain.MapDataset:
    """MapDataset of `(source index, PackedRow)`: every source shuffled per epoch and repeated, then mixed."""
    streams = [grain.MapDataset.source(_Tagged(i, p.rows[TRAIN])).shuffle(seed=_shuffle_seed(seed, i)).repeat()
               for i, p in enumerate(prepared)]
    return streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, weights)


def _shuffle_seed(seed: int, source: int) -> int:
    # grain adds the epoch to the seed, so neighbouring seeds would replay each other's epochs; a hash keeps them apart.
    return int.from_bytes(hashlib.sha256(f"{seed} {source}".encode()).digest()[:4], "big")


def _heldout_order(prepared: list[Prepared], seed: int) -> np.ndarray:
    """int64 [rows, 2] (source, row): each source's rows shuffled, the sources interleaved in proportion to their size."""
    parts, places = [], []
    for i, p in enumerate(prepared):
        n = len(p.rows[HELDOUT])
        permutation = np.random.default_rng(_shuffle_seed(seed, i)).permutation(n)
        parts.append(np.stack([np.full(n, i), permutation], axis=1))
        places.append((np.arange(n) + 0.5) / n)
    return np.concatenate(parts)[np.argsort(np.concatenate(places), kind="stable")]


def _text_row(row: PackedRow) -> Batch:
    return {"tokens": row.tokens, "segment_ids": row.segment_ids}


_TEXT = {"tokens": np.int32, "segment_ids": np.int32}
_TASK = _TEXT | {"target_mask": bool}


def _stack(rows: list[Batch], count: int, sequence_length: int, kinds: dict[str, type]) -> Batch:
    """Stacks `rows`, filled up with empty ones to `count`."""
    batch = {name: np.zeros((count, sequence_length), kind) for name, kind in kinds.items()}
    for b, row in enumerate(rows):
        for name, values in row.items():
            batch[name][b] = values
    return batch


def _read_ahead(steps: "_Steps", start_step: int) -> Iterator[Batch]:
    iterator = iter(grain.MapDataset.source(steps)[start_step:].to_iter_dataset(_PREFETCH))
    try:
        yield from iterator
    finally:
        iterator.close()


class _Tagged:
    """grain data source of `(source index, PackedRow)`."""

    def __init__(self, source: int, rows: preparation.RowReader):
        self._source, self._rows = source, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, PackedRow]:
        return self._source, self._rows[index]


class _Steps:
    """grain data source whose element s is the rows `share` of the batch of step s."""

    def __init__(self, row: Callable[[int], Batch], batch_size: int, share: Sequence[int]):
        self._row, self._batch_size, self._share = row, batch_size, share

    def __len__(self) -> int:
        return _ENDLESS // self._batch_size

    def __getitem__(self, step: int) -> Batch:
        first = step * self._batch_size
        rows = [self._row(first + b) for b in self._share]
        return _stack(rows, len(rows), len(rows[0]["tokens"]), {name: values.dtype for name, values in rows[0].items()})
