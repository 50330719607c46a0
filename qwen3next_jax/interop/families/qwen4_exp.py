"""The fields of `config.json` and the tensors of Qwen3.8-Flash-Next in transformers (`qwen4_exp`):
Gated DeltaNet with sigmoid gates, sparse attention (`qsa`), several residual streams in place of
norms, and n-gram embeddings in some layers.

As with Qwen3.5, a directory holds either the text model alone (`qwen4_exp_text`), or a wrapper
around the text model and a vision tower (`qwen4_exp`). This module knows the mixer, the residual
streams and the embedding only by their names in `config.registry`.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from qwen3next_jax.common.errors import require, short_repr
from qwen3next_jax.config import FULL, LINEAR, ModelConfig
from qwen3next_jax.interop.entries import (
    ParameterEntry,
    TensorSlice,
    one_tensor_entry,
    vector_entry,
)
from qwen3next_jax.interop.families import qwen3_5, qwen3_next, rope
from qwen3next_jax.interop.families.fields import (
    IGNORED,
    note_unknown_fields,
    present_fields,
    refuse_other_values,
)
from qwen3next_jax.interop.families.form import Fields, Form

# ---- config.json

_TEXT = "qwen4_exp_text"
_INDEXED = "indexed_attention"
# The last two are names of earlier versions of transformers.
_LAYER_TYPES = {LINEAR: LINEAR} | dict.fromkeys(
    (FULL, _INDEXED, "qwen_sparse_attention", "deepseek_sparse_attention"), FULL
)
_GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
# Fields that have the same name and meaning as a setting of ModelConfig.
_SAME = tuple(
    name
    for name in qwen3_next.SAME_NAME + qwen3_next.SAME_NAME_IF_MIXTURE
    if name not in ("layer_types", "full_attention_interval")
)
# Fields with the name and the meaning of a setting of model.streams; then the same for model.mixer.
_STREAMS = ("hc_count", "hc_lowrank")
_INDEXER = (
    "indexer_n_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)
# field → setting of model.ple
_PLE = {
    "ple_layer_ids": "layer_ids",
    "ple_embed_dim": "embed_dim",
    "ple_conv_kernel_size": "conv_kernel_size",
} | {
    name: name
    for name in (
        "ngram_size",
        "heads_per_ngram",
        "ngram_vocab_size_base",
        "make_ngram_vocab_size_divisible_by",
        "split_ngram_parts",
        "seed",
    )
}
# The values that transformers gives to missing fields.
_DEFAULTS = {
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 32_768,
}
_SUPPORTED = qwen3_next.SUPPORTED | {
    "indexer_kv_heads": (1,),
    "mtp_use_dedicated_embeddings": (False,),
    "norm_topk_prob": (True,),
    "output_gate_type": tuple(_GATES),
}
# number_of_conv_states is the size of a cache in transformers, which does not change results.
_IGNORED = frozenset(("number_of_conv_states", "mtp_num_hidden_layers"))
_SETTINGS = qwen3_next.SETTINGS | {"block", "streams", "ple", "mixer", "output_gate_type"}
_WIDTH_FIELDS = (
    *qwen3_next.WIDTH_FIELDS,
    ("hc_count", "hidden_size"),
    ("hc_lowrank",),
    ("indexer_n_heads", "indexer_head_dim"),
    ("ple_embed_dim",),
    ("ple_layer_ids",),
    ("ple_conv_kernel_size",),
    ("heads_per_ngram", "ngram_size"),
    ("split_ngram_parts",),
)


def _read_settings(fields: Fields, where: str) -> Fields:
    refuse_other_values(fields, _SUPPORTED, where)
    known = {*_SAME, *_STREAMS, *_INDEXER, *_PLE, *_SUPPORTED, *_IGNORED, *IGNORED, *rope.FIELDS}
    note_unknown_fields(fields, known | {"layer_types", "full_attention_interval"}, where)
    settings = _DEFAULTS | present_fields(fields, (*_SAME, "full_attention_interval"))
    if fields.get("layer_types") is not None:
        settings["layer_types"] = _read_layer_types(fields["layer_types"], where)
    settings |= rope.read_rope_settings(
        fields,
        settings["max_position_embeddings"],
        where,
        ignored=rope.IMAGE_POSITIONS,
        default_rotary_factor=1.0,
    )
    ple = {_PLE[name]: value for name, value in present_fields(fields, tuple(_PLE)).items()}
    ple.setdefault("embed_dim", settings["hidden_size"])
    ple.setdefault("split_ngram_parts", 512)
    if "layer_ids" in ple:
        ple["layer_ids"] = _read_ple_layer_ids(ple["layer_ids"], where)
    return settings | {
        "full_mixer": "qsa",
        "block": {"placement": "gated_residual"},
        "streams": present_fields(fields, _STREAMS),
        "mixer": present_fields(fields, _INDEXER),
        "ple": ple,
        "output_gate_type": _GATES[
            fields.get("output_gate_type") or fields.get("hidden_act") or "silu"
        ],
    }


def _read_ple_layer_ids(ids: object, where: str) -> list[int]:
    """Converts the field `ple_layer_ids` to the sorted numbers, without duplicates, of the layers
    that have an n-gram embedding.

    Raises:
      UserError: `ids` is not a list of integers.
    """
    require(
        isinstance(ids, list) and all(type(number) is int for number in ids),
        f"{where}: ple_layer_ids = {short_repr(ids)}: expected a list of numbers of layers, from 1",
    )
    return sorted(set(ids))


def _read_layer_types(names: object, where: str) -> list[str]:
    """Converts the field `layer_types` to the setting `layer_types`.

    Raises:
      UserError: `names` is not a list of layer types that this project supports.
    """
    require(
        isinstance(names, list) and all(name in _LAYER_TYPES for name in map(str, names)),
        f"{where}: layer_types = {short_repr(names)}: expected a list of {', '.join(_LAYER_TYPES)}",
    )
    return [_LAYER_TYPES[name] for name in names]


def _write_text_fields(config: ModelConfig, dtype: str, source: Fields, around: Fields) -> Fields:
    fields = qwen3_next.text_model_fields(config, dtype, source, _SAME)
    indexer = config.settings_of_mixer("qsa")
    return fields | {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": _TEXT,
        "layer_types": [
            LINEAR if mixer == "gated_deltanet" else _INDEXED for mixer in config.mixers
        ],
        **{name: getattr(config.streams, name) for name in _STREAMS},
        **{name: getattr(indexer, name) for name in _INDEXER},
        **{field: getattr(config.ple, name) for field, name in _PLE.items()},
        "ple_layer_ids": list(config.ple.layer_ids),
        "indexer_kv_heads": 1,
        "norm_topk_prob": True,
        "output_gate_type": config.output_gate_type,
        # the number of stored modules: all depths of multi-token prediction share one
        "mtp_num_hidden_layers": min(config.mtp_depth, 1),
    }


def _write_wrapper_fields(
    config: ModelConfig, dtype: str, source: Fields, around: Fields
) -> Fields:
    text = _write_text_fields(config, dtype, source, {})
    return qwen3_5.wrapper_fields(text, "Qwen4Exp", config, dtype, around)


def _check_model(config: ModelConfig) -> None:
    """Raises UserError for models that transformers' Qwen4Exp refuses or cannot represent."""
    form = config.hf_form
    block = dataclasses.replace(config.block, placement="pre")
    require(
        config.block.placement == "gated_residual" and block == type(block)(),
        f"model.block = {config.block}: {form} has placement 'gated_residual' alone, with the "
        "defaults of the rest",
    )
    require(
        config.streams.hc_count > 1,
        f"model.streams.hc_count = {config.streams.hc_count}: transformers refuses a {form} of "
        "one stream: expected at least 2 for an export",
    )
    for layer in config.ple.layer_ids:
        require(
            config.mixers[layer - 1] == "gated_deltanet",
            f"model.ple.layer_ids = {config.ple.layer_ids}: layer {layer} has the mixer "
            f"{config.mixers[layer - 1]!r}, and transformers refuses n-gram embeddings but on "
            "gated_deltanet: expected other layers for an export",
        )
    require(
        config.ple.embedding == "ngram",
        f"model.ple.embedding = {config.ple.embedding!r}: {form} has 'ngram' alone",
    )
    require(
        not config.has_dense_mlps and config.norm_topk_prob,
        f"model.num_experts = {config.num_experts} with model.decoder_sparse_step = "
        f"{config.decoder_sparse_step}, model.mlp_only_layers = {config.mlp_only_layers}, "
        f"model.norm_topk_prob = {config.norm_topk_prob}: {form} has experts in every layer, whose "
        "weights sum to 1",
    )
    without_field = sorted(config.mixer.keys() - set(_INDEXER))
    require(
        not without_field,
        f"model.mixer: {form} has no fields for {', '.join(without_field)}: expected defaults",
    )
    require(
        not config.mtp_depth or config.full_mixer == "qsa",
        f"model.full_mixer = {config.full_mixer!r}: the multi-token prediction module of {form} "
        "has qsa alone: expected that, or model.mtp_depth = 0",
    )


# ---- tensors


def _stream_mix_entries(
    config: ModelConfig, path: str, name: str, injects: bool
) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of a `StreamMix`.

    Args:
      path: the path of the `StreamMix` in the parameters.
      name: the name of the `StreamMix`'s module in transformers.
      injects: whether the `StreamMix` stands before a mixer or an MLP, and so also has the
        parameter `inject`.
    """
    streams, rank = config.streams.hc_count, config.streams.hc_lowrank
    width = streams * config.hidden_size
    yield vector_entry(f"{path}/norm", f"{name}.hc_norm.weight", width)
    yield one_tensor_entry(
        f"{path}/down", f"{name}.input_mix_weight_down.weight", (2, 0, 1), (rank, width)
    )
    yield one_tensor_entry(
        f"{path}/up", f"{name}.input_mix_weight_up.weight", (1, 2, 0), (width, rank)
    )
    if injects:
        tensor = f"{name}.block_inject_weight.weight"
        yield one_tensor_entry(f"{path}/inject", tensor, (2, 0, 1), (streams, width))


def _layer_norm_entries(config: ModelConfig, mixer: str) -> Iterator[ParameterEntry]:
    yield from _stream_mix_entries(config, "mixer_norm", "attn_hyper_connection", injects=True)
    yield from _stream_mix_entries(config, "mlp_norm", "mlp_hyper_connection", injects=True)


def _final_norm_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    yield from _stream_mix_entries(config, "final_norm", "hyper_connection_mixer", injects=False)


def _mtp_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    d = config.hidden_size
    yield vector_entry("embedding_norm", "pre_fc_norm_embedding.weight", d)
    yield vector_entry("hidden_norm", "pre_fc_norm_hidden.weight", config.streams.hc_count * d)
    yield one_tensor_entry("fc_embedding", "fc_embedding.weight", (1, 0), (d, d))
    yield one_tensor_entry("fc_hidden", "fc_hidden.weight", (1, 0), (d, d))
    yield from _stream_mix_entries(config, "norm", "hyper_connection_mixer", injects=False)


def _qsa_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of gated attention and of its indexer. The
    indexer's projection has the rows of all query heads, followed by the rows of the key head.
    """
    yield from qwen3_next.gated_attention_entries(config)
    s, name = config.settings_of_mixer("qsa"), "self_attn.indexer"
    height = (s.indexer_n_heads + 1) * s.indexer_head_dim
    tensor = f"{name}.index_qk_proj.weight"
    yield one_tensor_entry("index_qk_proj", tensor, (1, 2, 0), (height, config.hidden_size))
    yield vector_entry("index_q_norm", f"{name}.q_layernorm.weight", s.indexer_head_dim)
    yield vector_entry("index_k_norm", f"{name}.k_layernorm.weight", s.indexer_head_dim)


def _layer_embedding_entries(config: ModelConfig, number: int) -> Iterator[ParameterEntry]:
    """Yields the `ParameterEntry` of each parameter of a layer's n-gram embedding, whose table is
    divided over several tensors. `number`: the index of the embedding, from 0.
    """
    ple, d, width = config.ple, config.hidden_size, config.streams.hc_count * config.hidden_size
    shards = tuple(
        TensorSlice(
            (rows,),
            f"ple.ple_embedding.ngram_embedding.shard_{part}.weight",
            (rows.stop - rows.start, ple.head_width),
        )
        for part, rows in enumerate(ple.table_row_slices(number))
    )
    yield ParameterEntry("table", (0, 1), shards)
    yield one_tensor_entry("key_proj", "ple.key_proj.weight", (1, 2, 0), (width, ple.embed_dim))
    yield one_tensor_entry("value_proj", "ple.value_proj.weight", (1, 0), (d, ple.embed_dim))
    yield vector_entry("key_norm", "ple.norm_key.weight", width)
    yield vector_entry("query_norm", "ple.norm_query.weight", width)
    yield vector_entry("conv_norm", "ple.norm_conv.weight", width)
    yield one_tensor_entry(
        "conv_kernel", "ple.conv1d.weight", (1, 0), (width, 1, ple.conv_kernel_size)
    )


def _layer_constants(config: ModelConfig, number: int) -> dict[str, np.ndarray]:
    """Returns name of a tensor → the constants of a layer's hash functions in this tensor. The
    settings determine the constants, and an import compares them with the stored tensors.
    """
    ple, name = config.ple, "ple.ple_embedding"
    numbers = {
        "layer_multipliers": ple.hash_multipliers(number, config.vocab_size),
        "ngram_heads_offsets": ple.head_row_offsets(number),
        "ngram_heads_vocab_sizes": ple.table_rows_per_head(number),
    }
    return {f"{name}.{key}": np.array(value, np.int64) for key, value in numbers.items()}


TEXT = dataclasses.replace(
    qwen3_5.TEXT,
    name=_TEXT,
    display_name="Qwen4Exp",
    model_types={_TEXT: _TEXT},
    read_settings=_read_settings,
    write_config_fields=_write_text_fields,
    check_model=_check_model,
    supported_settings=_SETTINGS,
    mixer_entries={"gated_deltanet": qwen3_5.gated_deltanet_entries, "qsa": _qsa_entries},
    mtp_entries=_mtp_entries,
    width_field_groups=_WIDTH_FIELDS,
    layer_norm_entries=_layer_norm_entries,
    final_norm_entries=_final_norm_entries,
    layer_embedding_entries=_layer_embedding_entries,
    embedding_constant_tensors=_layer_constants,
)
WRAPPER: Form = dataclasses.replace(
    TEXT,
    name="qwen4_exp",
    model_types={"qwen4_exp": _TEXT},
    write_config_fields=_write_wrapper_fields,
    trunk_prefix=qwen3_5.WRAPPER.trunk_prefix,
    text_config_group="text_config",
    read_text_fields=qwen3_5.text_fields_in_wrapper,
    tensor_name_in_entries=qwen3_5.WRAPPER.tensor_name_in_entries,
)
