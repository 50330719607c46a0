"""The line-ups of published models: as many parameters as published, less what the file says is
not here.
"""

import pytest

from benchmarks.model.lineups import NAMES, counted


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_published_ones(name):
    here, _, published, lacks = counted(name)
    assert here + sum(lacks.values()) == published
