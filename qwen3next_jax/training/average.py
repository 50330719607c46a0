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

import dataclasses
import math
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp

from qwen3next_jax.common.trees import leaves_by_path, map_leaves
from qwen3next_jax.config import Config
from qwen3next_jax.training.parameter_groups import ParameterGroups
from qwen3next_jax.training.update_rules import StepInput, UpdateRule


@dataclasses.dataclass(frozen=True)
class MovingAverage(UpdateRule):
    """Keeps the entry "ema" of the train state.

    Attributes:
      decay: `train.ema`, above 0 and below 1.
      frozen_paths: the paths of the parameters that are frozen as a whole.
    """

    decay: float
    frozen_paths: frozenset[str]

    def init(self, params: dict) -> dict[str, Any]:
        average = jax.tree.map(jnp.copy, without_paths(params, self.frozen_paths))
        return {"ema": {"average": average, "updates": jnp.zeros((), jnp.int32)}}

    def apply(self, step: StepInput, after: dict, metrics: dict) -> tuple[dict, dict]:
        updates, params = after["ema"]["updates"] + 1, leaves_by_path(after["params"])
        # -expm1(t log d) is 1 - d^t, without the cancellation for a d near 1.
        weight = (1 - self.decay) / -jnp.expm1(updates * math.log(self.decay))
        average = map_leaves(
            lambda path, e: e + weight * (params[path] - e), after["ema"]["average"]
        )
        return after | {"ema": {"average": average, "updates": updates}}, metrics


def rule(config: Config, groups: ParameterGroups) -> MovingAverage | None:
    """Returns the rule of the average; None without `train.ema`."""
    return MovingAverage(config.train.ema, groups.frozen_paths) if config.train.ema else None


def averaged_params(params: dict, ema: dict[str, Any]) -> dict:
    """Returns all parameters, with the average in place of those that it has."""
    average = leaves_by_path(ema["average"])
    return map_leaves(lambda path, leaf: average.get(path, leaf), params)


def without_paths(tree: dict, paths: Container[str]) -> dict:
    """Returns a nested dict without the leaves at these paths."""
    return map_leaves(lambda path, leaf: None if path in paths else leaf, tree)
