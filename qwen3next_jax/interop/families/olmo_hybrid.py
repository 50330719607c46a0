"""Olmo Hybrid: Gated DeltaNet and attention without an output gate, with dense MLPs and without
multi-token prediction.

Every projection and every convolution of a recurrent layer is a tensor of its own. A recurrent
layer has its norms before the mixer and before the MLP; an attention layer has its norms after the
mixer and after the MLP. The norm of the queries is over all heads together, and so is the norm of
the keys.

The norms of layers have other tensor names in the released files than in the files that
`save_pretrained` of transformers writes. An import reads both sets of names; an export writes the
released names. `save_pretrained` also concatenates the three convolutions of a layer and cuts the
result into three tensors of equal size. An import refuses tensors that were concatenated and cut in
this way, unless queries, keys and values are equally wide.
"""

from collections.abc import Iterator

from qwen3next_jax.common.errors import UserError, require, short_repr
from qwen3next_jax.config import FULL, LINEAR, ModelConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.interop.entries import (
    ParameterEntry,
    TensorSlice,
    one_tensor_entry,
    vector_entry,
)
from qwen3next_jax.interop.families.fields import (
    IGNORED,
    fields_to_copy,
    note_unknown_fields,
    refuse_other_values,
    token_id_fields,
)
from qwen3next_jax.interop.families.form import Fields, Form

# ---- config.json

_MIXER_OF_LAYER_TYPE = {LINEAR: "gated_deltanet", FULL: "gated_attention"}
_LAYER_TYPES = {mixer: kind for kind, mixer in _MIXER_OF_LAYER_TYPE.items()}
_PLACEMENT = "olmo_hybrid"
_OUTPUT_NORM_EPS = 1e-5  # of the norm behind Gated DeltaNet; rms_norm_eps does not change it

# Fields that have the name and the meaning of a setting of `ModelConfig`.
_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# The values that transformers gives to missing fields. The numbers and widths of heads are not
# here: their defaults depend on other fields (`_with_defaults`).
_DEFAULTS = {
    "vocab_size": 100_352,
    "hidden_size": 3840,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "max_position_embeddings": 65_536,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
_ROPE_THETA = 10_000.0  # where the file has no rope_theta
# Field → the values that this project supports.
_SUPPORTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
}
# The fields of the distributions from which transformers draws the initial A_log and dt_bias.
# `model.decay_init` = "log_uniform" has the same distributions, except that its lowest A is above
# 0.
_START_VALUES = {
    "linear_a_log_min": 0.0,
    "linear_a_log_max": 16.0,
    "linear_dt_min": 0.001,
    "linear_dt_max": 0.1,
    "linear_dt_init_floor": 0.0001,
}
_ROPE = ("rope_theta", "rope_parameters", "rope_scaling")
_SETTINGS = frozenset(
    (
        *_SAME_NAME,
        "head_dim",
        "layer_types",
        "beta_range",
        "rope_theta",
        "partial_rotary_factor",
        "yarn_factor",
        "block",
        "mixer",
        "num_experts",
        "moe_intermediate_size",
        "num_experts_per_tok",
        "shared_expert_intermediate_size",
        "mtp_depth",
        "attention_output_gate",
        "zero_centered_norm",
        "bos_token_id",
        "eos_token_id",
    )
)
# See `Form.width_field_groups`.
_WIDTH_FIELDS = (
    ("num_attention_heads",),
    ("num_key_value_heads",),
    ("linear_num_key_heads", "linear_key_head_dim"),
    ("linear_num_value_heads", "linear_value_head_dim"),
    ("linear_conv_kernel_dim",),
)


def _read_settings(fields: Fields, where: str) -> Fields:
    refuse_other_values(fields, _SUPPORTED, where)
    known = {*_SAME_NAME, *_SUPPORTED, *_START_VALUES, *_ROPE, *IGNORED}
    note_unknown_fields(
        fields, known | {"layer_types", "head_dim", "linear_allow_neg_eigval"}, where
    )
    positions = _read_rotary_settings(fields, where)
    fields = _with_defaults(fields, where)
    settings = {name: fields[name] for name in (*_SAME_NAME, "head_dim", "layer_types")}
    return settings | {
        **positions,
        "linear_mixer": _MIXER_OF_LAYER_TYPE[LINEAR],
        "full_mixer": _MIXER_OF_LAYER_TYPE[FULL],
        "beta_range": 2 if fields["linear_allow_neg_eigval"] else 1,
        "decay_init": "log_uniform",
        "num_experts": 0,
        "attention_output_gate": False,
        "zero_centered_norm": False,
        "block": {"placement": _PLACEMENT},
        "mixer": {"qk_norm_over": "layer", "output_norm_eps": _OUTPUT_NORM_EPS},
    }


def _with_defaults(fields: Fields, where: str) -> Fields:
    """Returns `fields` with a value for each field of the architecture. A missing field gets the
    default of transformers.

    Raises:
      UserError: a field from which defaults follow has a wrong type, or `layer_types` is not valid
        for an Olmo Hybrid.
    """
    fields = _DEFAULTS | {name: value for name, value in fields.items() if value is not None}
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        _require_positive_integer(fields, name, where)
    heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
    for name in ("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"):
        fields.setdefault(name, heads)
    _require_positive_integer(fields, "linear_num_key_heads", where)
    key = int(0.75 * fields["hidden_size"] / fields["linear_num_key_heads"])
    fields.setdefault("linear_key_head_dim", key)
    _require_positive_integer(fields, "linear_key_head_dim", where)
    fields.setdefault("linear_value_head_dim", 2 * fields["linear_key_head_dim"])
    fields.setdefault("head_dim", fields["hidden_size"] // heads)
    require(
        isinstance(fields["linear_allow_neg_eigval"], bool),
        f"{where}: linear_allow_neg_eigval = {short_repr(fields['linear_allow_neg_eigval'])}: "
        "expected true or false",
    )
    if "layer_types" not in fields:
        kinds = [FULL if i % 4 == 3 else LINEAR for i in range(layers)]
        fields["layer_types"] = kinds if FULL in kinds else kinds[:-1] + [FULL]
    kinds = fields["layer_types"]
    require(
        isinstance(kinds, list)
        and len(kinds) == layers
        and set(map(str, kinds)) == set(_MIXER_OF_LAYER_TYPE),
        f"{where}: layer_types = {short_repr(kinds)}: expected {layers} of "
        f"{' and '.join(_MIXER_OF_LAYER_TYPE)}, of each at least one",
    )
    return fields


def _require_positive_integer(fields: Fields, name: str, where: str) -> None:
    """Raises UserError if the field `name` is not a positive number below 2^16."""
    value = fields[name]
    require(
        type(value) is int and 0 < value < 2**16,
        f"{where}: {name} = {short_repr(value)}: expected a positive number",
    )


def _read_rotary_settings(fields: Fields, where: str) -> Fields:
    """Returns the settings of rotary positions. If the field `rope_theta` is present and null,
    queries and keys are not rotated.

    Raises:
      UserError: the file asks for a scaling of positions, or for the rotation of only a part of
        each head.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    group = {} if fields.get(name) is None else fields[name]
    require(
        isinstance(group, dict),
        f"{where}: {name} = {short_repr(group)}: expected a group of settings",
    )
    kind = group.get("rope_type", group.get("type", "default"))
    if kind != "default":
        raise UserError(
            f"{where}: rope_type = {short_repr(kind)} is not supported for Olmo Hybrid: expected "
            "'default' (remove the scaling to use the model within its trained context)"
        )
    refuse_other_values(group, {"partial_rotary_factor": (1.0,)}, f"{where}: {name}")
    note_unknown_fields(group, ("rope_theta", "rope_type", "type", "partial_rotary_factor"), where)
    theta = group.get("rope_theta", fields.get("rope_theta", _ROPE_THETA))
    if theta is None:
        return {"partial_rotary_factor": 0.0}
    return {"partial_rotary_factor": 1.0, "rope_theta": theta}


def _write_fields(config: ModelConfig, dtype: str, source: Fields, wrapper: Fields) -> Fields:
    fields = {"pad_token_id": None, "use_cache": True} | _START_VALUES
    fields |= fields_to_copy(source)
    fields |= {name: getattr(config, name) for name in _SAME_NAME}
    fields |= token_id_fields(config, source)
    theta = config.rope_theta if config.partial_rotary_factor else None
    fields |= {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "dtype": dtype,
        "layer_types": [_LAYER_TYPES[mixer] for mixer in config.mixers],
        "linear_allow_neg_eigval": config.beta_range == 2,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }
    fields.pop("head_dim", None)
    if config.head_dim != config.hidden_size // config.num_attention_heads:
        fields["head_dim"] = config.head_dim
    return fields


def _check_model(config: ModelConfig) -> None:
    """Raises UserError for a model that the config.json of Olmo Hybrid cannot describe."""
    require(
        set(config.mixers) == set(_LAYER_TYPES),
        f"model.layer_types: olmo_hybrid has layers of {' and '.join(_LAYER_TYPES)}, of each at "
        "least one: expected these, or another form",
    )
    mixer = {"output_norm_eps": _OUTPUT_NORM_EPS, "qk_norm_over": "layer"}
    require(
        dict(config.mixer) == mixer,
        f"model.mixer = {dict(config.mixer)}: olmo_hybrid has {mixer} alone: expected these, or "
        "another form",
    )
    expected = {
        "block": BlockConfig(placement=_PLACEMENT),
        "num_experts": 0,
        "mtp_depth": 0,
        "attention_output_gate": False,
        "zero_centered_norm": False,
        "yarn_factor": 1.0,
    }
    for name, value in expected.items():
        require(
            getattr(config, name) == value,
            f"model.{name} = {getattr(config, name)!r}: olmo_hybrid cannot store it: expected "
            f"{value!r}, or another form",
        )
    require(
        config.partial_rotary_factor in (0.0, 1.0),
        f"model.partial_rotary_factor = {config.partial_rotary_factor}: olmo_hybrid rotates whole "
        "heads or none: expected 0.0 or 1.0, or another form",
    )


# ---- tensors


def _gated_deltanet_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of Gated DeltaNet. Each projection and each
    convolution has a tensor of its own.
    """
    d, groups, heads = (
        config.hidden_size,
        config.linear_num_key_heads,
        config.linear_num_value_heads,
    )
    key, values = config.linear_key_head_dim, heads // groups * config.linear_value_head_dim
    columns = {  # of one key head
        "q": slice(key),
        "k": slice(key, 2 * key),
        "v": slice(2 * key, 2 * key + values),
        "g": slice(2 * key + values, None),
    }
    rows = {"q": groups * key, "k": groups * key, "v": groups * values, "g": groups * values}

    def slices(parts: str, module: str, *shape: int) -> tuple[TensorSlice, ...]:
        return tuple(
            TensorSlice(
                (slice(None), columns[part]),
                f"linear_attn.{part}_{module}.weight",
                (rows[part], *shape),
            )
            for part in parts
        )

    r = heads // groups
    b = TensorSlice((slice(None), slice(r)), "linear_attn.b_proj.weight", (heads, d))
    a = TensorSlice((slice(None), slice(r, None)), "linear_attn.a_proj.weight", (heads, d))
    yield ParameterEntry("in_proj_qkvz", (1, 2, 0), slices("qkvg", "proj", d))
    yield ParameterEntry("in_proj_ba", (1, 2, 0), (b, a))
    yield ParameterEntry(
        "conv_kernel", (1, 2, 0), slices("qkv", "conv1d", 1, config.linear_conv_kernel_dim)
    )
    yield vector_entry("a_log", "linear_attn.A_log", heads)
    yield vector_entry("dt_bias", "linear_attn.dt_bias", heads)
    yield vector_entry("norm", "linear_attn.o_norm.weight", config.linear_value_head_dim)
    yield one_tensor_entry("out_proj", "linear_attn.o_proj.weight", (2, 0, 1), (d, groups * values))


def _attention_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of attention without an output gate."""
    d = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    yield one_tensor_entry("q_proj", "self_attn.q_proj.weight", (1, 2, 0), (queries, d))
    yield one_tensor_entry("k_proj", "self_attn.k_proj.weight", (1, 2, 0), (keys, d))
    yield one_tensor_entry("v_proj", "self_attn.v_proj.weight", (1, 2, 0), (keys, d))
    yield one_tensor_entry("o_proj", "self_attn.o_proj.weight", (2, 0, 1), (d, queries))
    yield vector_entry("q_norm", "self_attn.q_norm.weight", queries)
    yield vector_entry("k_norm", "self_attn.k_norm.weight", keys)


def _layer_norm_entries(config: ModelConfig, mixer: str) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each norm of a layer. `post_attention_layernorm` is the norm
    before the MLP in a recurrent layer, and the norm after the attention in an attention layer.
    """
    names = ("input_layernorm", "post_attention_layernorm")
    if mixer == _MIXER_OF_LAYER_TYPE[FULL]:
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
    for path, name in zip(("mixer_norm", "mlp_norm"), names):
        yield vector_entry(path, f"{name}.weight", config.hidden_size)


def _tensor_name_in_entries(name: str) -> str:
    """Returns the name that a tensor has in the released files. In files that `save_pretrained` of
    transformers writes, norms have other names.
    """
    name = name.replace(".attention_layer_norm.", ".input_layernorm.")
    return name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")


def _shape_advice(name: str) -> str:
    """Returns the end of the message about an unexpected shape of a convolution: the probable
    reason, and what to do.
    """
    if "conv1d" not in name:
        return ""
    return (
        "; transformers' save_pretrained cuts the convolutions of q, k and v into three equal "
        "parts: take the released files, or an export of this project"
    )


FORM = Form(
    name="olmo_hybrid",
    display_name="OlmoHybrid",
    model_types={"olmo_hybrid": "olmo_hybrid"},
    read_settings=_read_settings,
    write_config_fields=_write_fields,
    check_model=_check_model,
    supported_settings=_SETTINGS,
    mixer_entries={
        "gated_deltanet": _gated_deltanet_entries,
        "gated_attention": _attention_entries,
    },
    expert_entries=lambda config: iter(()),
    mtp_entries=None,
    width_field_groups=_WIDTH_FIELDS,
    tensor_name_in_entries=_tensor_name_in_entries,
    wrong_shape_advice=_shape_advice,
    layer_norm_entries=_layer_norm_entries,
)
