"""What a point needs beyond a valid configuration: its evaluations and its data must be able to
run. Checked for all points before the first starts; nothing is computed.
"""

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config.registry import OPTIMIZERS, resolve
from qwen3next_jax.data.pipeline import source_of
from qwen3next_jax.evals import evaluation
from qwen3next_jax.inference.decode import check_request
from qwen3next_jax.model.block import check_mixers
from qwen3next_jax.sweeps.points import Sweep
from qwen3next_jax.training.stages import parts_of


def check_points(sweep: Sweep) -> None:
    """Raises: UserError that names the first point which could not run to its end."""
    for point in sweep.points:
        config, model = point.config, point.config.model
        try:
            check_mixers(model)
            resolve(OPTIMIZERS, config.optimizer.name, "optimizer.name")
            source = source_of(config.data)
            tokenizer = source.tokenizer_of(config.data, model.vocab_size)
            evaluation.check(
                config.eval.suites, evaluation.options_of(config.eval), model, tokenizer
            )
            for part in parts_of(config):
                source.check(part.config.data, part.config.train.sequence_length, model.vocab_size)
            if config.eval.sample_tokens:
                check_request(
                    model,
                    [tokenizer.encode(config.eval.sample_prompt)],
                    config.eval.sample_tokens,
                    0.7,
                )
        except UserError as error:
            raise UserError(f"point {point.name}: {error}") from error
