"""Errors that users can cause, and the exit codes of commands.

A mistake of the user raises UserError. The message of a UserError is one line; it says what is
wrong, where, what was expected and what to do.
"""

import contextlib
import difflib
import enum
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator

# Linux's limits on paths and on names in them, in bytes
_LONGEST_PATH, _LONGEST_NAME = 4095, 255


class ExitCode(enum.IntEnum):
    """The exit code that a scheduler or supervisor sees. A process that a signal killed has the
    signal's code instead.
    """

    # The command finished its work.
    DONE = 0
    # An unexpected error, shown as a traceback. `verify` exits with this code when it finds damage.
    CRASHED = 1
    # A mistake in the settings or files: the same command would fail again.
    USER_ERROR = 2
    # The guards stopped a run that diverged: the same command would stop again.
    DIVERGED = 3
    # No step ended within the limit. The stacks of all threads are in the run's folder.
    HANG = 4
    # The last save failed: the same command continues from the save before it.
    NOT_SAVED = 5
    # The supervisor restarted too often, or its restarts made no progress.
    GAVE_UP = 6
    # The processes of the run did not find each other in time.
    UNREACHABLE = 7
    # The bucket of the run's folder took nothing for `checkpoint.patience` seconds.
    STORAGE = 8
    # Another process has taken over the run in a bucket: this one stopped before it wrote anything.
    TAKEN_OVER = 9
    # A hook of the run failed, an evaluation or one of the user's own. The run saved after the next
    # step: the same command continues from there, once the hook is corrected.
    HOOK_FAILED = 10
    # A signal asked the run to end. It saved, and the same command continues from there.
    INTERRUPTED = 130
    # A second signal ended the run at once, without a save.
    ABORTED = 131


# After these exit codes the supervisor runs the same command again, as it does after a signal
# killed the command.
RESTARTED = (ExitCode.CRASHED, ExitCode.HANG, ExitCode.UNREACHABLE, ExitCode.STORAGE)


class UserError(ValueError):
    """A mistake of the user. Commands print the message of a UserError as one line, without a
    traceback, and exit with its `exit_code`.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USER_ERROR):
        super().__init__(escape_control(message))
        self.exit_code = exit_code


class WrittenByOlderVersion(UserError):
    """An older version wrote the file `path` of prepared data, which this version does not use."""

    def __init__(self, path: os.PathLike):
        super().__init__(
            f"{path}: an older version wrote it, which commit 0f111363 reads: prepare its texts "
            "again"
        )


def require(condition: bool, message: str) -> None:
    """Raises a UserError with `message` unless `condition` holds."""
    if not condition:
        raise UserError(message)


@contextlib.contextmanager
def as_user_error(message: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns an error of one of `kinds` inside the `with` block into a UserError, whose message is
    `message` followed by the error's message in parentheses.
    """
    try:
        yield
    except kinds as error:
        raise UserError(f"{message} ({error_message(error)})") from error


def error_message(error: Exception) -> str:
    """Returns the message of an error in one line. For an error of the operating system, the
    message is its `strerror`, which does not contain the path; for any other error the first 200
    characters of its text.
    """
    return getattr(error, "strerror", None) or one_line(str(error))


def one_line(text: str) -> str:
    """Replaces each run of white space in a text by one space, and returns the first 200 characters
    of the result.
    """
    return " ".join(text.split())[:200]


def require_path(where: str, path: str | os.PathLike) -> None:
    """Raises a UserError that begins with `where` if no file or folder can have this path. Orbax,
    JSON and reports write paths as UTF-8, so a path that is not UTF-8 is refused too.
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
    # Parts with wildcards are not checked: a pattern may be longer than the names it matches.
    names = [name for name in encoded.split(b"/") if not set(name) & set(b"*?[")]
    longest = max(map(len, names), default=0)
    require(
        longest <= _LONGEST_NAME,
        f"{where}: a name of {longest:,} bytes: expected at most {_LONGEST_NAME} between two '/'",
    )


def escape_control(text: str) -> str:
    """Returns `text` with Python's escapes in place of characters that cannot be printed, such as
    control characters and lone surrogates. The escapes keep a name from another person's file from
    breaking a line or moving the terminal's cursor.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def escape_control_in_lines(text: str) -> str:
    """Applies `escape_control` to every line of a text, and keeps the line ends."""
    return "\n".join(escape_control(line) for line in text.split("\n"))


def out_of_memory_message(error: RuntimeError) -> str:
    """Returns, in one line, XLA's message about the memory that it could not allocate; "" if
    `error` has another cause.
    """
    _, found, said = str(error).partition("RESOURCE_EXHAUSTED: ")
    return one_line(said) if found else ""


def warn(message: str, word: str = "warning") -> None:
    """Prints the line "`word`: `message`" on standard error. If standard error cannot be written to
    (a full disk), the function prints nothing and raises nothing.
    """
    with contextlib.suppress(OSError):
        print(f"{word}: {escape_control(message)}", file=sys.stderr, flush=True)


def short_repr(value: object) -> str:
    """Returns `repr(value)`, cut to 80 characters; a phrase in place of an integer of more than 40
    digits.
    """
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < 10**40
        else "a number of more than 40 digits"
    )
    return text if len(text) <= 80 else text[:77] + "…"


def join_first(texts: Iterable[str], most: int, separator: str = ", ") -> str:
    """Joins the first `most` texts. If there are more than `most` texts, an ellipsis follows."""
    texts = list(texts)
    return separator.join([*texts[:most], "…"] if len(texts) > most else texts)


def similar_folder_hint(path: os.PathLike) -> str:
    """Returns " (did you mean 'x'?)" with the folder beside `path` whose name is closest to the
    name of `path`; "" if `path` exists.
    """
    with contextlib.suppress(OSError):
        if not isinstance(path, pathlib.Path) or path.exists():
            return ""
        return did_you_mean(path.name, (p.name for p in path.parent.iterdir() if p.is_dir()))
    return ""


class Mistakes:
    """Collects the mistakes that several checks find, so that one error names them all.

    mistakes = Mistakes()
    for point in points:
        with mistakes.collect(f"point {point.name}"):
            check(point)
    mistakes.raise_any()
    """

    def __init__(self):
        self._found: dict[str, str] = {}  # mistake → the place where it was found first

    @contextlib.contextmanager
    def collect(self, place: str) -> Iterator[None]:
        """Keeps a `UserError` of the `with` block, unless another place has the same mistake. The
        collected message begins with `place`; if the message of the error already begins with
        `place`, nothing is added.
        """
        try:
            yield
        except UserError as error:
            mistake = str(error).removeprefix(f"{place}: ")
            self._found.setdefault(mistake, place)

    def raise_any(self) -> None:
        """Raises a UserError that names all collected mistakes; does nothing if there are none."""
        found = [f"{place}: {mistake}" for mistake, place in self._found.items()]
        if len(found) == 1:
            raise UserError(found[0])
        if found:
            numbered = (f"({number}) {text}" for number, text in enumerate(found, 1))
            raise UserError(f"{len(found)} mistakes: {'; '.join(numbered)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" with the known name closest to `name`; "" if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_format_number(path: object, found: object, expected: int) -> None:
    """Checks the number of the format of a file that this program wrote.

    Args:
      path: the file, for the message.
      found: the number in the file; None if it has none.
      expected: the number of the format that this version writes and reads.

    Raises:
      UserError: the numbers differ.
    """
    if isinstance(found, int) and found > expected:
        raise UserError(
            f"{path}: written by a newer version (format {found}): expected one of this version "
            f"(format {expected}); read it with the version that wrote it"
        )
    require(
        found == expected,
        f"{path}: written by an older version: expected one of this version (format {expected}); "
        "the code of commit 0f111363 reads it",
    )
