"""Keeps the indexers of sparse attention constant (`train.indexer_training` = "frozen")."""

import jax

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model import declared


def keep_indexers(model: ModelConfig, before: dict, after: dict) -> dict:
    """Returns the parameters `after` an update, but those of indexers as they were `before` it. An
    indexer's gradient is then 0, but the momentum of earlier steps would still change it.

    Args:
      model: the settings of the model.
      before, after: nested dicts of the parameters.
    """
    indexers = {path for path, parameter in declared(model).items() if parameter.kind == "indexer"}
    if not indexers:
        return after
    return jax.tree_util.tree_map_with_path(
        lambda path, old, new: old if path_string(path) in indexers else new, before, after
    )
