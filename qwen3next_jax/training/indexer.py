"""Indexers of sparse attention that do not train."""

import jax

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model import declared


def keep_indexers(model: ModelConfig, before: dict, after: dict) -> dict:
    """The parameters `after` an update, with the indexers' as they were `before`: an optimizer's
    momentum would move them without a gradient, too.
    """
    indexers = {path for path, parameter in declared(model).items() if parameter.kind == "indexer"}
    if not indexers:
        return after
    return jax.tree_util.tree_map_with_path(
        lambda path, old, new: old if path_string(path) in indexers else new, before, after
    )
