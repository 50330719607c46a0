"""Evaluations of recall: multi-query associative recall (MQAR), induction, copying, and needles in
a haystack.

Each evaluation takes one forward pass over a prompt and the right answer, and compares each token
of the answer with the token that the model finds most likely in its place. If every token of the
answer is the model's most likely token, greedy decoding would generate the right answer.

Letters: B batch, T time.
"""

import functools
import itertools
import uuid

import numpy as np

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.metrics import Metric
from qwen3next_jax.config import ModelConfig, SyntheticConfig
from qwen3next_jax.data.synthetic import HELDOUT_SPLIT, TaskRows
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.evals.evaluation import EvalOptions, Evaluation, synthetic_vocab_size
from qwen3next_jax.evals.scoring import Scorer

_BATCH_TOKENS = 8192  # the most tokens that one forward pass scores
_HAYSTACK_TOKENS = 2**20  # held-out tokens from which the text around needles is drawn
_NOISE = "The river is wide. The hill is steep. The road goes on. Turn around and walk back. "
_KINDS = (1, 2, 3)  # the kinds of needles; see `needle_accuracy`
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


class _SyntheticTask(Evaluation):
    """The base class of evaluations on a task of `data.synthetic`. `run` measures accuracy for each
    row length in `options.row_lengths`, or in MQAR for each number of key-value pairs in
    `options.pair_counts`.
    """

    metrics = {"accuracy": Metric("accuracy", "share", "higher", main=True)}
    settings_read = ("suite_lengths",)
    task = ""  # the task's name in `data.synthetic`

    @classmethod
    def row_length_and_pairs(cls, options: EvalOptions) -> dict[str, tuple[int, int]]:
        """Returns condition → (row length in tokens, number of pairs)."""
        return {f"{length} tokens": (length, 1) for length in options.row_lengths}

    @classmethod
    def required_context_length(cls, options: EvalOptions) -> int:
        return max(length for length, _ in cls.row_length_and_pairs(options).values())

    @classmethod
    def check_model(cls, options: EvalOptions, config: ModelConfig, tokenizer: Tokenizer) -> None:
        for length, pairs in cls.row_length_and_pairs(options).values():
            _task_rows(cls.task, length, synthetic_vocab_size(config, tokenizer), pairs)

    def run(self, params: dict) -> dict[str, float]:
        context = self.eval_context
        ids = synthetic_vocab_size(context.model_config, context.tokenizer)
        rows = context.options.rows or 128
        scorer = context.scorer(params)
        return {
            f"accuracy/{condition}": task_accuracy(scorer, self.task, length, ids, rows, pairs)
            for condition, (length, pairs) in self.row_length_and_pairs(context.options).items()
        }


class AssociativeRecall(_SyntheticTask):
    """The evaluation "mqar", multi-query associative recall. A row has 64 tokens, as in
    publications, or more if the key-value pairs and queries need more.
    """

    settings_read = ("suite_pairs",)
    task = "mqar"

    @classmethod
    def row_length_and_pairs(cls, options: EvalOptions) -> dict[str, tuple[int, int]]:
        return {f"{pairs} pairs": (max(64, 4 * pairs), pairs) for pairs in options.pair_counts}


class Induction(_SyntheticTask):
    """The evaluation "induction", on the task "induction" of `data.synthetic`."""

    task = "induction"


class Copy(_SyntheticTask):
    """The evaluation "copy", on the task "copy" of `data.synthetic`."""

    task = "copy"


class NeedleInAHaystack(Evaluation):
    """The evaluation "niah", needle in a haystack: the model is asked for a value that a sentence
    in a long text states. `needle_accuracy` describes the three kinds of values and texts.
    """

    metrics = {
        "accuracy": Metric("accuracy", "share", "higher", main=True),
        "tokens_right": Metric("tokens of the answer right", "share", "higher", main=True),
    }
    settings_read = ("suite_lengths",)
    needs_text = True

    @classmethod
    def required_context_length(cls, options: EvalOptions) -> int:
        return max(options.row_lengths)

    @classmethod
    def check_model(cls, options: EvalOptions, config: ModelConfig, tokenizer: Tokenizer) -> None:
        # `_needle_row` raises if fact, question and answer do not fit into a row.
        for kind, length in itertools.product(_KINDS, options.row_lengths):
            rng, haystack = np.random.default_rng(0), np.zeros(max(length, 1), np.int32)
            _needle_row(rng, tokenizer, kind, length, 0.5, haystack)

    @functools.cached_property
    def _haystack(self) -> np.ndarray:
        """Held-out tokens [n], from which the text of the rows is drawn. If the data suffice, n is
        at least twice the length of a row, so that rows can start at many places.
        """
        parts = []
        enough = max(_HAYSTACK_TOKENS, 2 * max(self.eval_context.options.row_lengths))
        for batch in self.eval_context.open_data().heldout_batches():
            parts.append(batch["tokens"][batch["segment_ids"] > 0])
            if sum(map(len, parts)) >= enough:
                break
        return np.concatenate(parts)

    def run(self, params: dict) -> dict[str, float]:
        context, values = self.eval_context, {}
        scorer, rows = context.scorer(params), context.options.rows or 32
        for kind, length in itertools.product(_KINDS, context.options.row_lengths):
            accuracy, tokens_right = needle_accuracy(
                scorer, context.tokenizer, kind, length, rows, self._haystack
            )
            values[f"accuracy/S-NIAH-{kind} {length} tokens"] = accuracy
            values[f"tokens_right/S-NIAH-{kind} {length} tokens"] = tokens_right
        return values


def task_accuracy(
    scorer: Scorer, task: str, length: int, ids: int, rows: int, pairs: int = 8
) -> float:
    """Returns the accuracy on a synthetic task: the share of target tokens that the model finds
    most likely in their places.

    Args:
      scorer: computes the model's most likely token at every position.
      task: the name of a task of `data.synthetic`.
      length: tokens of each row.
      ids: the task uses token ids below this number.
      rows: the number of rows.
      pairs: the number of key-value pairs in a row (MQAR only).
    """
    task_rows = _task_rows(task, length, ids, pairs)
    tokens_BT, is_target_BT = (
        np.stack(arrays) for arrays in zip(*(task_rows[i] for i in range(rows)), strict=True)
    )
    is_correct_BT = _guess_is_right(scorer, tokens_BT)
    return float(is_correct_BT[is_target_BT[:, 1:]].mean())


def _task_rows(task: str, length: int, ids: int, pairs: int) -> TaskRows:
    """Returns the held-out rows of a synthetic task, as a sequence that generates a row when it is
    indexed.
    """
    return TaskRows(task, length, ids, SyntheticConfig(pairs=pairs), seed=0, split=HELDOUT_SPLIT)


def needle_accuracy(
    scorer: Scorer, tokenizer: Tokenizer, kind: int, length: int, rows: int, haystack: np.ndarray
) -> tuple[float, float]:
    """Measures single-needle retrieval (S-NIAH) as in RULER (arXiv 2404.06654).

    The needle is a sentence that states a value. The needles of the rows are at equally spaced
    depths of the text.

    Args:
      scorer: computes the model's most likely token at every position.
      kind: 1: the value is a number, and the text repeats the same sentences; 2: the value is a
        number, and the text is part of `haystack`; 3: the value is an identifier of 32 hexadecimal
        digits, and the text is part of `haystack`.
      length: tokens of prompt and answer together.
      rows: the number of rows.
      haystack: [n] token ids of running text, for kinds 2 and 3.

    Returns:
      (share of rows in which every token of the answer is the model's most likely token; share of
      the tokens of all answers that are the model's most likely token).

    Raises:
      UserError: `length` is too small, or `haystack` is too short.
    """
    rng = np.random.default_rng([kind, length])
    needle_rows = [
        _needle_row(rng, tokenizer, kind, length, (i + 0.5) / rows, haystack) for i in range(rows)
    ]
    is_correct_BT = _guess_is_right(scorer, np.stack([tokens for tokens, _ in needle_rows]))
    answers = [is_correct_BT[i, -count:] for i, (_, count) in enumerate(needle_rows)]
    accuracy = float(np.mean([answer.all() for answer in answers]))
    tokens_right = float(np.concatenate(answers).mean())
    return accuracy, tokens_right


def _needle_row(
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    kind: int,
    length: int,
    depth: float,
    haystack: np.ndarray,
) -> tuple[np.ndarray, int]:
    """Makes a row: text that contains the needle, then a question about the needle's value, then
    the answer.

    Args:
      depth: the place of the needle in the text, from 0 (start) to 1 (end).

    Returns:
      (tokens of the row [length]; number of tokens of the answer, which is at the end of the row).

    Raises:
      UserError: `length` is too small for needle, question and answer.
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
    text_length = length - len(needle) - len(question) - len(answer)
    if text_length < 1:
        raise UserError(
            f"niah at {length} tokens: fact, question and answer alone take "
            f"{length - text_length}; give "
            "a longer --lengths"
        )
    if kind == 1:
        text = np.resize(tokenizer.encode(_NOISE), text_length)
    else:
        text = _random_span(rng, haystack, text_length)
    start = round(depth * text_length)
    tokens = np.concatenate([text[:start], needle, text[start:], question, answer])
    return tokens.astype(np.int32), len(answer)


def _random_span(rng: np.random.Generator, haystack: np.ndarray, count: int) -> np.ndarray:
    """Returns `count` consecutive tokens of the haystack, from a random start.

    Raises:
      UserError: the haystack has fewer than `count` tokens.
    """
    if len(haystack) < count:
        raise UserError(
            f"niah needs {count} tokens of text and the data has {len(haystack)} held out: give "
            "more data, or a shorter --lengths"
        )
    start = int(rng.integers(0, len(haystack) - count + 1))
    return haystack[start : start + count]


def _guess_is_right(scorer: Scorer, tokens_BT: np.ndarray) -> np.ndarray:
    """Returns [B, T-1] bool: whether each of the tokens 1 … T-1 of every row is the model's most
    likely token in its place.
    """
    return best_guesses(scorer, tokens_BT) == tokens_BT[:, 1:]


def best_guesses(scorer: Scorer, tokens_BT: np.ndarray) -> np.ndarray:
    """Returns the most likely token after each of the tokens 0 … T-2 of every row, [B, T-1].

    All batches that are scored have the same size, so that the model is compiled once for the row
    length T.
    """
    size = max(1, min(len(tokens_BT), _BATCH_TOKENS // tokens_BT.shape[1]))
    padded = np.resize(tokens_BT, (-(-len(tokens_BT) // size) * size, tokens_BT.shape[1]))
    guesses = [scorer(padded[i : i + size])[1] for i in range(0, len(padded), size)]
    return np.concatenate(guesses)[: len(tokens_BT)]
