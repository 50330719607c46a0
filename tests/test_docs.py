"""The README and the docs: their links lead somewhere, and their commands are right.
`documented_commands` says how a command is checked.
"""

import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys

import pytest
import yaml
from documented_commands import check, commands_of, mistakes, pages

from qwen3next_jax.__main__ import VERBS
from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.common.events import iterate_events

ROOT = pathlib.Path(__file__).parents[1]
PLUGINS = [ROOT / "qwen3next_jax" / name for name in ("kernels", "zoo")]
MISSING = [folder for folder in PLUGINS if not folder.exists()]  # folders that may be deleted
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def _anchors(page: pathlib.Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not any(target.is_relative_to(folder) for folder in MISSING):
            assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page):
    """Verbs, configs and scripts in commands of a page."""
    text = page.read_text()
    for verb in re.findall(r"(?:^|`|uv run |--extra \w+ )qwen3next ([a-z]+)", text, re.MULTILINE):
        assert verb in VERBS, verb
    files = r"(?:--config=|sweep |python )((?:configs|benchmarks|examples)/[\w/]+\.py)\b"
    for file in re.findall(files, text):
        assert (ROOT / file).exists(), file


@pytest.mark.skipif(bool(MISSING), reason="commands name parts of folders that were deleted")
def test_commands_parse():
    """Every command is understood by its own flags and config, or says what it needs."""
    number, found = check(pages())
    assert number > 50
    assert found == []


@pytest.mark.parametrize(
    "block, mistake",
    [
        ("uv run train.py --config=configs/tiny.py --config.train.stepz=3", "stepz"),
        ("uv run train.py --config=configs/tiny.py --config.train.steps=x", "whole number"),
        ("uv run train.py --config=configs/tiny.py \\\n    --config.mixer.window=8", "mixer"),
        ("uv run train.py --config=configs/tiny.py --config.model.mixer.window=8", "window"),
        ("uv run train.py --config=configs/tinny.py", "tinny"),
        ("uv run --extra gpus eval.py --workdir=runs/tiny", "gpus"),
        ("ls runs && qwen3next eval --workdir=runs/a --suites=mqar  # needs a run", "suites"),
        ("qwen3next evaluate --workdir=runs/a", "no such verb"),
        ("python benchmarks/model/mixers.py --lairs", "lairs"),
        ("python -m tests.fault --record", "no such file"),
        ("sbatch deploy/slurm.sh", "what it needs"),
    ],
)
def test_a_wrong_command_is_found(block, mistake):
    found = mistakes(list(commands_of(f"```bash\n{block}\n```\n", "page.md")))
    assert len(found) == 1, found
    assert mistake in found[0], found


def test_the_page_of_metrics_has_every_field():
    """By the recorded run in docs/pictures/tiny."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    named = set(re.findall(r"`([\w/]+)`", page))
    for event in iterate_events(ROOT / "docs" / "pictures" / "tiny" / "metrics.jsonl"):
        fields = {re.sub(r"/\d+$", "/d", name) for name in event[1]}
        assert {event[1]["event"], *fields} <= named, {event[1]["event"], *fields} - named


def test_the_page_of_exit_codes_has_every_code():
    page = (ROOT / "docs" / "reference" / "exit_codes.md").read_text()
    codes = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    assert set(map(int, codes)) == {*ExitCode, 128 + signal.SIGABRT}


def test_every_page_is_in_the_menu():
    """The notes are added to it when the site is built."""
    menu = set(
        re.findall(r"[\w/]+\.md", str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    )
    found = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert menu == {page for page in found if not page.startswith("notes/")}


@pytest.mark.skipif(bool(MISSING), reason="they describe parts of folders that were deleted")
def test_the_reference_pages_say_what_the_code_says():
    reference = runpy.run_path(str(ROOT / "docs" / "_site" / "reference.py"))
    for name, text in reference["pages"]().items():
        current = (ROOT / "docs" / "reference" / name).read_text()
        assert current == text, f"{name}: python docs/_site/reference.py writes it anew"


def test_pages_are_plain_markdown():
    """They hold nothing that only the program that makes the site understands."""
    special = re.compile(r"^(:::|\?\?\?|!!!) ", re.MULTILINE)
    assert [page.name for page in PAGES if special.search(page.read_text())] == []


@pytest.mark.slow
def test_the_first_commands_run(tmp_path):
    """The commands of README.md and docs/start.md that need nothing but the project and the run
    that they make, in their order, with three steps instead of the config's.
    """
    commands: list[list[str]] = []
    for page in (ROOT / "README.md", ROOT / "docs" / "start.md"):
        for code, name in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", page.read_text(), re.S):
            (tmp_path / name).write_text(code)
        for command in commands_of(page.read_text(), page.name):
            words = [word for word in command.words if word not in ("uv", "run")]
            text = " ".join(words)
            of_tiny = re.search(r"configs/tiny\.py|runs/(tiny|half_attention)", text)
            has_all = "--extra" not in words and "--config.data.path=" not in text
            if of_tiny and has_all and words not in commands:
                commands.append(words)
    assert len(commands) >= 5
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # most of the time goes into compiling
    }
    for command in commands:
        if command[0] in ("train.py", "eval.py"):
            command = ["qwen3next", command[0].removesuffix(".py"), *command[1:]]
        words = [word.replace("/tmp/", f"{tmp_path}/") for word in command[1:]]
        if words[0] == "train":
            words = [word.replace("configs/", f"{ROOT}/configs/") for word in words]
            words += ["--config.train.steps=3", "--config.eval.every=3"]
        done = subprocess.run(
            [sys.executable, "-m", "qwen3next_jax", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
