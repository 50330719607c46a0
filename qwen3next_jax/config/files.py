"""Configuration files, which are Python, and the settings that a command line changes in them.
What a file does wrong is one line that names it and the line of it.
"""

import ast
import contextlib
import importlib.util
import pathlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import UserError, did_you_mean, require_path, short_repr
from qwen3next_jax.config import Config, default_config
from qwen3next_jax.config.mixer import is_mixer_setting
from qwen3next_jax.config.reading import FlagText, parse_flag


class UserInput(NamedTuple):
    """The settings that a user gave, before defaults complete them.

    Attributes:
      overrides: the dotted names of the settings on the command line.
      file: the path of the config file.
      file_config: the configuration of the file without the command line's overrides; None if
        the file is not valid without them.
    """

    overrides: frozenset[str]
    file: pathlib.Path
    file_config: Config | None


def call_file(path: pathlib.Path, function: str, flag: str = "") -> Any:
    """What `function()` of a Python file returns. `flag` ("--config=") is what the user wrote
    before the path.

    Raises:
      UserError: there is no such file or function, or whatever the file does wrong.
    """
    require_path(f"{flag}{path}", path)
    if not path.is_file():
        reason = (
            "a folder" if path.is_dir() else "no regular file" if path.exists() else "no such file"
        )
        raise UserError(
            f"{flag}{path}: "
            f"{reason}{did_you_mean(path.name, [f.name for f in path.parent.glob('*.py')])}"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None:
        raise UserError(f"{flag}{path}: expected a Python file, whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if callable(found := getattr(module, function, None)):
            return found()
    except SyntaxError as error:
        raise UserError(
            f"{flag}{error.filename or path}, line {error.lineno}: {error.msg}"
        ) from error
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(path)
        ]
        where = f", line {lines[-1]}" if lines else ""
        said = str(error)
        # a ConfigDict's AttributeError is the text of a KeyError: quoted, its lines and quotes
        # escaped
        if said.startswith(("'", '"')):
            with contextlib.suppress(ValueError, SyntaxError):
                said = str(ast.literal_eval(said))
        raise UserError(
            f"{flag}{path}{where}: {type(error).__name__}"
            + (f": {' '.join(said.split())}" if said else "")
        ) from error
    raise UserError(f"{flag}{path}: it has no function {function}()")


def load_config_file(path: pathlib.Path, flag: str = "--config=") -> dict[str, Any]:
    """The nested dict of settings that `get_config()` of a file returns.

    Raises:
      UserError: see `call_file`, or it returns something else.
    """
    config = call_file(path, "get_config", flag)
    if not hasattr(config, "to_dict"):
        what = "nothing (is a `return config` missing?)" if config is None else short_repr(config)
        raise UserError(
            f"{flag}{path}: get_config() returned {what}: expected the ConfigDict of a run, as in "
            "configs/tiny.py"
        )
    return config.to_dict()


def names_in_code(path: pathlib.Path) -> frozenset[str]:
    """The names that stand in the code of a Python file. A setting that is not among them is one
    that the file has from another file, or from the defaults.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.rpartition(".")[2])
    return frozenset(found)


def apply_overrides(values: dict[str, Any], overrides: Sequence[tuple[str, str]]) -> None:
    """Sets each (dotted name, text) of a command line in the nested dict `values`.

    Raises:
      UserError: a text that is not of the setting's type.
    """
    for name, text in overrides:
        default, group = default_of(name), values
        *groups, key = name.split(".")
        for part in groups:
            group = group.setdefault(part, {})
        group[key] = parse_flag(text, default, f"--config.{name}={text}")


def default_of(name: str) -> Any:
    """The default of the setting with a dotted name. Of a mixer's setting it is FlagText(""), as
    only the mixers of the model know its type.

    Raises:
      UserError: there is none, or it is a group of settings.
    """
    settings: Any = default_config()
    path = name.split(".")
    if is_mixer_setting(name):
        return FlagText("")
    for depth, key in enumerate(path):
        if not isinstance(settings, Mapping) or key not in settings:
            where = "--" + ".".join(("config", *path[: depth + 1]))
            known = settings if isinstance(settings, Mapping) else ()
            hint = did_you_mean(key, known)
            if known and not hint:
                hint = f"; known here: {', '.join(known)}"
            raise UserError(f"{where}: no such setting{hint}")
        settings = settings[key]
    if isinstance(settings, Mapping):
        raise UserError(f"--config.{name}: a group of settings: name one of {', '.join(settings)}")
    return settings
