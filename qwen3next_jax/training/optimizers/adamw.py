"""AdamW (1711.05101): the mean of the gradients, divided by the root of the mean of their squares,
element by element.
"""

from collections.abc import Mapping

import optax
from jax.sharding import Mesh

from qwen3next_jax.config import OptimizerConfig
from qwen3next_jax.model.parameters import Declared


def direction(
    config: OptimizerConfig, declared: Mapping[str, Declared], mesh: Mesh | None
) -> optax.GradientTransformation:
    """AdamW's direction (see `training.optimizer.make_optimizer`)."""
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
