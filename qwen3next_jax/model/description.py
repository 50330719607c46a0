"""Describes a model by its configuration: its layers, their parameters, and what a token and a
context cost. `qwen3next show` prints and draws the description.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.flops import used_by_token
from qwen3next_jax.model.language_model import declared
from qwen3next_jax.model.layer_properties import layer_cache
from qwen3next_jax.model.parameters import Declared


class LayerKind(NamedTuple):
    """Layers that have the same parts.

    Attributes:
      mixer: the name of the mixer, such as "gated_attention".
      mlp: "experts" or "dense".
      embedding: whether the layers add an n-gram embedding of their own.
      layers: the indices of the layers, from 0; () for the layer of the multi-token prediction
        module.
      parameters: {path in the layer: declaration}, such as "mixer/q_proj".
      size: the number of parameters of one layer.
      used: the number of them in whose matrix products a token takes part: only the experts that
        it chooses, and no table of embeddings.
    """

    mixer: str
    mlp: str
    embedding: bool
    layers: tuple[int, ...]
    parameters: Mapping[str, Declared]
    size: int
    used: int


class ContextMemory(NamedTuple):
    """The memory that decoding needs for one sequence, in the dtype of the model.

    Attributes:
      state: bytes of the caches whose size does not depend on the context.
      per_token: bytes that each token of the context adds.
    """

    state: int
    per_token: float


def layer_kinds(config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kinds of layers in the order of their first layers. The layer of the multi-token
    prediction module is last.
    """
    by_kind: dict[tuple, tuple[list[int], dict[str, Declared]]] = {}
    whole = declared(config)
    for number, layers in enumerate(config.layer_stacks):
        first = layers[0]
        kind = (
            *config.mixers_and_sparsity[first],
            config.ple.embedding_index(first) is not None,
        )
        parameters = _below(whole, f"layers/{number}/")
        by_kind.setdefault(kind, ([], parameters))[0].extend(layers)
    if config.mtp_depth:
        kind = (*config.mixers_and_sparsity[-1], False)
        by_kind[("mtp", *kind)] = ([], _below(whole, "mtp/block/"))
    return tuple(
        LayerKind(
            mixer,
            "experts" if sparse else "dense",
            embedding,
            tuple(sorted(layers)),
            parameters,
            sum(p.size for p in parameters.values()),
            sum(used_by_token(config, p) for p in parameters.values() if p.kind != "embedding"),
        )
        for (*_, mixer, sparse, embedding), (layers, parameters) in by_kind.items()
    )


def _below(parameters: Mapping[str, Declared], prefix: str) -> dict[str, Declared]:
    """The parameters whose path begins with `prefix`, by the rest of their path, each as one layer
    has it.
    """
    return {
        path.removeprefix(prefix): dataclasses.replace(parameter, stack=())
        for path, parameter in parameters.items()
        if path.startswith(prefix)
    }


def context_memory(config: ModelConfig) -> ContextMemory:
    """The memory for decoding one sequence. It is measured on caches for two lengths, so that a
    mixer with a window of past tokens counts with what it really keeps.
    """
    short, long = _cache_bytes(config, 4096), _cache_bytes(config, 8192)
    per_token = (long - short) / 4096
    return ContextMemory(round(short - 4096 * per_token), per_token)


def _cache_bytes(config: ModelConfig, length: int) -> int:
    """Bytes of the caches of all layers, without multi-token prediction, for one sequence."""
    caches = jax.eval_shape(
        lambda: [layer_cache(config, layer, 1, length) for layer in range(len(config.mixers))]
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
