"""Qwen3-Next: the released model's own config.json and tensors.

A projection of the recurrent layers is stored as here: one slab [q | k | v | z] per key head. Other
families that share parts of this one import them from here.
"""

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import FULL, LINEAR, MixerConfig, ModelConfig
from qwen3next_jax.interop.entries import Entries, Entry, TensorSlice, one, swiglu, vector
from qwen3next_jax.interop.families import rope
from qwen3next_jax.interop.families.fields import (
    IGNORED,
    given,
    note_unknown,
    refuse_other_values,
    taken_over,
    token_fields,
)
from qwen3next_jax.interop.families.form import Fields, Form

# ---- config.json

# Fields that are settings of the same name and meaning.
SAME = (
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
SAME_IF_DENSE = ("intermediate_size",)
SAME_IF_MIXTURE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
# Which layers have experts, and what their weights sum to.
MIXTURE_ONLY_HERE = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
_SAME = SAME + SAME_IF_DENSE + SAME_IF_MIXTURE + MIXTURE_ONLY_HERE

SETTINGS = frozenset(
    (
        *_SAME,
        "rope_theta",
        "partial_rotary_factor",
        "yarn_factor",
        "mtp_depth",
        "bos_token_id",
        "eos_token_id",
    )
)
# What transformers takes where the file says nothing, as far as it differs from `ModelConfig`.
DEFAULTS = {"max_position_embeddings": 32_768}
_DEFAULTS = DEFAULTS | {"intermediate_size": 5632}
# Fields with the values that this project computes.
SUPPORTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "quantization_config": (None,),
    "attn_output_gate": (True,),
}
SIZES = (
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


def _read(fields: Fields, where: str) -> Fields:
    refuse_other_values(fields, SUPPORTED, where)
    note_unknown(fields, {*_SAME, *SUPPORTED, *IGNORED, *rope.FIELDS}, where)
    settings = _DEFAULTS | given(fields, _SAME)
    return settings | rope.read_rope(fields, settings["max_position_embeddings"], where)


def _write(config: ModelConfig, dtype: str, source: Fields, around: Fields) -> Fields:
    fields = text_model_fields(config, dtype, source, _SAME)
    fields |= rope.rope_fields_at_the_top(config, source)
    return fields | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "mlp_only_layers": list(config.mlp_only_layers),
        "torch_dtype": dtype,
    }


def text_model_fields(
    config: ModelConfig, dtype: str, source: Fields, same: Collection[str]
) -> Fields:
    """The fields of the text model that all forms of this model have in common, with those that
    stay from its source.

    Args:
      config: the model.
      dtype: of the stored weights.
      source: fields of the source's text model.
      same: the fields of this form that are settings of the same name.
    """
    fields = {"pad_token_id": None, "use_cache": True}
    if "num_experts" in same:
        fields |= {"output_router_logits": False, "router_aux_loss_coef": 0.001}
    fields |= taken_over(source)
    fields |= {name: getattr(config, name) for name in same}
    fields["layer_types"] = [_LAYER_TYPES.get(mixer, mixer) for mixer in config.mixers]
    if not _layers_follow_the_interval(config):
        fields.pop("full_attention_interval", None)
    fields |= rope.rope_fields(config, source)
    fields |= token_fields(config, source)
    return fields | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "mtp_depth": config.mtp_depth,  # this project's own field; transformers does not use it
        "dtype": dtype,
    }


def _layers_follow_the_interval(config: ModelConfig) -> bool:
    """Whether `full_attention_interval` alone says the same as `layer_types`, as transformers
    reads it: 0 is not its word for "never".
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


def check(config: ModelConfig) -> None:
    """Raises UserError for a multi-token prediction module of another mixer."""
    require(
        not config.mtp_depth or config.full_mixer == "gated_attention",
        f"model.full_mixer = {config.full_mixer!r}: the multi-token prediction module has a "
        "Hugging Face form with gated_attention alone: expected that, or model.mtp_depth = 0",
    )


# ---- tensors


def gated_attention(config: ModelConfig) -> Iterator[Entry]:
    """Gated attention: q and its gate side by side in each head."""
    d, k = config.hidden_size, config.head_dim
    heads, key_value_heads = config.num_attention_heads, config.num_key_value_heads
    yield one("q_proj", "self_attn.q_proj.weight", (1, 2, 0), (heads * 2 * k, d))
    yield one("k_proj", "self_attn.k_proj.weight", (1, 2, 0), (key_value_heads * k, d))
    yield one("v_proj", "self_attn.v_proj.weight", (1, 2, 0), (key_value_heads * k, d))
    yield one("o_proj", "self_attn.o_proj.weight", (2, 0, 1), (d, heads * k))
    yield vector("q_norm", "self_attn.q_norm.weight", k)
    yield vector("k_norm", "self_attn.k_norm.weight", k)


def _gated_deltanet(config: ModelConfig) -> Iterator[Entry]:
    """Gated DeltaNet, its projections by key head as they are here."""
    d = config.hidden_size
    key_width = config.linear_num_key_heads * config.linear_key_head_dim
    value_width = config.linear_num_value_heads * config.linear_value_head_dim
    yield one(
        "in_proj_qkvz",
        "linear_attn.in_proj_qkvz.weight",
        (1, 2, 0),
        (2 * key_width + 2 * value_width, d),
    )
    yield one(
        "in_proj_ba",
        "linear_attn.in_proj_ba.weight",
        (1, 2, 0),
        (2 * config.linear_num_value_heads, d),
    )
    yield from recurrence(config)


def recurrence(config: ModelConfig) -> Iterator[Entry]:
    """Gated DeltaNet without its projections of the input."""
    heads, value_dim = config.linear_num_value_heads, config.linear_value_head_dim
    order = all_q_all_k_all_v(config)
    yield one(
        "conv_kernel",
        "linear_attn.conv1d.weight",
        (1, 2, 0),
        (len(order), 1, config.linear_conv_kernel_dim),
        row_order=order,
    )
    yield vector("a_log", "linear_attn.A_log", heads)
    yield vector("dt_bias", "linear_attn.dt_bias", heads)
    yield vector("norm", "linear_attn.norm.weight", value_dim)
    yield one(
        "out_proj",
        "linear_attn.out_proj.weight",
        (2, 0, 1),
        (config.hidden_size, heads * value_dim),
    )


def all_q_all_k_all_v(config: ModelConfig) -> np.ndarray:
    """[channels] The channels in the order of the files, q of all heads, k of all heads, v of all
    heads: which of the channels by key head, [q | k | v] each, it is.
    """
    groups, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    value_width = config.linear_num_value_heads // groups * config.linear_value_head_dim
    channels = 2 * key_dim + value_width
    by_key_head = np.arange(groups * channels).reshape(groups, channels)
    q, k, v = np.split(by_key_head, (key_dim, 2 * key_dim), axis=1)
    return np.concatenate([q.ravel(), k.ravel(), v.ravel()])


def experts(config: ModelConfig) -> Iterator[Entry]:
    """The mixture of experts: a tensor for each expert, or one for all of them."""
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
    yield one("router", "mlp.gate.weight", (1, 0), (count, d))
    yield Entry(
        "expert_gate_up",
        (0, 2, 3, 1),
        gate_and_up,
        fused=TensorSlice((), "mlp.experts.gate_up_proj", (count, 2 * width, d)),
    )
    yield Entry(
        "expert_down",
        (0, 2, 1),
        down,
        fused=TensorSlice((), "mlp.experts.down_proj", (count, d, width)),
    )
    if shared:
        yield from swiglu("shared_", "mlp.shared_expert", d, shared)
        yield one("shared_gate", "mlp.shared_expert_gate.weight", (0,), (1, d))


def multi_token_prediction(config: ModelConfig) -> Iterator[Entry]:
    """The multi-token prediction module without its layer."""
    d = config.hidden_size
    yield vector("embedding_norm", "pre_fc_norm_embedding.weight", d)
    yield vector("hidden_norm", "pre_fc_norm_hidden.weight", d)
    yield one("fc", "fc.weight", (1, 0), (d, 2 * d))
    yield vector("norm", "norm.weight", d)


MIXERS: dict[str, Entries] = {"gated_attention": gated_attention, "gated_deltanet": _gated_deltanet}

FORM = Form(
    name="qwen3_next",
    title="Qwen3Next",
    model_types={"qwen3_next": "qwen3_next"},
    read=_read,
    write=_write,
    check=check,
    settings=SETTINGS,
    mixers=MIXERS,
    experts=experts,
    multi_token_prediction=multi_token_prediction,
    sizes=SIZES,
)
