"""The one exception for mistakes a user can make: a single line that says what, where, what was expected, what to do."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave. Commands print its text as one line, without a traceback, and exit with code 2."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the known name closest to `name`, or `""` when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
