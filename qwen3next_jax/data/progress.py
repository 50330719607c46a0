"""Shows how far the preparation of data has come."""

from typing import Any

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from qwen3next_jax.common.errors import escape_control


class PreparationProgress:
    """A context manager that shows how far the preparation of each source has come. On a terminal
    it shows bars; without a terminal it prints one line when the preparation of a source begins.

    Args:
      doing: the word before the name of a source.
    """

    def __init__(self, doing: str = "preparing"):
        self._doing = doing
        self._bars = Progress(
            TextColumn(doing + " {task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            transient=True,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._tasks and self._bars.console.is_terminal:
            self._bars.stop()

    def __call__(self, source: str, bytes_read: int, bytes_in_all: int) -> None:
        if source not in self._tasks:
            if self._bars.console.is_terminal:
                self._bars.start()
            else:
                line = f"{self._doing} {source} ({bytes_in_all / 1e6:.1f} MB)"
                print(escape_control(line), flush=True)
            self._tasks[source] = self._bars.add_task(escape_control(source), total=bytes_in_all)
        self._bars.update(self._tasks[source], completed=bytes_read)
