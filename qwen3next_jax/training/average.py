"""The exponential moving average of the parameters during training (`train.ema`).

After update t, with parameters p_t, the average is

    e_t = Σ_i d^(t−i) p_i / Σ_i d^(t−i)   over the updates i = 1 … t,

where d is `train.ema`. So it depends on no start value: after the first update it is p_1. The
weights sum to (1 − d^t) / (1 − d), which gives the recurrence

    e_t = e_(t−1) + (1 − d) / (1 − d^t) · (p_t − e_(t−1)).

A skipped update does not count. Parameters that do not change keep their bits in the average, and
those that are frozen as a whole are left out of it.

The entry "ema" of the train state, if `train.ema` is not 0, has these entries:

    average  float32, the arrays of the parameters that are not frozen as a whole, sharded like them
    updates  int32, the number t of updates that the average counts
"""

import math
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp

from qwen3next_jax.common.trees import leaves_by_path, map_leaves


def init_average(params: dict, frozen_paths: Container[str]) -> dict[str, Any]:
    """Returns the entry "ema" before the first update; its average is a copy of `params`.

    Args:
      params: all parameters.
      frozen_paths: the paths of those that are frozen as a whole.
    """
    average = jax.tree.map(jnp.copy, without_paths(params, frozen_paths))
    return {"average": average, "updates": jnp.zeros((), jnp.int32)}


def update_average(
    ema: dict[str, Any], decay: float, params: dict, skip: jax.Array
) -> dict[str, Any]:
    """Returns the entry "ema" after an update.

    Args:
      ema: the entry before the update.
      decay: `train.ema`, above 0 and below 1.
      params: all parameters after the update.
      skip: whether the update was skipped; the entry then stays as it is.
    """
    updates = ema["updates"] + ~skip
    # -expm1(t log d) is 1 - d^t, without the cancellation for a d near 1.
    weight = (1 - decay) / -jnp.expm1(jnp.maximum(updates, 1) * math.log(decay))
    params = leaves_by_path(params)

    def updated(path: str, e: jax.Array) -> jax.Array:
        return jnp.where(skip, e, e + weight * (params[path] - e))

    average = map_leaves(updated, ema["average"])
    return {"average": average, "updates": updates}


def averaged_params(params: dict, ema: dict[str, Any]) -> dict:
    """Returns all parameters, with the average in place of those that it has."""
    average = leaves_by_path(ema["average"])
    return map_leaves(lambda path, leaf: average.get(path, leaf), params)


def without_paths(tree: dict, paths: Container[str]) -> dict:
    """Returns a nested dict without the leaves at these paths."""
    return map_leaves(lambda path, leaf: None if path in paths else leaf, tree)
