"""Checks of the operators' arguments. A failed check raises a ValueError with a message of one
line.
"""

import jax
import jax.numpy as jnp


def check_shapes(**arrays) -> dict:
    """Checks the shapes of arrays. Each argument has the form name=(array or None, axes). `axes`
    gives a letter or a size for each axis of the array, such as "BTD" or ("B", "T", 3).

    Returns:
      A dict: letter → the size of the axes with this letter.

    Raises:
      ValueError: the number of axes of an array differs from the number in `axes`, an axis with a
        letter has size 0, axes with the same letter have different sizes, or the size of an axis
        differs from the size in `axes`.
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
    message in `wrong` whose condition is true.

    Args:
      wrong: message → condition, a traced boolean scalar.
    """

    def report(*found):
        if any(found):
            raise ValueError(next(message for message, is_wrong in zip(wrong, found) if is_wrong))

    jax.debug.callback(report, *wrong.values())
