"""The terminal output of commands: tables, and a line that says what the command is waiting for."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def make_console() -> Console:
    """Makes the console on which a command prints its tables. In a pipe or a file lines have any
    length, because a program may read them: nothing is wrapped or cut.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


@contextlib.contextmanager
def show_while_waiting(text: str, console: Console | None = None) -> Iterator[None]:
    """Shows `text` while the block runs. On a terminal it stands in a line that counts the seconds
    and vanishes with the end of the block; elsewhere it is printed once, when the block begins.

    Args:
      console: where the text is shown; None: standard error.
    """
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(text, markup=False, soft_wrap=True)
        yield
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield
