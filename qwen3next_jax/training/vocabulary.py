"""Grows the vocabulary of a model, for example by the tokens of a chat format. The embedding and
the output head get a row for each new token. A new row begins as the mean of the old rows, so that
the logits of new tokens begin as the mean of the old tokens' logits (Hewitt, "Initializing New Word
Embeddings for Pretrained Language Models", 2021,
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


def resize_abstract_vocabulary(params: dict, model: ModelConfig, vocab_size: int) -> dict:
    """Returns abstract parameters with another size of the vocabulary.

    Args:
      params: parameters of `model` as `jax.ShapeDtypeStruct`s with shardings.
      model: the settings of the model.
      vocab_size: the new size of the vocabulary.
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


def grow_vocabulary(params: dict, grown: dict, model: ModelConfig) -> dict:
    """Returns parameters with a row for each new token of a vocabulary: the mean of the rows of the
    old tokens.

    Args:
      params: the parameters.
      grown: the shapes, dtypes and shardings of the result, as `jax.ShapeDtypeStruct`s.
      model: the settings of the model with the larger vocabulary.
    """
    declarations = parameter_declarations(model)

    def grow(path, leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        axis = _vocabulary_axis(declarations[path_string(path)])
        if axis is None or leaf.shape == wanted.shape:
            return leaf
        rows = wanted.shape[axis] - leaf.shape[axis]
        return _make_append_mean_rows(wanted.sharding, axis, rows)(leaf)

    return jax.tree_util.tree_map_with_path(grow, params, grown)


def _make_append_mean_rows(sharding: NamedSharding, axis: int, rows: int) -> Any:
    @functools.partial(jax.jit, out_shardings=sharding)
    def append(x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis, keepdims=True)
        return jnp.concatenate([x, jnp.repeat(mean, rows, axis)], axis)

    return append


def _vocabulary_axis(declaration: Any) -> int | None:
    """Returns the index of the dimension of a parameter whose size is that of the vocabulary; None
    if there is none.
    """
    if "vocab" not in declaration.axes:
        return None
    return len(declaration.stack_shape) + declaration.axes.index("vocab")
