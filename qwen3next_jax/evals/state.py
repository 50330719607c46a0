"""The evaluation of state-tracking tasks, such as parity (`data.state_tasks`): accuracy by
position, in rows that may be much longer than the training rows.

Letters: B batch, T time.
"""

from collections.abc import Sequence

import numpy as np

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.common.metrics import Metric
from qwen3next_jax.config import DataConfig, ModelConfig
from qwen3next_jax.data.pipeline import data_source_class
from qwen3next_jax.data.state_tasks import StateData
from qwen3next_jax.data.tokens import Tokenizer
from qwen3next_jax.evals.evaluation import EvalOptions, Evaluation
from qwen3next_jax.evals.recall import best_guesses

_ROWS = 64


class StateTracking(Evaluation):
    """The evaluation "state", on the state-tracking task of the run's data. The evaluation reads
    rows as long as the largest of `eval.suite_lengths`, and measures the accuracy in the ranges of
    positions between the lengths: for the lengths 64 and 512, at the positions 1 to 64 and 65 to
    512. The accuracy at positions 1 to 64 stands for the accuracy on rows of 64 tokens.
    """

    metrics = {"accuracy": Metric("accuracy", "share", "higher", main=True)}
    settings_read = ("suite_lengths",)

    @classmethod
    def required_context_length(cls, options: EvalOptions) -> int:
        return max(options.row_lengths)

    @classmethod
    def check_model(cls, options: EvalOptions, config: ModelConfig, tokenizer: Tokenizer) -> None:
        if tokenizer.reads_text:
            raise UserError(
                "eval.suites: state measures a task of data.state_tasks, such as parity: expected "
                "such a data.source"
            )

    @classmethod
    def check_data(cls, options: EvalOptions, data: DataConfig, vocab_size: int) -> None:
        source = data_source_class(data)
        require(
            issubclass(source, StateData),
            f"data.source = {data.source!r}: expected a task of data.state_tasks, such as parity",
        )
        try:
            source.check(data, max(options.row_lengths), vocab_size)
        except UserError as error:
            where = f"rows of {max(options.row_lengths)} tokens (eval.suite_lengths, --lengths)"
            raise UserError(f"{where}: {error}") from error

    def run(self, params: dict) -> dict[str, float]:
        context = self.eval_context
        data = context.open_data()
        if not isinstance(data, StateData):
            title = data.describe()["title"]
            raise UserError(f"eval.suites: state measures a task of data.state_tasks, not: {title}")
        lengths = sorted(context.options.row_lengths)
        rows = data.heldout_rows_of_length(lengths[-1], context.options.rows or _ROWS)
        tokens_BT, labels_BT, targets_BT = (np.stack(arrays) for arrays in zip(*rows, strict=True))
        guesses_BT = best_guesses(context.scorer(params), tokens_BT)
        is_right_BT = guesses_BT == labels_BT[:, 1:]
        return accuracy_by_position(is_right_BT, targets_BT[:, 1:], lengths)


def accuracy_by_position(
    is_right_BT: np.ndarray, is_target_BT: np.ndarray, lengths: Sequence[int]
) -> dict[str, float]:
    """Returns "accuracy/FIRST-LAST" for each range of positions that ends at one of `lengths`. The
    first position is 1, and `lengths` ascend. The answer after token t is at position t. Ranges
    without a target are left out.
    """
    found = {}
    for before, last in zip((0, *lengths), lengths):
        here = slice(before, last)
        targets = is_target_BT[:, here]
        if targets.any():
            found[f"accuracy/{before + 1}-{last}"] = float(is_right_BT[:, here][targets].mean())
    return found
