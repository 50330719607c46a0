"""Checks of the operators' arguments. A failed check raises a ValueError with a message of one
line.
"""

import jax
import jax.numpy as jnp


def check_shapes(**arrays) -> dict:
    """Checks the shapes of arrays. Each argument has the form name=(array or None, axes), where
    `axes` lists the array's axes by letter or size, such as "BTD" or ("B", "T", 3).

    Returns:
      {letter: the size of its axes}.

    Raises:
      ValueError: an array has another number of axes than `axes`, an axis with a letter has size 0,
        axes with the same letter have different sizes, or an axis given as a number has another
        size.
    """
    sizes = {}
    for name, (x, axes) in arrays.items():
        if x is None:
            continue
        wanted = [sizes.get(axis, axis) for axis in axes]
        if x.ndim != len(wanted) or any(
            n < 1 if isinstance(want, str) else n != want for n, want in zip(x.shape, wanted)
        ):
            known = ", ".join(
                str(axis) if axis == want else f"{axis} = {want}"
                for axis, want in zip(axes, wanted)
            )
            not_empty = ", nothing empty" if 0 in x.shape else ""
            raise ValueError(f"{name} has shape {x.shape}: expected [{known}]{not_empty}")
        sizes |= zip(axes, x.shape)
    return sizes


def check_integers(**arrays):
    """Checks that every array has an integer dtype. Arguments that are None are ignored."""
    for name, x in arrays.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {x.dtype}: expected integers")


def check_implementation_name(name: str | None, known):
    """Checks that `name`, an operator's argument `implementation`, is None or in `known`."""
    if name is not None and name not in known:
        raise ValueError(f"implementation={name!r}: expected one of {', '.join(known)}, or None")


def check_values_at_runtime(wrong: dict):
    """Checks values while the program runs: a host callback raises a ValueError with the first
    message whose condition is true.

    Args:
      wrong: {message: its condition, a traced boolean scalar}.
    """

    def report(*found):
        if any(found):
            raise ValueError(next(message for message, is_wrong in zip(wrong, found) if is_wrong))

    jax.debug.callback(report, *wrong.values())
