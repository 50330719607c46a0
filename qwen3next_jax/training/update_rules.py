"""Update rules: functions of the compiled step that change the train state after the optimizer, or
add metrics.

An update rule computes state that does not follow from gradients. One rule sets the biases of
routers from the load of the experts (`router_bias`), one computes a moving average of the
parameters (`average`), two restore frozen parameters (`parameter_groups`, `indexer`). Each of the
files `router_bias`, `average`, `parameter_groups` and `indexer` has a function `make_rule(config,
groups)`, which `resolve.make_update_rules` calls. The update step (`loop.make_train_step`) applies
the rules of the run in order.

The setting `train.update_rules` adds the user's own update rules (docs/extending.md).
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
    """The stage, the batch and the train state with which a step began.

    Attributes:
      stage: the settings of the stage, which are constants of the compiled step.
      batch: the batch (see `loop.make_train_step`).
      state_before: the train state before the step.
    """

    stage: ResolvedStage
    batch: dict[str, jax.Array]
    state_before: dict[str, Any]


class UpdateRule:
    """Base class of update rules. JAX traces the methods of a rule as parts of jitted functions.

    A rule with state adds an entry of its own to the train state, under a name that no other rule
    uses. Checkpoints save this entry. Each array of the entry must be a scalar, or have the shape
    of a parameter and a path that ends in the parameter's path; such an array is sharded like the
    parameter. A branch of a run (`train.init_state` = "all") continues with its parent's entry if
    the parent has an equal rule (`==`; a frozen dataclass of the rule's settings compares
    correctly). If the parent has no equal rule, the branch begins with the result of `init`.
    """

    def init(self, params: dict) -> dict[str, Any]:
        """Returns the entries that the rule adds to the train state, before the first step.

        Args:
          params: all parameters.
        """
        return {}

    def apply(self, step: StepInput, after: dict, metrics: dict) -> tuple[dict, dict]:
        """Applies the rule to a step. Returns (train state, metrics).

        Args:
          step: the stage, the batch and the train state before the step.
          after: the train state after the optimizer's update and the previous rules. The returned
            train state must have the same entries, shapes and dtypes as `after`. If the guards skip
            the step, the changes of the rule are dropped.
          metrics: the metrics so far: parts of the loss, gradient norms and so on. The rule may
            return additional metrics, which must be scalars, and may leave out metrics that only
            this rule reads.
        """
        raise NotImplementedError


def initial_rule_entries(rules: Sequence[UpdateRule], params: dict) -> dict[str, Any]:
    """Returns the entries that `rules` add to the train state, before the first step.

    Raises:
      UserError: two rules add the same entry, or a rule adds an entry that every run has.
    """
    entries: dict[str, Any] = {}
    taken = {"params", "opt_state", "step", "guards"}
    for rule in rules:
        for name, entry in rule.init(params).items():
            require(
                name not in taken,
                f"the update rule {_rule_class_name(rule)} adds the entry {name!r} to the train "
                "state, which is there already: choose another name",
            )
            taken.add(name)
            entries[name] = entry
    return entries


def apply_rule(
    rule: UpdateRule, step: StepInput, after: dict, metrics: dict, skip: jax.Array
) -> tuple[dict, dict]:
    """Applies `rule` to a step. Returns (train state, metrics); the train state is `after` if
    `skip` is true.

    Raises:
      UserError: the rule did not return a train state like `after` and metrics, or a new metric is
        not a scalar.
    """
    result = rule.apply(step, after, metrics)
    require(
        isinstance(result, tuple) and len(result) == 2,
        f"the update rule {_rule_class_name(rule)} returned {type(result).__name__}: expected "
        "(train state, metrics)",
    )
    changed, new_metrics = result
    for name in new_metrics.keys() - metrics.keys():
        require(
            jnp.ndim(new_metrics[name]) == 0,
            f"the update rule {_rule_class_name(rule)} returned the metric {name!r} of shape "
            f"{list(jnp.shape(new_metrics[name]))}: expected a scalar",
        )
    expected, found = _dtype_and_shape_by_path(after), _dtype_and_shape_by_path(changed)
    for path in sorted(expected.keys() | found.keys()):
        require(
            expected.get(path) == found.get(path),
            f"the update rule {_rule_class_name(rule)} returned {found.get(path, 'nothing')} for "
            f"{path}: expected {expected.get(path, 'no such entry, or init() that adds it')}",
        )
    return guards.keep_old_if(skip, after, changed), new_metrics


def _dtype_and_shape_by_path(state: dict) -> dict[str, str]:
    """Returns path → dtype and shape of every array of a train state, as text."""
    return {
        path_string(path): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _rule_class_name(rule: UpdateRule) -> str:
    return f"{type(rule).__module__}:{type(rule).__qualname__}"
