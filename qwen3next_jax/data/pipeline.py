"""Batches of packed rows for training and evaluation: the only module that imports grain.

Row i of the endless training stream is a pure function of i, and step s takes rows [s·B, (s + 1)·B). The state to resume
from is therefore one integer, the step, whatever the number of processes that share a batch.
"""

import hashlib
import json
from collections.abc import Iterator

import grain
import numpy as np

from qwen3next_jax.config import DataConfig
from qwen3next_jax.data import preparation, sources
from qwen3next_jax.data.preparation import HELDOUT, TRAIN, Prepared, Progress, Recipe
from qwen3next_jax.data.rows import PackedRow
from qwen3next_jax.data.tokens import load_tokenizer
from qwen3next_jax.errors import UserError

Batch = dict[str, np.ndarray]  # "tokens", "segment_ids": int32 [B_local, T]

_PREFETCH = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # batches ahead; threads do not change the order


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
        found = [sources.resolve(glob, config.text_field) for glob in config.globs or ("",)]
        self._prepared = [preparation.prepare(source, self.tokenizer, recipe, config.prepared_dir, progress)
                          for source in found]
        self.rows = sum(len(p.rows[TRAIN]) for p in self._prepared)
        self.heldout_rows = sum(len(p.rows[HELDOUT]) for p in self._prepared)
        self._weights = config.weights or tuple(float(len(p.rows[TRAIN])) for p in self._prepared)
        self._stream = _endless(self._prepared, self._weights, config.seed)
        self._heldout_order = _heldout_order(self._prepared, config.seed)
        parts = [[p.fingerprint for p in self._prepared], self._weights, config.seed]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]

    def batches(self, start_step: int, process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
        """Endless batches from `start_step` on, read ahead by background threads.

        With several processes each gets its share of a batch's rows; joined in the order of the processes they are the
        batch that one process would get.
        """
        local = _Steps(self._stream, self.batch_size, _share(self.batch_size, process_index, process_count))
        iterator = iter(grain.MapDataset.source(local)[start_step:].to_iter_dataset(_PREFETCH))
        try:
            yield from iterator
        finally:
            iterator.close()

    def heldout(self, rows: int | None = None, process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
        """The first `rows` held-out rows (None: all of them) in a fixed order, in batches of `batch_size`.

        The order is shuffled and takes from every source in proportion to its size, so that any beginning of it is a
        fair sample. The last batch is filled up with empty rows (segment ids 0).
        """
        order = self._heldout_order[:rows]
        share = _share(self.batch_size, process_index, process_count)
        for start in range(0, len(order), self.batch_size):
            chosen = order[start:start + self.batch_size][share].tolist()
            batch = [self._prepared[source].rows[HELDOUT][row] for source, row in chosen]
            yield _stack(batch, share.stop - share.start, self.sequence_length)

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


def _share(batch_size: int, process_index: int, process_count: int) -> slice:
    if batch_size % process_count:
        raise UserError(f"train.batch_size = {batch_size} is not a multiple of the {process_count} processes that share it")
    local = batch_size // process_count
    return slice(process_index * local, (process_index + 1) * local)


def _stack(rows: list[PackedRow], count: int, sequence_length: int) -> Batch:
    """Stacks `rows`, filled up with empty ones to `count`."""
    tokens_BT = np.zeros((count, sequence_length), np.int32)
    segment_ids_BT = np.zeros((count, sequence_length), np.int32)
    for b, row in enumerate(rows):
        tokens_BT[b], segment_ids_BT[b] = row.tokens, row.segment_ids
    return {"tokens": tokens_BT, "segment_ids": segment_ids_BT}


class _Tagged:
    """grain data source of `(source index, PackedRow)`."""

    def __init__(self, source: int, rows: preparation.RowReader):
        self._source, self._rows = source, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, PackedRow]:
        return self._source, self._rows[index]


class _Steps:
    """grain data source whose element s is this process's share of the batch of step s."""

    def __init__(self, stream: grain.MapDataset, batch_size: int, share: slice):
        self._stream, self._batch_size, self._share = stream, batch_size, share

    def __len__(self) -> int:
        return len(self._stream) // self._batch_size

    def __getitem__(self, step: int) -> Batch:
        first = step * self._batch_size
        rows = [self._stream[i][1] for i in range(first + self._share.start, first + self._share.stop)]
        return _stack(rows, len(rows), len(rows[0].tokens))
