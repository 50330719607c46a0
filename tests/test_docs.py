"""The README and the docs: their links lead somewhere, and their commands exist."""

import pathlib
import re

import pytest

from qwen3next_jax.__main__ import VERBS

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
