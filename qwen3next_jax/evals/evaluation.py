"""The base class of evaluations, and functions that check and construct evaluations by name.

An evaluation is a subclass of `Evaluation`. The name of an evaluation is a key of
`config.registry.EVALUATIONS`, or an import string, "package.module:Class".
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.common.metrics import Metric
from qwen3next_jax.config import DataConfig, EvalConfig, ModelConfig
from qwen3next_jax.config.registry import EVALUATIONS, resolve
from qwen3next_jax.data.pipeline import Batch, DataSource
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.evals.scoring import Scorer, make_score_step, make_scorer

_BYTE_IDS = 256  # token ids below this are the single bytes in a byte-level vocabulary


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Options that the user may set for all evaluations.

    Attributes:
      rows: number of rows that an evaluation runs. The evaluations mqar, induction, copy and niah
        run `rows` rows under each of their conditions. Every other evaluation runs `rows` rows in
        total (if the data are text, at most as many as there are held-out rows). If `rows` is None,
        each evaluation uses its own default.
      row_lengths: row lengths in tokens, for induction, copy, niah and state.
      pair_counts: numbers of key-value pairs in a row, for mqar.
    """

    rows: int | None = None
    row_lengths: tuple[int, ...] = (256,)
    pair_counts: tuple[int, ...] = (4, 8, 16)


def options_from_config(config: EvalConfig) -> EvalOptions:
    """Returns the options of the evaluations that run during training."""
    return EvalOptions(config.suite_rows, config.suite_lengths, config.suite_pairs)


@dataclasses.dataclass(frozen=True)
class EvalContext:
    """The model that evaluations measure, and the data that they measure it on.

    The context does not hold the parameters: `Evaluation.run` takes them, so that one compiled
    evaluation measures the model at several steps of training.

    Attributes:
      model_config: the settings of the model.
      graphdef: the graph definition of the `Qwen3Next`; `nnx.merge` adds parameters to it.
      tokenizer: turns text into the model's tokens.
      open_data: function that opens the data with the held-out rows. Only evaluations that read
        held-out rows call `open_data`.
      options: the user's options.
      mesh: the mesh on which the parameters lie, or None for a single device. If several
        processes share the mesh, each of them runs every evaluation on the same rows.
    """

    model_config: ModelConfig
    graphdef: nnx.GraphDef
    tokenizer: Tokenizer
    open_data: Callable[[], DataSource]
    options: EvalOptions = EvalOptions()
    mesh: Mesh | None = None

    def heldout_batches(self, rows: int | None = None, least: int = 0) -> Iterator[Batch]:
        """Yields batches of held-out rows as host arrays; `scoring.place_on_mesh` moves them to
        the mesh.

        Args:
          rows: the number of rows if `options.rows` is None; None: all rows.
          least: at least this many rows of each source of the data are yielded, or all rows of a
            source that has fewer. If the first `rows` rows hold fewer than `least` rows of a
            source, more rows of this source follow them.
        """
        return self.open_data().heldout_batches(self.options.rows or rows, least=least)

    def scorer(self, params: dict) -> Scorer:
        """Returns a scorer of the model with the parameters `params`: a function that computes, for
        each token of given rows, its loss and the token that the model finds most likely in its
        place (`scoring.Scorer`).
        """
        return make_scorer(self._score_step, params, self.mesh)

    @functools.cached_property
    def _score_step(self) -> Callable:
        return make_score_step(self.graphdef, self.mesh)


class Evaluation:
    """The base class of evaluations. An instance compiles its programs once and can then measure
    any parameters of its model.

    Attributes:
      metrics: name → declaration of every metric that `run` returns. If `run` measures a metric
        under several conditions, it returns one number per condition, named "metric/condition".
      needs_text: whether the evaluation requires a model of text, not of a synthetic task.
      settings_read: which of the settings "suite_lengths" and "suite_pairs" of `EvalConfig` the
        evaluation reads; None: it may read both. A run refuses a setting that none of its
        evaluations reads.
    """

    metrics: ClassVar[Mapping[str, Metric]] = {}
    needs_text: ClassVar[bool] = False
    settings_read: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, eval_context: EvalContext):
        self.eval_context = eval_context

    @classmethod
    def required_context_length(cls, options: EvalOptions) -> int:
        """Returns the length in tokens of the longest row that the evaluation generates; 0 if it
        generates no rows. A model with a shorter context is refused.
        """
        return 0

    @classmethod
    def check_model(cls, options: EvalOptions, config: ModelConfig, tokenizer: Tokenizer) -> None:
        """Checks the evaluation's requirements on a model, except for `needs_text` and
        `required_context_length`, which the caller checks. The method of the base class accepts
        every model.

        Raises:
          UserError: the evaluation cannot run on a model of this config.
        """

    @classmethod
    def check_data(cls, options: EvalOptions, data: DataConfig, vocab_size: int) -> None:
        """Checks the evaluation's requirements on the data of a run. The method of the base class
        accepts all data.

        Raises:
          UserError: the evaluation cannot measure on these data.
        """

    def run(self, params: dict) -> dict[str, float]:
        """Evaluates the model with the parameters `params`.

        Args:
          params: the model's parameters, sharded over the mesh as in the train state.

        Returns:
          Name → number: "metric", or "metric/condition". All processes get the same numbers.
        """
        raise NotImplementedError


def check_evaluations(
    names: Sequence[str],
    options: EvalOptions,
    config: ModelConfig,
    tokenizer: Tokenizer,
    setting: str = "eval.suites",
    data: DataConfig | None = None,
) -> None:
    """Checks that every named evaluation can run on the model, before anything is compiled.

    Args:
      setting: the setting or flag that holds the names; error messages name it.
      data: the settings of the data that the evaluations measure on; None: they are not checked.

    Raises:
      UserError: an evaluation cannot run. The message of the error names the evaluation and its
        requirement.
    """
    require(
        options.rows is None or options.rows >= 1,
        f"{options.rows} rows of each evaluation: expected at least 1",
    )
    for name in names:
        evaluation: type[Evaluation] = resolve(EVALUATIONS, name, setting)
        required = evaluation.required_context_length(options)
        available = config.context_length
        require(
            required <= available,
            f"suite {name} needs a context of {required} tokens, the model's is {available} "
            "(max_position_embeddings × yarn_factor): give smaller lengths or fewer pairs",
        )
        require(
            tokenizer.reads_text or not evaluation.needs_text,
            f"suite {name}: a model of a synthetic task reads no text",
        )
        try:
            evaluation.check_model(options, config, tokenizer)
            if data is not None:
                evaluation.check_data(options, data, config.vocab_size)
        except UserError as error:
            raise UserError(f"suite {name}: {error}") from error


def make_evaluations(
    names: Sequence[str],
    eval_context: EvalContext,
    setting: str = "eval.suites",
    data: DataConfig | None = None,
) -> dict[str, Evaluation]:
    """Checks the named evaluations and constructs them. `setting` and `data` are arguments of
    `check_evaluations`.

    Returns:
      Name → evaluation.

    Raises:
      UserError: an evaluation cannot run (see `check_evaluations`).
    """
    check_evaluations(
        names,
        eval_context.options,
        eval_context.model_config,
        eval_context.tokenizer,
        setting,
        data,
    )
    return {name: resolve(EVALUATIONS, name, setting)(eval_context) for name in names}


def synthetic_vocab_size(config: ModelConfig, tokenizer: Tokenizer) -> int:
    """Returns the number n of token ids that rows of synthetic tasks use, 0 … n - 1: the ids of
    single bytes if the tokenizer reads text, otherwise the whole vocabulary.
    """
    return min(config.vocab_size, _BYTE_IDS) if tokenizer.reads_text else config.vocab_size
