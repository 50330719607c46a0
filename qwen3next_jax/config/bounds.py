"""Bounds of settings, by the words that an error tells them in."""

import typing
from collections.abc import Mapping
from typing import Any

from qwen3next_jax.common.errors import require

BOUNDS = {
    "a positive number": lambda x: x > 0,
    "0 or more": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    "at least 2": lambda x: x >= 2,
    "at least 4": lambda x: x >= 4,
    "0 … 1": lambda x: 0 <= x <= 1,
    "0 or more, less than 1": lambda x: 0 <= x < 1,
    "between 0 and 1": lambda x: 0 < x < 1,
    "0 … 2^32 - 1": lambda x: 0 <= x < 2**32,
}


def check_bounds(group: Any, where: str, bounds: Mapping[str, str]) -> None:
    """Checks settings against `bounds`, {bound: "names of its settings"}. `where`: the name of
    the group, such as "model".

    Raises:
      UserError: a setting of `group` is beyond its bound.
    """
    for bound, names in bounds.items():
        for name in names.split():
            require(
                BOUNDS[bound](getattr(group, name)),
                f"{where}.{name} = {getattr(group, name)}: expected {bound}",
            )


def declared_bounds(cls: type) -> dict[str, str]:
    """{setting: bound} of the config dataclass `cls`, of fields such as
    `window: Annotated[int, "at least 1"]`.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: bound for name, bounds in found.items() for bound in bounds if bound in BOUNDS}


def check_declared_bounds(group: Any, where: str) -> None:
    """`check_bounds` of the bounds that the fields of `group` declare."""
    for name, bound in declared_bounds(type(group)).items():
        check_bounds(group, where, {bound: name})
