"""AdamW (1711.05101): each element over the root of its mean square."""

from collections.abc import Mapping

import optax
from jax.sharding import Mesh

from qwen3next_jax.config import OptimizerConfig
from qwen3next_jax.model.parameters import Declared


def direction(
    config: OptimizerConfig, declared: Mapping[str, Declared], mesh: Mesh | None
) -> optax.GradientTransformation:
    """See `training.optimizer.make_optimizer`."""
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
