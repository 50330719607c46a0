"""Checks that settings are within bounds. Every bound has a name such as "at least 1", which error
messages show.
"""

import typing
from collections.abc import Mapping
from typing import Any

from qwen3next_jax.common.errors import require

# Name of a bound → whether a number is within it.
BOUNDS = {
    "a positive number": lambda x: x > 0,
    "0 or more": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    "at least 2": lambda x: x >= 2,
    "at least 4": lambda x: x >= 4,
    "1 or 2": lambda x: x in (1, 2),
    "0 … 1": lambda x: 0 <= x <= 1,
    "0 or more, less than 1": lambda x: 0 <= x < 1,
    "between 0 and 1": lambda x: 0 < x < 1,
    "1 … 4096": lambda x: 1 <= x <= 4096,
    "0 … 2^32 - 1": lambda x: 0 <= x < 2**32,
}


def check_bounds(group: Any, where: str, bounds: Mapping[str, str]) -> None:
    """Checks that settings of one group are within the given bounds.

    Args:
      group: a config dataclass, such as a TrainConfig.
      where: the name of the group in messages, such as "train".
      bounds: name of a bound → the names of the settings that it applies to, separated by spaces.

    Raises:
      UserError: a setting is out of its bound.
    """
    for bound, names in bounds.items():
        for name in names.split():
            require(
                BOUNDS[bound](getattr(group, name)),
                f"{where}.{name} = {getattr(group, name)}: expected {bound}",
            )


def declared_bounds(cls: type) -> dict[str, str]:
    """Returns setting → bound, for the fields of the config dataclass `cls` that declare a bound,
    such as `window: Annotated[int, "at least 1"]`.

    Raises:
      UserError: a field declares a bound that is not in BOUNDS.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {}
    for name, hint in hints.items():
        for bound in getattr(hint, "__metadata__", ()):
            require(
                bound in BOUNDS,
                f"{cls.__module__}.{cls.__qualname__}.{name}: the bound {bound!r} is not known: "
                f"expected one of {', '.join(map(repr, BOUNDS))}",
            )
            found[name] = bound
    return found


def check_declared_bounds(group: Any, where: str) -> None:
    """Checks the settings of `group` against the bounds that its fields declare.

    Args:
      group: a config dataclass.
      where: the name of the group in messages, such as "train".

    Raises:
      UserError: a setting is out of its bound.
    """
    for name, bound in declared_bounds(type(group)).items():
        check_bounds(group, where, {bound: name})
