"""Olmo Hybrid: Gated DeltaNet and attention without an output gate, with dense MLPs and without
multi-token prediction.

Every projection and every convolution of a recurrent layer is a tensor of its own. Recurrent layers
have norms before the mixer and the MLP, attention layers behind them. The norms of queries and keys
are taken over all heads.

The norms of layers have two namings. The released model has the names of transformers' modules;
`save_pretrained` of transformers writes others. Both are read, and the released one is written.
`save_pretrained` also cuts the three convolutions of a layer, one behind the other, into three
parts of equal size. Unless queries, keys and values are equally wide, such files are refused.
"""

from collections.abc import Iterator

from qwen3next_jax.common.errors import UserError, require, short_repr
from qwen3next_jax.config import FULL, LINEAR, ModelConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.interop.entries import Entry, TensorSlice, one_tensor, vector
from qwen3next_jax.interop.families.fields import (
    IGNORED,
    fields_from_source,
    note_unknown,
    refuse_other_values,
    token_fields,
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
# The values that transformers gives to missing fields. Those of the numbers and widths of heads
# follow from other fields (`_with_defaults`).
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
# The distributions of the start values of A_log and dt_bias, with the values of transformers. They
# are those of `model.decay_init` = "log_uniform", but for a lowest A above 0.
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
# See `Form.width_fields`.
_WIDTH_FIELDS = (
    ("num_attention_heads",),
    ("num_key_value_heads",),
    ("linear_num_key_heads", "linear_key_head_dim"),
    ("linear_num_value_heads", "linear_value_head_dim"),
    ("linear_conv_kernel_dim",),
)


def _read(fields: Fields, where: str) -> Fields:
    refuse_other_values(fields, _SUPPORTED, where)
    known = {*_SAME_NAME, *_SUPPORTED, *_START_VALUES, *_ROPE, *IGNORED}
    note_unknown(fields, known | {"layer_types", "head_dim", "linear_allow_neg_eigval"}, where)
    positions = _read_positions(fields, where)
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
    """Returns `fields` with a value for each field of the architecture: that of the file, or the
    one that transformers gives to a missing field.

    Raises:
      UserError: a field from which others follow has a wrong type, or the kinds of layers are not
        those of an Olmo Hybrid.
    """
    fields = _DEFAULTS | {name: value for name, value in fields.items() if value is not None}
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        _require_count(fields, name, where)
    heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
    for name in ("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"):
        fields.setdefault(name, heads)
    _require_count(fields, "linear_num_key_heads", where)
    key = int(0.75 * fields["hidden_size"] / fields["linear_num_key_heads"])
    fields.setdefault("linear_key_head_dim", key)
    _require_count(fields, "linear_key_head_dim", where)
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


def _require_count(fields: Fields, name: str, where: str) -> None:
    """Raises UserError if the field `name` is not a positive number below 2^16."""
    value = fields[name]
    require(
        type(value) is int and 0 < value < 2**16,
        f"{where}: {name} = {short_repr(value)}: expected a positive number",
    )


def _read_positions(fields: Fields, where: str) -> Fields:
    """Returns the settings of rotary positions. A `rope_theta` that is there and null means that
    queries and keys are not rotated.

    Raises:
      UserError: the file asks for a scaling, or for the rotation of a part of each head.
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
    note_unknown(group, ("rope_theta", "rope_type", "type", "partial_rotary_factor"), where)
    theta = group.get("rope_theta", fields.get("rope_theta", _ROPE_THETA))
    if theta is None:
        return {"partial_rotary_factor": 0.0}
    return {"partial_rotary_factor": 1.0, "rope_theta": theta}


def _write(config: ModelConfig, dtype: str, source: Fields, wrapper: Fields) -> Fields:
    fields = {"pad_token_id": None, "use_cache": True} | _START_VALUES
    fields |= fields_from_source(source)
    fields |= {name: getattr(config, name) for name in _SAME_NAME}
    fields |= token_fields(config, source)
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


def _check(config: ModelConfig) -> None:
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


def _gated_deltanet(config: ModelConfig) -> Iterator[Entry]:
    """Yields the entries of Gated DeltaNet, with a tensor for each projection and convolution."""
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
    yield Entry("in_proj_qkvz", (1, 2, 0), slices("qkvg", "proj", d))
    yield Entry("in_proj_ba", (1, 2, 0), (b, a))
    yield Entry("conv_kernel", (1, 2, 0), slices("qkv", "conv1d", 1, config.linear_conv_kernel_dim))
    yield vector("a_log", "linear_attn.A_log", heads)
    yield vector("dt_bias", "linear_attn.dt_bias", heads)
    yield vector("norm", "linear_attn.o_norm.weight", config.linear_value_head_dim)
    yield one_tensor("out_proj", "linear_attn.o_proj.weight", (2, 0, 1), (d, groups * values))


def _attention(config: ModelConfig) -> Iterator[Entry]:
    """Yields an entry for each parameter of an attention layer, which has no output gate."""
    d = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    yield one_tensor("q_proj", "self_attn.q_proj.weight", (1, 2, 0), (queries, d))
    yield one_tensor("k_proj", "self_attn.k_proj.weight", (1, 2, 0), (keys, d))
    yield one_tensor("v_proj", "self_attn.v_proj.weight", (1, 2, 0), (keys, d))
    yield one_tensor("o_proj", "self_attn.o_proj.weight", (2, 0, 1), (d, queries))
    yield vector("q_norm", "self_attn.q_norm.weight", queries)
    yield vector("k_norm", "self_attn.k_norm.weight", keys)


def _layer_norms(config: ModelConfig, mixer: str) -> Iterator[Entry]:
    """Yields the entries of a layer's norms. In a recurrent layer, `post_attention_layernorm` is
    the norm before the MLP; in a layer with attention, it is the one behind the attention.
    """
    names = ("input_layernorm", "post_attention_layernorm")
    if mixer == _MIXER_OF_LAYER_TYPE[FULL]:
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
    for path, name in zip(("mixer_norm", "mlp_norm"), names):
        yield vector(path, f"{name}.weight", config.hidden_size)


def _tensor_name(name: str) -> str:
    """Returns the released name of a tensor. `save_pretrained` of transformers writes other names
    of norms.
    """
    name = name.replace(".attention_layer_norm.", ".input_layernorm.")
    return name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")


def _shape_advice(name: str) -> str:
    """Returns what happened to a convolution of an unexpected shape."""
    if "conv1d" not in name:
        return ""
    return (
        "; transformers' save_pretrained cuts the convolutions of q, k and v into three equal "
        "parts: take the released files, or an export of this project"
    )


FORM = Form(
    name="olmo_hybrid",
    title="OlmoHybrid",
    model_types={"olmo_hybrid": "olmo_hybrid"},
    read=_read,
    write=_write,
    check=_check,
    settings=_SETTINGS,
    mixers={"gated_deltanet": _gated_deltanet, "gated_attention": _attention},
    experts=lambda config: iter(()),
    multi_token_prediction=None,
    width_fields=_WIDTH_FIELDS,
    tensor_name=_tensor_name,
    shape_advice=_shape_advice,
    layer_norms=_layer_norms,
)
