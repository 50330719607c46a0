"""The bias with which a router without balance loss chooses its experts (2408.15664): the load
moves this parameter, no gradient does.

Letters: L sparse layers, the multi-token prediction module's last; E experts.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model import declared


def update_router_bias(
    model: ModelConfig, params: dict, load_LE: jax.Array | None, rate: float
) -> dict:
    """`params` with the biases of all routers moved by `rate`: up where an expert got less than
    its share of the choices of the whole batch, down where it got more. A model without such
    routers keeps its `params`.

    Args:
      load_LE: see `loss.expert_load`; None where the model has no experts.
    """
    if not model.moe.router_bias:
        return params
    sparse = [layer for layer, (_, experts) in enumerate(model.layer_kinds) if experts]
    # Shares are sums of quotients: two that differ in the seventh digit are of the same counts.
    less_LE = jnp.sign(jnp.round((jnp.mean(load_LE, axis=-1, keepdims=True) - load_LE) * 1e6))

    def moved(path, leaf):
        name = path_string(path)
        group, place, *_ = name.split("/") + [""]
        if declared(model)[name].kind != "balance":
            return leaf
        layers = (model.num_hidden_layers,) if group == "mtp" else model.stacks[int(place)]
        rows = jnp.array([sparse.index(layer) for layer in layers])
        return leaf + rate * less_LE[rows].reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(moved, params)
