"""The pictures in docs/pictures are what benchmarks/reporting/pictures.py draws of the records in
docs/, and docs/results.md is what benchmarks/reporting/results.py writes of them.
"""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks.reporting import results
from benchmarks.reporting.pictures import DOCS, draw_pictures
from tests.refusals import refused


@pytest.fixture(scope="module")
def drawn():
    return draw_pictures()


def test_the_pictures_are_current(drawn):
    """Otherwise run `python benchmarks/reporting/pictures.py`."""
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


def test_the_results_are_current():
    """Otherwise run `python benchmarks/reporting/results.py`."""
    assert (DOCS / "results.md").read_text() == results.page()
    for name in results.recorded():
        record = results.read(name)
        assert all(len(row) == len(record["columns"]) for row in record.get("rows", ())), name


def test_a_printed_table_becomes_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    printed = "warming up\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    results.store("muon", printed, "python x.py", results.this_machine())
    record = results.read("muon")
    assert (record["columns"], record["rows"]) == (["a", "b"], [["1", "2"]])
    assert "| 1 | 2 |" in results.section(record)
    with refused("table", error=ValueError):
        results.store("muon", "nothing\n", "python x.py", "")
    (tmp_path / "results" / "unknown.json").write_text("{}")
    with refused("unknown", error=ValueError):
        results.page()


def _text(svg: str) -> list[str]:
    return "".join(re.findall(r">([^<>]+)</text>", svg)).split()
