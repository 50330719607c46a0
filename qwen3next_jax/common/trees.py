"""Names the leaves of pytrees and of nested dicts. This module does not import JAX, because reports
read settings on machines without JAX.
"""

from collections.abc import Mapping
from typing import Any


def path_string(path: tuple, separator: str = "/") -> str:
    """Returns a JAX key path as text, for example "layers/0/mixer/q_proj". The path may lead
    through dicts, lists, named tuples and nnx states. The key "value" of an nnx Param is left out.
    """
    parts = [
        str(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)))
        for key in path
    ]
    return separator.join(part for part in parts if part != "value")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Maps dotted names to the leaves of nested dicts: {"train": {"steps": 3}} becomes
    {"train.steps": 3}.
    """
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return leaves
