"""A Hugging Face directory's config.json ↔ `ModelConfig`. Nothing here imports JAX.

What differs between families is in `interop.families`; here is what they have in common.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import UserError, require, short_repr
from qwen3next_jax.config import MixerConfig, ModelConfig, from_dict
from qwen3next_jax.config.registry import check_trusted
from qwen3next_jax.interop.families import FORMS, form_of
from qwen3next_jax.interop.families.fields import first_given, note
from qwen3next_jax.interop.families.form import Fields, Form
from qwen3next_jax.interop.weights import Weights, name_some, read_json

# A table of this width costs nothing, whatever the weights are.
_SMALL_WIDTH = 4096


class Checkpoint(NamedTuple):
    """A Hugging Face directory whose config.json and headers of tensors have been read.

    Attributes:
      directory: its path.
      fields: of its config.json.
      form: how it stores its model.
      weights: its tensors, by the names that the form's entries use.
      config: its model's settings.
    """

    directory: pathlib.Path
    fields: Fields
    form: Form
    weights: Weights
    config: ModelConfig

    @property
    def vision_tensors(self) -> list[str]:
        """The names of the tensors of its vision tower, sorted."""
        prefix = self.form.vision
        return sorted(n for n in self.weights.names if prefix and n.startswith(prefix))


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Reads config.json and the headers of the tensors, and no tensor. A vision tower, which is
    not computed here, is named in a note.

    Raises:
      UserError: see `huggingface.load_hf`.
    """
    directory = model_directory(path)
    file = directory / "config.json"
    where = str(file)
    raw = read_json(file)
    form = form_of(raw, where)
    weights = Weights(directory, form.tensor_name)
    fields = form.text_fields(raw, where)
    check_sizes(form, fields, {name: weights.shape(name) for name in weights.names}, where)
    checkpoint = Checkpoint(
        directory, raw, form, weights, _settings(form, fields, weights.names, where)
    )
    if tower := checkpoint.vision_tensors:
        note(
            f"{directory}: its vision tower ({name_some(tower, 1)}) is left aside: the text model "
            "alone is computed"
        )
    return checkpoint


def read_hf_config(path: str | os.PathLike) -> ModelConfig:
    """The settings of the model in a Hugging Face directory. See `open_checkpoint`."""
    return open_checkpoint(path).config


def model_directory(path: str | os.PathLike) -> pathlib.Path:
    """`path`, if it is a directory."""
    directory = pathlib.Path(path)
    if directory.is_dir():
        return directory
    found = "is a file" if directory.exists() else "does not exist"
    raise UserError(
        f"{directory} {found}: expected a Hugging Face model directory (config.json and "
        "*.safetensors)"
    )


def parse_hf_config(fields: Fields, names: Collection[str], where: str) -> ModelConfig:
    """The settings of the model that a config.json describes.

    Fields that are not known are named in a note. `mtp_depth` is what the file says (this
    project's own field, or `mtp_num_hidden_layers`), 1 when it says nothing, and 0 without
    tensors of the module. Any dtype but bfloat16 becomes float32.

    Args:
      fields: of the config.json.
      names: of the tensors beside it. They say whether there is a multi-token prediction
        module, and which experts are fused.
      where: names the file in messages.

    Raises:
      UserError: another model_type, or a model that this project does not compute.
    """
    form = form_of(fields, where)
    return _settings(form, form.text_fields(fields, where), names, where)


def _settings(form: Form, fields: Fields, names: Collection[str], where: str) -> ModelConfig:
    values = form.read(fields, where)
    dtype = first_given(fields, "dtype", "torch_dtype")
    require(
        dtype is None or isinstance(dtype, str),
        f"{where}: dtype = {short_repr(dtype)}: expected a name, such as 'bfloat16'",
    )
    values["dtype"] = "bfloat16" if dtype == "bfloat16" else "float32"
    values["mtp_depth"] = _mtp_depth(form, fields, names)
    values["bos_token_id"] = _token(fields, "bos_token_id", where)
    values["eos_token_id"] = _token(fields, "eos_token_id", where)
    values["hf_form"] = form.name
    values["hf_fused_experts"] = _fused_experts(names)
    check_trusted({"model": values}, where)
    try:
        config = from_dict(ModelConfig, values, path="model")
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    # Without a list of layers, the same model with more layers is one setting away. Settings of
    # mixers are left out here: the layers of another pattern may not read them.
    by_interval = dataclasses.replace(config, layer_types=(), mixer=MixerConfig())
    if by_interval.mixers != config.mixers:
        return config
    return dataclasses.replace(config, layer_types=())


def _mtp_depth(form: Form, fields: Fields, names: Collection[str]) -> Any:
    if not form.multi_token_prediction or not any(name.startswith("mtp.") for name in names):
        return 0
    depth = first_given(fields, "mtp_depth", "mtp_num_hidden_layers")
    return 1 if depth is None else depth


def _token(fields: Fields, name: str, where: str) -> Any:
    """A token's number, -1 for none; the first of several: training data ends with that one."""
    token = fields.get(name)
    if isinstance(token, list):
        require(
            all(type(number) is int for number in token),
            f"{where}: {name} = {short_repr(token)}: expected a token's number, or a list of them",
        )
        token = token[0] if token else None
    return -1 if token is None else token


def _fused_experts(names: Collection[str]) -> list[str]:
    fused = {
        "mtp" if name.startswith("mtp.") else "trunk"
        for name in names
        if name.endswith(".experts.gate_up_proj")
    }
    return sorted(fused)


def check_sizes(
    form: Form, fields: Fields, shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Refuses a config.json that calls for far more than the tensors beside it hold, before
    anything is built from it: a billion layers would otherwise be listed one by one.

    Args:
      form: of the checkpoint.
      fields: of the text model.
      shapes: the shape of each tensor, by its name.
      where: names the file in messages.

    Raises:
      UserError: a number of layers or a width that the tensors do not have.
    """
    prefix = f"{form.trunk}layers."
    layers = {name.removeprefix(prefix).split(".")[0] for name in shapes if name.startswith(prefix)}
    for name in ("num_hidden_layers", "layer_types", "mlp_only_layers"):
        require(
            _size(fields, name) <= len(layers),
            f"{where}: {name}: {short_repr(_size(fields, name))} layers, "
            f"the weights have {len(layers)}",
        )
    # A width that no layer uses may be larger than those there are, but not by so much that a
    # table of it would be a burden.
    widest = max((max(shape, default=0) for shape in shapes.values()), default=0)
    for names in form.sizes:
        product = " × ".join(f"{name} = {short_repr(_size(fields, name))}" for name in names)
        require(
            math.prod(_size(fields, name) for name in names) <= max(widest, _SMALL_WIDTH),
            f"{where}: {product}: the widest of the weights has {widest}",
        )


def _size(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if isinstance(value, list):
        return len(value)
    return value if type(value) is int else 0


def format_hf_config(config: ModelConfig, dtype: str, source: Fields | None = None) -> Fields:
    """The config.json from which `parse_hf_config` and transformers both rebuild the model:
    transformers 4.57 and later for Qwen3-Next, 5 for the other families.

    Args:
      config: the model, which has a form (`layout.check_hf_form`).
      dtype: of the stored weights.
      source: the config.json of the checkpoint that the model began with. Its other fields stay
        where its text model is of the same kind; those around the text model, where both files
        are wrappers. None: there is none.
    """
    form = FORMS[config.hf_form]
    fields = form.write(config, dtype, {}, {})
    if not source:
        return fields
    theirs = form_of(source, "the source's config.json")
    if theirs.model_types[source["model_type"]] != form.model_types[fields["model_type"]]:
        return fields
    return form.write(config, dtype, text_group(source), source if theirs.text_group else {})


def text_group(fields: Fields) -> Fields:
    """The group of a config.json that holds the fields of the text model."""
    group = form_of(fields, "config.json").text_group
    return fields[group] if group else fields
