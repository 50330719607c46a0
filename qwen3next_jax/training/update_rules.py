"""Update rules: what changes the train state beside the optimizer, or measures a step.

A rule decides what no gradient decides. The biases of routers follow the load of the experts
(`router_bias`), an average follows the parameters (`average`), frozen parameters stay as they are
(`parameter_groups`, `indexer`). A file that has a rule makes it in a function
`rule(config, groups)`, which `resolve.make_update_rules` calls. The update step
(`loop.make_train_step`) applies the rules of the run in order, and knows none of them.

The setting `train.update_rules` adds rules of a user's own (docs/extending.md).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.common.trees import path_string
from qwen3next_jax.training import guards
from qwen3next_jax.training.stages import ResolvedStage


@dataclasses.dataclass(frozen=True, eq=False)
class StepInput:
    """What a step began with.

    Attributes:
      stage: the settings of the stage, which are constants of the compiled step.
      batch: the batch (see `loop.make_train_step`).
      before: the train state before the step.
    """

    stage: ResolvedStage
    batch: dict[str, jax.Array]
    before: dict[str, Any]


class UpdateRule:
    """Base class of update rules. Its methods are traced, as parts of jitted functions.

    A rule that keeps something from step to step has an entry of its own in the train state, under
    a name that no other rule has. Checkpoints hold it like the rest of the state. An array of it is
    a scalar, or has the shape of a parameter and a path that ends in the path of this parameter;
    then it is sharded like the parameter. A branch of a run (`train.init_state` = "all") continues
    with the entry of its parent if the parent has an equal rule (`==`, so such a rule is best a
    frozen dataclass of its settings). If not, the entry begins anew.
    """

    def init(self, params: dict) -> dict[str, Any]:
        """Returns the entries that the rule adds to the train state, before the first step.

        Args:
          params: all parameters.
        """
        return {}

    def apply(self, step: StepInput, after: dict, metrics: dict) -> tuple[dict, dict]:
        """Returns the train state after the rule, and the metrics of the step.

        Args:
          step: what the step began with.
          after: the train state after the optimizer's update and the rules before this one. The
            result must have the same entries, shapes and dtypes. A step that the guards skip drops
            what the rule changed.
          metrics: the metrics so far: parts of the loss, gradient norms and so on. The result may
            have further ones, which are scalars, and need not have those that only this rule reads.
        """
        raise NotImplementedError


def initial_entries(rules: Sequence[UpdateRule], params: dict) -> dict[str, Any]:
    """Returns the entries that `rules` add to the train state, before the first step.

    Raises:
      UserError: two rules add the same entry, or one of them an entry that every run has.
    """
    entries: dict[str, Any] = {}
    taken = {"params", "opt_state", "step", "guards"}
    for rule in rules:
        for name, entry in rule.init(params).items():
            require(
                name not in taken,
                f"the update rule {_name(rule)} adds the entry {name!r} to the train state, which "
                "is there already: choose another name",
            )
            taken.add(name)
            entries[name] = entry
    return entries


def apply_rule(
    rule: UpdateRule, step: StepInput, after: dict, metrics: dict, skip: jax.Array
) -> tuple[dict, dict]:
    """Returns what `rule.apply` returns, but the train state `after` unchanged if `skip` is true.

    Raises:
      UserError: the rule returned something else than a train state like `after` and metrics.
    """
    result = rule.apply(step, after, metrics)
    require(
        isinstance(result, tuple) and len(result) == 2,
        f"the update rule {_name(rule)} returned {type(result).__name__}: expected "
        "(train state, metrics)",
    )
    changed, new_metrics = result
    for name in new_metrics.keys() - metrics.keys():
        require(
            jnp.ndim(new_metrics[name]) == 0,
            f"the update rule {_name(rule)} returned the metric {name!r} of shape "
            f"{list(jnp.shape(new_metrics[name]))}: expected a scalar",
        )
    expected, found = _shapes(after), _shapes(changed)
    for path in sorted(expected.keys() | found.keys()):
        require(
            expected.get(path) == found.get(path),
            f"the update rule {_name(rule)} returned {found.get(path, 'nothing')} for {path}: "
            f"expected {expected.get(path, 'no such entry, or init() that adds it')}",
        )
    return guards.keep_if(skip, after, changed), new_metrics


def _shapes(state: dict) -> dict[str, str]:
    """Returns path → dtype and shape of every array of a train state, as text."""
    return {
        path_string(path): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _name(rule: UpdateRule) -> str:
    return f"{type(rule).__module__}:{type(rule).__qualname__}"
