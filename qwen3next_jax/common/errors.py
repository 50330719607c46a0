"""How a command ends: the one exception for mistakes a user can make (a single line that says
what, where, what was expected, what to do), and the exit codes.
"""

import contextlib
import difflib
import enum
import os
import sys
from collections.abc import Iterable, Iterator

# of Linux, in bytes
_LONGEST_PATH, _LONGEST_NAME = 4095, 255


class ExitCode(enum.IntEnum):
    """What a scheduler or supervisor sees. A process ended by a signal from outside has the
    signal's code instead.
    """

    # trained to the last step, or the command did what it was asked
    DONE = 0
    # an error nobody foresaw (a traceback says which); of `verify`: something is damaged
    CRASHED = 1
    # a mistake in what was given: the same command fails again
    USER_ERROR = 2
    # the guards stopped the run: the same command stops again
    DIVERGED = 3
    # no step ended within the limit; the stacks are in the run's folder
    HANG = 4
    # ended or interrupted, but the last save failed: the same command goes on from the one before
    NOT_SAVED = 5
    # the supervisor: too many restarts, or none of them got anywhere
    GAVE_UP = 6
    # the run's processes did not find each other in time
    UNREACHABLE = 7
    # a signal: saved, and the same command goes on from there
    INTERRUPTED = 130
    # a second signal: left at once, without saving
    ABORTED = 131


# Ends after which the same command may go on, besides those by a signal.
RESTARTED = (ExitCode.CRASHED, ExitCode.HANG, ExitCode.UNREACHABLE)


class UserError(ValueError):
    """A mistake in what the user gave. Commands print its text as one line, without a traceback,
    and exit with `exit_code`.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USER_ERROR):
        super().__init__(printable(message))
        self.exit_code = exit_code


def require(condition: bool, message: str) -> None:
    """Raises a UserError of this message unless the condition holds."""
    if not condition:
        raise UserError(message)


@contextlib.contextmanager
def told(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """A `with` block in which an error of these kinds becomes a UserError: `what`, and the
    reason in brackets.
    """
    try:
        yield
    except kinds as error:
        raise UserError(f"{what} ({reason(error)})") from error


def reason(error: Exception) -> str:
    """What an error of the system or of a library says, in one line and without the path that is
    named beside it.
    """
    return getattr(error, "strerror", None) or short_text(str(error))


def short_text(text: str) -> str:
    """The beginning of a text of many lines, in one."""
    return " ".join(text.split())[:200]


def require_path(where: str, path: str | os.PathLike) -> None:
    """Raises a UserError, which begins with `where`, unless a file or folder may have this path.
    Orbax, JSON and reports write names as UTF-8, so that a name that is not UTF-8 is refused too.
    """
    text = os.fspath(path)
    where = where if len(where) <= 200 else where[:197] + "…"
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: the path is not UTF-8: give one whose name is") from None
    require("\0" not in text, f"{where}: a path cannot hold the character NUL")
    if "://" in text:
        return
    require(
        len(encoded) <= _LONGEST_PATH,
        f"{where}: a path of {len(encoded):,} bytes: expected at most {_LONGEST_PATH:,}",
    )
    # a pattern may be longer than the names that it matches
    names = [name for name in encoded.split(b"/") if not set(name) & set(b"*?[")]
    longest = max(map(len, names), default=0)
    require(
        longest <= _LONGEST_NAME,
        f"{where}: a name of {longest:,} bytes: expected at most {_LONGEST_NAME} between two '/'",
    )


def printable(text: str) -> str:
    """`text` with control characters and lone surrogates as Python escapes them: a name in a file
    that others wrote breaks no line and moves no cursor.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def escaped(text: str) -> str:
    """Lines for a terminal: `printable`, but line ends stay."""
    return "\n".join(printable(line) for line in text.split("\n"))


def out_of_memory(error: RuntimeError) -> str:
    """What XLA says of the memory that it did not get; "" where `error` is about something else."""
    _, found, said = str(error).partition("RESOURCE_EXHAUSTED: ")
    return short_text(said) if found else ""


def warn(message: str, word: str = "warning") -> None:
    """One line on standard error. Where that is a file on a full disk, the run goes on all the
    same.
    """
    with contextlib.suppress(OSError):
        print(f"{word}: {printable(message)}", file=sys.stderr, flush=True)


def short(value: object) -> str:
    """`value` as Python writes it, cut where a line would no longer be one to read."""
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < 10**40
        else "a number of more than 40 digits"
    )
    return text if len(text) <= 80 else text[:77] + "…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the known name closest to `name`, or `""` when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
