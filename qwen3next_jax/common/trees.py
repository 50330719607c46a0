"""Names of the leaves of trees. Imports no JAX: reports read settings on machines without it."""

from collections.abc import Mapping
from typing import Any


def path_string(path: tuple, separator: str = "/") -> str:
    """A JAX key path as text, for example "layers/0/mixer/q_proj". The path may lead through
    dicts, lists, named tuples and nnx states; the `value` of an nnx Param is left out.
    """
    parts = [
        str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))
        for key in path
    ]
    return separator.join(part for part in parts if part != "value")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by dotted names: {"train": {"steps": 3}} is {"train.steps": 3}."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return leaves
