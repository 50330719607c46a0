"""What a form is: one way to store a model in a Hugging Face directory.

A family is a file of this folder. It has one or more forms, the values of `model.hf_form`. A form
says how config.json becomes settings and back, which tensors hold which parameters, and which
models it cannot store. It is data and plain functions; nothing here imports JAX or the model.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.entries import Entries, Entry, vector

Fields = dict[str, Any]  # of a config.json


def layer_norms(config: ModelConfig) -> Iterator[Entry]:
    """The norms of a layer."""
    yield vector("mixer_norm", "input_layernorm.weight", config.hidden_size)
    yield vector("mlp_norm", "post_attention_layernorm.weight", config.hidden_size)


def final_norm(config: ModelConfig) -> Iterator[Entry]:
    """The norm after the last layer."""
    yield vector("final_norm", "norm.weight", config.hidden_size)


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to store a model in a Hugging Face directory.

    Attributes:
      name: the value of `model.hf_form`.
      title: what messages call a model of this form.
      model_types: config.json's `model_type` → the `model_type` of the text model in it, which is
        another one only in a wrapper.
      read: (fields of the text model, where) → settings of `ModelConfig`, without those that every
        form stores alike (`hf_config.parse_hf_config`). Raises UserError for a model that this
        project does not compute; `where` names the file.
      write: (config, dtype, fields of the source's text model, fields of the source around it) →
        the fields of config.json. `dtype` is the stored weights'. The source is the checkpoint
        that the model began with; both groups are empty where there is none of this kind.
      check: raises UserError for a model that has no such form, beyond what `mixers` and `settings`
        say.
      settings: the settings of `ModelConfig` that config.json holds, or that `check` looks at. Any
        other must have its default, or be one of `WITHOUT_MEANING`.
      mixers: name of a mixer (`config.registry.MIXERS`) → its entries.
      experts: entries of a layer's mixture of experts.
      multi_token_prediction: entries of that module without its layer; None: the form has no such
        module.
      sizes: fields whose product is a width of some tensor, checked before anything is built.
      trunk: what the names of the tensors of embedding, layers and last norm begin with.
      vision: what the names of a vision tower's tensors begin with; "": there is no tower.
      text_group: the group of config.json that holds the text model's fields; "": the file itself.
      text_fields: (fields of config.json, where) → the text model's fields, under the names that
        `read` and `sizes` know.
      tensor_name: name of a tensor in the file → its name in the entries.
      layer_norms: entries of a layer's norms, or what the placement has in their place.
      final_norm: the same of what follows the last layer.
      layer_embedding: (config, number) → entries of a layer's own embedding (`ModelConfig.ple`),
        the numbered one of the model's; None: the form has none.
      layer_constants: (config, number) → tensors of the same layer that hold no parameters: name →
        the integers that the settings ask for.
    """

    name: str
    title: str
    model_types: Mapping[str, str]
    read: Callable[[Fields, str], Fields]
    write: Callable[[ModelConfig, str, Fields, Fields], Fields]
    check: Callable[[ModelConfig], None]
    settings: frozenset[str]
    mixers: Mapping[str, Entries]
    experts: Entries
    multi_token_prediction: Entries | None
    sizes: tuple[tuple[str, ...], ...]
    trunk: str = "model."
    vision: str = ""
    text_group: str = ""
    text_fields: Callable[[Fields, str], Fields] = lambda fields, where: fields
    tensor_name: Callable[[str], str] = lambda name: name
    layer_norms: Entries = layer_norms
    final_norm: Entries = final_norm
    layer_embedding: Callable[[ModelConfig, int], Iterator[Entry]] | None = None
    layer_constants: Callable[[ModelConfig, int], Mapping[str, np.ndarray]] | None = None


# Settings that need no place in a file: they say how the model is computed, how its weights began,
# how it is stored, or (the last four) spell what `layer_types` says.
WITHOUT_MEANING = frozenset(
    (
        "delta_rule",
        "decay_init",
        "dtype",
        "hf_form",
        "hf_fused_experts",
        "linear_mixer",
        "full_mixer",
        "full_attention_interval",
        "full_attention_placement",
    )
)
