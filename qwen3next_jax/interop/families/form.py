"""A form: one way to store a model in a Hugging Face directory.

Each other file of this folder, but `fields.py` and `rope.py`, is a family of models with one or
more forms; the setting `model.hf_form` names a form. A form converts config.json to settings and
back, says which tensors hold which parameters, and refuses models that it cannot store. It consists
of data and plain functions; nothing here imports JAX or the model.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.entries import Entries, Entry, vector

Fields = dict[str, Any]  # the fields of a config.json, or of a group in it


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
      title: the name of such models in messages.
      model_types: the values of `model_type` in config.json → the `model_type` of the text model,
        which differs from it only in a wrapper (a model with a vision tower).
      read: (fields of the text model, where) → settings of `ModelConfig`, except those that every
        form stores alike (`hf_config.parse_hf_config` adds these). `where` names the file in
        messages. Raises UserError for a model that this project does not compute.
      write: (config, dtype, text, wrapper) → the fields of config.json. `dtype` is the dtype of
        the stored weights. `text` and `wrapper` are the fields of the text model and of the
        wrapper in the checkpoint that the model was initialised from, {} if there is none.
      check: raises UserError for a model that this form cannot store, for reasons that `mixers`
        and `settings` do not express.
      settings: the settings of `ModelConfig` that config.json holds or that `check` looks at. All
        others must have their defaults, except those in `NOT_IN_FILES`.
      mixers: name of a mixer (`config.registry.MIXERS`) → its entries.
      experts: the entries of a layer's mixture of experts.
      multi_token_prediction: the entries of the multi-token prediction module without its layer;
        None: the form has no such module.
      width_fields: groups of fields whose product is a width of some tensor. `check_sizes`
        compares these before anything is built.
      trunk_prefix: the prefix of the names of embedding, layers and last norm.
      vision_prefix: the prefix of the names of a vision tower's tensors; "": the form has no
        tower.
      text_group: the name of the group in config.json that holds the fields of the text model;
        "": they are not in a group.
      text_fields: (fields of config.json, where) → the fields of the text model, under the names
        that `read` and `width_fields` use.
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
    width_fields: tuple[tuple[str, ...], ...]
    trunk_prefix: str = "model."
    vision_prefix: str = ""
    text_group: str = ""
    text_fields: Callable[[Fields, str], Fields] = lambda fields, where: fields
    tensor_name: Callable[[str], str] = lambda name: name
    layer_norms: Entries = layer_norms
    final_norm: Entries = final_norm
    layer_embedding: Callable[[ModelConfig, int], Iterator[Entry]] | None = None
    layer_constants: Callable[[ModelConfig, int], Mapping[str, np.ndarray]] | None = None


# Settings that need no field in config.json: they say how the model is computed, how its weights
# were initialised or how it is stored, or (the last four) are another spelling of `layer_types`.
NOT_IN_FILES = frozenset(
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
