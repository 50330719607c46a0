"""Qwen3.5 and what followed: the mathematics of Qwen3-Next, dense or mixture in all layers.

The text model stands alone (`qwen3_5_text`), or in a wrapper beside a vision tower (`qwen3_5`),
whose config.json has the text model's fields in the group `text_config`. The projections of the
recurrent layers are stored apart: all q, all k, all v; z; b; a.
"""

import dataclasses
from collections.abc import Iterator

from qwen3next_jax.common.errors import require, short_repr
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.interop.entries import Entry, TensorSlice
from qwen3next_jax.interop.families import qwen3_next, rope
from qwen3next_jax.interop.families.fields import (
    IGNORED,
    given,
    note_unknown,
    refuse_other_values,
    taken_over,
)
from qwen3next_jax.interop.families.form import Fields, Form

# ---- config.json

_DENSE = "qwen3_5_text"
_MIXTURE = "qwen3_5_moe_text"
_SAME = {
    _DENSE: qwen3_next.SAME + qwen3_next.SAME_IF_DENSE,
    _MIXTURE: qwen3_next.SAME + qwen3_next.SAME_IF_MIXTURE,
}
# What transformers takes where the file says nothing, as far as it differs from `ModelConfig`.
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
_AROUND_THE_TEXT_MODEL = frozenset(
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
# Fields that a wrapper may hold for its text model.
_OF_THE_TEXT_MODEL = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)


def _read(fields: Fields, where: str) -> Fields:
    refuse_other_values(fields, _SUPPORTED, where)
    kind = _MIXTURE if fields["model_type"].startswith("qwen3_5_moe") else _DENSE
    known = {*_SAME[kind], *_SUPPORTED, *IGNORED, *rope.FIELDS, "mtp_num_hidden_layers"}
    note_unknown(fields, known, where)
    settings = _DEFAULTS[kind] | given(fields, _SAME[kind])
    context = settings["max_position_embeddings"]
    return settings | rope.read_rope(fields, context, where, ignored=rope.IMAGE_POSITIONS)


def text_fields_in_wrapper(fields: Fields, where: str) -> Fields:
    """The fields of `text_config`, and those of the wrapper that are about the text model.
    `model_type` is the wrapper's.

    Raises:
      UserError: the wrapper contradicts its text model.
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
    note_unknown(fields, _AROUND_THE_TEXT_MODEL | IGNORED | rope.FIELDS, where)
    return given(fields, _OF_THE_TEXT_MODEL) | given(text, list(text)) | {"model_type": model_type}


def _write_text(config: ModelConfig, dtype: str, source: Fields, around: Fields) -> Fields:
    kind = _MIXTURE if config.num_experts else _DENSE
    fields = qwen3_next.text_model_fields(config, dtype, source, _SAME[kind])
    return fields | {
        "architectures": [f"{_ARCHITECTURES[kind]}ForCausalLM"],
        "model_type": kind,
        "attn_output_gate": True,
        # the modules that are stored; each depth applies the same one
        "mtp_num_hidden_layers": min(config.mtp_depth, 1),
        "mtp_use_dedicated_embeddings": False,
    }


def _write_wrapper(config: ModelConfig, dtype: str, source: Fields, around: Fields) -> Fields:
    text = _write_text(config, dtype, source, {})
    return around_text(text, _ARCHITECTURES[text["model_type"]], config, dtype, around)


def around_text(
    text: Fields, architecture: str, config: ModelConfig, dtype: str, around: Fields
) -> Fields:
    """The fields of a wrapper around those of its text model; see `Form.write`."""
    kind = text["model_type"]
    text = {name: value for name, value in text.items() if name != "architectures"}
    return taken_over(around) | {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": kind.removesuffix("_text"),
        "text_config": text,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": dtype,
    }


def _check(config: ModelConfig) -> None:
    """Raises UserError for layers that differ in having experts, and for other weights of them."""
    qwen3_next.check(config)
    default = ModelConfig()
    for name in qwen3_next.MIXTURE_ONLY_HERE if config.num_experts else ():
        value, expected = getattr(config, name), getattr(default, name)
        require(
            value == expected,
            f"model.{name} = {value!r}: {config.hf_form} has no such models: expected "
            f"{expected!r}, or the form qwen3_next",
        )


# ---- tensors


def gated_deltanet(config: ModelConfig) -> Iterator[Entry]:
    """Gated DeltaNet, with a tensor for each projection of the input, all heads together."""
    d, heads = config.hidden_size, config.linear_num_value_heads
    value_heads_per_key_head = heads // config.linear_num_key_heads
    order = qwen3_next.all_q_all_k_all_v(config)
    channels_per_key_head = len(order) // config.linear_num_key_heads
    value_width = heads * config.linear_value_head_dim
    every = slice(None)  # every key head
    qkv = (every, slice(channels_per_key_head))
    z = (every, slice(channels_per_key_head, None))
    b = (every, slice(value_heads_per_key_head))
    a = (every, slice(value_heads_per_key_head, None))
    yield Entry(
        "in_proj_qkvz",
        (1, 2, 0),
        (
            TensorSlice(qkv, "linear_attn.in_proj_qkv.weight", (len(order), d), order),
            TensorSlice(z, "linear_attn.in_proj_z.weight", (value_width, d)),
        ),
    )
    yield Entry(
        "in_proj_ba",
        (1, 2, 0),
        (
            TensorSlice(b, "linear_attn.in_proj_b.weight", (heads, d)),
            TensorSlice(a, "linear_attn.in_proj_a.weight", (heads, d)),
        ),
    )
    yield from qwen3_next.recurrence(config)


TEXT = Form(
    name="qwen3_5_text",
    title="Qwen3.5",
    model_types={_DENSE: _DENSE, _MIXTURE: _MIXTURE},
    read=_read,
    write=_write_text,
    check=_check,
    settings=qwen3_next.SETTINGS,
    mixers=qwen3_next.MIXERS | {"gated_deltanet": gated_deltanet},
    experts=qwen3_next.experts,
    multi_token_prediction=qwen3_next.multi_token_prediction,
    sizes=qwen3_next.SIZES,
    vision="model.visual.",
)
WRAPPER = dataclasses.replace(
    TEXT,
    name="qwen3_5",
    model_types={"qwen3_5": _DENSE, "qwen3_5_moe": _MIXTURE},
    write=_write_wrapper,
    trunk="model.language_model.",
    text_group="text_config",
    text_fields=text_fields_in_wrapper,
)
