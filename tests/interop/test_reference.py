"""The model against what transformers' own Qwen3-Next, Qwen3.5, Kimi Linear, Qwen3.8-Flash-Next and
Olmo Hybrid compute from the same weights (tests/fixtures).
"""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.interop.parity import measure, round_trip_differences
from qwen3next_jax import load_hf
from tests.references import WRAPPERS, checkpoint

# group → how many quantities of it the reference holds
_DENSE = {
    "logits": 1,
    "MTP logits": 1,
    "losses": 2,
    "hidden states": 5,
    "gradients": 71,
    "greedy": 1,
    "export": 1,
}
_MIXTURE = _DENSE | {"losses": 3, "router logits": 4, "gradients": 91}
GROUPS = {
    "qwen3_next_tiny": _MIXTURE | {"losses": 2, "gradients": 66},
    "qwen3_5_tiny": _DENSE | {"YaRN": 1},
    "qwen3_5_moe_tiny": _MIXTURE,
    "qwen4_exp_text_tiny": _MIXTURE | {"gradients": 133, "choices": 2},
    "kimi_linear_tiny": {
        "logits": 1,
        "losses": 1,
        "hidden states": 6,
        "router logits": 4,
        "gradients": 183,
        "greedy": 1,
        "export": 1,
    },
    "olmo_hybrid_tiny": {
        "logits": 1,
        "losses": 1,
        "hidden states": 5,
        "gradients": 68,
        "greedy": 1,
        "export": 1,
    },
}
# qwen3_5_moe_tiny computes with the experts of qwen3_next_tiny and the mixers of qwen3_5_tiny; how
# its names are read is in test_interop.py.
SLOW = ("qwen3_5_tiny", "qwen3_5_moe_tiny", "kimi_linear_tiny", "qwen4_exp_text_tiny")


@pytest.mark.parametrize(
    "reference",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in GROUPS],
)
def test_agrees_with_transformers(reference):
    rows = measure(reference)
    assert collections.Counter(row.group for row in rows) == GROUPS[reference]
    assert [row for row in rows if not row.passes] == []


@functools.cache
def model(name):
    return load_hf(checkpoint(name))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_is_its_text_model(wrapper):
    """So it computes what the text model computes, which the test above compares."""
    ours, text = model(wrapper), model(WRAPPERS[wrapper].text)
    form = {"hf_form": text.config.hf_form, "hf_fused_experts": text.config.hf_fused_experts}
    assert dataclasses.replace(ours.config, **form) == text.config
    bits = [nnx.state(model, nnx.Param) for model in (ours, text)]
    jax.tree.map(np.testing.assert_array_equal, *bits)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_is_exported_with_its_bits(wrapper):
    assert round_trip_differences(model(wrapper), checkpoint(wrapper)) == 0
