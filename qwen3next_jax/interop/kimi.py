"""config.json of Kimi Linear ↔ the settings of `ModelConfig`: the released form
(`linear_attn_config`, `first_k_dense_replace`) and the one that transformers saves
(`layer_types`, `mlp_layer_types`). Some fields have two names; here they have transformers'
canonical one.
"""

from typing import Any

from qwen3next_jax.common.errors import require, short
from qwen3next_jax.config import FULL, LINEAR, ModelConfig
from qwen3next_jax.config.moe import MoEConfig

MIXERS = {LINEAR: "kda", FULL: "mla"}
LATENT_NORM_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps is

_NAMES = {  # in released files → canonical
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "model_max_length": "max_position_embeddings",
    "num_local_experts": "num_experts",
}
_LINEAR = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LISTS = {"full_attn_layers": FULL, "kda_layers": LINEAR}  # of layers, the first being 1
# What transformers takes where the file is silent.
_ABSENT = {
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
# Fields with the values under which a model is what is computed here.
ONLY = {
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
# Beside what every family has, fields that change nothing: without positions there is nothing to
# rotate.
ASIDE = {"auto_map", "head_dim", "qk_head_dim", "pretraining_tp"}
KNOWN = {*_ABSENT, *ONLY, *ASIDE, "num_key_value_heads", "layer_types", "mlp_layer_types"}
# As an export writes them; of a source they are never taken over.
WRITTEN = {*KNOWN, *_NAMES, "linear_attn_config"}


def canonical(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """`fields` under their canonical names, those of `linear_attn_config` among them, layers as
    `layer_types` and `mlp_layer_types`.

    Raises:
      UserError: it contradicts itself; `where` names the file.
    """
    inner, renamed = fields.get("linear_attn_config"), {}
    inner = {} if inner is None else inner
    require(
        isinstance(inner, dict),
        f"{where}: linear_attn_config = {short(inner)}: expected a group of settings",
    )
    for name, value in fields.items():
        if name != "linear_attn_config" and value is not None:
            if (known := _NAMES.get(name, name)) in renamed:
                require(
                    renamed[known] == value,
                    f"{where}: {name} = {short(value)}, and {short(renamed[known])} under its "
                    "other name",
                )
            renamed[known] = value
    for name, value in inner.items():
        if name not in _LISTS:
            renamed[_LINEAR.get(name, f"linear_attn_config.{name}")] = value
    count = renamed.get("num_hidden_layers", _ABSENT["num_hidden_layers"])
    require(
        type(count) is int and 0 < count < 2**16,
        f"{where}: num_hidden_layers = {short(count)}: expected a number of layers",
    )
    if "layer_types" not in renamed:
        kinds = [(i + 1, FULL if i and i % 4 == 0 else LINEAR) for i in range(count)]
        if inner.keys() & _LISTS.keys():
            for name in _LISTS:
                listed = inner.get(name, [])
                require(
                    isinstance(listed, list) and all(type(i) is int for i in listed),
                    f"{where}: linear_attn_config.{name} = {short(listed)}: expected a list of "
                    "layers",
                )
            kinds = sorted((i, kind) for name, kind in _LISTS.items() for i in inner.get(name, []))
        require(
            [i for i, _ in kinds] == list(range(1, count + 1)),
            f"{where}: linear_attn_config: expected each of the {count} layers, "
            "the first being 1, once in full_attn_layers or kda_layers",
        )
        renamed["layer_types"] = [kind for _, kind in kinds]
    if "mlp_layer_types" not in renamed:
        dense = renamed.get("first_k_dense_replace", _ABSENT["first_k_dense_replace"])
        require(
            type(dense) is int,
            f"{where}: first_k_dense_replace = {short(dense)}: expected a number of layers",
        )
        renamed["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(count)]
    return renamed


def settings(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings of `ModelConfig` that canonical `fields` stand for, but for tokens and dtype.

    Raises:
      UserError: sizes that this implementation does not compute; `where` names the file.
    """
    f = _ABSENT | fields
    heads, mlps, types = f["num_attention_heads"], f["mlp_layer_types"], f["layer_types"]
    for name, expected in (("num_key_value_heads", heads), ("v_head_dim", f["qk_nope_head_dim"])):
        require(
            f.get(name, expected) == expected,
            f"{where}: {name} = {short(f.get(name))} is not supported: expected {short(expected)}, "
            f"as {'num_attention_heads' if expected is heads else 'qk_nope_head_dim'}",
        )
    for name, kinds, known in (
        ("layer_types", types, MIXERS),
        ("mlp_layer_types", mlps, ("dense", "sparse")),
    ):
        require(
            isinstance(kinds, list)
            and set(map(str, kinds)) <= set(known)
            and len(kinds) == f["num_hidden_layers"],
            f"{where}: {name} = {short(kinds)}: expected {f['num_hidden_layers']} of "
            f"{' and '.join(known)}",
        )
    require(FULL in types, f"{where}: layer_types has no {FULL}: expected a layer of it")
    for name in ("qk_nope_head_dim", "qk_rope_head_dim") + (
        "n_shared_experts",
        "moe_intermediate_size",
    ) * ("sparse" in mlps):
        require(
            type(f[name]) is int and f[name] > 0,
            f"{where}: {name} = {short(f[name])}: expected a positive number",
        )
    same = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "layer_types",
        "max_position_embeddings",
        "linear_conv_kernel_dim",
        "intermediate_size",
        "initializer_range",
        "rms_norm_eps",
    )
    values = {name: f[name] for name in same} | {
        "linear_mixer": "kda",
        "full_mixer": "mla",
        "num_key_value_heads": heads,
        "partial_rotary_factor": 0.0,
        "head_dim": f["qk_nope_head_dim"] + f["qk_rope_head_dim"],
        "mtp_depth": 0,
        "decay_init": "log_uniform",
        "num_experts": 0,
        "linear_num_key_heads": f["linear_num_heads"],
        "linear_num_value_heads": f["linear_num_heads"],
        "linear_key_head_dim": f["linear_head_dim"],
        "linear_value_head_dim": f["linear_head_dim"],
        "zero_centered_norm": False,
        "attention_output_gate": False,
        "mixer": {
            "latent_rank": f["kv_lora_rank"],
            "query_rank": f["q_lora_rank"],
            "shared_key_width": f["qk_rope_head_dim"],
            "latent_norm_eps": LATENT_NORM_EPS,
        },
    }
    if "sparse" in mlps:
        values |= {
            name: f[name]
            for name in (
                "num_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "norm_topk_prob",
            )
        } | {
            "shared_expert_intermediate_size": f["n_shared_experts"] * f["moe_intermediate_size"],
            "mlp_only_layers": [i for i, kind in enumerate(mlps) if kind == "dense"],
            "moe": {"scoring_func": "sigmoid", "router_bias": True, "shared_expert_gate": False}
            | {name: f[name] for name in ("n_group", "topk_group", "routed_scaling_factor")},
        }
    return values


def fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json, under the released names where there are such, that stand for
    `config` (which passes `check`).
    """
    c, count = config, config.num_hidden_layers
    mla = config.settings_of("mla")
    mlps = ["sparse" if c.is_sparse(i) else "dense" for i in range(count)]
    first = (*mlps, "sparse").index("sparse")
    return {
        name: getattr(c, name)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "num_experts",
            "moe_intermediate_size",
            "initializer_range",
            "rms_norm_eps",
        )
    } | {
        "num_experts_per_token": c.num_experts_per_tok,
        "moe_renormalize": c.norm_topk_prob,
        "num_expert_group": c.moe.n_group,
        "num_shared_experts": c.shared_expert_intermediate_size // max(c.moe_intermediate_size, 1),
        "model_max_length": c.max_position_embeddings,
        "topk_group": c.moe.topk_group,
        "routed_scaling_factor": c.moe.routed_scaling_factor,
        "kv_lora_rank": mla.latent_rank,
        "q_lora_rank": mla.query_rank or None,
        "qk_rope_head_dim": mla.shared_key_width,
        "qk_nope_head_dim": c.head_dim - mla.shared_key_width,
        "v_head_dim": c.head_dim - mla.shared_key_width,
        "layer_types": [FULL if mixer == "mla" else LINEAR for mixer in c.mixers],
        "mlp_layer_types": mlps,
        "linear_attn_config": {
            "head_dim": c.linear_key_head_dim,
            "num_heads": c.linear_num_key_heads,
            "short_conv_kernel_size": c.linear_conv_kernel_dim,
            "full_attn_layers": [i for i, mixer in enumerate(c.mixers, 1) if mixer == "mla"],
            "kda_layers": [i for i, mixer in enumerate(c.mixers, 1) if mixer == "kda"],
        },
        **(
            {"first_k_dense_replace": first, "moe_layer_freq": 1}
            if "dense" not in mlps[first:]
            else {}
        ),
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "use_grouped_topk": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def check(config: ModelConfig) -> None:
    """Raises UserError where no Kimi Linear is such a model."""
    c = config
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
    require(
        "mla" in c.mixers
        and c.settings_of("mla").latent_norm_eps == LATENT_NORM_EPS
        and c.settings_of("mla").shared_key_width > 0,
        "model.mixer: kimi_linear "
        f"has layers of mla, latent_norm_eps = {LATENT_NORM_EPS} and a shared_key_width above 0: "
        "expected these, or another form",
    )
    for name, value in expected.items():
        require(
            getattr(c, name) == value,
            f"model.{name} = {getattr(c, name)!r}: kimi_linear has no such models: expected "
            f"{value!r}, or another form",
        )
    sizes = MoEConfig(
        n_group=c.moe.n_group,
        topk_group=c.moe.topk_group,
        routed_scaling_factor=c.moe.routed_scaling_factor,
        scoring_func="sigmoid",
        router_bias=True,
        shared_expert_gate=False,
    )
    shared = c.shared_expert_intermediate_size
    require(
        not c.has_experts
        or c.moe == sizes
        and shared > 0
        and shared % c.moe_intermediate_size == 0,
        "model.moe: kimi_linear has scoring_func = 'sigmoid', router_bias = True, "
        "shared_expert_gate = False, and a shared expert of a "
        "multiple of moe_intermediate_size: expected these, or another form",
    )
