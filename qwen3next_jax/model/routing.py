"""Router replay (2510.11370): the experts of each token in each layer are recorded while text is
generated, and training uses the recorded experts, so that generation and training compute with the
same experts.

Letters: B batch, T time, L trunk layers, A experts per token.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig


def stack_expert_ids(
    config: ModelConfig, per_layer: Sequence[dict[str, Any]], shape: tuple[int, int]
) -> jax.Array:
    """Returns the experts of every token in every layer, [B, T, L, A] int16. In layers without
    experts the experts' numbers are -1.

    Args:
      config: the settings of the model.
      per_layer: the auxiliary outputs of the layers (`layer_stack.run_layers`).
      shape: [B, T].
    """
    none = jnp.full((*shape, config.num_experts_per_tok), -1, jnp.int16)
    return jnp.stack([aux.get("expert_ids", none) for aux in per_layer], axis=2)


def check_expert_ids_shape(config: ModelConfig, shape: Sequence[int]) -> None:
    """Raises UserError if the shape [..., L, A] of recorded experts does not fit the model: the
    model has no experts, or another number of layers or of experts per token.
    """
    layers, chosen = config.num_hidden_layers, config.num_experts_per_tok
    require(config.has_experts, "choices of experts for a model without experts: leave them out")
    require(
        tuple(shape[-2:]) == (layers, chosen),
        f"choices of experts are of {shape[-2]} layers and {shape[-1]} experts per token: expected "
        f"those of this model, {layers} layers (model.num_hidden_layers) and {chosen} experts per "
        "token (model.num_experts_per_tok)",
    )
