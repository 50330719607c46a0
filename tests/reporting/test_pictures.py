"""The pictures in docs/pictures are what benchmarks/pictures.py draws of the records in docs/."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.pictures import DOCS, draw_pictures


@pytest.fixture(scope="module")
def drawn():
    return draw_pictures()


def test_the_pictures_are_current(drawn):
    """Otherwise run `python benchmarks/pictures.py`."""
    for name, svg in drawn.items():
        ElementTree.fromstring(svg)
        committed = (DOCS / "pictures" / name).read_text()
        if name == "terminal.svg":  # releases of rich draw the same text in other elements
            assert _text(committed) == _text(svg), name
        else:
            assert committed == svg, name
        assert len(svg) < 40_000, name


def test_the_pictures_load_nothing_and_every_colour_is_defined(drawn):
    for name, svg in drawn.items():
        assert not re.search(r"url\((?!#)|@import|href=\"(?!data:)", svg), name
        used, defined = (
            set(re.findall(pattern, svg)) for pattern in (r"var\((--[\w-]+)", r"(--[\w-]+):")
        )
        assert used <= defined, name


def _text(svg: str) -> list[str]:
    return "".join(re.findall(r">([^<>]+)</text>", svg)).split()
