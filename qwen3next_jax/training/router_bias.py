"""Updates the router biases, which balance the load of the experts without a balance loss
(2408.15664). The update depends on how often each expert was chosen, and on no gradient.

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
    """Adds `rate` to the bias of each expert whose load in the batch is below the mean, and
    subtracts `rate` from the bias of each expert whose load is above it.

    Args:
      model: the model's settings.
      params: the model's parameters.
      load_LE: `loss.expert_load` of the whole batch; None if the model has no experts.
      rate: the size of the change (`train.router_bias_rate`).

    Returns:
      The parameters with new biases; `params` itself if the model's routers have no bias.
    """
    if not model.moe.router_bias:
        return params
    sparse = [layer for layer, (_, experts) in enumerate(model.layer_kinds) if experts]
    # Differences below 5e-7 count as 0. Loads are sums of float32 quotients, so experts that were
    # chosen equally often may have loads that differ by rounding.
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
