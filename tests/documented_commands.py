"""Checks the commands that README.md and the docs show, without running them: a command of this
project is parsed by its own flags, and its config is loaded with the settings that it gives. Any
other command must be a common tool, or its block must say what it needs in a comment ("# needs a
TPU slice").

    python -m tests.documented_commands [PAGE …]    # exit code 1: there are mistakes

Placeholders stay as they are (PATH, DIR, …): no file that a command names has to exist, except this
project's own.
"""

import contextlib
import importlib
import pathlib
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

from absl import flags

import qwen3next_jax
from qwen3next_jax.__main__ import VERBS
from qwen3next_jax.config.files import (
    apply_overrides,
    default_of_setting,
    find_user_or_shipped_file,
    load_config_file,
)
from qwen3next_jax.training import unused_settings

ROOT = pathlib.Path(__file__).parents[1]
# Programs that a reader has, or gets from a command on the same page.
TOOLS = {"pip", "uv", "ruff", "mkdocs", "printf", "cat", "xprof", "jupyter", "export"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS, GROUPS = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]


class Command(NamedTuple):
    """A command of a page.

    Attributes:
      page: the page, relative to the repository.
      words: the program and its arguments.
      needs: what the block says that the command needs, "" if it says nothing.
    """

    page: str
    words: list[str]
    needs: str


# ---- reading pages


def pages() -> list[pathlib.Path]:
    """Returns README.md, CONTRIBUTING.md and the pages of the site, without the notes."""
    docs = [p for p in sorted((ROOT / "docs").glob("**/*.md")) if p.parent.name != "notes"]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs]


def commands_of(text: str, page: str) -> Iterator[Command]:
    """Yields the commands in the shell blocks of a page: fenced as bash, or indented."""
    for block in re.findall(r"^```(?:bash|sh|shell|console)\b[^\n]*\n(.*?)^```", text, re.M | re.S):
        yield from _commands_of_block(block, page)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for block in re.findall(r"(?:^    .*\n)+", outside, re.M):
        lines = re.sub(r"^    ", "", block, flags=re.M)
        if re.match(r"(uv|qwen3next|python|pip|train\.py) ", lines):
            yield from _commands_of_block(lines, page)


def _commands_of_block(block: str, page: str) -> Iterator[Command]:
    needs = " ".join(re.findall(r"#\s*(needs\b.*)", block))
    block = re.sub(r"\\\n|\n(?=\s+(?:--|\[--))", " ", block)  # continued lines
    line = ""
    for part in block.splitlines():
        line += part + "\n"
        try:
            tokens = shlex.shlex(line, posix=True, punctuation_chars=True)
            tokens.whitespace_split = True
            tokens.commenters = ""
            words = list(tokens)
        except ValueError:  # a quotation goes on in the next line
            continue
        line = ""
        yield from (Command(page, words, needs) for words in _simple_commands(words))


def _simple_commands(words: list[str]) -> Iterator[list[str]]:
    """Splits a line of the shell into programs with their arguments."""
    command: list[str] = []
    for word in words:
        if word.startswith("#"):
            break
        if word in ("&&", "||", "|", ";", "&", "<", ">"):
            yield from [command] * (command != [])
            command = ["cat"] if word in ("<", ">") else []  # what follows is a file
        elif word != "…":
            command.append(re.sub(r"^\[(--.*)\]$", r"\1", word))
    yield from [command] * (command != [])


# ---- checking commands


def mistakes(commands: list[Command]) -> list[str]:
    """Returns a line for every command that does not exist as it is written."""
    verbs: dict[str, list[Command]] = {}
    found = []
    for command in commands:
        try:
            words = _after_uv(_without_environment(command.words))
            if words and words[0] == "python":
                words = words[1:]
            match words:
                case ["qwen3next", verb, *rest] | ["-m", "qwen3next_jax", verb, *rest]:
                    verbs.setdefault(verb, []).append(command._replace(words=rest))
                case ["train.py" | "eval.py" as script, *rest]:
                    verb = script.removesuffix(".py")
                    verbs.setdefault(verb, []).append(command._replace(words=rest))
                case ["-m", module, *rest]:
                    path = ROOT / module.replace(".", "/")
                    _check_script(path if path.is_dir() else path.with_suffix(".py"), rest)
                case ["pytest", *rest]:
                    for word in rest:
                        if word.startswith("tests") and not (ROOT / word.split("::")[0]).exists():
                            raise ValueError(f"{word}: no such file")
                case [script, *rest] if script.endswith(".py") and not script.startswith("my_"):
                    _check_script(ROOT / script, rest)
                case [program, *rest] if program in TOOLS:
                    for extras in re.findall(r"qwen3next-jax\[([\w,]+)\]", " ".join(rest)):
                        _check_names(extras.split(","), EXTRAS, "extra")
                case [program, *_] if not command.needs:
                    raise ValueError(
                        f"{program} is neither of this project nor a common tool: say in a comment "
                        "of the block what it needs (# needs a cluster)"
                    )
        except ValueError as error:
            found.append(f"{command.page}: {shlex.join(command.words)}: {error}")
    for verb, of_verb in verbs.items():
        found += _mistakes_of_verb(verb, of_verb)
    return found


def _without_environment(words: list[str]) -> list[str]:
    """Leaves out settings of variables at the start, NAME=VALUE."""
    first = next((i for i, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    return words[first:]


def _after_uv(words: list[str]) -> list[str]:
    """Returns the command that `uv run` runs. Its extras and groups must exist."""
    if words[:2] != ["uv", "run"]:
        return words
    words = words[2:]
    while words and words[0].startswith("-"):
        if words[0] in ("--extra", "--group"):
            _check_names([words[1]], EXTRAS if words[0] == "--extra" else GROUPS, words[0])
        words = words[1 if words[0] == "--isolated" else 2 :]
    return words


def _check_names(names: list[str], known: dict, what: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name}: pyproject.toml has none of this name")


def _check_script(path: pathlib.Path, arguments: list[str]) -> None:
    """Checks that a script exists, and that its source defines the flags."""
    if not path.exists():
        raise ValueError(f"{path.relative_to(ROOT)}: no such file")
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    source = "\n".join(file.read_text() for file in files)
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--")
        names = {name, name.removeprefix("no"), name.replace("-", "_")}
        if argument.startswith("--") and not any(
            f'"{prefix}{n}"' in source for n in names for prefix in ("", "--")
        ):
            raise ValueError(f"--{name}: {path.relative_to(ROOT)} has no such flag")


def _mistakes_of_verb(verb: str, commands: list[Command]) -> list[str]:
    """Parses commands of one verb by the flags of its module."""
    if verb not in VERBS:
        return [f"{command.page}: qwen3next {verb}: no such verb" for command in commands]
    found = []
    with _module_of_verb(verb) as (module, config_flags):
        for command in commands:
            for flag in flags.FLAGS:
                flags.FLAGS[flag].unparse()
            config_flags._overrides.clear()
            try:
                _check_verb(module, config_flags, command.words)
            except (ValueError, flags.Error) as error:
                words = shlex.join(command.words)
                found.append(f"{command.page}: qwen3next {verb} {words}: {error}")
    return found


@contextlib.contextmanager
def _module_of_verb(verb: str) -> Iterator[tuple[Any, Any]]:
    """Imports (the module of a verb, `config_flags`) anew, as long as the context lasts, with the
    flags of this verb alone: verbs define flags of the same names.
    """
    prefix = "qwen3next_jax.commands"
    modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(prefix)}
    ours = {}
    for name in list(flags.FLAGS):
        definer = flags.FLAGS.find_module_defining_flag(name)
        if not definer.startswith("absl."):
            ours[name] = definer, flags.FLAGS[name]
            delattr(flags.FLAGS, name)
    of_absl = set(flags.FLAGS)
    try:
        module = importlib.import_module(f"{prefix}.{verb}")
        flags.DEFINE_list("trust", [], "")
        yield module, importlib.import_module(f"{prefix}.config_flags")
    finally:
        for name in set(flags.FLAGS) - of_absl:
            delattr(flags.FLAGS, name)
        for name, (definer, flag) in ours.items():
            flags.FLAGS[name] = flag
            flags.FLAGS.register_flag_by_module(definer, flag)
        for name in [name for name in sys.modules if name.startswith(prefix)]:
            del sys.modules[name]
        sys.modules.update(modules)
        if prefix in modules:
            qwen3next_jax.commands = modules[prefix]


def _check_verb(module, config_flags, words: list[str]) -> None:
    words = ["--config=configs/tiny.py" if word == "--config=…" else word for word in words]
    others = flags.FLAGS(config_flags.split_off_overrides(["", *words]))[1:]
    others = [word for word in others if word != "…"]
    if others and not hasattr(module, "ARGUMENTS"):
        raise ValueError(f"{others[0]}: expected flags alone")
    for path in others:
        if path.startswith("configs/") and not (ROOT / path).is_file():
            raise ValueError(f"{path}: no such file")
    if module.__name__.endswith(".sweep"):
        for setting in module._parse_set_flags(flags.FLAGS["set"].value or []):
            default_of_setting(setting)
    file = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
    if file is None and config_flags._overrides:
        raise ValueError("settings without a config")
    if file is not None:
        config_flags._file_values.clear()
        config_flags._file_values.update(load_config_file(find_user_or_shipped_file(file)))
        values = load_config_file(find_user_or_shipped_file(file))
        apply_overrides(values, config_flags._overrides)
        for given in (values, config_flags._file_values):
            if not given["model"]["vocab_size"]:  # a tokenizer of the reader's
                given["model"]["vocab_size"] = 1000
        config = config_flags.config_from_settings(values)
        # A run that begins with another one has settings that only that other one explains.
        if module.__name__.endswith(".train") and not config.train.init_from:
            unused_settings.check_effect_and_targets(config, config_flags.settings_given_by_user())


def check(paths: list[pathlib.Path]) -> tuple[int, list[str]]:
    """Returns the number of commands on these pages, and a line for each mistake."""
    commands = []
    with tempfile.TemporaryDirectory() as folder:
        sys.path.append(folder)
        for path in paths:
            text = path.read_text()
            commands += commands_of(text, str(path.relative_to(ROOT)))
            # Files that the page shows, "# my_mixer.py", may be named in its commands.
            for code in re.findall(r"```python\n(# (?:\w+)\.py\n.*?)```", text, re.S):
                (pathlib.Path(folder) / code[2:].partition("\n")[0]).write_text(code)
        try:
            return len(commands), mistakes(commands)
        finally:
            sys.path.remove(folder)


def main(names: list[str]) -> int:
    number, found = check([ROOT / name for name in names] or pages())
    print("\n".join([*found, f"{number} commands, {len(found)} mistakes"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
