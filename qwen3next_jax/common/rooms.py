"""Rooms of the package whose folders may be deleted: what a run would have done with one is left
out, and said in one line.
"""

import functools
import importlib.util

from qwen3next_jax.common.errors import UserError, warn


@functools.cache
def has_room(name: str) -> bool:
    """Whether the folder `qwen3next_jax/<name>` is there."""
    return importlib.util.find_spec(f"qwen3next_jax.{name}") is not None


@functools.cache
def warn_without(name: str, lost: str) -> bool:
    """Whether the room is there; where it is not, says once what the run does not do (`lost`)."""
    if not has_room(name):
        warn(f"qwen3next_jax/{name} is missing: {lost}")
    return has_room(name)


def require_room(name: str, needed_for: str) -> None:
    """Raises UserError where the room that `needed_for` needs is missing."""
    if not has_room(name):
        raise UserError(
            f"{needed_for}: this installation does not have qwen3next_jax/{name}: restore that "
            "folder, or do without"
        )
