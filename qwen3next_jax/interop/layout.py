"""Which tensors of a Hugging Face checkpoint hold which parameters of a model.

The entries of a layer are those of its norms, its mixer and its MLP, under the names of that
layer. The mixers' are looked up by name: in the form (`interop.families`), else on the class of a
mixer that is not this package's own (`hf_entries`, docs/extending.md).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import ModelConfig, to_dict
from qwen3next_jax.interop.entries import Entries, Entry, below, one, swiglu
from qwen3next_jax.interop.families import FORMS
from qwen3next_jax.interop.families.form import WITHOUT_MEANING, Form
from qwen3next_jax.model import declared
from qwen3next_jax.model.block import mixer_class
from qwen3next_jax.model.parameters import Declared


class Parameter(NamedTuple):
    """One parameter of the model, and its tensors.

    Attributes:
      path: in the parameter tree ("layers/0/mixer/q_proj").
      entry: the tensors of one layer.
      prefixes: what their names begin with, for each layer that is stacked along the parameter's
        first axis; one prefix where the parameter is not stacked.
      declared: the parameter's declaration.
    """

    path: str
    entry: Entry
    prefixes: tuple[str, ...]
    declared: Declared

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter, with the axis of stacked layers."""
        return self.declared.stack + self.declared.shape


def parameters(config: ModelConfig) -> list[Parameter]:
    """Every parameter of a model that has a Hugging Face form (`check_hf_form`), with the tensors
    of that form.

    Raises:
      UserError: the entries of a mixer name a parameter that it does not have, or leave one out.
    """
    declarations = declared(config)
    found = list(_parameters(config, declarations))
    entries, made = {parameter.path for parameter in found}, declarations.keys()
    require(
        entries == made,
        f"{', '.join(sorted(entries ^ made)[:3])}: "
        "a parameter of the model without an entry in its Hugging Face form, or an entry without "
        "a parameter: expected an entry for each (hf_entries of its mixer)",
    )
    return found


def _parameters(config: ModelConfig, declarations: Mapping[str, Declared]) -> Iterator[Parameter]:
    form = FORMS[config.hf_form]

    def group(path: str, prefixes: tuple[str, ...], entries: Iterator[Entry]):
        part = "mtp" if path.startswith("mtp/") else "trunk"
        for entry in entries:
            if entry.fused and part in config.hf_fused_experts:
                entry = entry._replace(slices=(entry.fused,))
            full_path = path + entry.path
            yield Parameter(full_path, entry, prefixes, declarations.get(full_path))

    yield from group("", (form.trunk,), _embedding(config))
    yield from group("", (form.trunk,), form.final_norm(config))
    if not config.tie_word_embeddings:
        yield from group("", ("",), _head(config))
    for position, layers in enumerate(config.stacks):
        prefixes = tuple(f"{form.trunk}layers.{layer}." for layer in layers)
        entries = _layer(form, config, *config.layer_kinds[layers[0]])
        yield from group(f"layers/{position}/", prefixes, entries)
        number = config.ple.number(layers[0])
        if number is not None:
            entries = form.layer_embedding(config, number)
            yield from group(f"layers/{position}/embedding/", prefixes, entries)
    if config.mtp_depth:
        yield from group("mtp/", ("mtp.",), form.multi_token_prediction(config))
        entries = _layer(form, config, *config.layer_kinds[-1])
        yield from group("mtp/block/", ("mtp.layers.0.",), entries)


def constants(config: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors that hold no parameters: name → the integers that the settings ask for."""
    form = FORMS[config.hf_form]
    return {
        f"{form.trunk}layers.{layer - 1}.{name}": value
        for layer in config.ple.layer_ids
        for name, value in form.layer_constants(config, config.ple.number(layer - 1)).items()
    }


def _embedding(config: ModelConfig) -> Iterator[Entry]:
    size = (config.vocab_size, config.hidden_size)
    yield one("embedding", "embed_tokens.weight", (0, 1), size)


def _head(config: ModelConfig) -> Iterator[Entry]:
    yield one("head", "lm_head.weight", (1, 0), (config.vocab_size, config.hidden_size))


def _layer(form: Form, config: ModelConfig, mixer: str, sparse: bool) -> Iterator[Entry]:
    """The entries of a layer with this mixer, and with experts or a dense MLP."""
    yield from form.layer_norms(config)
    yield from below("mixer", _mixer_entries(form, mixer)(config))
    if sparse:
        yield from below("mlp", form.experts(config))
    else:
        yield from below("mlp", swiglu("", "mlp", config.hidden_size, config.intermediate_size))


def _mixer_entries(form: Form, mixer: str) -> Entries | None:
    """The entries of a mixer; None: it has none in this form.

    `hf_entries` is not inherited: a mixer that derives from another has other mathematics.
    """
    if mixer in form.mixers:
        return form.mixers[mixer]
    own = mixer_class(mixer)
    return own.hf_entries if vars(own).get("hf_entries") else None


def check_hf_form(config: ModelConfig) -> None:
    """Checks that transformers has such a model, in the form that `config.hf_form` names.

    Raises:
      UserError: it has no such mixer (all are named, with their layers), or a setting that no
        file holds is not at its default.
    """
    form = FORMS[config.hf_form]
    without = [
        f"{mixer} (layers {_layers_with(config, mixer)})"
        for mixer in dict.fromkeys(mixer for mixer, _ in config.layer_kinds)
        if _mixer_entries(form, mixer) is None
    ]
    if without:
        raise UserError(
            f"this model has layers without a Hugging Face form: {'; '.join(without)}: expected "
            f"mixers that have one in {form.name}{_other_mixers(form)}"
        )
    default = flatten(to_dict(ModelConfig()))
    for name, value in flatten(to_dict(config)).items():
        if name.partition(".")[0] in form.settings | WITHOUT_MEANING:
            continue
        expected = repr(default[name]) if name in default else "its default"
        require(
            name in default and value == default[name],
            f"model.{name} = {value!r}: transformers' {form.title} has {expected} alone, so "
            "this model has no Hugging Face form",
        )
    form.check(config)


def _layers_with(config: ModelConfig, mixer: str) -> str:
    numbers = [str(layer) for layer, name in enumerate(config.mixers) if name == mixer]
    return ", ".join(numbers) or "of MTP"


def _other_mixers(form: Form) -> str:
    """Which other forms have mixers that this one does not have."""
    others = [
        f"{other.name} has {' and '.join(sorted(mixers))}"
        for other in FORMS.values()
        if (mixers := other.mixers.keys() - form.mixers.keys())
    ]
    return f" (--form: {'; '.join(others)})"
