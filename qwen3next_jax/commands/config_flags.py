"""The flag `--config=FILE` and the flags `--config.group.name=value`, which override settings of
the file.
"""

import collections
import copy
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from qwen3next_jax.commands.run_flags import workdir_flag_or_default
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import Config, from_dict, registry, to_dict
from qwen3next_jax.config.files import (
    UserInput,
    apply_overrides,
    default_of_setting,
    find_user_or_shipped_file,
    load_config_file,
)
from qwen3next_jax.config.reading import UnparsedFlagText
from qwen3next_jax.runs.record import read_config
from qwen3next_jax.runs.vocabulary import fill_vocabulary_from_tokenizer

_accepts_setting_flags = False  # whether the command accepts `--config.group.name=value`
_overrides: list[tuple[str, str]] = []
_file_values: dict[str, Any] = {}  # the settings of the file --config, without the overrides


def define_config_flag() -> Callable[..., Config | None]:
    """Defines the flag `--config=FILE.py`, and makes the command accept overrides of the form
    `--config.group.name=value`.

    Returns:
      A function (required, may_resume) that returns the validated Config. If the flag is not given
      and `required` is false, the function returns None. If `model.vocab_size` is 0, `may_resume`
      is true, and `--workdir` has a run that has taken steps, the Config gets the vocabulary size
      of that run.
    """
    accept_setting_flags()
    holder = flags.DEFINE_string(
        "config",
        None,
        "Python file with get_config(), which is run, such as configs/tiny.py; a name such as tiny "
        "stands for a config that comes with this project",
    )

    def get(required: bool = True, may_resume: bool = False) -> Config | None:
        if holder.value is None and (required or _overrides):
            why = "" if required else f" (--config.{_overrides[0][0]} changes a setting of it)"
            raise UserError(
                f"--config is missing{why}: expected a file such as --config=configs/tiny.py"
            )
        if holder.value is None:
            return None
        values = load_config_file(find_user_or_shipped_file(holder.value))
        _file_values.update(copy.deepcopy(values))
        apply_overrides(values, _overrides)
        return _config_of_user_settings(values, may_resume)

    return get


def accept_setting_flags() -> None:
    """Makes the command accept flags of the form `--config.group.name=value`. The `--help` of the
    command then lists the settings.
    """
    global _accepts_setting_flags
    _accepts_setting_flags = True


def command_accepts_setting_flags() -> bool:
    """Whether the command accepts flags of the form `--config.group.name=value`."""
    return _accepts_setting_flags


def split_off_overrides(argv: Sequence[str]) -> list[str]:
    """Returns the arguments that are not overrides of settings. If the command accepts overrides,
    appends each override (`--config.a.b=value` or `--config.a.b value`) to `_overrides`.

    Raises:
      UserError: a setting does not exist, or its value is missing.
    """
    rest, arguments = [argv[0]], collections.deque(argv[1:])
    while arguments:
        argument = arguments.popleft()
        name, equals, text = argument.lstrip("-").partition("=")
        if (
            not argument.startswith("-")
            or not name.startswith("config.")
            or not _accepts_setting_flags
        ):
            rest.append(argument)
            continue
        name = name.removeprefix("config.")
        default = default_of_setting(name)
        if not equals:
            # The type of a mixer's setting is not known yet; without a value it is a boolean.
            has_value = bool(arguments) and not arguments[0].startswith("--")
            if isinstance(default, bool) or isinstance(default, UnparsedFlagText) and not has_value:
                text = "True"
            elif arguments:
                text = arguments.popleft()
            else:
                raise UserError(f"--config.{name}: a value is missing: expected --config.{name}=…")
        _overrides.append((name, text))
    return rest


def load_settings_of_file_or_run(path: str) -> dict[str, Any]:
    """Reads a config file, or the configuration of a run, and applies the overrides of the command
    line. Returns the settings as a nested dict, without checking them.

    Args:
      path: the path of the file, the name of a config that comes with this project, or the folder
        of a run.

    Raises:
      UserError: the file cannot be read, or the text of an override is not a value of the setting's
        type.
    """
    found = find_user_or_shipped_file(path)
    if found.is_dir():
        values = to_dict(read_config(found))
    else:
        values = load_config_file(found, flag="")
    apply_overrides(values, _overrides)
    return values


def config_from_settings(values: dict[str, Any]) -> Config:
    """Returns the configuration that the nested dict `values` describes.

    Raises:
      UserError: a setting does not exist or is not valid.
    """
    return _config_of_user_settings(values, may_resume=False)


def settings_given_by_user(may_resume: bool = False) -> UserInput | None:
    """Returns the settings that the user gave by `--config` and overrides on the command line; None
    if `--config` is not given. `define_config_flag` explains `may_resume`.
    """
    file = flags.FLAGS["config"].value
    if file is None:
        return None
    try:
        file_config = _config_of_user_settings(copy.deepcopy(_file_values), may_resume)
    except UserError:  # the file is valid only with the overrides
        file_config = None
    return UserInput(
        frozenset(name for name, _ in _overrides), find_user_or_shipped_file(file), file_config
    )


def _config_of_user_settings(values: dict[str, Any], may_resume: bool) -> Config:
    """Returns the Config of the settings in the nested dict `values`, which the user wrote. If
    `model.vocab_size` is 0, the Config gets the size of the tokenizer's vocabulary. From now on,
    this process trusts the packages that the settings name, and may import them.
    """
    name = str(values.get("name", Config().name))
    fill_vocabulary_from_tokenizer(values, workdir_flag_or_default(name) if may_resume else None)
    registry.trust_user_settings(values)
    return from_dict(Config, values)
