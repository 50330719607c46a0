"""Says which tensors of a Hugging Face checkpoint hold which parameters of a model.

The tensors of a layer hold its norms, its mixer and its MLP; the names of these tensors begin with
the layer's name. A form (`interop.families.form.Form`) is one way to store a model in files. An
entry (`interop.entries.ParameterEntry`) says which tensors hold a parameter. A form has entries for
the mixers that it stores; the class of a mixer that no form stores may define its own entries
(`hf_entries`, docs/extending.md).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import ModelConfig, to_dict
from qwen3next_jax.interop.entries import (
    EntryFunction,
    ParameterEntry,
    entries_under_module,
    one_tensor_entry,
    swiglu_entries,
)
from qwen3next_jax.interop.families import FORMS
from qwen3next_jax.interop.families.form import NOT_IN_FILES, Form
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.parameters import ParameterDeclaration


class StoredParameter(NamedTuple):
    """One parameter of the model, with the tensors that hold it.

    Attributes:
      path: the parameter's path in the parameter tree ("layers/0/mixer/q_proj").
      entry: the tensors that hold the parameter of one layer.
      layer_prefixes: for each layer that is stacked along the parameter's first axis, the prefix of
        the names of the layer's tensors; a single prefix if the parameter is not stacked.
      declaration: the parameter's declaration.
    """

    path: str
    entry: ParameterEntry
    layer_prefixes: tuple[str, ...]
    declaration: ParameterDeclaration

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape, including the axis of the stacked layers."""
        return self.declaration.stack_shape + self.declaration.shape


def stored_parameters(config: ModelConfig) -> list[StoredParameter]:
    """Returns each parameter of a model with the tensors that hold it in the form `config.hf_form`.
    The form must be able to hold the model (`check_hf_form`).

    Raises:
      UserError: the entries of a mixer name a parameter that the mixer lacks, or one of the mixer's
        parameters has no entry.
    """
    declarations = parameter_declarations(config)
    found = list(_parameters_with_entries(config, declarations))
    stored, existing = {parameter.path for parameter in found}, declarations.keys()
    require(
        stored == existing,
        f"{', '.join(sorted(stored ^ existing)[:3])}: "
        "a parameter of the model without an entry in its Hugging Face form, or an entry without "
        "a parameter: expected an entry for each (hf_entries of its mixer)",
    )
    return found


def _parameters_with_entries(
    config: ModelConfig, declarations: Mapping[str, ParameterDeclaration]
) -> Iterator[StoredParameter]:
    """Yields all parameters that the entries of a model's form name. `declarations`: path of a
    parameter → its declaration. If the path of a parameter is not in `declarations`, its
    declaration is None.
    """
    form = FORMS[config.hf_form]

    def with_paths(module: str, prefixes: tuple[str, ...], entries: Iterator[ParameterEntry]):
        """Yields the parameters of the module at the path `module`; `entries` are the module's
        entries.
        """
        part = "mtp" if module.startswith("mtp/") else "trunk"
        for entry in entries:
            if entry.all_experts_slice and part in config.hf_fused_experts:
                entry = entry._replace(slices=(entry.all_experts_slice,))
            full_path = module + entry.path
            yield StoredParameter(full_path, entry, prefixes, declarations.get(full_path))

    yield from with_paths("", (form.trunk_prefix,), _embedding_entries(config))
    yield from with_paths("", (form.trunk_prefix,), form.final_norm_entries(config))
    if not config.tie_word_embeddings:
        yield from with_paths("", ("",), _head_entries(config))
    for position, layers in enumerate(config.layer_stacks):
        prefixes = tuple(f"{form.trunk_prefix}layers.{layer}." for layer in layers)
        entries = _layer_entries(form, config, *config.mixers_and_sparsity[layers[0]])
        yield from with_paths(f"layers/{position}/", prefixes, entries)
        number = config.ple.embedding_index(layers[0])
        if number is not None:
            entries = form.layer_embedding_entries(config, number)
            yield from with_paths(f"layers/{position}/embedding/", prefixes, entries)
    if config.mtp_depth:
        yield from with_paths("mtp/", ("mtp.",), form.mtp_entries(config))
        entries = _layer_entries(form, config, *config.mixers_and_sparsity[-1])
        yield from with_paths("mtp/block/", ("mtp.layers.0.",), entries)


def constant_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """Returns the tensors that hold no parameters, as name → integers. The integers are the
    constants of the n-gram hashes of `model.ple`, which the settings determine.
    """
    form = FORMS[config.hf_form]
    return {
        f"{form.trunk_prefix}layers.{layer - 1}.{name}": value
        for layer in config.ple.layer_ids
        for name, value in form.embedding_constant_tensors(
            config, config.ple.embedding_index(layer - 1)
        ).items()
    }


def _embedding_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    size = (config.vocab_size, config.hidden_size)
    yield one_tensor_entry("embedding", "embed_tokens.weight", (0, 1), size)


def _head_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    yield one_tensor_entry(
        "head", "lm_head.weight", (1, 0), (config.vocab_size, config.hidden_size)
    )


def _layer_entries(
    form: Form, config: ModelConfig, mixer: str, sparse: bool
) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of a layer with the mixer named `mixer`. The
    layer has experts if `sparse`, and a dense MLP otherwise.
    """
    yield from form.layer_norm_entries(config, mixer)
    yield from entries_under_module("mixer", _mixer_entries(form, mixer)(config))
    if sparse:
        yield from entries_under_module("mlp", form.expert_entries(config))
    else:
        yield from entries_under_module(
            "mlp", swiglu_entries("", "mlp", config.hidden_size, config.intermediate_size)
        )


def _mixer_entries(form: Form, mixer: str) -> EntryFunction | None:
    """Returns the function that yields the entries of a mixer; None if the form cannot store the
    mixer.

    If the form does not know the mixer, the mixer's own class may define `hf_entries`. An inherited
    `hf_entries` does not count, because a subclass computes something else than the class that it
    inherits from.
    """
    if mixer in form.mixer_entries:
        return form.mixer_entries[mixer]
    cls = mixer_class(mixer)
    return cls.hf_entries if vars(cls).get("hf_entries") else None


def check_hf_form(config: ModelConfig) -> None:
    """Checks that a Hugging Face directory of the form `config.hf_form` can hold the model.

    Raises:
      UserError: the form does not store some of the model's mixers (the message names these mixers
        and their layers), or a setting that the form's config.json cannot express differs from its
        default.
    """
    form = FORMS[config.hf_form]
    unsupported = [
        f"{mixer} (layers {_layers_with_mixer(config, mixer)})"
        for mixer in dict.fromkeys(mixer for mixer, _ in config.mixers_and_sparsity)
        if _mixer_entries(form, mixer) is None
    ]
    if unsupported:
        raise UserError(
            f"this model has layers without a Hugging Face form: {'; '.join(unsupported)}: "
            f"expected mixers that have one in {form.name}{_other_forms_hint(form)}"
        )
    default = flatten(to_dict(ModelConfig()))
    for name, value in flatten(to_dict(config)).items():
        if name.partition(".")[0] in form.supported_settings | NOT_IN_FILES:
            continue
        expected = repr(default[name]) if name in default else "its default"
        require(
            name in default and value == default[name],
            f"model.{name} = {value!r}: transformers' {form.display_name} has only {expected}, so "
            "this model has no Hugging Face form",
        )
    form.check_model(config)


def _layers_with_mixer(config: ModelConfig, mixer: str) -> str:
    """Returns the numbers of the layers with the mixer `mixer` as text, such as "0, 4"; "of the MTP
    module" if no decoder layer has this mixer.
    """
    numbers = [str(layer) for layer, name in enumerate(config.mixers) if name == mixer]
    return ", ".join(numbers) or "of the MTP module"


def _other_forms_hint(form: Form) -> str:
    """Returns a hint for a message: each form that stores mixers that `form` does not store, with
    the names of these mixers.
    """
    others = [
        f"{other.name} has {' and '.join(sorted(mixers))}"
        for other in FORMS.values()
        if (mixers := other.mixer_entries.keys() - form.mixer_entries.keys())
    ]
    return f" (--form: {'; '.join(others)})"
