"""Bounds of settings, by the words that an error tells them in."""

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
    """Raises: UserError: a setting of `group` ("model", "train", …) is beyond its bound.
    `bounds`: {bound: "names of its settings"}.
    """
    for bound, names in bounds.items():
        for name in names.split():
            require(
                BOUNDS[bound](getattr(group, name)),
                f"{where}.{name} = {getattr(group, name)}: expected {bound}",
            )
