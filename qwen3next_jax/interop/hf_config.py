"""config.json of the families ↔ `ModelConfig`.

model_type                           `ModelConfig.hf_form`   fields
qwen3_next                           qwen3_next              flat qwen3_5_text, qwen3_5_moe_text
qwen3_5_text            flat qwen3_5, qwen3_5_moe                 qwen3_5                 those
of the text model in `text_config`, beside a vision tower's
kimi_linear                          kimi_linear             others (`interop.kimi`)
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Collection
from typing import Any

from qwen3next_jax.common.errors import UserError, did_you_mean, require, short, warn
from qwen3next_jax.config import FULL, LINEAR, MixerConfig, ModelConfig, from_dict
from qwen3next_jax.config.registry import check_trusted
from qwen3next_jax.interop import kimi
from qwen3next_jax.interop.weights import Weights, name_some, read_json

FORMS = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_text": "qwen3_5_text",
    "qwen3_5_moe_text": "qwen3_5_text",
    "kimi_linear": "kimi_linear",
}
VISION = "model.visual."  # what the names of a vision tower's tensors begin with

# Fields of the same name and meaning on both sides.
_SHARED = (
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
_DENSE = ("intermediate_size",)
_MIXTURE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
# of qwen3_next alone; the others are all dense or all mixture
_MIXED = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
_LAYER_TYPES = {"gated_deltanet": LINEAR, "gated_attention": FULL}
# What transformers takes where the file is silent, as far as it differs from the released
# Qwen3-Next.
_ABSENT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
_ABSENT = {
    "qwen3_next": {"intermediate_size": 5632},
    "qwen3_5_text": {
        "num_experts": 0,
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248_320,
        "num_hidden_layers": 40,
    },
}
# Fields with the values under which a model is what is computed here.
_ONLY = {"hidden_act": ("silu",), "attention_bias": (False,), "quantization_config": (None,)}
_ONLY_NEXT = _ONLY | {"attn_output_gate": (True,)}
_ONLY_LATER = _ONLY | {
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "mtp_use_dedicated_embeddings": (False,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
_ONLY_YARN = {
    "beta_fast": (32,),
    "beta_slow": (1,),
    "truncate": (True,),
    "mscale": (None,),
    "mscale_all_dim": (None,),
}
# Fields that change nothing that is computed, whatever they say.
_ASIDE = {
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
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "partial_rotary_factor",  # read by `_rope`
}
_ASIDE_LATER = {"mtp_num_hidden_layers"}
_ASIDE_WRAPPER = {
    "text_config",
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
}
# Fields of an export that are never its source's.
_RENEWED = {
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
}
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ROPE_YARN = {"factor", "original_max_position_embeddings", "attention_factor", *_ONLY_YARN}
# of positions in images: tokens of a text have one position
_ROPE_LATER = {"mrope_section", "mrope_interleaved"}


def read_hf_config(path: str | os.PathLike) -> ModelConfig:
    """The architecture of a Hugging Face directory, without reading its weights (their names and
    shapes only), nor JAX. What is there beyond the text model is named in a note.

    Raises:
      UserError: see `huggingface.load_hf`.
    """
    directory = model_directory(path)
    weights, file = Weights(directory), directory / "config.json"
    fields = text_fields(read_json(file), str(file))
    check_sizes(fields, {name: weights.shape(name) for name in weights.names}, str(file))
    if tower := [name for name in weights.names if name.startswith(VISION)]:
        _note(
            f"{directory}: its vision tower ({name_some(tower, 1)}) is left aside: the text model "
            "alone is computed"
        )
    return parse_hf_config(fields, weights.names, str(file))


def model_directory(path: str | os.PathLike) -> pathlib.Path:
    """`path`, if it is a directory."""
    directory = pathlib.Path(path)
    if directory.is_dir():
        return directory
    found = "is a file" if directory.exists() else "does not exist"
    raise UserError(
        f"{directory} {found}: expected a Hugging Face model directory (config.json and "
        "*.safetensors)"
    )


def text_fields(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of the text model in a config.json: a wrapper's `text_config`, with what the
    wrapper itself says of it; the others as they are. `model_type` stays the file's own.

    Raises:
      UserError: another model_type, or a wrapper that contradicts itself; `where` names the file.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FORMS:
        raise UserError(
            f"{where}: model_type = {short(model_type)}: expected one of {', '.join(FORMS)}, the "
            "families that this project "
            "reads" + (did_you_mean(model_type, FORMS) if isinstance(model_type, str) else "")
        )
    if FORMS[model_type] == "kimi_linear":
        return kimi.canonical(fields, where)
    if FORMS[model_type] != "qwen3_5":
        return fields
    text = fields.get("text_config")
    require(
        isinstance(text, dict),
        f"{where}: text_config = {short(text)}: expected the fields of the text model",
    )
    inner = text.get("model_type", f"{model_type}_text")
    require(
        inner in (model_type, f"{model_type}_text"),
        f"{where}: text_config.model_type = {short(inner)} in a {model_type}: expected "
        f"'{model_type}_text'",
    )
    tied = [
        values["tie_word_embeddings"]
        for values in (fields, text)
        if values.get("tie_word_embeddings") is not None
    ]
    require(
        all(value == tied[0] for value in tied),
        f"{where}: tie_word_embeddings is true and false, at the top and in text_config: expected "
        "the same in both",
    )
    _name_unknown(
        {
            name: value
            for name, value in fields.items()
            if name not in _ASIDE_WRAPPER | _ASIDE | {"tie_word_embeddings"}
        },
        where,
    )
    said = (
        "dtype",
        "torch_dtype",
        "bos_token_id",
        "eos_token_id",
        "tie_word_embeddings",
        "quantization_config",
    )
    return (
        {name: fields[name] for name in said if fields.get(name) is not None}
        | {name: value for name, value in text.items() if value is not None}
        | {"model_type": model_type}
    )


def parse_hf_config(fields: dict[str, Any], names: Collection[str], where: str) -> ModelConfig:
    """The `ModelConfig` of a config.json.

    Both forms in circulation are read: `rope_parameters` or top-level `rope_theta` and
    `partial_rotary_factor`; `layer_types` or `full_attention_interval`; `dtype` or `torch_dtype`
    (any but bfloat16 becomes float32). `mtp_depth` is what the file says (this project's own
    field, or `mtp_num_hidden_layers`), 1 when it is silent, and 0 without tensors. Fields that
    are not known are named in a note.

    Args:
      fields: see `text_fields`.
      names: of the tensors beside it: whether there is a multi-token prediction module, and
      which experts are fused.

    Raises:
      UserError: another model_type, or anything this implementation does not compute; `where`
      names the file.
    """
    form, kind = FORMS[fields["model_type"]], _kind(fields)
    of_kimi = form == "kimi_linear"
    shared = () if of_kimi else _shared(kind)
    only = kimi.ONLY if of_kimi else _ONLY_NEXT if form == "qwen3_next" else _ONLY_LATER
    _refuse_unsupported(fields, only, where)
    known = {
        *shared,
        *only,
        *_ASIDE,
        *(kimi.KNOWN if of_kimi else () if form == "qwen3_next" else _ASIDE_LATER),
    }
    _name_unknown({name: value for name, value in fields.items() if name not in known}, where)

    if of_kimi:
        values = kimi.settings(fields, where)
    else:
        values = {"max_position_embeddings": 32_768, **_ABSENT[kind]} | {
            n: fields[n] for n in shared if fields.get(n) is not None
        }
        values |= _rope(fields, values["max_position_embeddings"], where)
    dtype = _first(fields, "dtype", "torch_dtype")
    require(
        dtype is None or isinstance(dtype, str),
        f"{where}: dtype = {short(dtype)}: expected a name, such as 'bfloat16'",
    )
    values["dtype"] = "bfloat16" if dtype == "bfloat16" else "float32"
    has_mtp = any(name.startswith("mtp.") for name in names)
    depth = _first(fields, "mtp_depth", "mtp_num_hidden_layers")
    values["mtp_depth"] = (1 if depth is None else depth) if has_mtp and not of_kimi else 0
    for name in ("bos_token_id", "eos_token_id"):
        token = fields.get(name)
        # several may end a text; the first is the one that training data ends with
        if isinstance(token, list):
            require(
                all(type(i) is int for i in token),
                f"{where}: {name} = {short(token)}: expected a token's number, or a list of them",
            )
            token = token[0] if token else None
        values[name] = -1 if token is None else token
    fused = {
        "mtp" if name.startswith("mtp.") else "trunk"
        for name in names
        if name.endswith(".experts.gate_up_proj")
    }
    values |= {"hf_form": form, "hf_fused_experts": sorted(fused)}
    check_trusted({"model": values}, where)
    try:
        config = from_dict(ModelConfig, values, path="model")
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    # without settings of mixers, which the layers of another pattern may not read
    by_interval = dataclasses.replace(config, layer_types=(), mixer=MixerConfig())
    if by_interval.mixers != config.mixers:
        return config
    return dataclasses.replace(config, layer_types=())


def _first(fields: dict[str, Any], *names: str) -> Any:
    """The first of the fields that says something: neither null nor, of a number, 0."""
    said = (fields.get(name) for name in names)
    return next((value for value in said if value is not None and value != 0), None)


def text_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The group of fields that a config.json whose model_type is known has for the text model."""
    return fields["text_config"] if FORMS[fields["model_type"]] == "qwen3_5" else fields


def _kind(fields: dict[str, Any]) -> str:
    """The model_type of the text model."""
    return fields["model_type"] + "_text" * (FORMS[fields["model_type"]] == "qwen3_5")


def _shared(kind: str) -> tuple[str, ...]:
    """The fields of this kind of model that are settings by the same name."""
    return (
        _SHARED
        + {
            "qwen3_next": _DENSE + _MIXTURE + _MIXED,
            "qwen3_5_text": _DENSE,
            "qwen3_5_moe_text": _MIXTURE,
        }[kind]
    )


def check_sizes(fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], where: str) -> None:
    """Refuses a config.json that calls for far more than the tensors beside it (name → shape)
    hold, before anything is built from it: a billion layers would otherwise be listed one by
    one.
    """
    layers = len(
        {
            name.partition(".layers.")[2].split(".")[0]
            for name in shapes
            if name.startswith(("model.layers.", "model.language_model.layers."))
        }
    )
    widest = max((max(shape, default=0) for shape in shapes.values()), default=0)

    def size(name: str) -> int:
        value = fields.get(name)
        return len(value) if isinstance(value, list) else value if type(value) is int else 0

    for name in ("num_hidden_layers", "layer_types", "mlp_only_layers"):
        if size(name) > layers:
            raise UserError(
                f"{where}: {name}: {short(size(name))} layers, the weights have {layers}"
            )
    # A width that is not used may be larger than those there are, but not by so much that a table
    # of it hurts.
    most = max(widest, 4096)
    for names in (
        ("num_experts",),
        ("num_attention_heads", "head_dim"),
        ("num_key_value_heads", "head_dim"),
        ("linear_num_key_heads", "linear_key_head_dim"),
        ("linear_num_value_heads", "linear_value_head_dim"),
        ("linear_conv_kernel_dim",),
        ("mtp_depth",),
        ("mtp_num_hidden_layers",),
        ("linear_num_heads", "linear_head_dim"),
        ("kv_lora_rank",),
        ("q_lora_rank",),
        ("num_attention_heads", "qk_nope_head_dim"),
        ("qk_rope_head_dim",),
    ):
        if math.prod(map(size, names)) > most:
            product = " × ".join(f"{name} = {short(size(name))}" for name in names)
            raise UserError(f"{where}: {product}: the widest of the weights has {widest}")


def _refuse_unsupported(fields: dict[str, Any], only: dict[str, tuple], where: str) -> None:
    for name, supported in only.items():
        value = fields.get(name)
        if value is not None and value not in supported:
            raise UserError(
                f"{where}: {name} = {short(value)} is not supported: expected "
                f"{' or '.join(map(repr, supported))}"
                + (
                    "; convert the checkpoint to bfloat16 first"
                    if name == "quantization_config"
                    else ""
                )
            )


def _name_unknown(fields: dict[str, Any], where: str) -> None:
    unknown = sorted(
        name
        for name, value in fields.items()
        if value is not None and (name, value) != ("attention_dropout", 0)
    )
    if unknown:
        _note(
            f"{where}: {', '.join(short(name) for name in unknown)}: not known here, and taken to "
            "change nothing that is computed"
        )


@functools.cache
def _note(message: str) -> None:  # once a process: a command reads a config.json several times
    warn(message, "note")


def _rope(fields: dict[str, Any], context: Any, where: str) -> dict[str, Any]:
    """The settings of rotary positions, with the context that they were trained for."""
    outside = _ABSENT_ROPE | {
        n: fields[n] for n in ("rope_theta", "partial_rotary_factor") if fields.get(n) is not None
    }
    groups = []
    for group in ("rope_parameters", "rope_scaling"):
        inner = {} if fields.get(group) is None else fields[group]
        require(
            isinstance(inner, dict),
            f"{where}: {group} = {short(inner)}: expected a group of settings",
        )
        groups.append(
            {"rope_type" if k == "type" else k: v for k, v in inner.items() if v is not None}
        )
    rope = outside | groups[0] | groups[1]
    if all(groups) and rope != outside | groups[1]:
        _note(
            f"{where}: transformers would read rope_scaling alone and forget what only "
            "rope_parameters says: put all of it there"
        )
    known = _ROPE | (_ROPE_LATER if fields["model_type"] != "qwen3_next" else set())
    settings = {
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
    }
    if rope["rope_type"] == "yarn":
        known |= _ROPE_YARN
        settings |= _yarn(rope, context, where)
    elif rope["rope_type"] != "default":
        raise UserError(
            f"{where}: rope_type = {short(rope['rope_type'])} is not supported: expected "
            "'default' or 'yarn' (remove the scaling to use the model within its trained context)"
        )
    _name_unknown(
        {f"rope_parameters.{name}": value for name, value in rope.items() if name not in known},
        where,
    )
    return settings


def _yarn(rope: dict[str, Any], context: Any, where: str) -> dict[str, Any]:
    _refuse_unsupported(rope, _ONLY_YARN, where)
    factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings", context)
    for name, value in (("factor", factor), ("original_max_position_embeddings", trained)):
        require(
            type(value) in (int, float) and 1 <= value < 2**40,
            f"{where}: rope_type = 'yarn' with {name} = {short(value)}: expected a "
            "number of at least 1",
        )
    require(
        context in (trained, int(trained * factor)),
        f"{where}: max_position_embeddings = {short(context)}, and YaRN reaches {factor:g} × "
        f"{trained:g} positions: expected "
        "max_position_embeddings to be that product, or original_max_position_embeddings",
    )
    scale, ours = rope.get("attention_factor"), 0.1 * math.log(factor) + 1
    require(
        scale is None or scale == ours,
        f"{where}: attention_factor = {short(scale)} is not supported: expected {ours} by the "
        "factor, or none",
    )
    return {"yarn_factor": factor, "max_position_embeddings": trained}


def format_hf_config(
    config: ModelConfig, dtype: str, source: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json from which `parse_hf_config` and transformers both rebuild the model:
    Qwen3-Next 4.57 and later, in both forms of the rotary settings; the later families 5.

    `mtp_depth` is this project's own field; transformers keeps it and does not use it.

    Args:
      dtype: of the stored weights.
      source: the config.json of the checkpoint that the model came from, whose other fields are
      kept where it is of the same kind (those
        beside the text model where both are wrappers); None: none.
    """
    of_kimi = config.hf_form == "kimi_linear"
    kind = (
        config.hf_form
        if of_kimi or config.hf_form == "qwen3_next"
        else "qwen3_5_moe_text"
        if config.num_experts
        else "qwen3_5_text"
    )
    source = source if source and _kind(source) == kind else {}
    of_text = text_of(source) if source else {}
    theirs = {name: value for name, value in of_text.items() if name not in _RENEWED}
    tokens = {}
    for name in ("bos_token_id", "eos_token_id"):
        token, several = getattr(config, name), theirs.get(name)
        tokens[name] = (
            None
            if token < 0
            else several
            if isinstance(several, list) and token in several
            else token
        )
    if of_kimi:
        theirs = {"pad_token_id": None, "use_cache": True} | {
            name: value for name, value in theirs.items() if name not in kimi.WRITTEN
        }
        return (
            theirs
            | kimi.fields(config)
            | tokens
            | {"architectures": ["KimiLinearForCausalLM"], "model_type": kind, "dtype": dtype}
        )
    fields = {name: getattr(config, name) for name in _shared(kind)}
    if kind == "qwen3_next":
        fields["mlp_only_layers"] = list(config.mlp_only_layers)
    fields["layer_types"] = [_LAYER_TYPES[mixer] for mixer in config.mixers]
    by_interval = dataclasses.replace(
        config,
        layer_types=(),
        full_attention_placement="last",
        linear_mixer="gated_deltanet",
        full_mixer="gated_attention",
    )
    if config.full_attention_interval == 0 or by_interval.mixers != config.mixers:
        # it would contradict the list, or (0) means "never" only here
        del fields["full_attention_interval"]
    fields |= {"max_position_embeddings": config.context_length} | _format_rope(config, of_text)
    fields |= tokens | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "mtp_depth": config.mtp_depth,
        "dtype": dtype,
    }
    if kind == "qwen3_next":
        fields["torch_dtype"] = dtype
    else:  # how many modules are stored: each depth applies the one
        fields |= {
            "attn_output_gate": True,
            "mtp_num_hidden_layers": min(config.mtp_depth, 1),
            "mtp_use_dedicated_embeddings": False,
        }
    absent = {"pad_token_id": None, "use_cache": True} | (
        {"output_router_logits": False, "router_aux_loss_coef": 0.001}
        if "num_experts" in fields
        else {}
    )
    text = {**absent, **theirs, **fields, "model_type": kind}
    if config.hf_form != "qwen3_5":
        named = {
            "qwen3_next": "Qwen3Next",
            "qwen3_5_text": "Qwen3_5",
            "qwen3_5_moe_text": "Qwen3_5Moe",
        }[kind]
        return {"architectures": [f"{named}ForCausalLM"], **text}
    wrapper = (
        {name: value for name, value in source.items() if name not in _RENEWED}
        if source and of_text is not source
        else {}
    )
    return wrapper | {
        "architectures": [
            "Qwen3_5MoeForConditionalGeneration"
            if config.num_experts
            else "Qwen3_5ForConditionalGeneration"
        ],
        "model_type": kind.removesuffix("_text"),
        "text_config": text,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": dtype,
    }


def _format_rope(config: ModelConfig, theirs: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor}
    scaling = {"rope_type": "default"}
    if config.yarn_factor > 1:
        scaling = {
            "rope_type": "yarn",
            "factor": config.yarn_factor,
            "original_max_position_embeddings": config.max_position_embeddings,
        }
    for group in ("rope_scaling", "rope_parameters"):
        scaling |= {
            name: value for name, value in (theirs.get(group) or {}).items() if name in _ROPE_LATER
        }
    both = {"rope_parameters": scaling | rope}
    if config.hf_form != "qwen3_next":
        return both
    return both | rope | {"rope_scaling": scaling if config.yarn_factor > 1 else None}
