"""Converts config dataclasses to nested plain dicts and back, and checks all names and types."""

import ast
import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal

from qwen3next_jax.common.errors import UserError, did_you_mean, require, short_repr

_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class UnparsedFlagText(str):
    """The text of a flag for a setting in `model.mixer`. The class of a mixer declares the type of
    the setting. Mixers are not imported while flags are read, so `config.mixer` parses the text
    later.
    """


def to_dict(config: Any) -> dict[str, Any]:
    """Converts a config dataclass to nested dicts, which JSON can hold; tuples stay tuples."""
    return _to_plain(config)


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {name: _to_plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_to_plain, value))
    return value


def from_dict(cls: type, values: dict[str, Any], path: str = "config") -> Any:
    """Returns an instance of the config dataclass `cls`, made from a nested dict. Names and types
    are checked.

    Args:
      cls: the dataclass.
      values: name of a field → value; a group of settings is a dict.
      path: the dotted name of the group, for messages.

    Raises:
      UserError: a key is unknown (the message suggests the most similar setting), a value has the
        wrong type, or `cls` refuses a value.
    """
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        where = f"{path}.{key}"
        if key not in hints:
            hint = did_you_mean(key, hints) or f"; known here: {', '.join(hints)}"
            raise UserError(f"{where}: no such setting{hint}")
        arguments[key] = _convert_value(value, hints[key], where)
    return cls(**arguments)


def _convert_value(value: Any, hint: Any, where: str) -> Any:
    """Converts a value to the type `hint` of its field, or raises UserError."""
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
        return None if value is None else _convert_value(value, typing.get_args(hint)[0], where)
    if origin is Literal:
        choices = typing.get_args(hint)
        if not isinstance(value, str) or value not in choices:
            raise UserError(
                f"{where} = {short_repr(value)}: expected one of {', '.join(map(repr, choices))}"
                f"{did_you_mean(str(value), choices)}"
            )
        return value
    if origin is tuple:
        require(isinstance(value, (tuple, list)), f"{where} = {short_repr(value)}: expected a list")
        return tuple(
            _convert_value(v, typing.get_args(hint)[0], f"{where}[{i}]")
            for i, v in enumerate(value)
        )
    return _convert_scalar(value, hint, where)


def _convert_scalar(value: Any, hint: type, where: str) -> Any:
    """Converts a value to `hint`, the type of its field (bool, int, float or str), or raises
    UserError.
    """
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
        hint is not str or _is_utf8_encodable(value),
        f"{where} = {short_repr(value)}: expected text that UTF-8 can encode",
    )
    require(
        hint is not float or math.isfinite(value), f"{where} = {value}: expected a finite number"
    )
    return value


def _is_utf8_encodable(text: str) -> bool:
    """Whether UTF-8 can encode `text`. If a file name contains bytes that are not UTF-8, Python
    represents these bytes by surrogates, which UTF-8 cannot encode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_flag_text(text: str, default: Any, where: str) -> Any:
    """Parses the text of a flag as a value of the type of `default`. If `default` is an
    UnparsedFlagText, returns the text as an UnparsedFlagText, which is parsed later.

    Args:
      text: the text after the flag's "=".
      default: the setting's default.
      where: the flag as the user wrote it, for error messages.

    Raises:
      UserError: the text is not a value of the type of `default`.
    """
    if isinstance(default, UnparsedFlagText):
        return UnparsedFlagText(text)
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
