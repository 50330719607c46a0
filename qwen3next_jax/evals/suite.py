"""The evaluations by name, what each needs, and running them on one model.

    heldout     loss, perplexity, bits per byte, accuracy; MTP loss and acceptance by depth
    position    loss by position in the document
    mqar        multi-query associative recall, by number of pairs
    induction   what followed a token the one time it occurred, by row length
    copy        saying a row again, by row length
    niah        S-NIAH 1-3: a number in noise, a number in text, an identifier in text, by length
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from flax import nnx

from qwen3next_jax.data.pipeline import SyntheticData, TrainData
from qwen3next_jax.data.tokens import TaskTokens, Tokenizer
from qwen3next_jax.errors import UserError, did_you_mean
from qwen3next_jax.evals import perplexity, recall
from qwen3next_jax.evals.heldout import evaluate_heldout, make_heldout_step
from qwen3next_jax.evals.scoring import Scorer
from qwen3next_jax.model import Qwen3Next

_TEXT_IDS = 256  # in byte-level vocabularies the ids below are the single bytes


@dataclasses.dataclass(frozen=True)
class Options:
    """rows per evaluation; lengths in tokens (of induction, copy, niah); pairs (of mqar)."""

    rows: int | None = None  # None: 128, and for heldout and position all there are
    lengths: tuple[int, ...] = (256,)
    pairs: tuple[int, ...] = (4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with what it is evaluated on. `open_rows()` gives the data, whose held-out rows count; it is opened only by
    the evaluations that read text."""

    model: Qwen3Next
    tokenizer: Tokenizer
    open_rows: Callable[[], TrainData | SyntheticData]

    @property
    def ids(self) -> int:
        """Token ids below this are used for made-up rows."""
        vocab = self.model.config.vocab_size
        return vocab if isinstance(self.tokenizer, TaskTokens) else min(vocab, _TEXT_IDS)


def check(names: tuple[str, ...], options: Options, longest: int) -> None:
    """Refuses what cannot run on a model of context `longest`, before anything is computed."""
    for name in names:
        if name not in SUITES:
            raise UserError(f"--suite={name}: no such evaluation{did_you_mean(name, SUITES)}; known: {', '.join(SUITES)}")
        if name in _LENGTHS and (needed := _LENGTHS[name](options)) > longest:
            raise UserError(f"--suite={name} needs a context of {needed} tokens, the model's is {longest} "
                            "(max_position_embeddings): give smaller --lengths or --pairs")


def run(names: tuple[str, ...], subject: Subject, options: Options) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields (name, values) of one evaluation after another."""
    check(names, options, subject.model.config.max_position_embeddings)
    scorer = Scorer(subject.model)
    for name in names:
        yield name, SUITES[name](subject, scorer, options)


def _heldout(subject: Subject, scorer: Scorer, options: Options) -> dict[str, float]:
    graphdef, params = nnx.split(subject.model, nnx.Param)
    return evaluate_heldout(make_heldout_step(graphdef), nnx.to_pure_dict(params), subject.open_rows().heldout(options.rows),
                            subject.tokenizer.token_bytes)


def _position(subject: Subject, scorer: Scorer, options: Options) -> dict[str, float]:
    return perplexity.loss_by_position(scorer, subject.open_rows().heldout(options.rows), subject.tokenizer.token_bytes)


def _mqar(subject: Subject, scorer: Scorer, options: Options) -> dict[str, float]:
    return {f"accuracy/{p} pairs": recall.task_accuracy(scorer, "mqar", recall.mqar_length(p), subject.ids,
                                                        options.rows or 128, p) for p in options.pairs}


def _by_length(task: str):
    def evaluate(subject: Subject, scorer: Scorer, options: Options) -> dict[str, float]:
        return {f"accuracy/{n} tokens": recall.task_accuracy(scorer, task, n, subject.ids, options.rows or 128)
                for n in options.lengths}
    return evaluate


def _niah(subject: Subject, scorer: Scorer, options: Options) -> dict[str, float]:
    if isinstance(subject.tokenizer, TaskTokens):
        raise UserError("--suite=niah: a model of a synthetic task reads no text")
    batches = subject.open_rows().heldout()
    haystack = np.concatenate([b["tokens"][b["segment_ids"] > 0] for b in batches])
    values = {}
    for kind in (1, 2, 3):
        for n in options.lengths:
            exact, tokens = recall.needle_accuracy(scorer, subject.tokenizer, kind, n, options.rows or 32, haystack)
            values |= {f"accuracy/S-NIAH-{kind} {n} tokens": exact, f"tokens_right/S-NIAH-{kind} {n} tokens": tokens}
    return values


SUITES = {"heldout": _heldout, "position": _position, "mqar": _mqar, "induction": _by_length("induction"),
          "copy": _by_length("copy"), "niah": _niah}
_LENGTHS = {"mqar": lambda o: max(map(recall.mqar_length, o.pairs)), "induction": lambda o: max(o.lengths),
            "copy": lambda o: max(o.lengths), "niah": lambda o: max(o.lengths)}
