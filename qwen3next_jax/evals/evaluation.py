"""What an evaluation is: a class of its own file and a line of `config.registry`; and running
them by name on one model.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.common.figures import Figure
from qwen3next_jax.config import EvalConfig, ModelConfig
from qwen3next_jax.config.registry import EVALUATIONS, resolve
from qwen3next_jax.data.pipeline import Batch, Data
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.evals.scoring import Scorer, make_score_step, make_scorer

_TEXT_IDS = 256  # in byte-level vocabularies the ids below are the single bytes


@dataclasses.dataclass(frozen=True)
class Options:
    """rows per evaluation; lengths in tokens (of induction, copy, niah); pairs (of mqar)."""

    rows: int | None = None  # None: each evaluation's own number
    lengths: tuple[int, ...] = (256,)
    pairs: tuple[int, ...] = (4, 8, 16)


def options_of(config: EvalConfig) -> Options:
    """What a run's configuration asks for during training."""
    return Options(config.suite_rows, config.suite_lengths, config.suite_pairs)


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model that is evaluated, and on what.

    graphdef: of the `Qwen3Next`, whose parameters come with every call. open_data: gives the
    data whose held-out rows count; called only by the evaluations that read them. mesh: on which
    the parameters lie, as `Qwen3Next.features` takes it; None: one device. On a mesh of several
    processes each
      of them runs every evaluation, with the same rows.
    """

    config: ModelConfig
    graphdef: nnx.GraphDef
    tokenizer: Tokenizer
    open_data: Callable[[], Data]
    options: Options = Options()
    mesh: Mesh | None = None

    def heldout(self, rows: int | None = None) -> Iterator[Batch]:
        """Held-out rows in batches on the host: `options.rows`, else `rows`, else all.
        `scoring.place` takes them to the mesh.
        """
        return self.open_data().heldout(self.options.rows or rows)

    def scorer(self, params: dict) -> Scorer:
        """Loss and best guess at every token of given rows."""
        return make_scorer(self._score_step, params, self.mesh)

    @functools.cached_property
    def _score_step(self) -> Callable:
        return make_score_step(self.graphdef, self.mesh)


class Evaluation:
    """One evaluation of one model, compiled once and run on any of its parameters. A subclass
    says what it gives and needs.

    figures: of every kind of number that `run` gives. A number that is measured in several
    places is named "kind/place". needs_text: whether the model's tokens have to stand for text.
    settings: "suite_lengths" and "suite_pairs", where it reads them; None: it may read both.
    """

    figures: ClassVar[Mapping[str, Figure]] = {}
    needs_text: ClassVar[bool] = False
    settings: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, subject: Subject):
        self.subject = subject

    @classmethod
    def context(cls, options: Options) -> int:
        """Tokens of the longest row that it makes itself."""
        return 0

    @classmethod
    def check(cls, options: Options, config: ModelConfig, tokenizer: Tokenizer) -> None:
        """Raises: UserError: it cannot run on such a model, for a reason that `needs_text` and
        `context` do not tell.
        """

    def run(self, params: dict) -> dict[str, float]:
        """Evaluates `params`, which lie on the mesh as those of the train state do. Every
        process returns the same numbers.
        """
        raise NotImplementedError


def check(
    names: Sequence[str],
    options: Options,
    config: ModelConfig,
    tokenizer: Tokenizer,
    setting: str = "eval.suites",
) -> None:
    """Refuses what cannot run on a model, before anything is computed. `setting`: where the
    names were given.

    Raises:
      UserError: names the evaluation, and what it needs.
    """
    require(
        options.rows is None or options.rows >= 1,
        f"{options.rows} rows of each evaluation: expected at least 1",
    )
    for name in names:
        evaluation: type[Evaluation] = resolve(EVALUATIONS, name, setting)
        needed, longest = evaluation.context(options), config.context_length
        require(
            needed <= longest,
            f"suite {name} needs a context of {needed} tokens, the model's is {longest} "
            "(max_position_embeddings × yarn_factor): give smaller lengths or fewer pairs",
        )
        require(
            tokenizer.reads_text or not evaluation.needs_text,
            f"suite {name}: a model of a synthetic task reads no text",
        )
        try:
            evaluation.check(options, config, tokenizer)
        except UserError as error:
            raise UserError(f"suite {name}: {error}") from error


def make(
    names: Sequence[str], subject: Subject, setting: str = "eval.suites"
) -> dict[str, Evaluation]:
    """The evaluations of these names, ready to run. Raises as `check` does."""
    check(names, subject.options, subject.config, subject.tokenizer, setting)
    return {name: resolve(EVALUATIONS, name, setting)(subject) for name in names}


def made_up_ids(config: ModelConfig, tokenizer: Tokenizer) -> int:
    """Rows that are made up use token ids below this."""
    return min(config.vocab_size, _TEXT_IDS) if tokenizer.reads_text else config.vocab_size
