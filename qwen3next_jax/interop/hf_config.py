"""config.json of `qwen3_next` ↔ `ModelConfig`."""

import dataclasses
import math
import os
import pathlib
from typing import Any

from qwen3next_jax.config import FULL, LINEAR, ModelConfig, from_dict
from qwen3next_jax.errors import UserError, short
from qwen3next_jax.interop.weights import Weights, read_json

# Fields of the same name and meaning on both sides.
_SHARED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "layer_types", "full_attention_interval", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
    "mlp_only_layers", "intermediate_size", "tie_word_embeddings", "rms_norm_eps", "initializer_range",
)
_LAYER_TYPES = {"gated_deltanet": LINEAR, "gated_attention": FULL}
# What transformers takes where the file is silent, as far as it differs from the released model.
_ABSENT = {"intermediate_size": 5632, "max_position_embeddings": 32_768}
_ABSENT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}


def read_hf_config(path: str | os.PathLike) -> ModelConfig:
    """The architecture of a Hugging Face directory, without reading its weights (their names and shapes only), nor JAX.

    Raises:
      UserError: see `huggingface.load_hf`.
    """
    directory = model_directory(path)
    weights, file = Weights(directory), directory / "config.json"
    fields = read_json(file)
    _refuse_unsupported(fields, str(file))
    check_sizes(fields, {name: weights.shape(name) for name in weights.names}, str(file))
    return parse_hf_config(fields, any(name.startswith("mtp.") for name in weights.names), str(file))


def model_directory(path: str | os.PathLike) -> pathlib.Path:
    """`path`, if it is a directory."""
    directory = pathlib.Path(path)
    if directory.is_dir():
        return directory
    found = "is a file" if directory.exists() else "does not exist"
    raise UserError(f"{directory} {found}: expected a Hugging Face model directory (config.json and *.safetensors)")


def parse_hf_config(fields: dict[str, Any], has_mtp: bool, where: str) -> ModelConfig:
    """The `ModelConfig` of a config.json with these `fields`.

    Both forms in circulation are read: `rope_parameters` or top-level `rope_theta` and `partial_rotary_factor`;
    `layer_types` or `full_attention_interval`; `dtype` or `torch_dtype` (any but bfloat16 becomes float32).
    `mtp_depth` is what the file says (this project writes it), 1 when it is silent, and 0 without `has_mtp`.

    Raises:
      UserError: another model_type, or anything this implementation does not compute; `where` names the file.
    """
    _refuse_unsupported(fields, where)
    values = _ABSENT | {name: fields[name] for name in _SHARED if fields.get(name) is not None}
    rope = _rope(fields, where)
    values |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    values["dtype"] = "bfloat16" if dtype == "bfloat16" else "float32"
    values["mtp_depth"] = (fields.get("mtp_depth") or 1) if has_mtp else 0
    for name in ("bos_token_id", "eos_token_id"):
        token = fields.get(name)
        if isinstance(token, list):  # several may end a text; the first is the one that training data ends with
            token = token[0] if token else None
        values[name] = -1 if token is None else token
    try:
        config = from_dict(ModelConfig, values, path="model")
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    by_interval = dataclasses.replace(config, layer_types=())
    return by_interval if by_interval.mixers == config.mixers else config


def check_sizes(fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], where: str) -> None:
    """Refuses a config.json that calls for far more than the tensors beside it (name → shape) hold, before anything is built
    from it: a billion layers would otherwise be listed one by one."""
    layers = len({name.split(".")[2] for name in shapes if name.startswith("model.layers.")})
    widest = max((max(shape, default=0) for shape in shapes.values()), default=0)

    def size(name: str) -> int:
        value = fields.get(name)
        return len(value) if isinstance(value, list) else value if type(value) is int else 0
    for name in ("num_hidden_layers", "layer_types", "mlp_only_layers"):
        if size(name) > layers:
            raise UserError(f"{where}: {name}: {short(size(name))} layers, the weights have {layers}")
    # A width that is not used may be larger than those there are, but not by so much that a table of it hurts.
    most = max(widest, 4096)
    for names in (("num_experts",), ("num_attention_heads", "head_dim"), ("num_key_value_heads", "head_dim"),
                  ("linear_num_key_heads", "linear_key_head_dim"), ("linear_num_value_heads", "linear_value_head_dim"),
                  ("linear_conv_kernel_dim",), ("mtp_depth",)):
        if math.prod(map(size, names)) > most:
            product = " × ".join(f"{name} = {short(size(name))}" for name in names)
            raise UserError(f"{where}: {product}: the widest of the weights has {widest}")


def _refuse_unsupported(fields: dict[str, Any], where: str) -> None:
    if fields.get("model_type") != "qwen3_next":
        raise UserError(f"{where}: model_type = {fields.get('model_type')!r}: expected 'qwen3_next', the one architecture "
                        "this project reads")
    for name, only in (("hidden_act", "silu"), ("attention_bias", False), ("quantization_config", None)):
        value = fields.get(name, only)
        if value != only and value is not None:
            raise UserError(f"{where}: {name} = {value!r} is not supported: expected {only!r}"
                            + ("; convert the checkpoint to bfloat16 first" if name == "quantization_config" else ""))


def _rope(fields: dict[str, Any], where: str) -> dict[str, Any]:
    top_level = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    rope = _ABSENT_ROPE | {name: value for name, value in top_level.items() if value is not None}
    for group in ("rope_parameters", "rope_scaling"):
        inner = fields.get(group) or {}
        if not isinstance(inner, dict):
            raise UserError(f"{where}: {group} = {inner!r}: expected a group of settings")
        rope |= {"rope_type": inner.get("type", rope["rope_type"])} | {k: v for k, v in inner.items() if v is not None}
    if rope["rope_type"] != "default":
        raise UserError(f"{where}: rope_type = {rope['rope_type']!r} is not supported: expected 'default' (remove the scaling "
                        "to use the model within its trained context)")
    return rope


def format_hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json from which `parse_hf_config` and transformers (4.57 and later) both rebuild the model.

    `dtype` is that of the stored weights. Both forms of the rotary settings are written. `mtp_depth` is this project's
    own field; transformers keeps it and does not use it.
    """
    fields = {name: getattr(config, name) for name in _SHARED}
    fields["mlp_only_layers"] = list(config.mlp_only_layers)
    fields["layer_types"] = [_LAYER_TYPES[mixer] for mixer in config.mixers]
    by_interval = dataclasses.replace(config, layer_types=(), full_attention_placement="last", linear_mixer="gated_deltanet",
                                      full_mixer="gated_attention")
    if config.full_attention_interval == 0 or by_interval.mixers != config.mixers:
        del fields["full_attention_interval"]  # it would contradict the list, or (0) means "never" only here
    rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor}
    fields |= rope | {"rope_parameters": {"rope_type": "default", **rope}, "rope_scaling": None}
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(config, name)
        fields[name] = None if token < 0 else token
    return {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **fields,
        "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "mtp_depth": config.mtp_depth,
        "output_router_logits": False, "pad_token_id": None, "router_aux_loss_coef": 0.001, "use_cache": True,
        "dtype": dtype, "torch_dtype": dtype,
    }
