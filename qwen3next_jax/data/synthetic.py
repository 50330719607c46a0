"""Rows of synthetic tasks. Each row is a pure function of the seed and the row's index, so any row
can be made at any time.

A task marks some tokens of a row as targets. Loss, accuracy and evaluations count only targets.

    mqar       Multi-query associative recall (2312.04927, Zoology). A row begins with pairs of a
               key and its value: k v k v …. After the pairs, each key occurs again, at a gap drawn
               from a power law, followed by its value. The targets are the second occurrences of
               the values. In Zoology's rows, filler tokens stand in place of the second values.
    induction  Random tokens, one of which occurs twice; its second occurrence is the last token but
               one. The last token repeats the token after the first occurrence, and is the target.
    copy       Random tokens, a separator, and the same tokens again. The targets are the tokens
               after the separator.
    backcopy   A Markov chain over the vocabulary in which each of three trigger tokens is followed
               by a copy of the token before the trigger (2410.13835). All tokens but the first are
               targets. On backcopy, attention layers without a gate develop attention sinks.

Letters: T, the number of tokens of a row; P, of pairs; V, the size of the vocabulary.
"""

import dataclasses
import json
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import DataConfig, SyntheticConfig
from qwen3next_jax.data.pipeline import Batch, DataSource
from qwen3next_jax.data.preparation import Progress
from qwen3next_jax.data.tokens import Tokenizer

TRAIN_SPLIT, HELDOUT_SPLIT = 0, 1
# The first token of copy and backcopy rows, and the token between the halves of a copy row.
SEPARATOR = 0
_TRIGGERS = 3


class TaskRow(NamedTuple):
    """A row of a task.

    Attributes:
      tokens: int32 [T].
      target_mask: bool [T], whether each token counts as a target.
    """

    tokens: np.ndarray
    target_mask: np.ndarray


class TaskRows:
    """The rows of one split of a task. The row with index i is the same whenever and wherever it is
    made.

    Raises:
      UserError: rows of `length` tokens over `vocab_size` ids are too small for the task.
    """

    def __init__(
        self,
        task: str,
        length: int,
        vocab_size: int,
        options: SyntheticConfig,
        seed: int,
        split: int,
    ):
        self._make, needed_length, needed_vocab = _row_maker(task, options)
        if length < needed_length:
            raise UserError(
                f"{task} rows have {length} tokens: expected at least {needed_length}"
                + (f" for {options.pairs} pairs" if task == "mqar" else "")
            )
        if vocab_size < needed_vocab:
            raise UserError(
                f"model.vocab_size = {vocab_size}: {task} needs at least {needed_vocab} tokens"
            )
        self._arguments = length, vocab_size, options
        self._key = np.array([seed, split], np.uint64)
        self._chain = _backcopy_chain(vocab_size, seed) if task == "backcopy" else None

    def __getitem__(self, index: int) -> TaskRow:
        # Philox has a counter of 256 bits, so every row has 2^64 draws of its own.
        rng = np.random.Generator(np.random.Philox(key=self._key, counter=[0, index, 0, 0]))
        if self._chain is not None:
            return _backcopy_row(rng, self._arguments[0], *self._chain)
        return self._make(rng, *self._arguments)


def _row_maker(task: str, options: SyntheticConfig) -> tuple[Callable | None, int, int]:
    """Returns (function that makes a row, smallest row length, smallest vocabulary). For the task
    backcopy the function is None: `_backcopy_row` makes its rows.
    """
    pairs = options.pairs
    return {
        "mqar": (_mqar_row, 4 * pairs, 2 * pairs + 2),
        "induction": (_induction_row, 4, 8),
        "copy": (_copy_row, 4, 4),
        "backcopy": (None, 8, 4 * _TRIGGERS),
    }[task]


def _mqar_row(
    rng: np.random.Generator, length: int, vocab_size: int, options: SyntheticConfig
) -> TaskRow:
    """Makes an mqar row. Keys are the ids 1 … V/2 - 1; values are the ids V/2 … V - 1. The
    remaining positions hold random values.
    """
    pairs, half = options.pairs, vocab_size // 2
    keys = 1 + rng.permutation(half - 1)[:pairs]
    values = half + rng.permutation(vocab_size - half)[:pairs]
    tokens = rng.integers(half, vocab_size, length)
    tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2] = keys, values
    slots = (length - 2 * pairs) // 2
    # Draws P slots without replacement, with P(slot) ∝ slot^(power - 1): each slot has an
    # exponential waiting time with this rate, and the P slots with the shortest times are chosen.
    rate = np.arange(1, slots + 1) ** (options.gap_power - 1.0)
    chosen = np.argsort(rng.exponential(size=slots) / rate)[:pairs]
    query = 2 * pairs + 2 * chosen
    tokens[query], tokens[query + 1] = keys, values
    targets = np.zeros(length, bool)
    targets[query + 1] = True
    return TaskRow(tokens.astype(np.int32), targets)


def _induction_row(
    rng: np.random.Generator, length: int, vocab_size: int, options: SyntheticConfig
) -> TaskRow:
    trigger = int(rng.integers(1, vocab_size))
    tokens = rng.integers(1, vocab_size - 1, length)
    tokens += tokens >= trigger  # so these are all ids but 0 and the trigger's
    first = int(rng.integers(0, length - 3))
    tokens[first], tokens[-2], tokens[-1] = trigger, trigger, tokens[first + 1]
    targets = np.zeros(length, bool)
    targets[-1] = True
    return TaskRow(tokens.astype(np.int32), targets)


def _copy_row(
    rng: np.random.Generator, length: int, vocab_size: int, options: SyntheticConfig
) -> TaskRow:
    half = (length - 2) // 2
    tokens = np.full(length, SEPARATOR)
    tokens[1 : 1 + half] = rng.integers(1, vocab_size, half)
    tokens[2 + half : 2 + 2 * half] = tokens[1 : 1 + half]
    targets = np.zeros(length, bool)
    targets[2 + half : 2 + 2 * half] = True
    return TaskRow(tokens.astype(np.int32), targets)


def _backcopy_chain(vocab_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the Markov chain of the backcopy task with this seed: (cumulative transition
    probabilities [V, V], whether each token is a trigger [V]).
    """
    rng = np.random.default_rng([seed, 7])
    transition = rng.dirichlet(np.full(vocab_size - 1, 0.1), vocab_size)
    cumulative = np.cumsum(
        np.pad(transition, ((0, 0), (1, 0))), axis=1
    )  # the separator has probability 0
    trigger = np.zeros(vocab_size, bool)
    frequent = np.argsort(transition.sum(axis=0))[::-1] + 1
    trigger[frequent[:_TRIGGERS]] = True
    return cumulative / cumulative[:, -1:], trigger


def _backcopy_row(
    rng: np.random.Generator, length: int, cumulative: np.ndarray, trigger: np.ndarray
) -> TaskRow:
    draws = rng.random(length)
    tokens = np.full(length, SEPARATOR)
    for t in range(1, length):
        if trigger[tokens[t - 1]] and t >= 2:
            tokens[t] = tokens[t - 2]
        else:
            tokens[t] = np.searchsorted(cumulative[tokens[t - 1]], draws[t], side="right")
    targets = np.ones(length, bool)
    targets[0] = False
    return TaskRow(tokens.astype(np.int32), targets)


class TaskTokenizer:
    """The `Tokenizer` of a synthetic task. The ids of a synthetic task do not stand for text, so
    its texts are lists of numbers, such as "17 4 230".
    """

    reads_text = False
    eos_id = -1

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.token_byte_counts = np.zeros(vocab_size, np.int32)
        self.fingerprint = digests.sha256(f"{vocab_size} ids of a synthetic task")

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.array([int(word) for word in text.split()], np.int32)
        except ValueError as error:
            raise UserError(
                f"{text!r}: a model of a synthetic task reads ids, such as '17 4 230'"
            ) from error

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def save(self, directory: epath.PathLike) -> None:
        """Writes nothing: the export of a model of a synthetic task has no tokenizer.json."""


class SyntheticData(DataSource):
    """The rows of a synthetic task. Each row is made when it is read.

    Raises:
      UserError: the rows or the vocabulary are too small for the task.
    """

    array_dtypes = DataSource.array_dtypes | {"target_mask": bool}
    heldout_rows = 1024  # the default number; a task can make any number of rows

    def __init__(
        self,
        config: DataConfig,
        sequence_length: int,
        batch_size: int,
        vocab_size: int,
        progress: Progress | None = None,
    ):
        self.tokenizer = self.tokenizer_of(config, vocab_size)
        self.task = config.source
        self._config = config
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self._rows, self._heldout = (
            self.task_rows(config, sequence_length, vocab_size, split)
            for split in (TRAIN_SPLIT, HELDOUT_SPLIT)
        )
        # Settings that this task does not read are left out, so that a new setting of one task does
        # not change the fingerprints of others.
        read = self.settings_read(config)
        settings = (
            dataclasses.asdict(config.synthetic)
            if read is None
            else {name: operator.attrgetter(name)(config) for name in read}
        )
        parts = [config.source, settings, sequence_length, vocab_size, config.seed]
        self.fingerprint = digests.sha256(json.dumps(parts))[:20]

    @staticmethod
    def tokenizer_of(config: DataConfig, vocab_size: int) -> Tokenizer:
        return TaskTokenizer(vocab_size)

    @classmethod
    def settings_read(cls, config: DataConfig) -> tuple[str, ...] | None:
        if cls is not SyntheticData:  # a subclass may read any setting
            return None
        return ("synthetic.pairs", "synthetic.gap_power") if config.source == "mqar" else ()

    @classmethod
    def check(cls, config: DataConfig, sequence_length: int, vocab_size: int) -> None:
        cls.task_rows(config, sequence_length, vocab_size, TRAIN_SPLIT)

    @staticmethod
    def task_rows(config: DataConfig, length: int, vocab_size: int, split: int) -> Any:
        """Returns the rows of one split, an object that maps an index to a `TaskRow`."""
        return TaskRows(config.source, length, vocab_size, config.synthetic, config.seed, split)

    def row(self, index: int) -> Batch:
        return _arrays_of_row(self._rows[index])

    def heldout_row(self, index: int) -> Batch:
        return _arrays_of_row(self._heldout[index])

    def document_names_of_row(self, index: int) -> list[str]:
        return [f"{self.task}:{index}"]

    def describe(self) -> dict[str, Any]:
        return {"title": f"synthetic task {self.task}", "bits_per_nat": None}


def _arrays_of_row(row: TaskRow) -> Batch:
    return {
        "tokens": row.tokens,
        "segment_ids": np.ones_like(row.tokens),
        "target_mask": row.target_mask,
    }
