"""FLOPs and parameter counts against the model's own parameter shapes; the chip table."""

import dataclasses
import math

import jax
import pytest
from flax import nnx

from qwen3next_jax import ModelConfig, Qwen3Next
from qwen3next_jax.model.flops import flops_per_token, forward_flops_per_token, parameter_counts
from qwen3next_jax.sharding.chips import CHIPS, find_chip
from tests.models import UNEVEN

SIX_LAYERS = dataclasses.replace(UNEVEN, num_hidden_layers=6, full_attention_interval=3)
MODELS = {
    "released": ModelConfig(),
    "dense": dataclasses.replace(
        SIX_LAYERS, num_experts=0, num_experts_per_tok=0, tie_word_embeddings=True
    ),
    "mixed": dataclasses.replace(
        SIX_LAYERS, mlp_only_layers=(1, 4), mtp_depth=0, shared_expert_intermediate_size=0
    ),
    "no attention": dataclasses.replace(SIX_LAYERS, full_attention_interval=0, mtp_depth=1),
}


def leaves(config):
    """(path as text, shape) of every parameter."""
    params = nnx.to_pure_dict(
        nnx.state(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))), nnx.Param)
    )
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_parameter_counts_are_the_model_s(config):
    sizes = {path: math.prod(shape) for path, shape in leaves(config)}
    counts = parameter_counts(config)
    assert counts.total == sum(sizes.values())
    assert counts.mtp == sum(size for path, size in sizes.items() if path.startswith("mtp"))
    assert counts.embeddings == sizes["embedding"] + sizes.get("head", 0)


def test_released_model():
    counts = parameter_counts(ModelConfig())
    assert counts.total == 81_324_862_720
    assert counts.mtp == 1_650_471_424
    assert counts.active == pytest.approx(3.25e9, rel=0.01)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_forward_flops_are_weights_and_mixers(config):
    c, t = config, 64
    expected = 0.0
    for path, shape in leaves(c):
        name, repeats = path.rpartition("/")[2], c.mtp_depth if path.startswith("mtp") else 1
        if name in ("embedding", "conv_kernel", "a_log", "dt_bias", "norm") or "norm" in name:
            continue
        size = math.prod(shape)
        routed = name in ("expert_gate_up", "expert_down")
        expected += 2 * repeats * size * (c.num_experts_per_tok / c.num_experts if routed else 1)
    expected += 2 * c.hidden_size * c.vocab_size * (c.mtp_depth + c.tie_word_embeddings)
    full = c.resolved_layer_types.count("full_attention") + c.mtp_depth
    keys = sum(range(1, t + 1)) / t  # of a query, on average
    expected += full * c.num_attention_heads * c.head_dim * keys * 2 * 2
    erase_write_read = 3 * 2 * c.linear_key_head_dim * c.linear_value_head_dim
    expected += (
        c.resolved_layer_types.count("linear_attention")
        * c.linear_num_value_heads
        * erase_write_read
    )
    assert sum(forward_flops_per_token(c, t).values()) == pytest.approx(expected, rel=1e-12)
    assert flops_per_token(c, t) == pytest.approx(3 * expected, rel=1e-12)


@pytest.mark.parametrize(
    "kind, name",
    [("TPU v5", "v5p"), ("TPU v5 lite", "v5e"), ("NVIDIA H200", "H200")],
)
def test_a_chip_is_found_by_its_kind(kind, name):
    assert find_chip(kind).name == name


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe"])
def test_an_unknown_kind_has_no_chip(kind):
    assert find_chip(kind) is None


def test_half_a_chip_has_half_its_flops():
    assert find_chip("TPU7x").device_flops == CHIPS["tpu7x"].bf16_flops / 2


def test_no_kind_has_two_chips():
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(set(kinds)) == len(kinds)
