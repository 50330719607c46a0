"""Reads config files, which are Python code, and applies the overrides of the command line.

If the code of a config file raises an error, this module raises a UserError instead. The message of
the UserError is one line, which names the file and the line number.
"""

import ast
import contextlib
import difflib
import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qwen3next_jax.common.errors import UserError, did_you_mean, require_path, short_repr
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import Config, default_config
from qwen3next_jax.config.mixer import is_mixer_setting
from qwen3next_jax.config.reading import UnparsedFlagText, parse_flag_text


class UserInput(NamedTuple):
    """What a user set for a run, without the defaults of the other settings.

    Attributes:
      overridden_settings: the dotted names of the settings that the command line overrides.
      config_file: the path of the config file.
      config_without_overrides: the configuration in the file alone; None if the file is valid only
        together with the overrides.
    """

    overridden_settings: frozenset[str]
    config_file: pathlib.Path
    config_without_overrides: Config | None


# The folder that contains the folder configs/. In an installed wheel it is inside this package; in
# a checkout it is the folder that contains this package.
_PACKAGE = pathlib.Path(__file__).parents[1]
_SHIPPED = next(
    (folder for folder in (_PACKAGE / "shipped", _PACKAGE.parent) if (folder / "configs").is_dir()),
    None,
)


def find_user_or_shipped_file(name: str | pathlib.Path) -> pathlib.Path:
    """Returns the path of the file that a user names. If there is no file `name`, returns the
    config called `name` that comes with this project; for example "configs/tiny.py" or "tiny". If
    neither a file nor a config is called `name`, returns the path `name`.

    Raises:
      UserError: no file can have the path `name`.
    """
    path = pathlib.Path(name)
    require_path(str(name), name)
    is_file = path.exists() and not path.is_dir()  # a run in ./tiny does not hide the config
    if is_file or _SHIPPED is None or path.is_absolute():
        return path
    bare = not path.suffix and len(path.parts) == 1
    shipped = _SHIPPED / (f"configs/{name}.py" if bare else path)
    if not shipped.is_file():
        return path
    if str(_SHIPPED) not in sys.path:  # a config may import others, such as `configs.tiny`
        sys.path.append(str(_SHIPPED))
    return shipped


def call_function_of_file(path: pathlib.Path, function_name: str, flag: str = "") -> Any:
    """Calls a function of a Python file, without arguments, and returns the result.

    Args:
      path: the path of the file.
      function_name: the function's name.
      flag: the text before the path in error messages, such as "--config=".

    Raises:
      UserError: there is no such file or function, or the file's code raises an error.
    """
    require_path(f"{flag}{path}", path)
    if not path.is_file():
        if path.is_dir():
            reason = "a folder"
        else:
            reason = "not a regular file" if path.exists() else "no such file"
        known = [file.name for file in path.parent.glob("*.py")]
        bare = not path.suffix and len(path.parts) == 1
        if function_name == "get_config" and bare and _SHIPPED is not None:
            known = [file.stem for file in (_SHIPPED / "configs").glob("*.py")]
        raise UserError(f"{flag}{path}: {reason}{did_you_mean(path.name, known)}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None:
        raise UserError(f"{flag}{path}: expected a Python file, whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        # An import would keep bytecode beside the file, and read that although the file was changed
        # within the same second.
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
        if callable(found := getattr(module, function_name, None)):
            return found()
    except SyntaxError as error:
        raise UserError(
            f"{flag}{error.filename or path}, line {error.lineno}: {error.msg}"
        ) from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{flag}{path}{_describe_error(error, path)}") from error
    raise UserError(f"{flag}{path}: it has no function {function_name}()")


def _describe_error(error: BaseException, path: pathlib.Path) -> str:
    """Returns the end of an error message, such as ", line 3: ValueError: …". The line is the last
    line of the file `path` in the error's traceback. If the traceback has no line of `path`, the
    message has no line number.
    """
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    line = f", line {lines[-1]}" if lines else ""
    message = str(error)
    # The AttributeError of a ConfigDict has the message of a KeyError, which is in quotes.
    if message.startswith(("'", '"')):
        with contextlib.suppress(ValueError, SyntaxError):
            message = str(ast.literal_eval(message))
    message = " ".join(message.split())
    return f"{line}: {type(error).__name__}" + (f": {message}" if message else "")


def load_config_file(path: pathlib.Path, flag: str = "--config=") -> dict[str, Any]:
    """Calls `get_config()` of a config file and returns the settings as a nested dict.

    Args:
      path: the path of the file.
      flag: the text before the path in error messages.

    Raises:
      UserError: the file or `get_config()` in it does not exist, its code raises an error, or
        `get_config()` does not return a ConfigDict.
    """
    config = call_function_of_file(path, "get_config", flag)
    if not hasattr(config, "to_dict"):
        found = "nothing (is a `return config` missing?)" if config is None else short_repr(config)
        raise UserError(
            f"{flag}{path}: get_config() returned {found}: expected the ConfigDict of a run, as in "
            "configs/tiny.py"
        )
    return config.to_dict()


def setting_names_in_code(path: pathlib.Path) -> frozenset[str]:
    """Returns all names that could be settings in the code of a Python file: attributes, keyword
    arguments, and strings (of a dotted string, the last part). If a config file does not name a
    setting, the value of the setting comes from another file or from the defaults.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.rpartition(".")[2])
    return frozenset(names)


def apply_overrides(values: dict[str, Any], overrides: Sequence[tuple[str, str]]) -> None:
    """Applies the overrides of a command line to the nested dict `values`.

    Args:
      values: the settings, which this function changes.
      overrides: (dotted name of a setting, text of its value), in the order of the command line.

    Raises:
      UserError: there is no such setting, or the text is not a value of its type.
    """
    for name, text in overrides:
        default, group = default_of_setting(name), values
        *groups, key = name.split(".")
        for part in groups:
            group = group.setdefault(part, {})
        group[key] = parse_flag_text(text, default, f"--config.{name}={text}")


def settings_ending_in(name: str, guess: bool = False) -> list[str]:
    """Returns at most three settings whose dotted names are `name` or end in `name`. For example,
    "train.steps" ends in "steps". If there are none, "_" in `name` may stand for ".": then
    "model.lora.rank" ends in "lora_rank".

    Args:
      name: the last parts of a dotted name.
      guess: whether to return settings whose last part is similar to `name`, if no name ends in
        `name`.
    """
    last_parts = {path: path.rpartition(".")[2] for path in flatten(default_config())}
    found = [path for path in last_parts if f".{path}".endswith(f".{name}")]
    if not found and "_" in name:  # "lora_rank" is written for "lora.rank"
        end = f"_{name}".replace(".", "_")
        found = [path for path in last_parts if f"_{path}".replace(".", "_").endswith(end)]
    if not found and guess:
        close = difflib.get_close_matches(name, last_parts.values(), n=1, cutoff=0.75)
        found = [path for path, part in last_parts.items() if part in close]
    return found[:3]


def setting_flags_hint(settings: Sequence[str], as_flags: bool = True) -> str:
    """Returns " (did you mean --config.…=…?)" with the given settings, or without `as_flags`
    " (did you mean '…'?)"; "" without settings.
    """
    names = " or ".join(f"--config.{path}=…" if as_flags else repr(path) for path in settings)
    return f" (did you mean {names}?)" if settings else ""


def default_of_setting(name: str, as_flag: bool = True) -> Any:
    """Returns the default of the setting with the dotted name `name`. For a setting in
    `model.mixer` it returns UnparsedFlagText(""), because only the mixer's class declares the type
    of the setting, and this class is not imported yet.

    Args:
      name: the dotted name of the setting.
      as_flag: whether error messages name settings as the flags of a command, such as
        "--config.train.steps", or as Python programs do, such as "train.steps".

    Raises:
      UserError: there is no such setting, or the name is that of a group of settings.
    """
    settings: Any = default_config()
    prefix = "--config." if as_flag else ""
    path = name.split(".")
    if is_mixer_setting(name):
        return UnparsedFlagText("")
    for depth, key in enumerate(path):
        if not isinstance(settings, Mapping) or key not in settings:
            where = prefix + ".".join(path[: depth + 1])
            known = settings if isinstance(settings, Mapping) else ()
            elsewhere = ".".join(path[depth:])  # this name, in another group
            hint = (
                setting_flags_hint(settings_ending_in(elsewhere), as_flag)
                or did_you_mean(key, known)
                or setting_flags_hint(settings_ending_in(elsewhere, guess=True), as_flag)
            )
            if known and not hint:
                hint = f"; known here: {', '.join(known)}"
            raise UserError(f"{where}: no such setting{hint}")
        settings = settings[key]
    if isinstance(settings, Mapping):
        raise UserError(f"{prefix}{name}: a group of settings: name one of {', '.join(settings)}")
    return settings
