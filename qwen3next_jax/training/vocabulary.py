"""A run whose vocabulary is larger than that of the model it begins with, as the tokens of a chat
format make it. The embedding and the output head get further rows. They begin as the mean of the
rows that are there, so that the logits of new tokens begin as the mean of the old tokens' logits
(J. Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021,
https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.sharding.rules import storage_spec


def with_vocabulary(params: dict, model: ModelConfig, vocab_size: int) -> dict:
    """Returns abstract parameters with another vocabulary.

    Args:
      params: parameters of `model` as `jax.ShapeDtypeStruct`s with shardings.
      model: the settings of the model.
      vocab_size: the size of the other vocabulary.
    """
    declarations = parameter_declarations(model)

    def resize(path, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        declaration = declarations[path_string(path)]
        axis = _vocabulary_axis(declaration)
        if axis is None:
            return leaf
        shape = (*leaf.shape[:axis], vocab_size, *leaf.shape[axis + 1 :])
        mesh = leaf.sharding.mesh
        sharding = NamedSharding(mesh, storage_spec(declaration, shape, mesh))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(resize, params)


def grow_vocabulary(params: dict, like: dict, model: ModelConfig) -> dict:
    """Returns parameters with further rows for the new tokens of a vocabulary, each the mean of the
    rows of the old tokens.

    Args:
      params: the parameters.
      like: the same parameters of `model`, as `jax.ShapeDtypeStruct`s with shardings.
      model: the settings of the model with the larger vocabulary.
    """
    declarations = parameter_declarations(model)

    def grow(path, leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        axis = _vocabulary_axis(declarations[path_string(path)])
        if axis is None or leaf.shape == wanted.shape:
            return leaf
        rows = wanted.shape[axis] - leaf.shape[axis]
        return _with_mean_rows(wanted.sharding, axis, rows)(leaf)

    return jax.tree_util.tree_map_with_path(grow, params, like)


def _with_mean_rows(sharding: NamedSharding, axis: int, rows: int) -> Any:
    @functools.partial(jax.jit, out_shardings=sharding)
    def append(x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis, keepdims=True)
        return jnp.concatenate([x, jnp.repeat(mean, rows, axis)], axis)

    return append


def _vocabulary_axis(declaration: Any) -> int | None:
    """Returns the number of the dimension of a parameter that counts tokens; None if none does."""
    if "vocab" not in declaration.axes:
        return None
    return len(declaration.stack_shape) + declaration.axes.index("vocab")
