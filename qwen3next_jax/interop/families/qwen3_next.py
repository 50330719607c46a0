"""Qwen3-Next: the config.json and the tensors of the released model.

The files have the input projection of a recurrent layer in the same layout as this project's
parameter: one block [q | k | v | z] per key head. Other families import from this module what they
have in common with Qwen3-Next.
"""

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import FULL, LINEAR, MixerConfig, ModelConfig
from qwen3next_jax.interop.entries import (
    EntryFunction,
    ParameterEntry,
    TensorSlice,
    one_tensor_entry,
    swiglu_entries,
    vector_entry,
)
from qwen3next_jax.interop.families import rope
from qwen3next_jax.interop.families.fields import (
    IGNORED,
    fields_to_copy,
    note_unknown_fields,
    present_fields,
    refuse_other_values,
    token_id_fields,
)
from qwen3next_jax.interop.families.form import Fields, Form

# ---- config.json

# Fields that have the name and the meaning of a setting of `ModelConfig`.
SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "layer_types",
    "full_attention_interval",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "tie_word_embeddings",
    "rms_norm_eps",
    "initializer_range",
)
SAME_NAME_IF_DENSE = ("intermediate_size",)
SAME_NAME_IF_MIXTURE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
# Fields about experts that Qwen3.5 does not have. They say which layers have experts, and whether
# the weights of a token's experts are divided by their sum.
MIXTURE_FIELDS_OF_QWEN3_NEXT = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
_SAME_NAME = SAME_NAME + SAME_NAME_IF_DENSE + SAME_NAME_IF_MIXTURE + MIXTURE_FIELDS_OF_QWEN3_NEXT

SETTINGS = frozenset(
    (
        *_SAME_NAME,
        "rope_theta",
        "partial_rotary_factor",
        "yarn_factor",
        "mtp_depth",
        "bos_token_id",
        "eos_token_id",
    )
)
# The values that transformers gives to missing fields, where they differ from the defaults of
# `ModelConfig`.
DEFAULTS = {"max_position_embeddings": 32_768}
_DEFAULTS = DEFAULTS | {"intermediate_size": 5632}
# Field → the values that this project supports.
SUPPORTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "quantization_config": (None,),
    "attn_output_gate": (True,),
}
# See `Form.width_field_groups`.
WIDTH_FIELDS = (
    ("num_experts",),
    ("num_attention_heads", "head_dim"),
    ("num_key_value_heads", "head_dim"),
    ("linear_num_key_heads", "linear_key_head_dim"),
    ("linear_num_value_heads", "linear_value_head_dim"),
    ("linear_conv_kernel_dim",),
    ("mtp_depth",),
    ("mtp_num_hidden_layers",),
)
_LAYER_TYPES = {"gated_deltanet": LINEAR, "gated_attention": FULL}


def _read_settings(fields: Fields, where: str) -> Fields:
    refuse_other_values(fields, SUPPORTED, where)
    note_unknown_fields(fields, {*_SAME_NAME, *SUPPORTED, *IGNORED, *rope.FIELDS}, where)
    settings = _DEFAULTS | present_fields(fields, _SAME_NAME)
    return settings | rope.read_rope_settings(fields, settings["max_position_embeddings"], where)


def _write_fields(config: ModelConfig, dtype: str, source: Fields, wrapper: Fields) -> Fields:
    fields = text_model_fields(config, dtype, source, _SAME_NAME)
    fields |= rope.top_level_rope_fields(config, source)
    return fields | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "mlp_only_layers": list(config.mlp_only_layers),
        "torch_dtype": dtype,
    }


def text_model_fields(
    config: ModelConfig, dtype: str, source: Fields, same_name: Collection[str]
) -> Fields:
    """Returns the fields of the text model that Qwen3-Next, Qwen3.5 and Qwen3.8-Flash-Next have in
    common, and the fields that are copied from the source.

    Args:
      config: the model's settings.
      dtype: the dtype of the stored weights.
      source: the fields of the text model in the checkpoint with which the model was initialised.
      same_name: the fields that have the same name and meaning as a setting of `ModelConfig`.
    """
    fields = {"pad_token_id": None, "use_cache": True}
    if "num_experts" in same_name:
        fields |= {"output_router_logits": False, "router_aux_loss_coef": 0.001}
    fields |= fields_to_copy(source)
    fields |= {name: getattr(config, name) for name in same_name}
    fields["layer_types"] = [_LAYER_TYPES.get(mixer, mixer) for mixer in config.mixers]
    if not _layers_follow_the_interval(config):
        fields.pop("full_attention_interval", None)
    fields |= rope.rope_fields(config, source)
    fields |= token_id_fields(config, source)
    return fields | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "mtp_depth": config.mtp_depth,  # a field of this project; transformers ignores it
        "dtype": dtype,
    }


def _layers_follow_the_interval(config: ModelConfig) -> bool:
    """Whether transformers derives the model's layers from `full_attention_interval` alone. The
    interval 0 (no full attention) exists only in this project.
    """
    by_interval = dataclasses.replace(
        config,
        layer_types=(),
        full_attention_placement="last",
        linear_mixer="gated_deltanet",
        full_mixer="gated_attention",
        mixer=MixerConfig(),
    )
    return config.full_attention_interval > 0 and by_interval.mixers == config.mixers


def check_model(config: ModelConfig) -> None:
    """Raises UserError unless the mixer of the multi-token prediction module is gated attention, as
    in the released model.
    """
    require(
        not config.mtp_depth or config.full_mixer == "gated_attention",
        f"model.full_mixer = {config.full_mixer!r}: the multi-token prediction module has a "
        "Hugging Face form with gated_attention only: expected that, or model.mtp_depth = 0",
    )


# ---- tensors


def gated_attention_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of gated attention. For each head, q_proj has
    the rows of the query, followed by the rows of the gate.
    """
    d, k = config.hidden_size, config.head_dim
    heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
    yield one_tensor_entry("q_proj", "self_attn.q_proj.weight", (1, 2, 0), (heads * 2 * k, d))
    yield one_tensor_entry("k_proj", "self_attn.k_proj.weight", (1, 2, 0), (key_value_heads * k, d))
    yield one_tensor_entry("v_proj", "self_attn.v_proj.weight", (1, 2, 0), (key_value_heads * k, d))
    yield one_tensor_entry("o_proj", "self_attn.o_proj.weight", (2, 0, 1), (d, heads * k))
    yield vector_entry("q_norm", "self_attn.q_norm.weight", k)
    yield vector_entry("k_norm", "self_attn.k_norm.weight", k)


def _gated_deltanet_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of Gated DeltaNet. The tensors of the input
    projections are grouped by key head, like the parameters.
    """
    d = config.hidden_size
    key_width = config.linear_num_key_heads * config.linear_key_head_dim
    value_width = config.linear_num_value_heads * config.linear_value_head_dim
    yield one_tensor_entry(
        "in_proj_qkvz",
        "linear_attn.in_proj_qkvz.weight",
        (1, 2, 0),
        (2 * key_width + 2 * value_width, d),
    )
    yield one_tensor_entry(
        "in_proj_ba",
        "linear_attn.in_proj_ba.weight",
        (1, 2, 0),
        (2 * config.linear_num_value_heads, d),
    )
    yield from deltanet_entries_after_in_proj(config)


def deltanet_entries_after_in_proj(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of Gated DeltaNet but the input projections."""
    heads, value_dim = config.linear_num_value_heads, config.linear_value_head_dim
    order = conv_channel_order_in_files(config)
    yield one_tensor_entry(
        "conv_kernel",
        "linear_attn.conv1d.weight",
        (1, 2, 0),
        (len(order), 1, config.linear_conv_kernel_dim),
        row_order=order,
    )
    yield vector_entry("a_log", "linear_attn.A_log", heads)
    yield vector_entry("dt_bias", "linear_attn.dt_bias", heads)
    yield vector_entry("norm", "linear_attn.norm.weight", value_dim)
    yield one_tensor_entry(
        "out_proj",
        "linear_attn.out_proj.weight",
        (2, 0, 1),
        (config.hidden_size, heads * value_dim),
    )


def conv_channel_order_in_files(config: ModelConfig) -> np.ndarray:
    """Returns the order of the convolution's channels in files, [channels]: element i is the
    position of the file's channel i in the parameter. Files have q of all heads, k of all heads,
    then v of all heads. The parameter has a group [q | k | v] for each key head.
    """
    groups, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    value_width = config.linear_num_value_heads // groups * config.linear_value_head_dim
    channels = 2 * key_dim + value_width
    by_key_head = np.arange(groups * channels).reshape(groups, channels)
    q, k, v = np.split(by_key_head, (key_dim, 2 * key_dim), axis=1)
    return np.concatenate([q.ravel(), k.ravel(), v.ravel()])


def expert_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of a mixture of experts. Either each expert has
    tensors of its own, or all experts share a fused tensor (`ParameterEntry.all_experts_slice`).
    """
    d, width = config.hidden_size, config.moe_intermediate_size
    count, shared = config.num_experts, config.shared_expert_intermediate_size
    gate_and_up = tuple(
        TensorSlice((expert, half), f"mlp.experts.{expert}.{name}.weight", (width, d))
        for expert in range(count)
        for half, name in enumerate(("gate_proj", "up_proj"))
    )
    down = tuple(
        TensorSlice((expert,), f"mlp.experts.{expert}.down_proj.weight", (d, width))
        for expert in range(count)
    )
    yield one_tensor_entry("router", "mlp.gate.weight", (1, 0), (count, d))
    yield ParameterEntry(
        "expert_gate_up",
        (0, 2, 3, 1),
        gate_and_up,
        all_experts_slice=TensorSlice((), "mlp.experts.gate_up_proj", (count, 2 * width, d)),
    )
    yield ParameterEntry(
        "expert_down",
        (0, 2, 1),
        down,
        all_experts_slice=TensorSlice((), "mlp.experts.down_proj", (count, d, width)),
    )
    if shared:
        yield from swiglu_entries("shared_", "mlp.shared_expert", d, shared)
        yield one_tensor_entry("shared_gate", "mlp.shared_expert_gate.weight", (0,), (1, d))


def mtp_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of the multi-token prediction module without
    its decoder layer.
    """
    d = config.hidden_size
    yield vector_entry("embedding_norm", "pre_fc_norm_embedding.weight", d)
    yield vector_entry("hidden_norm", "pre_fc_norm_hidden.weight", d)
    yield one_tensor_entry("fc", "fc.weight", (1, 0), (d, 2 * d))
    yield vector_entry("norm", "norm.weight", d)


MIXERS: dict[str, EntryFunction] = {
    "gated_attention": gated_attention_entries,
    "gated_deltanet": _gated_deltanet_entries,
}

FORM = Form(
    name="qwen3_next",
    display_name="Qwen3Next",
    model_types={"qwen3_next": "qwen3_next"},
    read_settings=_read_settings,
    write_config_fields=_write_fields,
    check_model=check_model,
    supported_settings=SETTINGS,
    mixer_entries=MIXERS,
    expert_entries=expert_entries,
    mtp_entries=mtp_entries,
    width_field_groups=WIDTH_FIELDS,
)
