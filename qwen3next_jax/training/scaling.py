"""μP and CompleteP (`optimizer.scaling`): scales the initial values and the learning rate of each
parameter with the width and the depth of the model, so that the learning rate that is best for a
small model is about the best for a large one.

m is the width of the model divided by `optimizer.base_width`, and l the number of layers divided by
`optimizer.base_depth`. For a model of the base width and depth all factors of the initial values
and learning rates are 1. For other models, the table gives the factors. The declaration of a
parameter tells its row of the table: whether the dimensions that the parameter's matrix product
sums over (in) and the dimensions of the product's result (out) grow with the width.

                       in      out     start value   AdamW's rate   Muon's rate
    hidden matrices    grows   grows   m^-1/2        m^-1           m^-1/2
    head, router, …    grows   –       m^-1          m^-1           –
    embedding, …       –       grows   1             1              –
    norms, rates, …    –       –       1             1              –

"mup" (2203.03466, table 3) has the factors of the table. "completep" (2505.01618) also divides the
initial value and the learning rate of the matrices that write to the residual stream by l. The
paper of CompleteP divides the output of each block by l; scaling the matrices has the same effect
for an optimizer whose update does not depend on the size of the gradient. Scaling the matrices
changes neither the model's forward pass nor its exported files. Muon's column is the spectral
condition ‖ΔW‖ ∝ √(out / in) (2310.17813) for updates whose norm is 0.2 √max(in, out); parameters
that Muon leaves to AdamW have AdamW's factors.

The weight decay of a parameter is divided by the factor of its learning rate, so that weight decay
shrinks every parameter by the same share per step. Adam's `eps` is not scaled.

The factors assume that the width of MLPs and the numbers of heads grow with the model's width, and
that the width of a head does not.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig, OptimizerConfig
from qwen3next_jax.config.registry import OPTIMIZERS, resolve
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.parameters import ParameterDeclaration

# Logical axes whose sizes grow with the width of the model. A dimension without an axis grows if it
# is larger in a model whose `hidden_size` is larger, and all else equal.
GROWING = (
    "embed",
    "embed_out",
    "query_heads",
    "key_value_heads",
    "key_heads",
    "value_heads",
    "channels",
    "mlp",
    "mlp_in",
)


class ScalingFactors(NamedTuple):
    """The factors of a parameter: for its initial values and for its learning rate."""

    init_scale: float = 1.0
    learning_rate: float = 1.0


def scaling_factors(
    model: ModelConfig, optimizer: OptimizerConfig, parameters: Mapping[str, ParameterDeclaration]
) -> dict[str, ScalingFactors]:
    """Returns path of a parameter → its factors, for the parameters whose factors are not both 1.

    Args:
      model: the settings of the model.
      optimizer: the settings of the optimizer.
      parameters: path of a parameter → its declaration.

    Raises:
      UserError: the optimizer or the model has no rule for scaling.
    """
    if optimizer.scaling == "none":
        return {}
    width = model.hidden_size / optimizer.base_width
    depth = 1.0
    if optimizer.scaling == "completep":
        depth = model.num_hidden_layers / optimizer.base_depth
    rate_over_width = _find_rate_over_width(model, optimizer)
    wider = parameter_declarations(dataclasses.replace(model, hidden_size=2 * model.hidden_size))
    found = {}
    for path, parameter in parameters.items():
        input_growth, output_growth = (
            width if _grows_with_width(parameter, wider[path], letter) else 1.0 for letter in "io"
        )
        residual = depth if _writes_to_residual(path, parameter) else 1.0
        factors = ScalingFactors(
            init_scale=1
            / (math.sqrt(input_growth) if output_growth == input_growth else input_growth)
            / residual,
            learning_rate=rate_over_width(parameter, input_growth, output_growth) / residual,
        )
        if factors != ScalingFactors():
            found[path] = factors
    return found


def _grows_with_width(
    parameter: ParameterDeclaration, wider: ParameterDeclaration, letter: str
) -> bool:
    """Whether a dimension of the parameter with the letter `letter`
    (`ParameterDeclaration.dim_roles`) grows with the width of the model. `wider`: the declaration
    of the same parameter in a model that is wider and otherwise equal.
    """
    return any(
        axis in GROWING or not axis and size != wider_size
        for size, wider_size, axis, role in zip(
            parameter.shape, wider.shape, parameter.axes, parameter.dim_roles
        )
        if role == letter
    )


def _writes_to_residual(path: str, parameter: ParameterDeclaration) -> bool:
    """Whether the parameter is the last matrix of a mixer or an MLP of the trunk."""
    return path.startswith("layers/") and parameter.writes_to_residual


def _find_rate_over_width(
    model: ModelConfig, optimizer: OptimizerConfig
) -> Callable[[ParameterDeclaration, float, float], float]:
    """Returns the function `rate_over_width` of the optimizer's module: (parameter, factor by which
    its input dimensions have grown, factor by which its output dimensions have grown) → factor of
    the learning rate.

    Raises:
      UserError: the optimizer or the model has no rule for scaling.
    """
    where = f"optimizer.scaling = {optimizer.scaling!r}"
    direction = resolve(OPTIMIZERS, optimizer.name, "optimizer.name")
    module = importlib.import_module(direction.__module__)
    rule = getattr(module, "rate_over_width", None)
    require(
        rule is not None,
        f"{where} with optimizer.name = {optimizer.name!r}: {module.__name__} has no function "
        "rate_over_width, so how its learning rate follows the width is not known: expected "
        "'adamw' or 'muon', or scaling = 'none'",
    )
    require(
        not model.tie_word_embeddings,
        f"{where} with model.tie_word_embeddings: the head needs another scale than the embedding: "
        "set model.tie_word_embeddings = False",
    )
    require(
        not model.lora.rank,
        f"{where} with model.lora: adapters are not scaled: leave one of them out",
    )
    require(
        optimizer.scaling != "completep" or model.block.placement == "pre",
        f"{where} with model.block.placement = {model.block.placement!r}: it scales what a block "
        "adds to the residual stream, which is known for placement 'pre' alone: use 'mup'",
    )
    require(
        optimizer.scaling != "completep" or not model.depth_scaled_init,
        f"{where} with model.depth_scaled_init: both scale start values by the depth: leave one of "
        "them out",
    )
    require(
        not (optimizer.name == "muon" and optimizer.muon.per_head),
        f"{where} with optimizer.muon.per_head: no rule is known for single heads: leave one of "
        "them out",
    )
    return rule
