"""The terminal output of commands: tables, and a line that says what the command is waiting for."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def make_console() -> Console:
    """Makes the console on which a command prints its tables. If standard output is a pipe or a
    file, lines are neither wrapped nor cut, because a program may read them.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


@contextlib.contextmanager
def show_while_waiting(text: str, console: Console | None = None) -> Iterator[None]:
    """Shows `text` while a `with` block runs. On a terminal, the line with the text also counts the
    seconds, and vanishes when the block ends. In a pipe or a file, the text is printed once, when
    the block begins.

    Args:
      console: the console that shows the text; None: standard error.
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
