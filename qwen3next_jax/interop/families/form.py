"""Defines a form: one way to store a model in a Hugging Face directory.

The other files of this folder, except `fields.py` and `rope.py`, are families of models. A family
has one or more forms, and the setting `model.hf_form` names a form. A form converts config.json to
settings and back, has entries (`interop.entries.ParameterEntry`) that say which tensors hold which
parameters, and refuses models that it cannot store. A form consists of data and plain functions:
this folder imports neither JAX nor the model.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.entries import EntryFunction, ParameterEntry, vector_entry

Fields = dict[str, Any]  # the fields of a config.json, or of a group in it


def layer_norm_entries(config: ModelConfig, mixer: str) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each of the two norms of a layer with the mixer `mixer`."""
    yield vector_entry("mixer_norm", "input_layernorm.weight", config.hidden_size)
    yield vector_entry("mlp_norm", "post_attention_layernorm.weight", config.hidden_size)


def final_norm_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of the norm after the last layer."""
    yield vector_entry("final_norm", "norm.weight", config.hidden_size)


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to store a model in a Hugging Face directory.

    Attributes:
      name: the value of `model.hf_form`.
      display_name: the name of the form's models in messages.
      model_types: each value of `model_type` in config.json → the `model_type` of its text model.
        Only a wrapper (a text model with a vision tower) has another `model_type` than its text
        model.
      read_settings: function (fields of the text model, where) → settings of `ModelConfig`.
        `hf_config.parse_hf_config` adds the settings that all forms store in the same way. `where`
        names the file in messages. The function raises UserError for a model that this project does
        not compute.
      write_config_fields: function (config, dtype, text, wrapper) → the fields of config.json.
        `dtype` is the dtype of the stored weights. `text` and `wrapper` are the fields of the text
        model and of the wrapper in the checkpoint with which the model was initialised; {} without
        such a checkpoint or wrapper.
      check_model: function (config) that raises UserError for a model that this form cannot store.
        `layout.check_hf_form` calls `check_model` after all its own checks: every mixer of the
        model has entries, and every setting that is neither in `supported_settings` nor in
        `NOT_IN_FILES` has its default.
      supported_settings: the names of the settings of `ModelConfig` that config.json holds or that
        `check_model` checks. Every other setting that is not in `NOT_IN_FILES` must have its
        default.
      mixer_entries: name of a mixer (`config.registry.MIXERS`) → the function that yields the
        `ParameterEntry` of each parameter of the mixer.
      expert_entries: function that yields the `ParameterEntry` of each parameter of a layer's
        mixture of experts.
      mtp_entries: function that yields the `ParameterEntry` of each parameter of the multi-token
        prediction module without its decoder layer; None: the form has no multi-token prediction
        module.
      width_field_groups: groups of fields; the product of a group's values is a width of a tensor.
        `hf_config.check_claimed_sizes` compares the products with the shapes of the tensors before
        other code allocates anything.
      trunk_prefix: the prefix of the tensors' names in the model without its head and its
        multi-token prediction module.
      vision_prefix: the prefix of the names of a vision tower's tensors; "": the form has no
        tower.
      text_config_group: the name of the group in config.json that holds the fields of the text
        model; "": the fields are at the top level.
      read_text_fields: function (fields of config.json, where) → the fields of the text model,
        under the names that `read_settings` and `width_field_groups` use.
      tensor_name_in_entries: function from the name of a tensor in the file to its name in the
        entries.
      wrong_shape_advice: function from the name of a tensor, as in the entries, to the advice at
        the end of the error message about an unexpected shape of this tensor; "": no advice.
      layer_norm_entries: function (config, mixer) that yields the `ParameterEntry` of each
        parameter of a layer's norms (`Block.make_norm`). `mixer` is the name of the layer's mixer.
      final_norm_entries: function that yields the `ParameterEntry` of each parameter of the norm
        after the last layer (`Block.make_final_norm`).
      layer_embedding_entries: function (config, number) that yields the `ParameterEntry` of each
        parameter of a layer's own embedding (`model.ple`). `number` counts the layers that have an
        embedding of their own, from 0. None: the form has no layers with an embedding of their own.
      embedding_constant_tensors: function (config, number) → {name of a tensor: its integers}, for
        the tensors that hold constants of embedding `number` (as in `layer_embedding_entries`). The
        settings determine the integers.
    """

    name: str
    display_name: str
    model_types: Mapping[str, str]
    read_settings: Callable[[Fields, str], Fields]
    write_config_fields: Callable[[ModelConfig, str, Fields, Fields], Fields]
    check_model: Callable[[ModelConfig], None]
    supported_settings: frozenset[str]
    mixer_entries: Mapping[str, EntryFunction]
    expert_entries: EntryFunction
    mtp_entries: EntryFunction | None
    width_field_groups: tuple[tuple[str, ...], ...]
    trunk_prefix: str = "model."
    vision_prefix: str = ""
    text_config_group: str = ""
    read_text_fields: Callable[[Fields, str], Fields] = lambda fields, where: fields
    tensor_name_in_entries: Callable[[str], str] = lambda name: name
    wrong_shape_advice: Callable[[str], str] = lambda name: ""
    layer_norm_entries: Callable[[ModelConfig, str], Iterator[ParameterEntry]] = layer_norm_entries
    final_norm_entries: EntryFunction = final_norm_entries
    layer_embedding_entries: Callable[[ModelConfig, int], Iterator[ParameterEntry]] | None = None
    embedding_constant_tensors: Callable[[ModelConfig, int], Mapping[str, np.ndarray]] | None = None


# Settings that need no field in config.json. They say how the model is computed, how its weights
# were initialised or how it is stored. The last four are another way to write `layer_types`.
NOT_IN_FILES = frozenset(
    (
        "delta_rule",
        "decay_init",
        "depth_scaled_init",
        "dtype",
        "hf_form",
        "hf_fused_experts",
        "linear_mixer",
        "full_mixer",
        "full_attention_interval",
        "full_attention_placement",
    )
)
