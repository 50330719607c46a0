"""Writes the pages of docs/reference that are made from the code: the settings, the commands and
the Python functions.

    python docs/_site/reference.py

The pages are files of the repository, so that they can be read where it is browsed. A test says
when they no longer say what the code says.
"""

import ast
import html
import importlib.util
import inspect
import pathlib
import re
from collections.abc import Iterator, Mapping

from qwen3next_jax.__main__ import VERBS
from qwen3next_jax.config import Config
from qwen3next_jax.config.describe import list_settings

FOLDER = pathlib.Path(__file__).parents[1] / "reference"
# module → its public functions and classes, in the order of the page
PUBLIC = {
    "commands.python": ("load_config", "train", "evaluate", "generate", "plan", "Run"),
    "interop.huggingface": ("load_hf", "save_hf", "hf_tensors"),
    "model.language_model": ("Qwen3Next",),
    "ops.delta_rule.api": ("gated_delta_rule",),
}
WIDTH = 90  # the longest signature in one line, in characters


def pages() -> dict[str, str]:
    """Returns the name of each page in docs/reference → its text."""
    return {"settings.md": settings(), "commands.md": commands(), "python.md": python()}


def settings() -> str:
    lines = [
        "# Settings",
        "",
        "A config file sets them, and `--config.GROUP.NAME=VALUE` overrides one. `train.py --help "
        "WORD` lists those that have a word in their name or meaning. The settings of single "
        "mixers are in [the table of mixers](../mixers.md).",
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
                "|---|---|---|---|",
            ]
        lines.append(f"| `{name}` | `{default!r}` | {_cell(allowed)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def commands() -> str:
    lines = [
        "# Commands",
        "",
        "`qwen3next VERB`; `train.py` and `eval.py` are `qwen3next train` and `qwen3next eval`. "
        "Commands with `--config` also take every [setting](settings.md), as "
        "`--config.GROUP.NAME=VALUE`. `--trust=PACKAGE` lets a command run parts of your own that "
        "a run names ([extending](../extending.md)).",
    ]
    shared = {}
    for module in ("commands.config_flags", "commands.run_flags", "processes.supervisor"):
        for node in _parsed(module).body:
            if isinstance(node, ast.FunctionDef):
                shared[node.name] = node
    for verb, meaning in VERBS.items():
        tree = _parsed(f"commands.{verb}")
        lines += ["", f"## {verb}", "", f"To {meaning}.", ""]
        lines += ["```text", ast.get_docstring(tree), "```"]
        lines += ["", "| flag | meaning |", "|---|---|"]
        for name, text in sorted(_flags_of(tree, shared)):
            lines.append(f"| `--{name}` | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def python() -> str:
    lines = [
        "# Python",
        "",
        "The functions do what the commands do. A mistake raises `UserError`.",
    ]
    for module, names in PUBLIC.items():
        found = {node.name: node for node in _parsed(module).body if hasattr(node, "name")}
        path = f"qwen3next_jax/{module.replace('.', '/')}.py"
        for name in names:
            node = found[name]
            lines += ["", f"## {name}", "", f"In [`{path}`](../../{path}).", ""]
            if isinstance(node, ast.FunctionDef):
                lines += _block(node)
                continue
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            start = next((part for part in methods if part.name == "__init__"), None)
            lines += _block(node, start)
            for method in methods:
                if not method.name.startswith("_"):
                    lines += ["", f"### {name}.{method.name}", "", *_block(method)]
    return "\n".join(lines) + "\n"


def _block(node: ast.FunctionDef | ast.ClassDef, start: ast.FunctionDef | None = None) -> list[str]:
    """Returns the lines of a signature and a docstring. A class has the signature of `start`, its
    `__init__`.
    """
    function = start or node
    if isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator) == "property" for decorator in node.decorator_list
    ):
        signature = f"{node.name}: {ast.unparse(node.returns)}"
    else:
        arguments = _arguments(function.args)
        returns = (
            f" -> {ast.unparse(function.returns)}" if node is function and function.returns else ""
        )
        signature = f"{node.name}({', '.join(arguments)}){returns}"
        if len(signature) > WIDTH:
            inner = "".join(f"    {argument},\n" for argument in arguments)
            signature = f"{node.name}(\n{inner}){returns}"
    docstring = inspect.cleandoc(ast.get_docstring(node) or "")
    return ["```python", signature, "```", "", "```text", docstring, "```"]


def _arguments(arguments: ast.arguments) -> list[str]:
    """Returns the arguments of a function without `self`, each as it stands in the code."""
    texts = []
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(plain, defaults, strict=True):
        texts.append(_argument(argument, default))
    if arguments.vararg or arguments.kwonlyargs:
        texts.append(f"*{ast.unparse(arguments.vararg) if arguments.vararg else ''}")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        texts.append(_argument(argument, default))
    if arguments.kwarg:
        texts.append(f"**{ast.unparse(arguments.kwarg)}")
    return [text for text in texts if text != "self"]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(argument)
    equals = " = " if argument.annotation else "="
    return f"{ast.unparse(argument)}{equals}{ast.unparse(default)}"


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


if __name__ == "__main__":
    for page_name, page_text in pages().items():
        (FOLDER / page_name).write_text(page_text, encoding="utf-8")
