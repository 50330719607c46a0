"""Batches of rows for training and evaluation. Only this module imports grain.

Row i of the endless training stream is a pure function of i. With a batch size of B, batch n of a
stage of a run, counted from 0, holds B rows, from row n·B on; `set_start` adds an offset to n·B.
Therefore a run only needs its step, one integer, to resume, and it may resume with another number
of processes.
"""

import collections
import concurrent.futures
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import as_user_error, warn
from qwen3next_jax.common.storage import is_bucket
from qwen3next_jax.config import DataConfig, ModelConfig
from qwen3next_jax.config.registry import DATA_SOURCES, resolve
from qwen3next_jax.data import preparation, readers
from qwen3next_jax.data.preparation import HELDOUT, TRAIN, PreparedSource, Progress, RowRecipe
from qwen3next_jax.data.rows import PackedRow
from qwen3next_jax.data.sources import MessagesFormat, Source, is_remote
from qwen3next_jax.data.tokens import Tokenizer, load_tokenizer

# The arrays of a batch, or of one row (then without the axis B_local, the rows of this process):
# "tokens", "segment_ids": int32 [B_local, T]. Rows of synthetic tasks also have "target_mask": bool
# [B_local, T], the tokens that count as targets; in rows of text all tokens count. If a glob holds
# conversations, rows have "loss_weights": float32 [B_local, T], the weight of the loss with which
# each token is predicted. Recorded rows also have "expert_ids": int16 [B_local, T, layers, experts
# per token], the experts that the tokens use.
Batch = dict[str, np.ndarray]

_ENDLESS = 2**62  # rows
_SAMPLED_ROWS = 32
_ROWS_AT_ONCE = 32  # read from a bucket


class Epoch(NamedTuple):
    """One epoch of a stream: the rows that the stream has before it repeats a document.

    Attributes:
      source: the name of the source that the stream reads.
      rows: the number of rows.
      tokens: the number of tokens, without padding.
      documents: the number of documents.
    """

    source: str
    rows: int
    tokens: int
    documents: int


class DataSource(Protocol):
    """The rows of a run. Every data source in `config.registry` is a subclass of `DataSource` that
    defines the row with index i.

    Attributes:
      tokenizer: the tokenizer of the rows; `tokenizer.reads_text` says whether the rows are text.
      fingerprint: hexadecimal digest of everything that determines the rows. A run can resume only
        if the fingerprint is the same.
      batch_size: B, number of rows of a batch.
      sequence_length: T, number of tokens of a row.
      heldout_rows: number of held-out rows.
      array_dtypes: name of each array [T] of a row → its dtype.
      stream_weights: name of a stream → its weight, for each stream that the training stream mixes.
        The name of a stream holds a digest of everything that determines its rows. `stream_weights`
        is empty if the data source does not mix streams, as in a synthetic task.
      stream_epochs: name of a stream → one epoch of the stream. `stream_epochs` is empty if no
        stream repeats, as in a synthetic task.
      heldout_sources: the names of the sources of the held-out rows; empty if all held-out rows are
        from one source.
    """

    tokenizer: Tokenizer
    fingerprint: str
    batch_size: int
    sequence_length: int
    heldout_rows: int
    array_dtypes: dict[str, type] = {"tokens": np.int32, "segment_ids": np.int32}
    # The streams that the training stream mixes: name → weight. The name holds a digest of
    # everything that determines the rows. A mix may be of one stream; a source that does not mix
    # (a synthetic task) has none.
    stream_weights: Mapping[str, float] = {}
    stream_epochs: Mapping[str, Epoch] = {}
    heldout_sources: Sequence[str] = ()
    _first_row = 0
    _stream_starts: Mapping[str, int] = {}

    def __init__(
        self,
        config: DataConfig,
        sequence_length: int,
        batch_size: int,
        vocab_size: int | None = None,
        progress: Progress | None = None,
    ):
        """Opens the rows; prepares rows that are not ready.

        Args:
          config: settings of the data.
          sequence_length: T, number of tokens of a row.
          batch_size: B, number of rows of a batch.
          vocab_size: size of the model's vocabulary; None: unknown.
          progress: called now and then while rows are prepared; never called if all rows are ready.
        """

    @staticmethod
    def tokenizer_of(config: DataConfig, vocab_size: int | None) -> Tokenizer:
        """Returns the tokenizer of the rows without opening the rows: a trained model is also used
        on machines that do not have its training data.

        Raises:
          UserError: the tokenizer does not exist, or does not fit the model's vocabulary.
        """

    @classmethod
    def settings_read(cls, config: DataConfig) -> tuple[str, ...] | None:
        """Returns the names of the `DataConfig` settings ("path", "synthetic.pairs") that this
        source reads in addition to the seed; None if the source may read any setting. A user who
        changes a setting that the data source does not read gets an error.
        """
        return None

    @staticmethod
    def check(config: DataConfig, sequence_length: int, vocab_size: int) -> None:
        """Checks that rows can be made with these settings. The check is fast: it lists files, but
        does not read all of their content.

        Raises:
          UserError: no rows can be made with these settings.
        """

    @staticmethod
    def check_model(config: DataConfig, model: ModelConfig) -> None:
        """Checks that `model` can train on rows that hold more than tokens, such as the experts of
        a recorded text.

        Raises:
          UserError: the rows belong to another model.
        """

    @property
    def token_byte_counts(self) -> np.ndarray:
        """The number of UTF-8 bytes that each token stands for, int32 [vocab_size]; all 0 if the
        bytes of a text do not follow from its tokens.
        """
        return self.tokenizer.token_byte_counts

    def set_start(self, row: int, starts: Mapping[str, int]) -> None:
        """Sets where the current stage of a run starts to read, so that it skips the rows of
        earlier stages.

        Args:
          row: index of the row of the training stream with which batch 0 begins.
          starts: name of a stream of the mix → the row from which that stream is read; an absent
            stream is read from row 0. The name of a training stream that is not a mix is
            `fingerprint`.
        """
        self._first_row, self._stream_starts = row + starts.get(self.fingerprint, 0), starts

    def row(self, index: int) -> Batch:
        """Returns row `index` of the endless training stream."""

    def heldout_row(self, index: int) -> Batch:
        """Returns held-out row `index`. Held-out rows are in random order, so for any n the first n
        rows are a fair sample.
        """

    def document_names_of_row(self, index: int) -> list[str]:
        """Returns where each document of training row `index` comes from, such as
        "dir/part.jsonl:17", "dir/book.txt" or "mqar:17".
        """

    def describe(self) -> dict[str, Any]:
        """Returns facts about the data as JSON values. Two facts are always present: `title`, a
        short text; and `bits_per_nat`, the factor that turns a loss in nats per token into bits per
        byte of text. `bits_per_nat` is None if the tokens do not stand for text, or if the bytes of
        a text do not follow from its tokens.
        """

    def batches(self, first_batch: int, share: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yields batches without end, while background threads read ahead. Batch n holds B rows of
        the training stream, beginning n · B rows after the start that `set_start` sets. A row
        depends on the seed, the source and the epoch alone. To resume, a run therefore needs only
        the number of its next batch (`stages.DataCursor.batch_index`).

        Args:
          first_batch: number of the first batch.
          share: ascending indices of the rows of every batch to read; None: all rows.
        """
        import grain

        share = range(self.batch_size) if share is None else share
        numbers = grain.MapDataset.range(first_batch, _ENDLESS // self.batch_size)
        # The buffer is counted in batches. The threads do not change the order of the batches.
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
        iterator = iter(
            numbers.map(
                lambda number: self._stack_rows(
                    self._read_rows([self._first_row_of_batch(number) + b for b in share]),
                    len(share),
                )
            ).to_iter_dataset(options)
        )
        try:
            yield from iterator
        finally:
            iterator.close()

    def heldout_batches(
        self,
        rows: int | None = None,
        share: Sequence[int] | None = None,
        least: int = 0,
    ) -> Iterator[Batch]:
        """Yields held-out rows in batches. The last batch is filled up with empty rows, whose
        segment ids are 0.

        Args:
          rows: number of held-out rows, from the first on; None: all.
          share: ascending indices of the rows of every batch to read; None: all rows.
          least: the smallest number of rows of each source. If a source has fewer than `least` of
            the first `rows` rows, its next rows follow, until it has `least` rows or none is left.
        """
        share = range(self.batch_size) if share is None else share
        indices = self._first_heldout_indices_with_all_sources(rows or self.heldout_rows, least)
        for start in range(0, len(indices), self.batch_size):
            batch = indices[start : start + self.batch_size]
            rows_of_share = [self.heldout_row(batch[b]) for b in share if b < len(batch)]
            yield self._stack_rows(rows_of_share, len(share))

    def heldout_places_by_source(self, rows: int | None, least: int) -> dict[str, list[int]]:
        """Returns name of a source → the positions, from 0, of the source's rows among all rows of
        `heldout_batches(rows, least=least)`.
        """
        rows = rows or self.heldout_rows
        place = {
            index: at
            for at, index in enumerate(self._first_heldout_indices_with_all_sources(rows, least))
        }
        return {
            source: [place[index] for index in self._heldout_indices(rows, source, least)]
            for source in self.heldout_sources
        }

    def _first_heldout_indices_with_all_sources(self, rows: int, least: int) -> list[int]:
        """Returns the indices of the first `rows` held-out rows, followed by the next rows of each
        source that has fewer than `least` of the first `rows`.
        """
        first = self._heldout_indices(rows, None)
        lacking = (
            index
            for source in self.heldout_sources
            for index in self._heldout_indices(rows, source, least)
            if index >= len(first)
        )
        return [*first, *lacking]

    def _heldout_indices(self, rows: int, source: str | None, least: int = 0) -> Sequence[int]:
        """Returns the indices of the rows of `source` among the first `rows` held-out rows. If
        `source` has fewer than `least` of the first `rows` rows, its next rows follow. If `source`
        is None, returns the indices of the first `rows` held-out rows of all sources.
        """
        return range(rows)

    def _read_rows(self, indices: Sequence[int]) -> list[Batch]:
        """Returns rows of the training stream. A subclass whose rows are slow to read may read
        several rows at once.
        """
        return [self.row(index) for index in indices]

    def document_names_of_batch(self, number: int) -> list[list[str]]:
        """Returns, for each row of batch `number`, the result of `document_names_of_row`."""
        return [
            self.document_names_of_row(self._first_row_of_batch(number) + b)
            for b in range(self.batch_size)
        ]

    def _first_row_of_batch(self, number: int) -> int:
        return self._first_row + number * self.batch_size

    def _stack_rows(self, rows: Sequence[Batch], count: int) -> Batch:
        """Returns a batch of `count` rows: `rows`, then empty rows."""
        batch = {
            name: np.zeros((count, self.sequence_length), kind)
            for name, kind in self.array_dtypes.items()
        }
        for b, row in enumerate(rows):
            for name, values in row.items():
                batch[name][b] = values
        return batch


def data_source_class(config: DataConfig) -> type[DataSource]:
    """Returns the class that `data.source` names."""
    return resolve(DATA_SOURCES, config.source, "data.source")


def open_data(
    config: DataConfig,
    sequence_length: int,
    batch_size: int,
    vocab_size: int | None = None,
    progress: Progress | None = None,
) -> DataSource:
    """Opens the rows that a `DataConfig` describes. The arguments are those of the constructor of
    `DataSource`.
    """
    return data_source_class(config)(config, sequence_length, batch_size, vocab_size, progress)


class TextData(DataSource):
    """Rows of text: the sources of a `DataConfig`, mixed. Every epoch (`rows` rows) shuffles the
    sources anew. The constructor prepares the sources that are not prepared yet. Several processes
    that share `prepared_dir` may prepare the same sources at once; each process uses the parts that
    another process has finished.

    Raises:
      UserError: the files, the tokenizer, the prepared rows or the package grain are missing or
        wrong.
    """

    def __init__(
        self,
        config: DataConfig,
        sequence_length: int,
        batch_size: int,
        vocab_size: int | None = None,
        progress: Progress | None = None,
    ):
        with as_user_error(
            "reading text needs the package grain: pip install 'grain>=0.2.15,<0.3'", ImportError
        ):
            import grain  # here, because a machine that only loads a model may not have it

        self.tokenizer = self.tokenizer_of(config, vocab_size)
        self.batch_size, self.sequence_length = batch_size, sequence_length
        recipe = RowRecipe(sequence_length, config.heldout_fraction, config.seed)
        self._prepared = preparation.prepare(
            find_sources(config, self.tokenizer),
            self.tokenizer,
            recipe,
            config.prepared_dir,
            progress,
        )
        # A row from a bucket takes some 10 ms, nearly all of it waiting.
        self._pool = None
        if is_bucket(config.prepared_dir):
            self._pool = concurrent.futures.ThreadPoolExecutor(_ROWS_AT_ONCE, "rows")
        if any(p.rows[TRAIN].table.has_loss_weights for p in self._prepared):
            self.array_dtypes = DataSource.array_dtypes | {"loss_weights": np.float32}
        self.rows = sum(len(p.rows[TRAIN]) for p in self._prepared)
        self.heldout_rows = sum(len(p.rows[HELDOUT]) for p in self._prepared)
        self._weights = config.source_weights or tuple(
            float(len(p.rows[TRAIN])) for p in self._prepared
        )
        self._heldout_order = _heldout_order(self._prepared, config.seed)
        # The name holds the position of the source in `path`, which also determines the order of
        # the source's rows.
        names = [f"{i} {p.fingerprint}" for i, p in enumerate(self._prepared)]
        rows = [
            grain.MapDataset.source(p.rows[TRAIN])
            .shuffle(seed=_shuffle_seed(config.seed, i))
            .repeat()
            for i, p in enumerate(self._prepared)
        ]  # each source is shuffled anew every time that it is repeated
        self.stream_weights = dict(zip(names, self._weights, strict=True))
        self._names = [one.name or p.source.name for one, p in zip(config.sources, self._prepared)]
        self.stream_epochs = {
            name: Epoch(source, len(p.rows[TRAIN]), statistics.tokens, statistics.documents)
            for name, source, p in zip(names, self._names, self._prepared, strict=True)
            for statistics in [p.statistics[TRAIN]]
        }
        if len(self._names) > 1:
            self.heldout_sources = [
                name for name, p in zip(self._names, self._prepared) if len(p.rows[HELDOUT])
            ]
        self._stream = mix_streams(self._weights).map(
            lambda at: (at[0], rows[at[0]][at[1] + self._stream_starts.get(names[at[0]], 0)])
        )
        fingerprints = [p.fingerprint for p in self._prepared]
        identity = [fingerprints, self._weights, config.seed, self._sample_digest()]
        self.fingerprint = digests.sha256(json.dumps(identity))[:20]

    def _sample_digest(self) -> str:
        """Returns a digest of some training rows and some held-out rows. The digest is part of the
        fingerprint, so that hosts and resumed runs notice when another version of a library gives
        other rows: numpy draws the random numbers of packing, grain shuffles and mixes the rows,
        and array_record stores the rows.
        """
        spread = np.random.default_rng(0).integers(0, 2 * self.rows, _SAMPLED_ROWS).tolist()
        sampled = [self.row(i) for i in [*range(_SAMPLED_ROWS), *spread]]
        sampled += [self.heldout_row(i) for i in range(min(_SAMPLED_ROWS, self.heldout_rows))]
        arrays = [row[name] for row in sampled for name in ("tokens", "segment_ids")]
        data = b"".join(a.astype("<i4").tobytes() for a in arrays)
        if "loss_weights" in self.array_dtypes:
            data += b"".join(row["loss_weights"].astype("<f4").tobytes() for row in sampled)
        return digests.sha256(data)

    @staticmethod
    def tokenizer_of(config: DataConfig, vocab_size: int | None) -> Tokenizer:
        return load_tokenizer(config.tokenizer, vocab_size, config.parse_tokens)

    @classmethod
    def settings_read(cls, config: DataConfig) -> tuple[str, ...] | None:
        if cls is not TextData:  # a source that extends it may read more
            return None
        return (
            "path",
            "weights",
            "text_field",
            "messages_field",
            "template_date",
            "on_bad_text",
            "bad_records",
            "bad_records_limit",
            "tokenizer",
            "parse_tokens",
            "heldout_fraction",
            "prepared_dir",
        )

    @staticmethod
    def check(config: DataConfig, sequence_length: int, vocab_size: int) -> None:
        find_sources(config, load_tokenizer(config.tokenizer, vocab_size, config.parse_tokens))

    @property
    def token_byte_counts(self) -> np.ndarray:
        sizes = self.tokenizer.token_byte_counts
        return sizes if self._token_bytes_match_text else np.zeros_like(sizes)

    @property
    def _token_bytes_match_text(self) -> bool:
        return all(one.token_bytes_match_text for one in self._prepared)

    def row(self, index: int) -> Batch:
        return self._arrays_of_row(self._stream[index][1])

    def _read_rows(self, indices: Sequence[int]) -> list[Batch]:
        return (
            list(self._pool.map(self.row, indices)) if self._pool else super()._read_rows(indices)
        )

    def heldout_row(self, index: int) -> Batch:
        source, row = self._heldout_order[index].tolist()
        return self._arrays_of_row(self._prepared[source].rows[HELDOUT][row])

    def _arrays_of_row(self, row: PackedRow) -> Batch:
        found = {"tokens": row.tokens, "segment_ids": row.segment_ids}
        if "loss_weights" in self.array_dtypes:
            is_text = row.loss_weights is None
            found["loss_weights"] = row.segment_ids > 0 if is_text else row.loss_weights
        return found

    def _heldout_indices(self, rows: int, source: str | None, least: int = 0) -> Sequence[int]:
        rows = min(rows, self.heldout_rows)
        if source is None:
            return range(rows)
        own = np.flatnonzero(self._heldout_order[:, 0] == self._names.index(source))
        return own[: max(np.searchsorted(own, rows), least)].tolist()

    def document_names_of_row(self, index: int) -> list[str]:
        source, row = self._stream[index]
        return [
            readers.document_name(self._prepared[source].source, *origin)
            for origin in row.document_origins
        ]

    def describe(self) -> dict[str, Any]:
        """Returns facts about the data. The entries `documents`, `cut_documents`, `bytes` (of UTF-8
        text), `tokens`, `ignored_tokens` (with the loss weight 0, whose text `bytes` leaves out)
        and `padding_share` count training and held-out rows together. `dropped_tokens` counts the
        tokens of long conversations that are in no row. `left_out_documents` counts the
        conversations without a token in any row.
        """
        parts = [
            {
                "source": name,
                "files": len(p.source.files),
                "directory": str(p.common_row_folder),
                "weight": weight / sum(self._weights),
                "bad_records": p.bad_counts,
                "bad_places": list(p.first_bad_places),
                "empty_documents": p.empty_documents,
                **_total_counts([p]),
            }
            for name, p, weight in zip(self._names, self._prepared, self._weights, strict=True)
        ]
        total = _total_counts(self._prepared)
        bad = sum(sum(p.bad_counts.values()) for p in self._prepared)
        counted = total["tokens"] - total["ignored_tokens"]
        bits = None
        if total["bytes"] and self._token_bytes_match_text:
            bits = counted / total["bytes"] / math.log(2)
        share = ""
        if total["ignored_tokens"]:
            share = f" ({counted / total['tokens']:.0%} in the loss)"
        title = f"{total['documents']:,} documents, {total['tokens']:,} tokens{share}"
        if bad:
            title += f", {bad:,} bad records"
        if blank := sum(p.empty_documents for p in self._prepared):
            title += f", {blank:,} blank texts left out"
        fits = [
            f"; {p.long_conversations_note}" for p in self._prepared if p.long_conversations_note
        ]
        return {
            "title": title + "".join(fits),
            "bits_per_nat": bits,
            "fingerprint": self.fingerprint,
            "sequence_length": self.sequence_length,
            **total,
            "sources": parts,
        }


def find_sources(config: DataConfig, tokenizer: Tokenizer) -> list[Source]:
    """Returns the sources that `config` names, with their files. The function finds the files of
    all sources before preparation begins, so that a mistake in the last glob of `data.path` is
    reported at once.
    """
    found = [
        preparation.find_source_files(
            Source(
                one.glob,
                (),
                one.text_field,
                config.on_bad_text,
                config.bad_records,
                config.bad_records_limit,
                chat_format=_chat_format_of(one.messages_field, config, tokenizer),
            ),
            tokenizer,
            config.prepared_dir,
        )
        for one in config.sources
    ]
    _warn_of_repeated_files(found)
    return found


def _warn_of_repeated_files(sources: Sequence[Source]) -> None:
    """Warns if two sources read the same field of a local file, because their globs overlap."""
    # A file has one size and modification time, so the paths of most files need not be resolved,
    # which would take as long as finding the files.
    alike = collections.defaultdict(list)
    for source in sources:
        field = source.chat_format.messages_field if source.chat_format else source.text_field
        for file in () if source.text_is_gone else source.files:
            alike[file.size, file.mtime_or_checksum, field].append((file.path, source.name))
    repeated = []
    for found in alike.values():
        if len({name for _, name in found}) == 1 or is_remote(os.fspath(found[0][0])):
            continue
        source_of: dict[str, str] = {}
        for path, name in found:
            other = source_of.setdefault(os.path.realpath(path), name)
            if other != name:
                repeated.append(f"{path} by {other!r} and {name!r}")
    if repeated:
        warn(
            f"data.path: {len(repeated):,} files are read twice, such as {repeated[0]}: their "
            "documents occur in two sources"
        )


def _chat_format_of(field: str, config: DataConfig, tokenizer: Tokenizer) -> MessagesFormat | None:
    if not field:
        return None
    # Texts do not need this file.
    from qwen3next_jax.data.conversations import load_chat_format

    return load_chat_format(field, config.tokenizer, tokenizer, config.template_date)


def _total_counts(prepared: list[PreparedSource]) -> dict:
    def total(field: str, *splits: str) -> int:
        return sum(
            getattr(p.statistics[split], field)
            for p in prepared
            for split in splits or (TRAIN, HELDOUT)
        )

    return {
        "documents": total("documents"),
        "heldout_documents": total("documents", HELDOUT),
        "cut_documents": total("cut_documents"),
        "bytes": total("text_bytes"),
        "tokens": total("tokens"),
        "ignored_tokens": total("ignored"),
        "dropped_tokens": total("dropped"),
        "left_out_documents": total("left_out"),
        "rows": total("rows", TRAIN),
        "heldout_rows": total("rows", HELDOUT),
        "padding_share": total("padding") / (total("tokens") + total("padding")),
    }


def mix_streams(weights: Sequence[float]) -> Any:
    """Returns a grain MapDataset that mixes endless streams in proportion to `weights`. The
    MapDataset maps the index of a row to (index of a stream, index of the row in this stream).
    """
    import grain

    streams = [
        grain.MapDataset.range(_ENDLESS).map(lambda row, i=i: (i, row))
        for i, weight in enumerate(weights)
        if weight
    ]
    return grain.MapDataset.mix(streams, [weight for weight in weights if weight])


def row_counts_of_streams(weights: Sequence[float], rows: int) -> list[int]:
    """Returns, for each stream, how many of the first `rows` rows of `mix_streams(weights)` are
    from it.
    """
    positive = [weight for weight in weights if weight]
    # This is grain's rule: each stream in turn takes its share of the rows that the streams before
    # it left.
    shares = [int(weight * (100 / min(positive))) for weight in positive]
    rows_left, shares_left, counts = rows, sum(shares), []
    for share in shares:
        rest = rows_left * (shares_left - share) // shares_left
        counts.append(rows_left - rest)
        rows_left, shares_left = rest, shares_left - share
    found = iter(counts)
    in_all = [next(found) if weight else 0 for weight in weights]
    stream, row = mix_streams(weights)[rows]
    assert in_all[stream] == row, "grain mixes by another rule"
    return in_all


def _shuffle_seed(seed: int, source: int) -> int:
    # grain adds the number of the epoch to the seed. With neighbouring seeds, one source's epoch
    # would therefore have the order of another source's next epoch. Hashed seeds are far apart.
    return int(digests.sha256(f"{seed} {source}")[:8], 16)


def _heldout_order(prepared: list[PreparedSource], seed: int) -> np.ndarray:
    """Returns the order of the held-out rows, int64 [rows, 2]: (index of the source, index of the
    row in the source). The rows of each source are shuffled, and the sources are interleaved in
    proportion to their sizes.
    """
    orders = []
    relative_positions = []  # of each source: position of each row in it, 0 … 1
    for i, p in enumerate(prepared):
        n = len(p.rows[HELDOUT])
        orders.append(
            np.stack(
                [np.full(n, i), np.random.default_rng(_shuffle_seed(seed, i)).permutation(n)],
                axis=1,
            )
        )
        relative_positions.append((np.arange(n) + 0.5) / n)
    order = np.argsort(np.concatenate(relative_positions), kind="stable")
    return np.concatenate(orders)[order]
