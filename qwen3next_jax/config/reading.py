"""Configurations from and to nested plain dicts, every name and type checked."""

import ast
import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal

from qwen3next_jax.common.errors import UserError, did_you_mean, require, short_repr

_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class FlagText(str):
    """The text of a flag of which only code that is not imported yet knows the setting's type: of
    a mixer's setting.
    """


def to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as nested plain dicts (JSON-ready; tuples stay tuples)."""
    return _plain(config)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value


def from_dict(cls: type, values: dict[str, Any], path: str = "config") -> Any:
    """Builds the config dataclass `cls` from a nested dict, checking names and types.

    Raises:
      UserError: an unknown key (the nearest known one is suggested), a value of the wrong type,
      or one that `cls` refuses.
    """
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        where = f"{path}.{key}"
        if key not in hints:
            hint = did_you_mean(key, hints) or f"; known here: {', '.join(hints)}"
            raise UserError(f"{where}: no such setting{hint}")
        arguments[key] = _checked(value, hints[key], where)
    return cls(**arguments)


def _checked(value: Any, hint: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        require(
            isinstance(value, dict), f"{where} = {short_repr(value)}: expected a group of settings"
        )
        return from_dict(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, Mapping):
        require(
            isinstance(value, Mapping),
            f"{where} = {short_repr(value)}: expected a group of settings",
        )
        return hint(**value)
    origin = typing.get_origin(hint)
    if type(None) in typing.get_args(hint):
        return None if value is None else _checked(value, typing.get_args(hint)[0], where)
    if origin is Literal:
        choices = typing.get_args(hint)
        require(
            isinstance(value, str) and value in choices,
            f"{where} = {short_repr(value)}: expected one of {', '.join(map(repr, choices))}"
            f"{did_you_mean(str(value), choices)}",
        )
        return value
    if origin is tuple:
        require(isinstance(value, (tuple, list)), f"{where} = {short_repr(value)}: expected a list")
        return tuple(
            _checked(v, typing.get_args(hint)[0], f"{where}[{i}]") for i, v in enumerate(value)
        )
    return _checked_scalar(value, hint, where)


def _checked_scalar(value: Any, hint: type, where: str) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        require(
            -(2**64) < value < 2**64, f"{where} = {short_repr(value)}: expected at most 64 bits"
        )
        value = float(value) if hint is float else value
    right_type = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    require(
        right_type,
        f"{where} = {short_repr(value)} is of type {type(value).__name__}: "
        f"expected {hint.__name__}",
    )
    require(
        hint is not str or _is_unicode(value),
        f"{where} = {short_repr(value)}: expected text that UTF-8 can write",
    )
    require(
        hint is not float or math.isfinite(value), f"{where} = {value}: expected a finite number"
    )
    return value


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which a name that is not UTF-8 leaves."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_flag(text: str, default: Any, where: str) -> Any:
    """The value that the text of a flag stands for, of the type of the setting's default; with a
    FlagText as default the text itself, to be parsed later.

    Raises:
      UserError: it is not of that type; `where` is what the user wrote.
    """
    if isinstance(default, FlagText):
        return FlagText(text)
    if isinstance(default, bool):
        if text.lower() not in _TRUTH:
            raise UserError(f"{where}: expected True or False")
        return _TRUTH[text.lower()]
    if isinstance(default, tuple):
        try:
            value = ast.literal_eval(text or "()")
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = tuple(text.split(","))
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if isinstance(default, (int, float)):
        try:
            return type(default)(text)
        except ValueError as error:
            raise UserError(
                f"{where}: expected a {'whole ' if isinstance(default, int) else ''}number"
            ) from error
    return text
