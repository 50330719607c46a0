"""The exponential moving average of the parameters during training (`train.ema`).

After update t, with parameters p_t, the average is

    e_t = Σ_i d^(t−i) p_i / Σ_i d^(t−i)   over the updates i = 1 … t,

where d is `train.ema`. The average does not depend on a start value: after the first update the
average is p_1. The weights d^(t−i) sum to (1 − d^t) / (1 − d), which gives the recurrence

    e_t = e_(t−1) + (1 − d) / (1 − d^t) · (p_t − e_(t−1)).

An update that the guards skip does not count in the average. A parameter that never changes has
bit-identical values in the average. The average leaves out parameters that are frozen as a whole.

If `train.ema` is not 0, the train state has the entry "ema", a dict:

    average  float32, the arrays of the parameters that are not frozen as a whole, sharded like them
    updates  int32, the number t of updates that are averaged
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
    """The update rule that computes the moving average, the entry "ema" of the train state.

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


def make_rule(config: Config, groups: ParameterGroups) -> MovingAverage | None:
    """Returns the update rule of the moving average; None if `train.ema` is 0."""
    return MovingAverage(config.train.ema, groups.frozen_paths) if config.train.ema else None


def averaged_params(params: dict, ema: dict[str, Any]) -> dict:
    """Returns the tree `params`, in which every parameter that has a moving average is replaced by
    it.
    """
    average = leaves_by_path(ema["average"])
    return map_leaves(lambda path, leaf: average.get(path, leaf), params)


def without_paths(tree: dict, paths: Container[str]) -> dict:
    """Returns the nested dict `tree` without the leaves at `paths`."""
    return map_leaves(lambda path, leaf: None if path in paths else leaf, tree)
