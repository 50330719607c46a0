"""Converts the config.json of a Hugging Face directory to a `ModelConfig` and back.

This file converts the fields that all families of models share; `interop.families` converts the
fields that differ. A form is one way to store a model in a directory (`families.form.Form`).
Nothing here imports JAX.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import UserError, require, short_repr
from qwen3next_jax.common.storage import to_path
from qwen3next_jax.config import MixerConfig, ModelConfig, from_dict
from qwen3next_jax.config.registry import check_trusted
from qwen3next_jax.interop.families import FORMS, form_of_config
from qwen3next_jax.interop.families.fields import first_present, note_once
from qwen3next_jax.interop.families.form import Fields, Form
from qwen3next_jax.interop.weights import Weights, count_and_names, read_json

# `check_claimed_sizes` accepts every width up to this one, because an array of this width needs
# little memory.
_SMALL_WIDTH = 4096


class Checkpoint(NamedTuple):
    """A Hugging Face directory of which the config.json and the headers of the tensors were read.

    Attributes:
      directory: the path of the directory.
      config_fields: the fields of the config.json.
      form: the form in which the directory stores its model.
      weights: the tensors, under the names that the form's entries use.
      config: the settings of the model.
    """

    directory: pathlib.Path
    config_fields: Fields
    form: Form
    weights: Weights
    config: ModelConfig

    @property
    def vision_tensors(self) -> list[str]:
        """The sorted names of the vision tower's tensors; [] without a vision tower."""
        prefix = self.form.vision_prefix
        return sorted(name for name in self.weights.names if prefix and name.startswith(prefix))


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Reads the config.json of a Hugging Face directory and the headers of its tensors, but no
    tensor. Prints a note if the directory has a vision tower, which this project does not compute.

    Raises:
      UserError: for the reasons that `huggingface.load_hf` lists.
    """
    directory = require_model_directory(path)
    file = directory / "config.json"
    where = str(file)
    raw = read_json(file)
    form = form_of_config(raw, where)
    weights = Weights(directory, form.tensor_name_in_entries)
    fields = form.read_text_fields(raw, where)
    check_claimed_sizes(form, fields, {name: weights.shape(name) for name in weights.names}, where)
    checkpoint = Checkpoint(
        directory, raw, form, weights, _parse_settings(form, fields, weights.names, where)
    )
    if tower := checkpoint.vision_tensors:
        note_once(
            f"{directory}: its vision tower ({count_and_names(tower, 1)}) is not read: this "
            "project computes the text model only"
        )
    return checkpoint


def read_hf_config(path: str | os.PathLike) -> ModelConfig:
    """Returns the settings of the model in a Hugging Face directory, with the checks of
    `open_checkpoint`.
    """
    return open_checkpoint(path).config


def require_model_directory(path: str | os.PathLike) -> pathlib.Path:
    """Returns `path` as a `pathlib.Path`. Raises UserError if it is not a directory."""
    directory = to_path(path)
    if directory.is_dir():
        return directory
    found = "is a file" if directory.exists() else "does not exist"
    raise UserError(
        f"{directory} {found}: expected a Hugging Face model directory (config.json and "
        "*.safetensors)"
    )


def parse_hf_config(fields: Fields, names: Collection[str], where: str) -> ModelConfig:
    """Returns the settings of the model that a config.json describes.

    A note on standard error names the fields that this project does not know. The setting
    `mtp_depth` is 0 if `names` contains no tensors of the multi-token prediction module. If the
    multi-token prediction module has tensors, `mtp_depth` is the value of the field `mtp_depth`
    (which only this project writes) or `mtp_num_hidden_layers`; 1 if both fields are missing. The
    setting `dtype` is "bfloat16" if the field is "bfloat16", and "float32" in all other cases.

    Args:
      fields: the fields of the config.json.
      names: the names of the tensors in the same directory, which show whether there is a
        multi-token prediction module, and which experts are fused.
      where: the name of the file, for messages.

    Raises:
      UserError: the model_type is unknown, or this project does not compute the model.
    """
    form = form_of_config(fields, where)
    return _parse_settings(form, form.read_text_fields(fields, where), names, where)


def _parse_settings(form: Form, fields: Fields, names: Collection[str], where: str) -> ModelConfig:
    """Does the work of `parse_hf_config`, given the fields of the text model that
    `form.read_text_fields` returns.
    """
    values = form.read_settings(fields, where)
    dtype = first_present(fields, "dtype", "torch_dtype")
    require(
        dtype is None or isinstance(dtype, str),
        f"{where}: dtype = {short_repr(dtype)}: expected a name, such as 'bfloat16'",
    )
    values["dtype"] = "bfloat16" if dtype == "bfloat16" else "float32"
    values["mtp_depth"] = _mtp_depth(form, fields, names)
    values["bos_token_id"] = _read_token_id(fields, "bos_token_id", where)
    values["eos_token_id"] = _read_token_id(fields, "eos_token_id", where)
    values["hf_form"] = form.name
    values["hf_fused_experts"] = _parts_with_fused_experts(names)
    check_trusted({"model": values}, where)
    try:
        config = from_dict(ModelConfig, values, path="model")
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    # If `full_attention_interval` alone gives the same layers, the result has no list of layers.
    # The user can then change the number of layers with one setting. The comparison leaves out the
    # settings of mixers, because the mixers of the interval's pattern may not have them.
    by_interval = dataclasses.replace(config, layer_types=(), mixer=MixerConfig())
    if by_interval.mixers != config.mixers:
        return config
    return dataclasses.replace(config, layer_types=())


def _mtp_depth(form: Form, fields: Fields, names: Collection[str]) -> Any:
    """Returns the value of `mtp_depth` (see `parse_hf_config`) without checking it."""
    if not form.mtp_entries or not any(name.startswith("mtp.") for name in names):
        return 0
    depth = first_present(fields, "mtp_depth", "mtp_num_hidden_layers")
    return 1 if depth is None else depth


def _read_token_id(fields: Fields, name: str, where: str) -> Any:
    """Returns the token id in the field `name`; -1 if the field is missing, null or an empty list.
    For a list of ids, the result is the first id, because documents of training data end with a
    single token.
    """
    token = fields.get(name)
    if isinstance(token, list):
        require(
            all(type(item) is int for item in token),
            f"{where}: {name} = {short_repr(token)}: expected a token id, or a list of them",
        )
        token = token[0] if token else None
    return -1 if token is None else token


def _parts_with_fused_experts(names: Collection[str]) -> list[str]:
    """Returns the parts of the model ("mtp", "trunk") in which all experts of a layer share one
    tensor `gate_up_proj`.
    """
    fused = [name for name in names if name.endswith(".experts.gate_up_proj")]
    return sorted({"mtp" if name.startswith("mtp.") else "trunk" for name in fused})


def check_claimed_sizes(
    form: Form, fields: Fields, shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Checks that a config.json does not describe a far larger model than the tensors in its
    directory. The check protects other code, which makes lists of all layers, from running out of
    memory.

    Args:
      form: the form of the checkpoint.
      fields: the fields of the text model.
      shapes: tensor name → shape.
      where: the name of the file, for messages.

    Raises:
      UserError: the config.json has more layers, or a larger width, than the tensors.
    """
    prefix = f"{form.trunk_prefix}layers."
    layers = {name.removeprefix(prefix).split(".")[0] for name in shapes if name.startswith(prefix)}
    if not layers and shapes:
        example = min(shapes, key=lambda name: (".layers." not in name, name))
        raise UserError(
            f"{where}: the weights have no tensor {prefix}0.…: they have, for example, {example}: "
            "expected the names that transformers writes for this model_type"
        )
    for name in ("num_hidden_layers", "layer_types", "mlp_only_layers"):
        require(
            _integer_or_list_length(fields, name) <= len(layers),
            f"{where}: {name}: {short_repr(_integer_or_list_length(fields, name))} layers, "
            f"the weights have {len(layers)}",
        )
    # A field that no layer uses may be larger than all tensors, but not larger than _SMALL_WIDTH.
    widest = max((max(shape, default=0) for shape in shapes.values()), default=0)
    for names in form.width_field_groups:
        product = " × ".join(
            f"{name} = {short_repr(_integer_or_list_length(fields, name))}" for name in names
        )
        require(
            math.prod(_integer_or_list_length(fields, name) for name in names)
            <= max(widest, _SMALL_WIDTH),
            f"{where}: {product}: the widest of the weights has {widest}",
        )


def _integer_or_list_length(fields: Fields, name: str) -> int:
    """Returns the value of the field `name` if it is an integer, its length if it is a list, and 0
    otherwise. `Form.read_settings` checks the types later.
    """
    value = fields.get(name)
    if isinstance(value, list):
        return len(value)
    return value if type(value) is int else 0


def hf_config_fields(config: ModelConfig, dtype: str, source: Fields | None = None) -> Fields:
    """Returns the fields of the config.json of an export. Both `parse_hf_config` and transformers
    (4.57 or later for Qwen3-Next, 5 or later for the other families) rebuild the model from these
    fields.

    Args:
      config: the settings of a model that has a Hugging Face form (`layout.check_hf_form`).
      dtype: the dtype of the stored weights.
      source: the fields of the config.json of the checkpoint with which the model was initialised;
        None: there is no such checkpoint. If the text model of `source` has the same `model_type`,
        the result keeps those fields of the text model that this project does not write. If the
        export and `source` are wrappers (a text model and a vision tower), the result also keeps
        the fields of the wrapper.
    """
    form = FORMS[config.hf_form]
    fields = form.write_config_fields(config, dtype, {}, {})
    if not source:
        return fields
    source_form = form_of_config(source, "the source's config.json")
    if source_form.model_types[source["model_type"]] != form.model_types[fields["model_type"]]:
        return fields
    wrapper = source if source_form.text_config_group else {}
    return form.write_config_fields(config, dtype, text_fields_as_written(source), wrapper)


def text_fields_as_written(fields: Fields) -> Fields:
    """Returns the fields of the text model in a config.json, under the names in the file."""
    group = form_of_config(fields, "config.json").text_config_group
    return fields[group] if group else fields
