"""Qwen3.5 and later models of the same architecture: Qwen3-Next with experts in all layers, or in
no layer.

A directory holds either the text model alone (`qwen3_5_text`), or a wrapper around a text model and
a vision tower (`qwen3_5`). The config.json of a wrapper has the fields of its text model in the
group `text_config`. A recurrent layer has four tensors for its input projections: one for q of all
heads, k of all heads and v of all heads, in this order, and one each for z, b and a.

The tensors of a text model begin with `model.language_model.` in a wrapper, and with `model.`
without one. If transformers loads the text model of a wrapper and saves it, the result has
the config.json of a text model and the tensor names of a wrapper. An import of a text model reads
both names; an export writes `model.`.
"""

import dataclasses
from collections.abc import Iterator

from qwen3next_jax.common.errors import require, short_repr
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.entries import ParameterEntry, TensorSlice
from qwen3next_jax.interop.families import qwen3_next, rope
from qwen3next_jax.interop.families.fields import (
    IGNORED,
    fields_to_copy,
    note_unknown_fields,
    present_fields,
    refuse_other_values,
)
from qwen3next_jax.interop.families.form import Fields, Form

# ---- config.json

_DENSE = "qwen3_5_text"
_MIXTURE = "qwen3_5_moe_text"
_SAME_NAME = {
    _DENSE: qwen3_next.SAME_NAME + qwen3_next.SAME_NAME_IF_DENSE,
    _MIXTURE: qwen3_next.SAME_NAME + qwen3_next.SAME_NAME_IF_MIXTURE,
}
# The values that transformers gives to missing fields, where they differ from the defaults of
# `ModelConfig`.
_DEFAULTS = {
    _DENSE: qwen3_next.DEFAULTS
    | {
        "num_experts": 0,
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    _MIXTURE: qwen3_next.DEFAULTS
    | {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248_320,
        "num_hidden_layers": 40,
    },
}
_SUPPORTED = qwen3_next.SUPPORTED | {
    "output_gate_type": ("swish", "silu"),
    "mtp_use_dedicated_embeddings": (False,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
_ARCHITECTURES = {_DENSE: "Qwen3_5", _MIXTURE: "Qwen3_5Moe"}
# Fields of a wrapper, outside of `text_config`.
_WRAPPER_FIELDS = frozenset(
    (
        "text_config",
        "tie_word_embeddings",
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    )
)
# Fields of a wrapper that describe its text model.
_TEXT_FIELDS_OF_WRAPPER = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)


def _read_settings(fields: Fields, where: str) -> Fields:
    refuse_other_values(fields, _SUPPORTED, where)
    kind = _MIXTURE if fields["model_type"].startswith("qwen3_5_moe") else _DENSE
    known = {*_SAME_NAME[kind], *_SUPPORTED, *IGNORED, *rope.FIELDS, "mtp_num_hidden_layers"}
    note_unknown_fields(fields, known, where)
    settings = _DEFAULTS[kind] | present_fields(fields, _SAME_NAME[kind])
    context = settings["max_position_embeddings"]
    return settings | rope.read_rope_settings(fields, context, where, ignored=rope.IMAGE_POSITIONS)


def text_fields_in_wrapper(fields: Fields, where: str) -> Fields:
    """Returns the fields of `text_config`, together with the fields of the wrapper that describe
    the text model. The `model_type` in the result is that of the wrapper.

    Raises:
      UserError: the wrapper and its text model contradict each other.
    """
    model_type, text = fields["model_type"], fields.get("text_config")
    require(
        isinstance(text, dict),
        f"{where}: text_config = {short_repr(text)}: expected the fields of the text model",
    )
    inner_type = text.get("model_type", f"{model_type}_text")
    require(
        inner_type in (model_type, f"{model_type}_text"),
        f"{where}: text_config.model_type = {short_repr(inner_type)} in a {model_type}: expected "
        f"'{model_type}_text'",
    )
    tied = [
        group["tie_word_embeddings"]
        for group in (fields, text)
        if group.get("tie_word_embeddings") is not None
    ]
    require(
        all(value == tied[0] for value in tied),
        f"{where}: tie_word_embeddings is true and false, at the top and in text_config: expected "
        "the same in both",
    )
    for name, value in present_fields(fields, rope.FIELDS).items():
        require(
            text.get(name) == value,
            f"{where}: {name} = {short_repr(value)} stands beside text_config, where transformers "
            f"ignores it: move it into text_config, which has {short_repr(text.get(name))}, or "
            "remove it",
        )
    known = _WRAPPER_FIELDS | IGNORED | rope.FIELDS | set(_TEXT_FIELDS_OF_WRAPPER)
    note_unknown_fields(fields, known, where)
    return (
        present_fields(fields, _TEXT_FIELDS_OF_WRAPPER)
        | present_fields(text, list(text))
        | {"model_type": model_type}
    )


def _write_text_fields(config: ModelConfig, dtype: str, source: Fields, wrapper: Fields) -> Fields:
    """Returns the fields of config.json for a text model."""
    kind = _MIXTURE if config.num_experts else _DENSE
    fields = qwen3_next.text_model_fields(config, dtype, source, _SAME_NAME[kind])
    return fields | {
        "architectures": [f"{_ARCHITECTURES[kind]}ForCausalLM"],
        "model_type": kind,
        "attn_output_gate": True,
        # the number of stored modules; all depths apply the same module
        "mtp_num_hidden_layers": min(config.mtp_depth, 1),
        "mtp_use_dedicated_embeddings": False,
    }


def _write_wrapper_fields(
    config: ModelConfig, dtype: str, source: Fields, wrapper: Fields
) -> Fields:
    text = _write_text_fields(config, dtype, source, {})
    return wrapper_fields(text, _ARCHITECTURES[text["model_type"]], config, dtype, wrapper)


def wrapper_fields(
    text: Fields, architecture: str, config: ModelConfig, dtype: str, wrapper: Fields
) -> Fields:
    """Returns the fields of a wrapper around a text model. `text`: the fields of the text model.
    `architecture`: the beginning of the name of transformers' class. `Form.write_config_fields`
    explains the other arguments.
    """
    kind = text["model_type"]
    text = {name: value for name, value in text.items() if name != "architectures"}
    tokens = {name: text[name] for name in ("bos_token_id", "eos_token_id") if name in wrapper}
    return (
        fields_to_copy(wrapper)
        | tokens
        | {
            "architectures": [f"{architecture}ForConditionalGeneration"],
            "model_type": kind.removesuffix("_text"),
            "text_config": text,
            "tie_word_embeddings": config.tie_word_embeddings,
            "dtype": dtype,
        }
    )


def _check_model(config: ModelConfig) -> None:
    """Raises UserError if only some layers have experts, or if the weights of a token's experts do
    not sum to 1.
    """
    qwen3_next.check_model(config)
    default = ModelConfig()
    for name in qwen3_next.MIXTURE_FIELDS_OF_QWEN3_NEXT if config.num_experts else ():
        value, expected = getattr(config, name), getattr(default, name)
        require(
            value == expected,
            f"model.{name} = {value!r}: {config.hf_form} cannot store it: expected "
            f"{expected!r}, or the form qwen3_next",
        )


# ---- tensors


def gated_deltanet_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of Gated DeltaNet. The input projections have
    one tensor for q, k and v, and one each for z, b and a.
    """
    d, heads = config.hidden_size, config.linear_num_value_heads
    value_heads_per_key_head = heads // config.linear_num_key_heads
    order = qwen3_next.conv_channel_order_in_files(config)
    channels_per_key_head = len(order) // config.linear_num_key_heads
    value_width = heads * config.linear_value_head_dim
    all_key_heads = slice(None)
    qkv = (all_key_heads, slice(channels_per_key_head))
    z = (all_key_heads, slice(channels_per_key_head, None))
    b = (all_key_heads, slice(value_heads_per_key_head))
    a = (all_key_heads, slice(value_heads_per_key_head, None))
    yield ParameterEntry(
        "in_proj_qkvz",
        (1, 2, 0),
        (
            TensorSlice(qkv, "linear_attn.in_proj_qkv.weight", (len(order), d), order),
            TensorSlice(z, "linear_attn.in_proj_z.weight", (value_width, d)),
        ),
    )
    yield ParameterEntry(
        "in_proj_ba",
        (1, 2, 0),
        (
            TensorSlice(b, "linear_attn.in_proj_b.weight", (heads, d)),
            TensorSlice(a, "linear_attn.in_proj_a.weight", (heads, d)),
        ),
    )
    yield from qwen3_next.deltanet_entries_after_in_proj(config)


_PREFIX_IN_WRAPPER = "model.language_model."


def _tensor_name_in_entries(name: str) -> str:
    """Returns the name that a tensor has in a text model alone."""
    if name.startswith(_PREFIX_IN_WRAPPER):
        return f"model.{name.removeprefix(_PREFIX_IN_WRAPPER)}"
    return name


TEXT = Form(
    name="qwen3_5_text",
    display_name="Qwen3.5",
    model_types={_DENSE: _DENSE, _MIXTURE: _MIXTURE},
    read_settings=_read_settings,
    write_config_fields=_write_text_fields,
    check_model=_check_model,
    supported_settings=qwen3_next.SETTINGS,
    mixer_entries=qwen3_next.MIXERS | {"gated_deltanet": gated_deltanet_entries},
    expert_entries=qwen3_next.expert_entries,
    mtp_entries=qwen3_next.mtp_entries,
    width_field_groups=qwen3_next.WIDTH_FIELDS,
    vision_prefix="model.visual.",
    tensor_name_in_entries=_tensor_name_in_entries,
)
WRAPPER = dataclasses.replace(
    TEXT,
    name="qwen3_5",
    model_types={"qwen3_5": _DENSE, "qwen3_5_moe": _MIXTURE},
    write_config_fields=_write_wrapper_fields,
    trunk_prefix=_PREFIX_IN_WRAPPER,
    text_config_group="text_config",
    read_text_fields=text_fields_in_wrapper,
    tensor_name_in_entries=lambda name: name,
)
