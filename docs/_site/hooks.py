"""Pages of the site that are made from the code when it is built (settings, commands), the list
of notes, and links. `mkdocs.yml` names this file.
"""

import ast
import html
import importlib.util
import os
import pathlib
import re
from collections.abc import Iterator, Mapping

from mkdocs.structure.files import File

from qwen3next_jax.__main__ import VERBS
from qwen3next_jax.config import Config
from qwen3next_jax.config.describe import list_settings


def on_config(config):
    """Lists the notes in the navigation, by date, the newest first."""
    notes = sorted((pathlib.Path(config["docs_dir"]) / "notes").glob("*.md"))
    by_date: dict[str, list[dict[str, str]]] = {}
    for note in notes:
        heading = note.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        title = re.sub(r", \d+ \w+ \d{4}$", "", heading)  # the date is above it
        by_date.setdefault(note.name[:10], []).append({title: f"notes/{note.name}"})
    listed = [{date: by_date[date]} for date in sorted(by_date, reverse=True)]
    config["nav"].append({"Notes": listed})
    return config


def on_files(files, config):
    """Adds the generated pages and the style sheet."""
    for name, text in {
        "reference/settings.md": _settings(),
        "reference/commands.md": _commands(),
    }.items():
        files.append(File.generated(config, name, content=text))
    style = pathlib.Path(__file__).with_name("site.css").read_text(encoding="utf-8")
    files.append(File.generated(config, "site.css", content=style))
    return files


def on_page_markdown(markdown, page, config, files):
    """Keeps the text alone of links to files outside of the site, such as those of the code."""
    folder = pathlib.PurePosixPath(page.file.src_uri).parent

    def without_link(match):
        path = os.path.normpath(folder / match[2].partition("#")[0])
        return match[1] if path.startswith("..") else match[0]

    return re.sub(r"\[([^\]\n]+)\]\((?![a-z]+:)([^)\s]+)\)", without_link, markdown)


def _settings() -> str:
    lines = [
        "# Settings",
        "",
        "A config file sets them, and `--config.GROUP.NAME=VALUE` overrides one. The settings of "
        "single mixers are in [the table of mixers](../mixers.md).",
    ]
    group = None
    for name, default, allowed, meaning in list_settings(Config):
        if name.rpartition(".")[0] != group:
            group = name.rpartition(".")[0]
            lines += [
                "",
                f"## {group or 'general'}",
                "",
                "| setting | default | values | meaning |",
            ]
            lines += ["|---|---|---|---|"]
        lines.append(f"| `{name}` | `{default!r}` | {_cell(allowed)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def _commands() -> str:
    lines = [
        "# Commands",
        "",
        "`qwen3next VERB`; `train.py` and `eval.py` are `qwen3next train` and `qwen3next eval`. "
        "Commands with `--config` also take every [setting](settings.md), as "
        "`--config.GROUP.NAME=VALUE`. `--trust=PACKAGE` lets a command run parts of your own that "
        "a run names ([extending](../extending.md)).",
        "",
    ]
    shared = {}
    for module in ("commands.cli", "processes.supervisor"):
        for node in _parsed(module).body:
            if isinstance(node, ast.FunctionDef):
                shared[node.name] = node
    for verb, meaning in VERBS.items():
        tree = _parsed(f"commands.{verb}")
        lines += [f"## {verb}", "", f"To {meaning}.", "", "```text", ast.get_docstring(tree), "```"]
        lines += ["", "| flag | meaning |", "|---|---|"]
        for name, text in sorted(_flags_of(tree, shared)):
            lines.append(f"| `--{name}` | {_cell(text)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Returns a plain text as the cell of a table, with links to the pages that it names."""
    text = html.escape(text, quote=False)
    text = re.sub(r"([|*])", r"\\\1", text)
    return re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", text)


def _parsed(module: str) -> ast.Module:
    source = importlib.util.find_spec(f"qwen3next_jax.{module}").origin
    return ast.parse(pathlib.Path(source).read_text(encoding="utf-8"))


def _flags_of(tree: ast.AST, shared: Mapping[str, ast.AST]) -> Iterator[tuple[str, str]]:
    """Yields (name, meaning) of the flags that a module defines, itself or by a function of
    `shared`.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func).rpartition(".")[2]
        if function.startswith("DEFINE_"):
            texts = [
                (part.lineno, part.col_offset, part.value)
                for argument in node.args[2:]  # after the name and the default
                for part in ast.walk(argument)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            name = ast.literal_eval(node.args[0])
            meaning = next(text for *_, text in sorted(texts) if " " in text.strip())
            yield name, meaning.strip(" :")
        elif function.startswith("define_") and function in shared:
            yield from _flags_of(shared[function], shared)
