"""Functions that several families use to read and write the fields of a config.json.

In all functions, `where` is the name of the file, for messages. "The source" of an export is the
checkpoint with which the exported model was initialised.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any

from qwen3next_jax.common.errors import UserError, short_repr, warn
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.families.form import Fields

# Fields that do not affect what this project computes, or that it reads elsewhere (`hf_config`).
IGNORED = frozenset(
    (
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "mamba_ssm_dtype",
        "model_type",
        "mtp_depth",
        "output_router_logits",
        "pad_token_id",
        "router_aux_loss_coef",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "_name_or_path",
    )
)
# Fields that an export never copies from its source, because it writes them itself or leaves them
# out.
_NOT_COPIED = frozenset(
    (
        "architectures",
        "dtype",
        "full_attention_interval",
        "original_max_position_embeddings",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
        "partial_rotary_factor",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
    )
)


def first_present(fields: Fields, *names: str) -> Any:
    """Returns the first value of the fields `names` that is neither null nor 0; None if none is."""
    values = (fields.get(name) for name in names)
    return next((value for value in values if value is not None and value != 0), None)


def present_fields(fields: Fields, names: Collection[str]) -> Fields:
    """Returns the fields `names` that are present and not null."""
    return {name: fields[name] for name in names if fields.get(name) is not None}


def refuse_other_values(fields: Fields, supported: Mapping[str, tuple], where: str) -> None:
    """Raises UserError if a field has an unsupported value. `supported`: name of a field → its
    supported values. A field that is missing or null is accepted.
    """
    for name, values in supported.items():
        value = fields.get(name)
        if value is None or value in values:
            continue
        quantized = name == "quantization_config"
        advice = "; convert the checkpoint to bfloat16 first" if quantized else ""
        raise UserError(
            f"{where}: {name} = {short_repr(value)} is not supported: expected "
            f"{' or '.join(map(repr, values))}{advice}"
        )


def note_unknown_fields(fields: Fields, known: Collection[str], where: str) -> None:
    """Prints a note with the names of the fields that are not in `known`, if there are any."""
    unknown = sorted(
        name
        for name, value in fields.items()
        if name not in known and value is not None and (name, value) != ("attention_dropout", 0)
    )
    if unknown:
        note_once(
            f"{where}: {', '.join(short_repr(name) for name in unknown)}: unknown fields, which "
            "are assumed not to affect what the model computes"
        )


@functools.cache
def note_once(message: str) -> None:
    """Prints a note on standard error. A process prints the same note only once, because a command
    may read a config.json several times.
    """
    warn(message, "note")


def fields_to_copy(source: Fields) -> Fields:
    """Returns `source` without the fields that an export never copies."""
    return {name: value for name, value in source.items() if name not in _NOT_COPIED}


def token_id_fields(config: ModelConfig, source: Fields) -> Fields:
    """Returns the fields `bos_token_id` and `eos_token_id` of an exported config.json. If one of
    the two fields of the source is a list that contains the model's token, the list is copied, with
    the model's token first: an import takes the first token of a list, and so do the hashes of
    n-grams in transformers' Qwen4Exp.
    """
    tokens = {}
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(config, name)
        in_source = source.get(name)
        if token < 0:
            tokens[name] = None
        elif isinstance(in_source, list) and token in in_source:
            tokens[name] = [token, *(other for other in in_source if other != token)]
        else:
            tokens[name] = token
    return tokens
