"""The evaluations by name, what each needs, and running them on one model.

    heldout     loss, perplexity, bits per byte, accuracy; MTP loss and acceptance by depth
    position    loss by position in the document
    mqar        multi-query associative recall, by number of pairs
    induction   what followed a token the one time it occurred, by row length
    copy        saying a row again, by row length
    niah        S-NIAH 1-3: a number in noise, a number in text, an identifier in text, by length
    sinks       attention on first tokens and the largest activations, by layer
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from flax import nnx

from qwen3next_jax.config import EvalConfig, ModelConfig, SyntheticConfig
from qwen3next_jax.data.pipeline import SyntheticData, TrainData
from qwen3next_jax.data.synthetic import HELDOUT_SPLIT, TaskRows
from qwen3next_jax.data.tokens import TaskTokens, Tokenizer
from qwen3next_jax.errors import UserError, did_you_mean
from qwen3next_jax.evals import perplexity, recall
from qwen3next_jax.evals.heldout import evaluate_heldout, make_heldout_step
from qwen3next_jax.evals.scoring import Scorer, make_score_step, make_scorer
from qwen3next_jax.evals.sinks import make_probe_step, sinks

_HAYSTACK = 2**20  # tokens
_TEXT_IDS = 256  # in byte-level vocabularies the ids below are the single bytes


@dataclasses.dataclass(frozen=True)
class Options:
    """rows per evaluation; lengths in tokens (of induction, copy, niah); pairs (of mqar)."""

    rows: int | None = None  # None: 128 (niah and sinks 32), and for heldout and position all there are
    lengths: tuple[int, ...] = (256,)
    pairs: tuple[int, ...] = (4, 8, 16)


def options_of(config: EvalConfig) -> Options:
    """What a run's configuration asks for during training."""
    return Options(config.suite_rows, config.suite_lengths, config.suite_pairs)


def check(names: Sequence[str], options: Options, model: ModelConfig, text: bool) -> None:
    """Refuses what cannot run on a model, before anything is computed. `text`: its tokens stand for text, not for a task's ids."""
    if options.rows is not None and options.rows < 1:
        raise UserError(f"{options.rows} rows of each evaluation: expected at least 1")
    longest = model.max_position_embeddings
    for name in names:
        if name not in SUITES:
            raise UserError(f"suite {name}: no such evaluation{did_you_mean(name, SUITES)}; known: {', '.join(SUITES)}")
        if name in _LENGTHS and (needed := _LENGTHS[name](options)) > longest:
            raise UserError(f"suite {name} needs a context of {needed} tokens, the model's is {longest} "
                            "(max_position_embeddings): give smaller lengths or fewer pairs")
        if name == "niah" and not text:
            raise UserError("suite niah: a model of a synthetic task reads no text")
        for length, pairs in _tasks(name, options):
            try:
                TaskRows(name, length, _ids(model, text), SyntheticConfig(pairs=pairs), seed=0, split=HELDOUT_SPLIT)
            except UserError as error:
                raise UserError(f"suite {name}: {error}") from error


def _tasks(name: str, options: Options) -> list[tuple[int, int]]:
    """(row length, pairs) of every synthetic task that an evaluation draws."""
    if name == "mqar":
        return [(recall.mqar_length(pairs), pairs) for pairs in options.pairs]
    return [(length, 1) for length in options.lengths] if name in ("induction", "copy") else []


def _ids(model: ModelConfig, text: bool) -> int:
    """Rows that are made up use token ids below this."""
    return min(model.vocab_size, _TEXT_IDS) if text else model.vocab_size


class Suites:
    """The named evaluations of one architecture, compiled once and run on any of its parameters.

    `open_rows()` gives the data whose held-out rows count; it is called only by the evaluations that read text.
    """

    def __init__(self, names: Sequence[str], options: Options, graphdef: nnx.GraphDef, config: ModelConfig, tokenizer: Tokenizer,
                 open_rows: Callable[[], TrainData | SyntheticData]):
        text = not isinstance(tokenizer, TaskTokens)
        check(names, options, config, text)
        self.names, self.options, self.tokenizer, self.open_rows = tuple(names), options, tokenizer, open_rows
        self.ids, self.layers = _ids(config, text), config.num_hidden_layers
        if "niah" in names:
            recall.check_needle_lengths(tokenizer, options.lengths)
        self.heldout_step, self._score_step = make_heldout_step(graphdef), make_score_step(graphdef)
        self.probe_step = make_probe_step(graphdef)

    @functools.cached_property
    def haystack(self) -> np.ndarray:
        """Held-out text [n], as much as needles need to lie in different places."""
        parts, enough = [], max(_HAYSTACK, 2 * max(self.options.lengths))
        for batch in self.open_rows().heldout():
            parts.append(batch["tokens"][batch["segment_ids"] > 0])
            if sum(map(len, parts)) >= enough:
                break
        return np.concatenate(parts)

    def run(self, params: dict) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields (name, values) of one evaluation after another."""
        scorer = make_scorer(self._score_step, params)
        for name in self.names:
            yield name, SUITES[name](self, scorer, params)


def _heldout(suites: Suites, scorer: Scorer, params: dict) -> dict[str, float]:
    return evaluate_heldout(suites.heldout_step, params, suites.open_rows().heldout(suites.options.rows), suites.tokenizer.token_bytes)


def _position(suites: Suites, scorer: Scorer, params: dict) -> dict[str, float]:
    return perplexity.loss_by_position(scorer, suites.open_rows().heldout(suites.options.rows), suites.tokenizer.token_bytes)


def _mqar(suites: Suites, scorer: Scorer, params: dict) -> dict[str, float]:
    return {f"accuracy/{p} pairs": recall.task_accuracy(scorer, "mqar", recall.mqar_length(p), suites.ids, suites.options.rows or 128, p)
            for p in suites.options.pairs}


def _by_length(task: str):
    def evaluate(suites: Suites, scorer: Scorer, params: dict) -> dict[str, float]:
        return {f"accuracy/{n} tokens": recall.task_accuracy(scorer, task, n, suites.ids, suites.options.rows or 128)
                for n in suites.options.lengths}
    return evaluate


def _niah(suites: Suites, scorer: Scorer, params: dict) -> dict[str, float]:
    haystack = suites.haystack
    values = {}
    for kind in (1, 2, 3):
        for n in suites.options.lengths:
            exact, tokens = recall.needle_accuracy(scorer, suites.tokenizer, kind, n, suites.options.rows or 32, haystack)
            values |= {f"accuracy/S-NIAH-{kind} {n} tokens": exact, f"tokens_right/S-NIAH-{kind} {n} tokens": tokens}
    return values


def _sinks(suites: Suites, scorer: Scorer, params: dict) -> dict[str, float]:
    return sinks(suites.probe_step, params, suites.open_rows().heldout(suites.options.rows or 32), suites.layers)


SUITES = {"heldout": _heldout, "position": _position, "mqar": _mqar, "induction": _by_length("induction"),
          "copy": _by_length("copy"), "niah": _niah, "sinks": _sinks}
_LENGTHS = {"mqar": lambda o: max(map(recall.mqar_length, o.pairs)), "induction": lambda o: max(o.lengths),
            "copy": lambda o: max(o.lengths), "niah": lambda o: max(o.lengths)}
