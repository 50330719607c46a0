"""AdamW (1711.05101). Its direction is, element by element, the running mean of the gradients
divided by the square root of the running mean of the squared gradients.
"""

from collections.abc import Mapping

import optax
from jax.sharding import Mesh

from qwen3next_jax.config import OptimizerConfig
from qwen3next_jax.model.parameters import Declared


def direction(
    config: OptimizerConfig, declared: Mapping[str, Declared], mesh: Mesh | None
) -> optax.GradientTransformation:
    """Returns the transformation of gradients to AdamW's direction. The arguments are explained in
    `training.optimizer.make_optimizer`.
    """
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)
