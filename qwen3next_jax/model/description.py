"""Describes a model by its configuration: its kinds of layers, their parameters, and the memory of
decoding. `qwen3next show` prints and draws the description.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.flops import elements_used_by_token
from qwen3next_jax.model.language_model import parameter_declarations
from qwen3next_jax.model.layer_properties import empty_layer_cache
from qwen3next_jax.model.parameters import ParameterDeclaration


class LayerKind(NamedTuple):
    """The layers of a model that have the same mixer, the same kind of MLP, and either all or none
    an n-gram embedding.

    Attributes:
      mixer: the name of the mixer, such as "gated_attention".
      mlp: "experts" or "dense".
      has_ngram_embedding: whether each of the layers adds an n-gram embedding of the tokens.
      layer_indices: the indices of the layers, from 0; () for the layer of the multi-token
        prediction module.
      declarations: {path in the layer, such as "mixer/q_proj": declaration of the parameter}.
      parameter_count: the number of parameters of one layer.
      parameters_per_token: the number of parameters of one layer that a token uses: only the
        experts that it chooses, and no table of embeddings.
    """

    mixer: str
    mlp: str
    has_ngram_embedding: bool
    layer_indices: tuple[int, ...]
    declarations: Mapping[str, ParameterDeclaration]
    parameter_count: int
    parameters_per_token: int


class ContextMemory(NamedTuple):
    """The memory that decoding needs for one sequence, in the dtype of the model.

    Attributes:
      state_bytes: bytes of the caches whose size does not depend on the context.
      bytes_per_token: bytes that each token of the context adds.
    """

    state_bytes: int
    bytes_per_token: float


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """Returns the kinds of layers, ordered by the index of their first layer. The layer of the
    multi-token prediction module is a kind of its own, the last of the result.
    """
    by_kind: dict[tuple, tuple[list[int], dict[str, ParameterDeclaration]]] = {}
    whole = parameter_declarations(config)
    for number, layers in enumerate(config.layer_stacks):
        first = layers[0]
        kind = (
            *config.mixers_and_sparsity[first],
            config.ple.embedding_index(first) is not None,
        )
        parameters = _parameters_below(whole, f"layers/{number}/")
        by_kind.setdefault(kind, ([], parameters))[0].extend(layers)
    if config.mtp_depth:
        kind = (*config.mixers_and_sparsity[-1], False)
        by_kind[("mtp", *kind)] = ([], _parameters_below(whole, "mtp/block/"))
    return tuple(
        LayerKind(
            mixer,
            "experts" if sparse else "dense",
            embedding,
            tuple(sorted(layers)),
            parameters,
            sum(p.size for p in parameters.values()),
            sum(
                elements_used_by_token(config, p)
                for p in parameters.values()
                if p.kind != "embedding"
            ),
        )
        for (*_, mixer, sparse, embedding), (layers, parameters) in by_kind.items()
    )


def _parameters_below(
    parameters: Mapping[str, ParameterDeclaration], prefix: str
) -> dict[str, ParameterDeclaration]:
    """Returns {rest of the path: declaration} of the parameters whose path begins with `prefix`.
    The declarations describe a single layer, without the dimension of stacked layers.
    """
    return {
        path.removeprefix(prefix): dataclasses.replace(parameter, stack_shape=())
        for path, parameter in parameters.items()
        if path.startswith(prefix)
    }


def context_memory(config: ModelConfig) -> ContextMemory:
    """Returns the memory that decoding needs for one sequence. The memory is computed from the
    sizes of the caches for two lengths, so the cache of a mixer with a short window counts as
    state.
    """
    short, long = _cache_bytes(config, 4096), _cache_bytes(config, 8192)
    per_token = (long - short) / 4096
    return ContextMemory(round(short - 4096 * per_token), per_token)


def _cache_bytes(config: ModelConfig, length: int) -> int:
    """Returns how many bytes the caches of all layers have for one sequence of `length` tokens, not
    counting the layer of multi-token prediction.
    """
    caches = jax.eval_shape(
        lambda: [empty_layer_cache(config, layer, 1, length) for layer in range(len(config.mixers))]
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
