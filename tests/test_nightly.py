"""Every slow test is run by night, and the table keeps what each piece of a night found."""

import ast
import json
import pathlib
import re

import pytest
import yaml

from tests import nightly

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def slow_files():
    """The files that mark a test as slow, by their text."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if any(
            isinstance(node, ast.Attribute) and node.attr == "slow" and node.value.attr == "mark"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(getattr(node, "value", None), ast.Attribute)
        )
    }


@pytest.mark.slow
def test_every_slow_file_is_collected(slow_files):
    collected = {test.partition("::")[0] for test in nightly.slow_tests(["tests"])}
    assert slow_files - collected <= {"tests/data/test_datatrove.py"}  # needs the extra prepare


def test_shards_of_a_night_have_all_slow_files(slow_files):
    jobs = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]["slow"]
    shards = jobs["strategy"]["matrix"]["shard"]
    (command,) = (step["run"] for step in jobs["steps"] if "run" in step)
    number = int(re.fullmatch(r"\.ci/nightly --shard=\$\{\{ matrix\.shard \}\}/(\d+)", command)[1])
    assert shards == list(range(1, number + 1))
    tests = [f"{file}::test" for file in slow_files]
    assert sorted(file for part in nightly.parts(tests, {}, number) for file in part) == sorted(
        slow_files
    )


def test_faults_of_a_night_have_all_rows():
    jobs = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]["faults"]
    rows = [int(row) for part in jobs["strategy"]["matrix"]["rows"] for row in part.split(",")]
    table = json.loads((ROOT / "docs" / "fault_table.json").read_text())
    assert sorted(rows) == sorted({record["row"] for record in table})


def row(test, date, **changes):
    plain = {"seconds": 1.0, "passed": 1, "skipped": 0, "failed": [], "commit": "a"}
    return {test: {"test": test, "date": date, **plain} | changes}


def test_later_rows_replace_earlier_ones():
    old, new = row("t", "2026-01-01 10:00"), row("t", "2026-01-02 10:00", commit="b")
    assert nightly.merged(old, new) == nightly.merged(new, old) == new


def test_rows_of_removed_tests_go():
    here = "tests/test_nightly.py"
    table = row(f"{here}::gone", "1") | row(f"{here}::there", "1") | row("tests/no.py::x", "1")
    other = row("tests/test_docs.py::test_the_first_commands_run", "1")
    gone = row("tests/test_docs.py::gone", "1")  # of a file of which no test is collected
    assert nightly.without_gone(table | other | gone, [f"{here}::there"]) == (
        row(f"{here}::there", "1") | other
    )


def test_merged_tables_have_no_removed_test(tmp_path, monkeypatch):
    there, gone = (f"tests/test_docs.py::{name}" for name in ("test_the_first_commands_run", "x"))
    monkeypatch.setattr(nightly, "TABLE", tmp_path / "table.json")
    monkeypatch.setattr(nightly, "PAGE", tmp_path / "page.md")
    nightly.PAGE.write_text(nightly.BEGIN + nightly.END)
    nightly.TABLE.write_text(json.dumps([*row(there, "1").values(), *row(gone, "1").values()]))
    shard = tmp_path / "shard.json"
    shard.write_text(json.dumps([*row(there, "2").values()]))
    monkeypatch.setattr("sys.argv", ["nightly", "--merge", str(shard)])
    nightly.main()
    assert nightly.read(nightly.TABLE) == row(there, "2")


def test_a_file_gives_a_row_a_test(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.slow\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_half(n):\n    assert n == 1\n"
        "@pytest.mark.slow\n"
        "def test_not_here():\n    pytest.skip('no GPU')\n"
        "def test_quick():\n    pass\n"
    )
    rows = {
        test.partition("::")[2]: r for test, r in nightly.run(str(tmp_path / "test_it.py")).items()
    }
    counts = {test: (r["passed"], r["skipped"], len(r["failed"])) for test, r in rows.items()}
    assert counts == {"test_half": (1, 0, 1), "test_not_here": (0, 1, 0)}
