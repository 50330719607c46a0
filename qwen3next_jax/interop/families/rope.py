"""Reads and writes the settings of rotary positions in the config.json of Qwen3-Next and Qwen3.5.

A config.json has one of two notations for rotary positions: the fields `rope_theta`,
`partial_rotary_factor` and `rope_scaling` at the top level, or the group `rope_parameters`.
"""

import math
from typing import Any

from qwen3next_jax.common.errors import UserError, require, short_repr
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.families.fields import (
    note_once,
    note_unknown_fields,
    present_fields,
    refuse_other_values,
)
from qwen3next_jax.interop.families.form import Fields

_TRAINED_CONTEXT = "original_max_position_embeddings"
FIELDS = frozenset(
    ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", _TRAINED_CONTEXT)
)
# Fields about the positions of image tokens. They have no effect here, because this project
# computes the text model only.
IMAGE_POSITIONS = frozenset(("mrope_section", "mrope_interleaved"))

# The values that transformers gives to missing fields.
_DEFAULTS = {"rope_type": "default", "rope_theta": 10_000.0}
_KNOWN = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
_YARN_SUPPORTED = {
    "beta_fast": (32,),
    "beta_slow": (1,),
    "truncate": (True,),
    "mscale": (None,),
    "mscale_all_dim": (None,),
}
_YARN_KNOWN = frozenset(("factor", _TRAINED_CONTEXT, "attention_factor", *_YARN_SUPPORTED))


def read_rope_settings(
    fields: Fields,
    context: Any,
    where: str,
    ignored: frozenset[str] = frozenset(),
    default_rotary_factor: float = 0.25,
) -> Fields:
    """Reads the settings of `ModelConfig` about rotary positions.

    Args:
      fields: the fields of the text model.
      context: the text model's `max_position_embeddings`.
      where: the name of the file, for messages.
      ignored: names of rotary fields that have no effect, for which no note is printed.
      default_rotary_factor: the value that transformers gives to `partial_rotary_factor` if the
        file lacks it.

    Raises:
      UserError: the file asks for a scaling of positions that this project does not compute.
    """
    top_level = (
        _DEFAULTS
        | {"partial_rotary_factor": default_rotary_factor}
        | present_fields(fields, ("rope_theta", "partial_rotary_factor"))
    )
    parameters = _rotary_group(fields, "rope_parameters", where)
    scaling = _rotary_group(fields, "rope_scaling", where)
    rope = top_level | parameters | scaling
    if parameters and scaling and rope != top_level | scaling:
        note_once(
            f"{where}: transformers would read rope_scaling only and ignore "
            "rope_parameters: put all rotary fields into rope_scaling"
        )
    known = _KNOWN | ignored
    settings = present_fields(rope, ("rope_theta", "partial_rotary_factor"))
    if rope["rope_type"] == "yarn":
        known |= _YARN_KNOWN
        # As in transformers, this field at the top level counts before the same field of a group.
        rope |= present_fields(fields, (_TRAINED_CONTEXT,))
        settings |= _read_yarn(rope, context, where)
    elif rope["rope_type"] != "default":
        raise UserError(
            f"{where}: rope_type = {short_repr(rope['rope_type'])} is not supported: expected "
            "'default' or 'yarn' (remove the scaling to use the model within its trained context)"
        )
    unknown = {name: value for name, value in rope.items() if name not in known}
    note_unknown_fields({f"rope_parameters.{name}": v for name, v in unknown.items()}, (), where)
    return settings


def _rotary_group(fields: Fields, name: str, where: str) -> Fields:
    """Returns the group `name` of `fields` without its null fields, and with "type" renamed to
    "rope_type"; {} if the group is missing.
    """
    group = {} if fields.get(name) is None else fields[name]
    require(
        isinstance(group, dict),
        f"{where}: {name} = {short_repr(group)}: expected a group of settings",
    )
    given = {key: value for key, value in group.items() if value is not None}
    if "type" in given:
        given.setdefault("rope_type", given.pop("type"))
    return given


def _read_yarn(rope: Fields, context: Any, where: str) -> Fields:
    """Returns the settings of `ModelConfig` for YaRN: yarn_factor and max_position_embeddings."""
    refuse_other_values(rope, _YARN_SUPPORTED, where)
    factor = rope.get("factor")
    trained = rope.get(_TRAINED_CONTEXT, context)
    for name, value in (("factor", factor), (_TRAINED_CONTEXT, trained)):
        require(
            type(value) in (int, float) and 1 <= value < 2**40,
            f"{where}: rope_type = 'yarn' with {name} = {short_repr(value)}: expected a "
            "number of at least 1",
        )
    require(
        context in (trained, int(trained * factor)),
        f"{where}: max_position_embeddings = {short_repr(context)}, and YaRN reaches {factor:g} × "
        f"{trained:g} positions: expected "
        "max_position_embeddings to be that product, or original_max_position_embeddings",
    )
    scale = rope.get("attention_factor")
    expected = 0.1 * math.log(factor) + 1
    require(
        scale is None or scale == expected,
        f"{where}: attention_factor = {short_repr(scale)} is not supported: expected {expected} by "
        "the factor, or none",
    )
    return {"yarn_factor": factor, "max_position_embeddings": trained}


def rope_fields(config: ModelConfig, source: Fields) -> Fields:
    """Returns the fields `max_position_embeddings` and `rope_parameters` of an exported
    config.json. Fields about the positions of image tokens are copied from `source`.
    """
    scaling = _rope_scaling_fields(config, source)
    return {
        "max_position_embeddings": config.context_length,
        "rope_parameters": scaling | _theta_and_factor_fields(config),
    }


def top_level_rope_fields(config: ModelConfig, source: Fields) -> Fields:
    """Returns the rotary settings in the older notation, as fields at the top level: `rope_theta`,
    `partial_rotary_factor`, and `rope_scaling`, which is None without YaRN.
    """
    scaling = _rope_scaling_fields(config, source) if config.yarn_factor > 1 else None
    return _theta_and_factor_fields(config) | {"rope_scaling": scaling}


def _theta_and_factor_fields(config: ModelConfig) -> Fields:
    return {
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
    }


def _rope_scaling_fields(config: ModelConfig, source: Fields) -> Fields:
    scaling = {"rope_type": "default"}
    if config.yarn_factor > 1:
        scaling = {
            "rope_type": "yarn",
            "factor": config.yarn_factor,
            "original_max_position_embeddings": config.max_position_embeddings,
        }
    for name in ("rope_scaling", "rope_parameters"):
        group = source.get(name) or {}
        scaling |= {key: group[key] for key in group.keys() & IMAGE_POSITIONS}
    return scaling
