"""Kimi Linear: a model with layers of KDA (Kimi Delta Attention) and of MLA (multi-head latent
attention), DeepSeek-V3's router, no positions, and no multi-token prediction.

A config.json of Kimi Linear has one of two notations: the released model uses `linear_attn_config`
and `first_k_dense_replace`; transformers uses `layer_types` and `mlp_layer_types`. This module
reads both notations. If a field has two names, this module uses the name in transformers. An export
has the fields of both notations, so that both transformers and the code of the released model can
read it. This module knows the mixers `kda` and `mla` only by their names in
`config.registry.MIXERS`.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from qwen3next_jax.common.errors import require, short_repr
from qwen3next_jax.config import FULL, LINEAR, ModelConfig
from qwen3next_jax.interop.entries import (
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
    refuse_other_values,
    token_id_fields,
)
from qwen3next_jax.interop.families.form import Fields, Form

# ---- config.json

_MIXER_OF_LAYER_TYPE = {LINEAR: "kda", FULL: "mla"}
_LAYER_TYPES = {mixer: kind for kind, mixer in _MIXER_OF_LAYER_TYPE.items()}
_MLP_TYPES = ("dense", "sparse")
_LATENT_NORM_EPS = 1e-6  # eps of the norms of MLA's latents; rms_norm_eps does not change it

# Name of a field in released files → its name in transformers.
_TRANSFORMERS_NAMES = {
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "model_max_length": "max_position_embeddings",
    "num_local_experts": "num_experts",
}
# Name of a field in the group `linear_attn_config` → its name in transformers, at the top level.
_TRANSFORMERS_NAMES_OF_LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# Name of a field in the group `linear_attn_config` that lists layers → the type of these layers.
# The first layer has the number 1.
_LAYER_LISTS = {"full_attn_layers": FULL, "kda_layers": LINEAR}
# The values that transformers gives to missing fields.
_DEFAULTS = {
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "q_lora_rank": 0,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 1_048_576,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "num_experts": 256,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "first_k_dense_replace": 1,
}
# Field → the values that this project supports.
_SUPPORTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "quantization_config": (None,),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "num_nextn_predict_layers": (0,),
    "rope_scaling": (None,),
    "tie_word_embeddings": (False,),
    "use_grouped_topk": (True,),
    "topk_method": ("noaux_tc",),
}
# Fields that have no effect in this family, which has no rotary positions. `IGNORED` and
# `rope.FIELDS` are others.
_IGNORED = frozenset(("auto_map", "head_dim", "qk_head_dim", "pretraining_tp"))
_READ = {
    *_DEFAULTS,
    *_SUPPORTED,
    *_IGNORED,
    *("num_key_value_heads", "layer_types", "mlp_layer_types"),
}
# Fields that an export never copies from its source, because it writes them itself or leaves them
# out.
_WRITTEN = {*_READ, *_TRANSFORMERS_NAMES, "linear_attn_config"}
# Fields that have the name and the meaning of a setting of `ModelConfig`.
_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "initializer_range",
    "rms_norm_eps",
)
# Fields that have the name and the meaning of a setting of `ModelConfig` in a model with experts.
_SAME_NAME_IF_MIXTURE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
)
# Fields that have the name and the meaning of a setting of `model.moe`.
_SAME_NAME_IN_ROUTER = ("n_group", "topk_group", "routed_scaling_factor")
# The settings that config.json holds, or that `_check_model` looks at (see
# `Form.supported_settings`).
_SETTINGS = frozenset(
    (
        *_SAME_NAME,
        *_SAME_NAME_IF_MIXTURE,
        "bos_token_id",
        "eos_token_id",
        "decoder_sparse_step",
        "head_dim",
        "layer_types",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "max_position_embeddings",
        "mixer",
        "mlp_only_layers",
        "moe",
        "rope_theta",  # has no effect: no positions are rotated
        "shared_expert_intermediate_size",
        # `_check_model` requires certain values of these
        "attention_output_gate",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "mtp_depth",
        "num_key_value_heads",
        "partial_rotary_factor",
        "short_convolution",
        "tie_word_embeddings",
        "yarn_factor",
        "zero_centered_norm",
    )
)
# See `Form.width_field_groups`.
_WIDTH_FIELDS = (
    ("num_experts",),
    ("linear_num_heads", "linear_head_dim"),
    ("linear_conv_kernel_dim",),
    ("kv_lora_rank",),
    ("q_lora_rank",),
    ("num_attention_heads", "qk_nope_head_dim"),
    ("qk_rope_head_dim",),
)


def _with_transformers_names(fields: Fields, where: str) -> Fields:
    """Returns `fields` under the names of transformers, and adds `layer_types` and
    `mlp_layer_types` if they are missing.

    Raises:
      UserError: two fields of the file contradict each other.
    """
    inner = fields.get("linear_attn_config")
    inner = {} if inner is None else inner
    require(
        isinstance(inner, dict),
        f"{where}: linear_attn_config = {short_repr(inner)}: expected a group of settings",
    )
    renamed = {}
    for name, value in fields.items():
        if name == "linear_attn_config" or value is None:
            continue
        canonical = _TRANSFORMERS_NAMES.get(name, name)
        require(
            canonical not in renamed or renamed[canonical] == value,
            f"{where}: {name} = {short_repr(value)}, and {short_repr(renamed.get(canonical))} "
            "under its other name",
        )
        renamed[canonical] = value
    for name, value in inner.items():
        if name not in _LAYER_LISTS:
            canonical = _TRANSFORMERS_NAMES_OF_LINEAR.get(name, f"linear_attn_config.{name}")
            renamed[canonical] = value

    count = renamed.get("num_hidden_layers", _DEFAULTS["num_hidden_layers"])
    require(
        type(count) is int and 0 < count < 2**16,
        f"{where}: num_hidden_layers = {short_repr(count)}: expected a number of layers",
    )
    if "layer_types" not in renamed:
        renamed["layer_types"] = _layer_types_from_lists(inner, count, where)
    if "mlp_layer_types" not in renamed:
        dense = renamed.get("first_k_dense_replace", _DEFAULTS["first_k_dense_replace"])
        require(
            type(dense) is int,
            f"{where}: first_k_dense_replace = {short_repr(dense)}: expected a number of layers",
        )
        renamed["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(count)]
    return renamed


def _layer_types_from_lists(linear_attn_config: Fields, count: int, where: str) -> list[str]:
    """Returns the field `layer_types` for a file that lacks it: from the lists of layers in
    `linear_attn_config`; without such lists, the default of transformers.
    """
    if not linear_attn_config.keys() & _LAYER_LISTS.keys():
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(count)]
    kinds = []
    for name, kind in _LAYER_LISTS.items():
        layers = linear_attn_config.get(name, [])
        require(
            isinstance(layers, list) and all(type(layer) is int for layer in layers),
            f"{where}: linear_attn_config.{name} = {short_repr(layers)}: expected a list of layers",
        )
        kinds += [(layer, kind) for layer in layers]
    kinds.sort()
    require(
        [layer for layer, _ in kinds] == list(range(1, count + 1)),
        f"{where}: linear_attn_config: expected each of the {count} layers, "
        "the first being 1, once in full_attn_layers or kda_layers",
    )
    return [kind for _, kind in kinds]


def _read_settings(fields: Fields, where: str) -> Fields:
    refuse_other_values(fields, _SUPPORTED, where)
    note_unknown_fields(fields, {*_READ, *IGNORED, *rope.FIELDS}, where)
    fields = _DEFAULTS | fields
    _check_fields(fields, where)
    settings = {
        name: fields[name] for name in (*_SAME_NAME, "layer_types", "max_position_embeddings")
    }
    settings |= {
        "linear_mixer": _MIXER_OF_LAYER_TYPE[LINEAR],
        "full_mixer": _MIXER_OF_LAYER_TYPE[FULL],
        "num_key_value_heads": fields["num_attention_heads"],
        "partial_rotary_factor": 0.0,
        "head_dim": fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"],
        "mtp_depth": 0,
        "decay_init": "log_uniform",
        "num_experts": 0,
        "linear_num_key_heads": fields["linear_num_heads"],
        "linear_num_value_heads": fields["linear_num_heads"],
        "linear_key_head_dim": fields["linear_head_dim"],
        "linear_value_head_dim": fields["linear_head_dim"],
        "linear_conv_kernel_dim": fields["linear_conv_kernel_dim"],
        "zero_centered_norm": False,
        "attention_output_gate": False,
        "mixer": {
            "latent_rank": fields["kv_lora_rank"],
            "query_rank": fields["q_lora_rank"],
            "shared_key_width": fields["qk_rope_head_dim"],
            "latent_norm_eps": _LATENT_NORM_EPS,
        },
    }
    if "sparse" not in fields["mlp_layer_types"]:
        return settings
    router = {"scoring_func": "sigmoid", "router_bias": True, "shared_expert_gate": False}
    dense = [layer for layer, kind in enumerate(fields["mlp_layer_types"]) if kind == "dense"]
    return (
        settings
        | {name: fields[name] for name in _SAME_NAME_IF_MIXTURE}
        | {
            "shared_expert_intermediate_size": fields["n_shared_experts"]
            * fields["moe_intermediate_size"],
            "mlp_only_layers": dense,
            "moe": router | {name: fields[name] for name in _SAME_NAME_IN_ROUTER},
        }
    )


def _check_fields(fields: Fields, where: str) -> None:
    """Raises UserError for sizes and kinds of layers that this project does not support."""
    for name, same_as in (
        ("num_key_value_heads", "num_attention_heads"),
        ("v_head_dim", "qk_nope_head_dim"),
    ):
        require(
            fields.get(name, fields[same_as]) == fields[same_as],
            f"{where}: {name} = {short_repr(fields.get(name))} is not supported: expected "
            f"{short_repr(fields[same_as])}, as {same_as}",
        )
    for name, known in (("layer_types", _MIXER_OF_LAYER_TYPE), ("mlp_layer_types", _MLP_TYPES)):
        kinds = fields[name]
        require(
            isinstance(kinds, list)
            and set(map(str, kinds)) <= set(known)
            and len(kinds) == fields["num_hidden_layers"],
            f"{where}: {name} = {short_repr(kinds)}: expected {fields['num_hidden_layers']} of "
            f"{' and '.join(known)}",
        )
    require(
        FULL in fields["layer_types"], f"{where}: layer_types has no {FULL}: expected a layer of it"
    )
    positive = ("qk_nope_head_dim", "qk_rope_head_dim")
    if "sparse" in fields["mlp_layer_types"]:
        positive += ("n_shared_experts", "moe_intermediate_size")
    for name in positive:
        require(
            type(fields[name]) is int and fields[name] > 0,
            f"{where}: {name} = {short_repr(fields[name])}: expected a positive number",
        )


def _write_fields(config: ModelConfig, dtype: str, source: Fields, wrapper: Fields) -> Fields:
    c, latent = config, _mla_settings(config)
    mlp_types = ["sparse" if c.is_sparse(i) else "dense" for i in range(c.num_hidden_layers)]
    first_sparse = (*mlp_types, "sparse").index("sparse")
    key_and_value_width = c.head_dim - latent.shared_key_width
    numbered_mixers = list(enumerate(c.mixers, 1))
    fields = {"pad_token_id": None, "use_cache": True}
    fields |= {name: v for name, v in fields_to_copy(source).items() if name not in _WRITTEN}
    fields |= {name: getattr(c, name) for name in _SAME_NAME}
    fields |= token_id_fields(config, source)
    fields |= {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": dtype,
        "num_key_value_heads": c.num_key_value_heads,
        "model_max_length": c.max_position_embeddings,
        # the mixture
        "num_experts": c.num_experts,
        "moe_intermediate_size": c.moe_intermediate_size,
        "num_experts_per_token": c.num_experts_per_tok,
        "moe_renormalize": c.norm_topk_prob,
        "num_shared_experts": c.shared_expert_intermediate_size // max(c.moe_intermediate_size, 1),
        "num_expert_group": c.moe.n_group,
        "topk_group": c.moe.topk_group,
        "routed_scaling_factor": c.moe.routed_scaling_factor,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "mlp_layer_types": mlp_types,
        # latent attention
        "kv_lora_rank": latent.latent_rank,
        "q_lora_rank": latent.query_rank or None,
        "qk_rope_head_dim": latent.shared_key_width,
        "qk_nope_head_dim": key_and_value_width,
        "v_head_dim": key_and_value_width,
        "mla_use_nope": True,
        # the layers
        "layer_types": [_LAYER_TYPES[mixer] for mixer in c.mixers],
        "linear_attn_config": {
            "head_dim": c.linear_key_head_dim,
            "num_heads": c.linear_num_key_heads,
            "short_conv_kernel_size": c.linear_conv_kernel_dim,
            "full_attn_layers": [layer for layer, mixer in numbered_mixers if mixer == "mla"],
            "kda_layers": [layer for layer, mixer in numbered_mixers if mixer == "kda"],
        },
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    if "dense" not in mlp_types[first_sparse:]:
        fields |= {"first_k_dense_replace": first_sparse, "moe_layer_freq": 1}
    return fields


def _check_model(config: ModelConfig) -> None:
    """Raises UserError for a model that Kimi Linear's config.json cannot describe."""
    c, latent = config, _mla_settings(config)
    unsupported = sorted(set(c.mixers) - set(_LAYER_TYPES))
    require(
        not unsupported,
        f"model.layer_types: kimi_linear has no layers of {', '.join(unsupported)}: expected kda "
        "and mla, or another form",
    )
    require(
        "mla" in c.mixers
        and latent.latent_norm_eps == _LATENT_NORM_EPS
        and latent.shared_key_width > 0,
        f"model.mixer: kimi_linear has layers of mla, latent_norm_eps = {_LATENT_NORM_EPS} and a "
        "shared_key_width above 0: expected these, or another form",
    )
    expected = {
        "zero_centered_norm": False,
        "short_convolution": True,
        "attention_output_gate": False,
        "mtp_depth": 0,
        "tie_word_embeddings": False,
        "linear_num_value_heads": c.linear_num_key_heads,
        "yarn_factor": 1.0,
        "linear_value_head_dim": c.linear_key_head_dim,
        "partial_rotary_factor": 0.0,
        "num_key_value_heads": c.num_attention_heads,
    }
    for name, value in expected.items():
        require(
            getattr(c, name) == value,
            f"model.{name} = {getattr(c, name)!r}: kimi_linear cannot store it: expected "
            f"{value!r}, or another form",
        )
    if not c.has_experts:
        return
    router = dataclasses.replace(
        ModelConfig().moe,
        scoring_func="sigmoid",
        router_bias=True,
        shared_expert_gate=False,
        **{name: getattr(c.moe, name) for name in _SAME_NAME_IN_ROUTER},
    )
    shared = c.shared_expert_intermediate_size
    require(
        c.moe == router and shared > 0 and shared % c.moe_intermediate_size == 0,
        "model.moe: kimi_linear has scoring_func = 'sigmoid', router_bias = True, "
        "shared_expert_gate = False, and a shared expert whose width is a multiple of "
        "moe_intermediate_size: expected these, or another form",
    )


def _mla_settings(config: ModelConfig) -> Any:
    """Returns the settings of the mixer `mla`: latent_rank, query_rank, shared_key_width,
    latent_norm_eps.
    """
    return config.settings_of_mixer("mla")


# ---- tensors


def _kda_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of the mixer `kda`. q, k and v have a tensor
    each. The projection of the decay has two tensors, one for each of its low-rank factors, and so
    has the projection of the gate.
    """
    d, heads = config.hidden_size, config.linear_num_value_heads
    k = config.linear_key_head_dim  # the width of a head's keys, and of its values
    index_of = {
        name: (slice(None), slice(i * k, (i + 1) * k)) for i, name in enumerate(("q", "k", "v"))
    }
    projections = tuple(
        TensorSlice(index, f"self_attn.{name}_proj.weight", (heads * k, d))
        for name, index in index_of.items()
    )
    convolutions = tuple(
        TensorSlice(
            index,
            f"self_attn.{name}_conv1d.weight",
            (heads * k, 1, config.linear_conv_kernel_dim),
        )
        for name, index in index_of.items()
    )
    yield ParameterEntry("in_proj", (1, 2, 0), projections)
    yield ParameterEntry("conv_kernel", (1, 2, 0), convolutions)
    yield one_tensor_entry("beta_proj", "self_attn.b_proj.weight", (1, 0), (heads, d))
    yield one_tensor_entry("decay_down", "self_attn.f_a_proj.weight", (1, 0), (k, d))
    yield one_tensor_entry("decay_up", "self_attn.f_b_proj.weight", (1, 2, 0), (heads * k, k))
    yield one_tensor_entry("gate_down", "self_attn.g_a_proj.weight", (1, 0), (k, d))
    yield one_tensor_entry("gate_up", "self_attn.g_b_proj.weight", (1, 2, 0), (heads * k, k))
    yield one_tensor_entry("a_log", "self_attn.A_log", (0,), (1, 1, heads, 1))
    yield one_tensor_entry("dt_bias", "self_attn.dt_bias", (0, 1), (heads * k,))
    yield vector_entry("norm", "self_attn.o_norm.weight", k)
    yield one_tensor_entry("out_proj", "self_attn.o_proj.weight", (2, 0, 1), (d, heads * k))


def _mla_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of the mixer `mla`. Keys and values are
    projections of a latent vector. If `query_rank` > 0, queries are projections of a second latent
    vector.
    """
    d, heads, latent = config.hidden_size, config.num_attention_heads, _mla_settings(config)
    rank, query_rank, shared = latent.latent_rank, latent.query_rank, latent.shared_key_width
    own = config.head_dim - shared  # width of a value, and of the unshared part of a key
    query = (heads * config.head_dim, query_rank or d)
    if query_rank:
        yield one_tensor_entry("q_down", "self_attn.q_a_proj.weight", (1, 0), (query_rank, d))
        yield vector_entry("q_norm", "self_attn.q_a_layernorm.weight", query_rank)
        yield one_tensor_entry("q_proj", "self_attn.q_b_proj.weight", (1, 2, 0), query)
    else:
        yield one_tensor_entry("q_proj", "self_attn.q_proj.weight", (1, 2, 0), query)
    yield one_tensor_entry(
        "kv_down", "self_attn.kv_a_proj_with_mqa.weight", (1, 0), (rank + shared, d)
    )
    yield vector_entry("kv_norm", "self_attn.kv_a_layernorm.weight", rank)
    yield one_tensor_entry(
        "kv_up", "self_attn.kv_b_proj.weight", (1, 2, 0), (heads * 2 * own, rank)
    )
    yield one_tensor_entry("o_proj", "self_attn.o_proj.weight", (2, 0, 1), (d, heads * own))


def _expert_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of a mixture of experts with a router bias and
    an ungated shared expert.
    """
    d, width = config.hidden_size, config.moe_intermediate_size
    count, mlp = config.num_experts, "block_sparse_moe"
    gate_and_up = tuple(
        TensorSlice((expert, half), f"{mlp}.experts.{expert}.{name}.weight", (width, d))
        for expert in range(count)
        for half, name in enumerate(("w1", "w3"))
    )
    down = tuple(
        TensorSlice((expert,), f"{mlp}.experts.{expert}.w2.weight", (d, width))
        for expert in range(count)
    )
    yield one_tensor_entry("router", f"{mlp}.gate.weight", (1, 0), (count, d))
    yield vector_entry("router_bias", f"{mlp}.gate.e_score_correction_bias", count)
    yield ParameterEntry("expert_gate_up", (0, 2, 3, 1), gate_and_up)
    yield ParameterEntry("expert_down", (0, 2, 1), down)
    yield from swiglu_entries(
        "shared_", f"{mlp}.shared_experts", d, config.shared_expert_intermediate_size
    )


_DENSE_MLP_AS_EXPERTS = re.compile(r"(layers\.\d+)\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")


def _tensor_name_in_entries(name: str) -> str:
    """Renames a tensor of a dense MLP to its name in the released files, which begins with `mlp`.
    transformers saves these tensors under the name of the experts' module, `block_sparse_moe`, but
    reads both names.
    """
    return _DENSE_MLP_AS_EXPERTS.sub(r"\1.mlp.", name)


FORM = Form(
    name="kimi_linear",
    display_name="Kimi Linear",
    model_types={"kimi_linear": "kimi_linear"},
    read_settings=_read_settings,
    write_config_fields=_write_fields,
    check_model=_check_model,
    supported_settings=_SETTINGS,
    mixer_entries={"kda": _kda_entries, "mla": _mla_entries},
    expert_entries=_expert_entries,
    mtp_entries=None,
    width_field_groups=_WIDTH_FIELDS,
    read_text_fields=_with_transformers_names,
    tensor_name_in_entries=_tensor_name_in_entries,
)
