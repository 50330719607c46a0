"""What the families share in reading and writing the fields of a config.json.

In all functions `where` names the file, for messages.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any

from qwen3next_jax.common.errors import UserError, short_repr, warn
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.families.form import Fields

# Fields that change nothing that is computed, whatever their value.
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
# Fields that an export always writes anew. It takes over others from the checkpoint that its
# model began with.
_RENEWED = frozenset(
    (
        "architectures",
        "dtype",
        "full_attention_interval",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
        "partial_rotary_factor",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
    )
)


def first_given(fields: Fields, *names: str) -> Any:
    """The first value of these fields that is neither null nor 0; None: there is none."""
    values = (fields.get(name) for name in names)
    return next((value for value in values if value is not None and value != 0), None)


def given(fields: Fields, names: Collection[str]) -> Fields:
    """Those of the fields that are there and not null."""
    return {name: fields[name] for name in names if fields.get(name) is not None}


def refuse_other_values(fields: Fields, supported: Mapping[str, tuple], where: str) -> None:
    """Raises UserError where a field has a value that is not supported; null is no value."""
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


def note_unknown(fields: Fields, known: Collection[str], where: str) -> None:
    """Names the fields that are not known, in a note."""
    unknown = sorted(
        name
        for name, value in fields.items()
        if name not in known and value is not None and (name, value) != ("attention_dropout", 0)
    )
    if unknown:
        note(
            f"{where}: {', '.join(short_repr(name) for name in unknown)}: not known here, and "
            "taken to change nothing that is computed"
        )


@functools.cache
def note(message: str) -> None:
    """A note on standard error, once per process: a command reads a config.json several times."""
    warn(message, "note")


def taken_over(source: Fields) -> Fields:
    """The fields that an export takes over from its source, unless it writes them itself."""
    return {name: value for name, value in source.items() if name not in _RENEWED}


def token_fields(config: ModelConfig, source: Fields) -> Fields:
    """`bos_token_id` and `eos_token_id`. A list in the source stays if it has the model's token."""
    tokens = {}
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(config, name)
        in_source = source.get(name)
        if token < 0:
            tokens[name] = None
        elif isinstance(in_source, list) and token in in_source:
            tokens[name] = in_source
        else:
            tokens[name] = token
    return tokens
