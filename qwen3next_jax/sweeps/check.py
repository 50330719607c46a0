"""What a point needs beyond a valid configuration: its evaluations and its data must be able to run. Checked for all points
before the first starts; nothing is computed."""

from qwen3next_jax.data.check import check_text
from qwen3next_jax.data.synthetic import TRAIN_SPLIT, TaskRows
from qwen3next_jax.errors import UserError
from qwen3next_jax.evals import suite
from qwen3next_jax.evals.recall import check_needle_lengths
from qwen3next_jax.sweeps.points import Sweep


def check_points(sweep: Sweep) -> None:
    """Raises: UserError that names the first point which could not run to its end."""
    for point in sweep.points:
        config = point.config
        try:
            text = config.data.source == "text"
            suite.check(config.eval.suites, suite.options_of(config.eval), config.model, text)
            if text:
                tokenizer = check_text(config.data, config.model.vocab_size)
                if "niah" in config.eval.suites:
                    check_needle_lengths(tokenizer, config.eval.suite_lengths)
            else:
                TaskRows(config.data.source, config.train.sequence_length, config.model.vocab_size, config.data.synthetic,
                         config.data.seed, TRAIN_SPLIT)
        except UserError as error:
            raise UserError(f"point {point.name}: {error}") from error
