"""Recall: multi-query associative recall, induction, copying, and needles in a haystack.

All are read off one forward pass over prompt and answer: greedy decoding gives the answer
exactly where the best guess is right at each of its tokens, given the right ones before.
Letters: B batch, T time.
"""

import functools
import itertools
import uuid

import numpy as np

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.figures import Figure
from qwen3next_jax.config import ModelConfig, SyntheticConfig
from qwen3next_jax.data.synthetic import HELDOUT_SPLIT, TaskRows
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.evals.evaluation import Evaluation, Options, made_up_ids
from qwen3next_jax.evals.scoring import Scorer

_BATCH_TOKENS = 8192  # of one scored batch
_HAYSTACK = 2**20  # tokens
_NOISE = "The river is wide. The hill is steep. The road goes on. Turn around and walk back. "
_WORDS = (
    "amber",
    "basket",
    "candle",
    "dragon",
    "ember",
    "forest",
    "garden",
    "harbor",
    "island",
    "jungle",
    "kettle",
    "lantern",
    "marble",
    "needle",
    "orchard",
    "pebble",
    "quartz",
    "ribbon",
    "saddle",
    "timber",
    "umbrella",
    "velvet",
    "willow",
    "zephyr",
)


class _Task(Evaluation):
    """A synthetic task on rows of every length, or with every number of pairs, that the options
    name.
    """

    figures = {"accuracy": Figure("accuracy", "share", "higher", main=True)}
    settings = ("suite_lengths",)
    task = ""

    @classmethod
    def shapes(cls, options: Options) -> dict[str, tuple[int, int]]:
        """Place → (row length, pairs)."""
        return {f"{length} tokens": (length, 1) for length in options.lengths}

    @classmethod
    def context(cls, options: Options) -> int:
        return max(length for length, _ in cls.shapes(options).values())

    @classmethod
    def check(cls, options: Options, config: ModelConfig, tokenizer: Tokenizer) -> None:
        for length, pairs in cls.shapes(options).values():
            _rows(cls.task, length, made_up_ids(config, tokenizer), pairs)

    def run(self, params: dict) -> dict[str, float]:
        s = self.subject
        ids, rows, scorer = (
            made_up_ids(s.config, s.tokenizer),
            s.options.rows or 128,
            s.scorer(params),
        )
        return {
            f"accuracy/{place}": task_accuracy(scorer, self.task, length, ids, rows, pairs)
            for place, (length, pairs) in self.shapes(s.options).items()
        }


class AssociativeRecall(_Task):
    """Rows of 64 tokens, as in the usual figures, or of what the pairs need."""

    settings = ("suite_pairs",)
    task = "mqar"

    @classmethod
    def shapes(cls, options: Options) -> dict[str, tuple[int, int]]:
        return {f"{pairs} pairs": (max(64, 4 * pairs), pairs) for pairs in options.pairs}


class Induction(_Task):
    task = "induction"


class Copy(_Task):
    task = "copy"


class Needles(Evaluation):
    figures = {
        "accuracy": Figure("accuracy", "share", "higher", main=True),
        "tokens_right": Figure("tokens of the answer right", "share", "higher", main=True),
    }
    settings = ("suite_lengths",)
    needs_text = True

    @classmethod
    def context(cls, options: Options) -> int:
        return max(options.lengths)

    @classmethod
    def check(cls, options: Options, config: ModelConfig, tokenizer: Tokenizer) -> None:
        # rows that cannot hold fact, question and answer
        for kind, length in itertools.product((1, 2, 3), options.lengths):
            _needle_row(
                np.random.default_rng(0),
                tokenizer,
                kind,
                length,
                0.5,
                np.zeros(max(length, 1), np.int32),
            )

    @functools.cached_property
    def _haystack(self) -> np.ndarray:
        """Held-out text [n], as much as needles need to lie in different places."""
        parts, enough = [], max(_HAYSTACK, 2 * max(self.subject.options.lengths))
        for batch in self.subject.open_data().heldout():
            parts.append(batch["tokens"][batch["segment_ids"] > 0])
            if sum(map(len, parts)) >= enough:
                break
        return np.concatenate(parts)

    def run(self, params: dict) -> dict[str, float]:
        options, scorer, values = self.subject.options, self.subject.scorer(params), {}
        for kind, n in itertools.product((1, 2, 3), options.lengths):
            exact, tokens = needle_accuracy(
                scorer, self.subject.tokenizer, kind, n, options.rows or 32, self._haystack
            )
            values |= {
                f"accuracy/S-NIAH-{kind} {n} tokens": exact,
                f"tokens_right/S-NIAH-{kind} {n} tokens": tokens,
            }
        return values


def task_accuracy(
    scorer: Scorer, task: str, length: int, ids: int, rows: int, pairs: int = 8
) -> float:
    """Share of a task's targets that the model's best guess hits.

    Args:
      task: one of `data.synthetic`'s.
      ids: the task draws from token ids below this.
    """
    made = _rows(task, length, ids, pairs)
    chosen = [made[i] for i in range(rows)]
    tokens_BT, targets_BT = (np.stack(x) for x in zip(*chosen, strict=True))
    hits = _hits(scorer, tokens_BT)
    return float(hits[targets_BT[:, 1:]].mean())


def _rows(task: str, length: int, ids: int, pairs: int) -> TaskRows:
    return TaskRows(task, length, ids, SyntheticConfig(pairs=pairs), seed=0, split=HELDOUT_SPLIT)


def needle_accuracy(
    scorer: Scorer, tokenizer: Tokenizer, kind: int, length: int, rows: int, haystack: np.ndarray
) -> tuple[float, float]:
    """S-NIAH in the manner of RULER (2404.06654) → (share of rows whose hidden value the model
    would say, word for word; share of the values' tokens that it hits).

    Args:
      kind: 1: a number in repeated noise; 2: a number in text; 3: a 32-digit identifier in text.
      length: tokens of prompt and answer together.
      haystack: [n] ids of running text, for kinds 2 and 3.
    """
    rng = np.random.default_rng([kind, length])
    made = [
        _needle_row(rng, tokenizer, kind, length, (i + 0.5) / rows, haystack) for i in range(rows)
    ]
    tokens_BT = np.stack([tokens for tokens, _ in made])
    hits = _hits(scorer, tokens_BT)
    answers = [hits[i, -count:] for i, (_, count) in enumerate(made)]
    return float(np.mean([answer.all() for answer in answers])), float(
        np.concatenate(answers).mean()
    )


def _needle_row(
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    kind: int,
    length: int,
    depth: float,
    haystack: np.ndarray,
) -> tuple[np.ndarray, int]:
    """(tokens [T], tokens of the answer): text with one fact in it, at `depth` (0 … 1), and a
    question at the end.
    """
    word = rng.choice(_WORDS)
    value = (
        str(rng.integers(1_000_000, 10_000_000))
        if kind < 3
        else str(uuid.UUID(bytes=rng.bytes(16)))
    )
    needle = tokenizer.encode(f"\nThe secret number of {word} is {value}.\n")
    question = tokenizer.encode(f"\nThe secret number of {word} is")
    answer = tokenizer.encode(f" {value}")
    room = length - len(needle) - len(question) - len(answer)
    if room < 1:
        raise UserError(
            f"niah at {length} tokens: fact, question and answer alone take {length - room}; give "
            "a longer --lengths"
        )
    text = np.resize(tokenizer.encode(_NOISE), room) if kind == 1 else _stretch(rng, haystack, room)
    place = round(depth * room)
    return np.concatenate([text[:place], needle, text[place:], question, answer]).astype(
        np.int32
    ), len(answer)


def _stretch(rng: np.random.Generator, haystack: np.ndarray, count: int) -> np.ndarray:
    if len(haystack) < count:
        raise UserError(
            f"niah needs {count} tokens of text and the data has {len(haystack)} held out: give "
            "more data, or a shorter --lengths"
        )
    start = int(rng.integers(0, len(haystack) - count + 1))
    return haystack[start : start + count]


def _hits(scorer: Scorer, tokens_BT: np.ndarray) -> np.ndarray:
    """[B, T-1] bool: whether the best guess for tokens 1 … T-1 is right."""
    size = max(1, min(len(tokens_BT), _BATCH_TOKENS // tokens_BT.shape[1]))
    padded = np.resize(tokens_BT, (-(-len(tokens_BT) // size) * size, tokens_BT.shape[1]))
    guesses = [scorer(padded[i : i + size])[1] for i in range(0, len(padded), size)]
    return np.concatenate(guesses)[: len(tokens_BT)] == tokens_BT[:, 1:]
