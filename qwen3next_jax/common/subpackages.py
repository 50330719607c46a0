"""Finds out which optional subpackages are installed. A user may delete some subpackages. A run
works without a deleted subpackage, and prints one line that says what it cannot do.
"""

import functools
import importlib.util

from qwen3next_jax.common.errors import UserError, warn


@functools.cache
def has_subpackage(name: str) -> bool:
    """Whether the folder `qwen3next_jax/<name>` is there."""
    return importlib.util.find_spec(f"qwen3next_jax.{name}") is not None


@functools.cache
def has_subpackage_or_warn(name: str, lost: str) -> bool:
    """Whether the folder `qwen3next_jax/<name>` is there. If the folder is missing, prints one
    warning, in which `lost` says what the run will not do.
    """
    if not has_subpackage(name):
        warn(f"qwen3next_jax/{name} is missing: {lost}")
    return has_subpackage(name)


def require_subpackage(name: str, needed_for: str) -> None:
    """Raises UserError if the folder `qwen3next_jax/<name>` is missing. The message begins with
    `needed_for`, which names the setting or command that needs the folder.
    """
    if not has_subpackage(name):
        raise UserError(
            f"{needed_for}: this installation does not have qwen3next_jax/{name}: restore that "
            "folder, or do without"
        )
