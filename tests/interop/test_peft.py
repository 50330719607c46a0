"""PEFT's files against the merged and the unmerged export: for every module of transformers the
difference of the two weights is what PEFT adds, alpha / r · B A.
"""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from qwen3next_jax.common.trees import map_leaves
from qwen3next_jax.config import LoRAConfig
from qwen3next_jax.config.block import BlockConfig
from qwen3next_jax.config.mixer import MixerConfig
from qwen3next_jax.interop.huggingface import hf_tensors
from qwen3next_jax.interop.peft import save_adapter
from qwen3next_jax.model.adapter_names import base_params, config_without_adapters, is_adapter
from qwen3next_jax.model.adapters import merge_adapters
from tests.models import HYBRID, drawn_model
from tests.refusals import refused

LORA = LoRAConfig(rank=2, alpha=3.0, targets=("kind=matrix name!=*/expert_*",))
MODEL = dataclasses.replace(HYBRID, linear_value_head_dim=4, lora=LORA)


def _exported(config, out):
    """Writes PEFT's files. Returns (the tensors without, and with the adapters)."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype),
        nnx.state(drawn_model(config), nnx.Param),
    )
    merged = nnx.to_pure_dict(merge_adapters(params, config.lora))
    params = jax.device_get(nnx.to_pure_dict(params))
    adapters = map_leaves(lambda path, leaf: leaf if is_adapter(path) else None, params)
    save_adapter(config, adapters, out, "base", "digest")
    plain = config_without_adapters(config)
    return hf_tensors(base_params(params), plain), hf_tensors(base_params(merged), plain)


def _umask():
    os.umask(mask := os.umask(0))
    return mask


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"hf_form": "qwen3_5_text"}, marks=pytest.mark.slow),
        {"lora": dataclasses.replace(LORA, targets=("kind=matrix part=v|gate",))},
        {
            "hf_form": "olmo_hybrid",
            "num_experts": 0,
            "attention_output_gate": False,
            "zero_centered_norm": False,
            "partial_rotary_factor": 0.0,
            "block": BlockConfig(placement="olmo_hybrid"),
            "mixer": MixerConfig(qk_norm_over="layer", output_norm_eps=1e-5),
        },
    ],
)
def test_peft_adds_what_merging_adds(changes, tmp_path):
    config = dataclasses.replace(MODEL, **changes)
    before, after = _exported(config, tmp_path / "adapter")
    pairs = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    modules = set()
    for name, base in before.items():
        module = name.removesuffix(".weight")
        key = f"base_model.model.{module}.lora"
        if f"{key}_A.weight" not in pairs:
            np.testing.assert_array_equal(after[name], base, err_msg=name)
            continue
        modules.add(module)
        a, b = pairs[f"{key}_A.weight"], pairs[f"{key}_B.weight"]
        assert fields["rank_pattern"][module] == len(a)
        scale = fields["alpha_pattern"][module] / len(a)
        np.testing.assert_allclose(after[name] - base, scale * b @ a, atol=1e-6, err_msg=name)
    assert modules == set(fields["target_modules"])
    assert len(pairs) == 2 * len(modules)
    (mode,) = {file.stat().st_mode for file in (tmp_path / "adapter").iterdir()}
    assert mode & 0o777 == 0o666 & ~_umask()


def test_a_link_to_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    save_adapter(MODEL, {}, tmp_path / "link", "base", "digest")
    names = {"adapter_model.safetensors", "adapter_config.json"}
    assert set(os.listdir(tmp_path / "disk")) == names


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": dataclasses.replace(LORA, targets=("kind=matrix",))},  # experts
        {"mtp_depth": 1},
        {"hf_form": "kimi_linear"},
        {"lora": LoRAConfig()},
    ],
)
def test_adapters_without_a_module_are_refused(changes, tmp_path):
    with refused():
        save_adapter(dataclasses.replace(MODEL, **changes), {}, tmp_path / "adapter", "", "")
