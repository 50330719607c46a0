"""Runs the slow tests and writes their table: `python -m tests.nightly`, in pieces if you like.

    python -m tests.nightly                          all of them, file by file
    python -m tests.nightly tests/zoo tests/runs     those of these files or folders
    python -m tests.nightly --shard=2/8              the second of eight parts of about equal time
    python -m tests.nightly --merge a.json b.json    puts the rows of other tables into this one

The table is docs/slow_tests.json, and docs/reference/slow_tests.md shows it. A run replaces the
rows of the tests that it finished and keeps the others, so pieces of several days and machines add
up to one table, in which each row has its commit. A file's rows are written when the file ends.

This file is also the pytest plugin that measures: seconds are those of a CPU (this process and the
ones it starts), because other work on a machine does not change them.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "docs" / "slow_tests.json"
PAGE = ROOT / "docs" / "reference" / "slow_tests.md"
BEGIN, END = "<!-- slow tests -->\n", "<!-- end of the slow tests -->"
ROWS = "NIGHTLY_ROWS"  # environment variable: the file to which the plugin appends rows
UNKNOWN_SECONDS = 20.0  # of a test that is not in the table yet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="*", default=["tests"], help="files or folders")
    parser.add_argument("--shard", default="1/1", help="which part of how many, such as 2/8")
    parser.add_argument("--merge", nargs="+", default=[], help="tables to put into this one")
    options = parser.parse_args()
    table = read(TABLE)
    if options.merge:
        for file in options.merge:
            table = merged(table, read(pathlib.Path(file)))
        write(without_gone(table, []))
        return
    tests = slow_tests(options.places)
    table = without_gone(table, tests)
    shard, shards = map(int, options.shard.split("/"))
    failed = []
    for file in parts(tests, table, shards)[shard - 1]:
        rows = run(file)
        table = merged(table, rows)
        write(table)
        failed += [case for row in rows.values() for case in row["failed"]]
        lost = [test for test in tests if test.startswith(f"{file}::") and test not in rows]
        failed += [f"{test}: did not end" for test in lost]
    if failed:
        raise SystemExit("\n".join(["", f"{len(failed)} failed:", *failed]))


# ---- which tests


def slow_tests(places: list[str]) -> list[str]:
    """Names of the slow tests in files or folders, such as "tests/test_docs.py::test_x"."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-o", "addopts="]
    done = subprocess.run(
        [*command, "-m", "slow", *places], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    cases = [line for line in done.stdout.splitlines() if line.startswith("tests/")]
    return list(dict.fromkeys(case.partition("[")[0] for case in cases))


def parts(tests: list[str], table: dict[str, dict], number: int) -> list[list[str]]:
    """The files of the tests in `number` parts, the longest file first, each to the part that has
    the fewest seconds so far.
    """
    seconds: dict[str, float] = collections.defaultdict(float)
    for test in tests:
        seconds[test.partition("::")[0]] += table.get(test, {"seconds": UNKNOWN_SECONDS})["seconds"]
    found: list[list[str]] = [[] for _ in range(number)]
    filled = [0.0] * number
    for file in sorted(seconds, key=lambda file: (-seconds[file], file)):
        least = filled.index(min(filled))
        found[least].append(file)
        filled[least] += seconds[file]
    return found


# ---- one file


def run(file: str) -> dict[str, dict]:
    """Runs the slow tests of a file in a process; returns the rows of those that ended."""
    with tempfile.TemporaryDirectory() as folder:
        rows = pathlib.Path(folder) / "rows.jsonl"
        python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-p", "tests.nightly", "-m", "slow", file]
        environment = os.environ | {ROWS: str(rows), "PYTHONPATH": python_path}
        subprocess.run(command, cwd=ROOT, env=environment)
        lines = rows.read_text().splitlines() if rows.exists() else []
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    made = {"commit": commit(), "date": date}
    return {row["test"]: row | made for row in map(json.loads, lines)}


def commit() -> str:
    """The commit of this checkout; with a "+" where code was changed after it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.check_output([*git, "rev-parse", "--short=8", "HEAD"], text=True).strip()
    changed = subprocess.check_output(
        [*git, "status", "--porcelain", "--", "*.py", "tests", "qwen3next_jax"], text=True
    )
    return name + "+" * bool(changed.strip())


class Measured:
    """The part of a pytest run that writes one row a test, when the last of its cases ended."""

    def __init__(self, file: pathlib.Path):
        self.file = file
        self.left: dict[str, int] = {}  # test → cases that have not ended
        self.rows: dict[str, dict] = {}

    def pytest_collection_finish(self, session):
        for item in session.items:
            test = item.nodeid.partition("[")[0]
            self.left[test] = self.left.get(test, 0) + 1
            self.rows[test] = {
                "test": test,
                "seconds": 0.0,
                "passed": 0,
                "skipped": 0,
                "failed": [],
            }

    def pytest_runtest_protocol(self, item, nextitem):
        from _pytest.runner import runtestprotocol

        begun = sum(os.times()[:4])
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        test = item.nodeid.partition("[")[0]
        row = self.rows[test]
        row["seconds"] = round(row["seconds"] + sum(os.times()[:4]) - begun, 1)
        outcomes = {report.outcome for report in reports}
        if "failed" in outcomes:
            row["failed"].append(item.nodeid)
        else:
            row["skipped" if "skipped" in outcomes else "passed"] += 1
        self.left[test] -= 1
        if not self.left[test]:
            with self.file.open("a") as out:
                out.write(json.dumps(row) + "\n")
        return True


def pytest_configure(config):
    if ROWS in os.environ:
        # The processes that tests start measure nothing.
        config.pluginmanager.register(Measured(pathlib.Path(os.environ.pop(ROWS))))


# ---- the table


def read(file: pathlib.Path) -> dict[str, dict]:
    """Test → its row."""
    rows = json.loads(file.read_text()) if file.exists() else []
    return {row["test"]: row for row in rows}


def merged(one: dict[str, dict], other: dict[str, dict]) -> dict[str, dict]:
    """The rows of both; of two of the same test, the later one."""
    rows = dict(one)
    for test, row in other.items():
        if test not in rows or row["date"] >= rows[test]["date"]:
            rows[test] = row
    return rows


def without_gone(table: dict[str, dict], tests: list[str]) -> dict[str, dict]:
    """The table without tests that are gone or no longer slow. A file that has slow tests, of which
    none is collected here, for want of a package or because tables are merged, keeps the rows of
    the tests that are in it.
    """
    files = {test.partition("::")[0] for test in tests}

    def stays(test: str) -> bool:
        place, _, name = test.partition("::")
        if place in files:
            return test in tests
        text = (ROOT / place).read_text() if (ROOT / place).exists() else ""
        return "mark.slow" in text and f"def {name}(" in text

    return {test: row for test, row in table.items() if stays(test)}


def write(table: dict[str, dict]) -> None:
    """Writes the table, and its page."""
    rows = [table[test] for test in sorted(table)]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    TABLE.write_text(f"[\n{lines}\n]\n")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + page_of(rows) + "\n" + END + rest.split(END)[1])


def page_of(rows: list[dict]) -> str:
    """The table as Markdown, a section a file."""
    cases = sum(row["passed"] + row["skipped"] + len(row["failed"]) for row in rows)
    failed = sum(len(row["failed"]) for row in rows)
    skipped = sum(row["skipped"] for row in rows)
    minutes = sum(row["seconds"] for row in rows) / 60
    text = (
        f"{len(rows)} tests with {cases} cases took {minutes:.0f} minutes of one core: "
        f"{failed} cases failed, {skipped} were skipped.\n"
    )
    files = dict.fromkeys(row["test"].partition("::")[0] for row in rows)
    for file in files:
        text += f"\n## {file.removeprefix('tests/')}\n\n"
        text += "| test | seconds | passed | commit |\n|---|---:|---|---|\n"
        for row in rows:
            if row["test"].startswith(f"{file}::"):
                name = row["test"].partition("::")[2].removeprefix("test_").replace("_", " ")
                text += f"| {name} | {row['seconds']:.0f} | {_passed(row)} | {row['commit']} |\n"
    return text


def _passed(row: dict) -> str:
    number = row["passed"] + row["skipped"] + len(row["failed"])
    text = "yes" if row["passed"] == number else f"{row['passed']} of {number}"
    return text + (f", {row['skipped']} skipped" if row["skipped"] else "")


if __name__ == "__main__":
    main()
