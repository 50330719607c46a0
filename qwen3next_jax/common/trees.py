"""Names the leaves of pytrees and of nested dicts. This module does not import JAX, because reports
read settings on machines without JAX.
"""

from collections.abc import Callable, Mapping
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


def map_leaves(f: Callable[[str, Any], Any], tree: Mapping[Any, Any], prefix: str = "") -> dict:
    """Returns a nested dict with f(path, leaf) in place of every leaf. A path is a text such as
    "layers/0/mixer/q_proj". The result leaves out each leaf for which f returns None, and each dict
    that would be empty.
    """
    result = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        is_dict = isinstance(value, Mapping)
        new = map_leaves(f, value, path + "/") if is_dict else f(path, value)
        if new is not None and not (is_dict and not new):
            result[key] = new
    return result


def leaves_by_path(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns path → leaf of a nested dict, with paths such as "layers/0/mixer/q_proj"."""
    leaves = {}
    map_leaves(lambda path, leaf: leaves.update({path: leaf}), tree)
    return leaves


def join_trees(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> dict:
    """Returns a nested dict with the leaves of both nested dicts, which have no leaf in common."""
    joined = dict(first)
    for key, value in second.items():
        joined[key] = join_trees(joined[key], value) if key in joined else value
    return joined
