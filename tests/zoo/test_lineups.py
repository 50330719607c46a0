"""The line-ups of published models: as many parameters as published, less what the file says is
not here.
"""

import pytest

from benchmarks.model.lineups import NAMES, counted

QUICK = ("gemma3_1b", "gpt_oss_20b", "nemotron3_nano", "olmo2_7b")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_parameters_are_the_published_ones(name):
    here, _, published, lacks = counted(name)
    assert here + sum(lacks.values()) == published
