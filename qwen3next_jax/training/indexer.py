"""The update rule of the indexers of sparse attention (`train.indexer_training`)."""

import dataclasses

from qwen3next_jax.common.trees import leaves_by_path, map_leaves
from qwen3next_jax.config import Config
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.training.parameter_groups import ParameterGroups
from qwen3next_jax.training.update_rules import StepInput, UpdateRule


@dataclasses.dataclass(frozen=True)
class IndexerTraining(UpdateRule):
    """Keeps indexers constant in a stage that trains none ("frozen"). Their gradients are then 0,
    but the momentum of earlier stages would still change them. In other stages it adds the weight
    of the indexers' loss to the metrics.

    Attributes:
      paths: the paths of the parameters of indexers.
    """

    paths: frozenset[str]

    def apply(self, step: StepInput, after: dict, metrics: dict) -> tuple[dict, dict]:
        if "indexer_loss" in metrics:
            metrics = metrics | {"indexer_loss_weight": step.stage.train.indexer_loss_weight}
        if step.stage.train.indexer_training != "frozen":
            return after, metrics
        before = leaves_by_path(step.before["params"])

        def kept(path, leaf):
            return before[path] if path in self.paths else leaf

        return after | {"params": map_leaves(kept, after["params"])}, metrics


def rule(config: Config, groups: ParameterGroups) -> IndexerTraining | None:
    """Returns the rule of indexers; None if the model has none."""
    parameters = parameter_declarations(config.model)
    paths = {path for path, parameter in parameters.items() if parameter.kind == "indexer"}
    return IndexerTraining(frozenset(paths)) if paths else None
