"""AdamW (1711.05101). AdamW's direction is, element by element, the running mean of the gradients
divided by the square root of the running mean of the squared gradients.
"""

from collections.abc import Mapping

import optax
from jax.sharding import Mesh

from qwen3next_jax.config import OptimizerConfig
from qwen3next_jax.model.parameters import ParameterDeclaration


def direction(
    config: OptimizerConfig, declared: Mapping[str, ParameterDeclaration], mesh: Mesh | None
) -> optax.GradientTransformation:
    """Returns the transformation of gradients to AdamW's direction. The arguments are explained in
    `training.optimizer.make_optimizer`.
    """
    return optax.scale_by_adam(
        b1=config.beta1, b2=config.beta2, eps=config.eps, mu_dtype=mean_dtype(config)
    )


def mean_dtype(config: OptimizerConfig) -> str | None:
    """Returns the dtype in which the mean of the gradients is kept; None: the parameter's dtype."""
    return "bfloat16" if config.mean_dtype == "bfloat16" else None


def rate_over_width(
    declared: ParameterDeclaration, input_growth: float, output_growth: float
) -> float:
    """Returns the factor of a parameter's learning rate: 1 / input_growth. Compared with a model of
    the base width, the product with the parameter sums over `input_growth` times as many inputs,
    and has `output_growth` times as many outputs. The elements of AdamW's direction have the same
    size in any model, and the product adds up their effects over the inputs (2203.03466).
    """
    return 1 / input_growth
