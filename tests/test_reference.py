"""The model against what transformers' own Qwen3-Next computes from the same weights (tests/fixtures/qwen3_next_tiny)."""

import pytest

from benchmarks.parity import measure

# group → how many quantities of it the reference holds
GROUPS = {"logits": 1, "MTP logits": 1, "losses": 2, "hidden states": 5, "router logits": 4, "gradients": 66, "greedy": 1,
          "export": 1}


@pytest.fixture(scope="module")
def rows():
    return measure()


@pytest.mark.parametrize("group", GROUPS)
def test_agrees_with_transformers(rows, group):
    of_group = [row for row in rows if row.group == group]
    assert len(of_group) == GROUPS[group]
    assert [row for row in of_group if not row.passes] == []
