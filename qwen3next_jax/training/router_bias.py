"""Updates the biases of routers, which balance the experts without a balance loss (2408.15664). The
load of the experts changes these parameters; gradients do not.

Letters: L layers with experts (the layer of the multi-token prediction module is last), E experts.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model import declared


def update_router_bias(
    model: ModelConfig, params: dict, load_LE: jax.Array | None, rate: float
) -> dict:
    """Adds `rate` to the bias of each expert with less than the mean load in the whole batch, and
    subtracts `rate` from the bias of each expert with more.

    Args:
      model: the model's settings.
      params: the model's parameters.
      load_LE: `loss.expert_load` of the whole batch; None if the model has no experts.
      rate: the size of the change.

    Returns:
      The parameters with new biases; `params` itself if the model's routers have no bias.
    """
    if not model.moe.router_bias:
        return params
    sparse = [layer for layer, (_, experts) in enumerate(model.layer_kinds) if experts]
    # Loads are sums of quotients in float32, so experts that were chosen equally often may have
    # loads that differ in the seventh digit.
    direction_LE = jnp.sign(jnp.round((jnp.mean(load_LE, axis=-1, keepdims=True) - load_LE) * 1e6))

    def update(path, leaf):
        name = path_string(path)
        group, block, *_ = name.split("/") + [""]
        if declared(model)[name].kind != "balance":
            return leaf
        layers = (model.num_hidden_layers,) if group == "mtp" else model.stacks[int(block)]
        rows = jnp.array([sparse.index(layer) for layer in layers])
        return leaf + rate * direction_LE[rows].reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(update, params)
