"""The model against what transformers' own Qwen3-Next, Qwen3.5, Kimi Linear, Qwen3.8-Flash-Next and
Olmo Hybrid compute from the same weights (tests/fixtures).
"""

import functools

import pytest

from benchmarks.interop.parity import measure

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
    "qwen3_5_wrapper_tiny": _DENSE,
    "qwen3_5_moe_tiny": _MIXTURE,
    "qwen3_5_moe_wrapper_fused_mtp_tiny": _MIXTURE,
    "qwen4_exp_text_tiny": _MIXTURE | {"gradients": 133, "choices": 2},
    "qwen4_exp_wrapper_tiny": _MIXTURE | {"gradients": 133, "choices": 2},
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
# The third computes with the experts of qwen3_next_tiny and the mixers of qwen3_5_tiny; how its
# names are read is in test_interop.py.
SLOW = (
    "qwen3_5_tiny",
    "qwen3_5_wrapper_tiny",
    "qwen3_5_moe_wrapper_fused_mtp_tiny",
    "qwen3_5_moe_tiny",
    "kimi_linear_tiny",
    "qwen4_exp_text_tiny",
    "qwen4_exp_wrapper_tiny",
)
measured = functools.cache(measure)


@pytest.mark.parametrize(
    ("reference", "group"),
    [
        pytest.param(reference, group, marks=[pytest.mark.slow] * (reference in SLOW))
        for reference, groups in GROUPS.items()
        for group in groups
    ],
)
def test_agrees_with_transformers(reference, group):
    of_group = [row for row in measured(reference) if row.group == group]
    assert len(of_group) == GROUPS[reference][group]
    assert [row for row in of_group if not row.passes] == []
