"""What the operators say of arguments that do not fit: a ValueError of one line."""

import jax
import jax.numpy as jnp


def shapes(**arrays) -> dict:
    """The size of every letter of `name=(array or None, axes)`, such as "BTD" or ("B", "T", 3).

    A letter is at least 1 and the same wherever it stands; a number is itself.
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
            raise ValueError(
                f"{name} has shape {x.shape}: expected [{known}]"
                + ", nothing empty" * (0 in x.shape)
            )
        sizes |= zip(axes, x.shape)
    return sizes


def integers(**arrays):
    for name, x in arrays.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {x.dtype}: expected integers")


def implementation(name: str | None, known):
    if name is not None and name not in known:
        raise ValueError(f"implementation={name!r}: expected one of {', '.join(known)}, or None")


def values(wrong: dict):
    """{message: whether it is so, [] traced}: the first that is ends the program with a
    ValueError, from a host callback.
    """

    def report(*found):
        if any(found):
            raise ValueError(next(message for message, is_wrong in zip(wrong, found) if is_wrong))

    jax.debug.callback(report, *wrong.values())
