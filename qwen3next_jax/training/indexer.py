"""The update rule of the indexers of sparse attention (`train.indexer_training`)."""

import dataclasses

from qwen3next_jax.common.trees import leaves_by_path, map_leaves
from qwen3next_jax.config import Config
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.training.parameter_groups import ParameterGroups
from qwen3next_jax.training.update_rules import StepInput, UpdateRule


@dataclasses.dataclass(frozen=True)
class FreezeIndexers(UpdateRule):
    """The update rule that keeps indexers constant in a stage with `train.indexer_training` =
    "frozen". The gradients of frozen indexers are 0, but without the rule the optimizer's momentum
    from earlier stages would still change the indexers. In stages that train the indexers, the rule
    adds the weight of the indexers' loss to the metrics.

    Attributes:
      indexer_paths: the paths of the parameters of indexers.
    """

    indexer_paths: frozenset[str]

    def apply(self, step: StepInput, after: dict, metrics: dict) -> tuple[dict, dict]:
        if "indexer_loss" in metrics:
            metrics = metrics | {"indexer_loss_weight": step.stage.train.indexer_loss_weight}
        if step.stage.train.indexer_training != "frozen":
            return after, metrics
        before = leaves_by_path(step.state_before["params"])

        def kept(path, leaf):
            return before[path] if path in self.indexer_paths else leaf

        return after | {"params": map_leaves(kept, after["params"])}, metrics


def make_rule(config: Config, groups: ParameterGroups) -> FreezeIndexers | None:
    """Returns the update rule of indexers; None if the model has no indexer."""
    parameters = parameter_declarations(config.model)
    paths = {path for path, parameter in parameters.items() if parameter.kind == "indexer"}
    return FreezeIndexers(frozenset(paths)) if paths else None
