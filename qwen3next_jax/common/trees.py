"""The leaves of trees by their names. No JAX is needed: a report reads settings on machines
without it.
"""

from collections.abc import Mapping
from typing import Any


def path_string(path: tuple, separator: str = "/") -> str:
    """ "layers/0/mixer/q_proj" of a JAX key path through dicts, lists, named tuples or nnx states
    (whose leaves sit in a Param).
    """
    parts = [
        str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))
        for key in path
    ]
    return separator.join(part for part in parts if part != "value")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts: {"train": {"steps": 3}} is {"train.steps": 3}."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= (
            flat(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return leaves
