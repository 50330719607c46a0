"""What a run records and shows: `metrics.jsonl` is the record; the terminal shows its newest lines.

On a terminal the run is one live panel (rich); elsewhere plain lines, one per `train.log_every` steps.
"""

import json
import math
import os
import pathlib
import sys
import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


class MetricsFile:
    """Append-only JSON lines, one event each: {"event": "train" | "heldout" | "sample" | …, "step": …, …}."""

    def __init__(self, path: pathlib.Path, first_step: int):
        """Events after `first_step` are dropped: the run that wrote them died, and they are about to be written again."""
        self._path = path
        kept = [line for line in _lines(path) if line["step"] <= first_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, path)
        self._file = path.open("a", buffering=1)

    def write(self, event: str, step: int, **values: Any) -> None:
        # JSON has no NaN and no infinity: they are written as text, so that every reader can parse the file.
        clean = {k: (str(v) if isinstance(v, float) and not math.isfinite(v) else v) for k, v in values.items()}
        self._file.write(json.dumps({"event": event, "step": step, "time": round(time.time(), 3)} | clean) + "\n")

    def close(self) -> None:
        self._file.close()


def _lines(path: pathlib.Path) -> list[dict]:
    """The events in `path`; a last line torn by a kill is not one."""
    if not path.exists():
        return []
    events = []
    for line in path.read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("step"), int):
            events.append(event)
    return events


class PreparationProgress:
    """Shows how far the tokenizing of each source is: a bar on a terminal, one line elsewhere. A context manager."""

    def __init__(self):
        self._bars = Progress(TextColumn("preparing {task.description}"), BarColumn(), TaskProgressColumn(),
                              TimeElapsedColumn(), transient=True)
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
                print(f"preparing {source} ({bytes_in_all / 1e6:.1f} MB)", flush=True)
            self._tasks[source] = self._bars.add_task(source, total=bytes_in_all)
        self._bars.update(self._tasks[source], completed=bytes_read)


def heldout_figure(values: dict[str, float]) -> str:
    """The one figure of a held-out evaluation: bits per byte, or the accuracy where tokens are no text."""
    return f"{values['bits_per_byte']:.3f} bits/byte" if "bits_per_byte" in values else f"accuracy {values['accuracy']:.1%}"


class Display:
    """The run on the terminal. Use as a context manager."""

    def __init__(self, title: str, steps: int, first_step: int, bits_per_nat: float | None):
        """`bits_per_nat`: bits per byte for each nat per token, 1 / (ln 2 · bytes per token); None where tokens are no text."""
        self._steps, self._bits_per_nat, self._title = steps, bits_per_nat, title
        self._console = Console(highlight=False)
        self._values: dict[str, Any] = {}
        self._heldout: list[str] = []
        self._sample = ""
        self._checkpoint = "none yet"
        self._live = None
        if self._console.is_terminal:
            self._progress = Progress(TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=None),
                                      TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
                                      console=self._console)
            self._task = self._progress.add_task("train", total=steps, completed=first_step)
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self):
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception):
        if self._live:
            self._live.stop()

    def step(self, step: int) -> None:
        if self._live:
            self._progress.update(self._task, completed=step)

    def train(self, step: int, values: dict[str, float]) -> None:
        self._values = values
        if not self._live:
            self.say(f"step {step:>6}/{self._steps}  loss {values['loss']:.4f}  "
                     f"{self._per_byte(values)[0]} {self._per_byte(values)[1]}"
                     + "".join(f"  mtp{name.rpartition('/')[2]} {value:.3f}" for name, value in values.items() if name.startswith("mtp_loss/"))
                     + f"  grad {values['grad_norm']:.2f}  lr {values['learning_rate']:.2e}  {values['tokens_per_second']:,.0f} tok/s")

    def _per_byte(self, values: dict[str, float]) -> tuple[str, str]:
        if self._bits_per_nat is None:
            return "accuracy", f"{values['top1']:.1%}"
        return "bits/byte", f"{values['loss'] * self._bits_per_nat:.3f}"

    def heldout(self, step: int, values: dict[str, float]) -> None:
        line = f"step {step:>6}  held-out {heldout_figure(values)}  loss {values['loss']:.4f}" + "".join(
            f"  acceptance@{name.rpartition('/')[2]} {value:.1%}" for name, value in values.items() if name.startswith("mtp_acceptance/"))
        self._heldout.append(line)
        if not self._live:
            self.say(line)

    def sample(self, step: int, text: str) -> None:
        self._sample = text
        if not self._live:
            self.say(f"step {step:>6}  sample {text!r}")

    def checkpoint(self, step: int) -> None:
        self._checkpoint = f"step {step}"

    def say(self, line: str) -> None:
        """One plain line that stays on the screen."""
        self._console.print(line, markup=False, soft_wrap=True)
        sys.stdout.flush()

    def _render(self) -> Panel:
        grid = Table.grid(padding=(0, 2), expand=True)
        for _ in range(4):
            grid.add_column(ratio=1)
        cells = [Text.assemble((name + " ", "dim"), value) for name, value in self._cells()]
        for i in range(0, len(cells), 4):
            grid.add_row(*cells[i:i + 4])
        parts: list[Any] = [self._progress, grid]
        if self._heldout:
            parts += [Text(""), Text("\n".join(self._heldout[-5:]), no_wrap=True, overflow="ellipsis")]
        if self._sample:
            parts.append(Panel(Text("\n".join(self._sample.splitlines()[:8])), title="sample", title_align="left", border_style="dim"))
        return Panel(Group(*parts), title=self._title, title_align="left")

    def _cells(self) -> list[tuple[str, str]]:
        v = self._values
        if not v:
            return [("compiling the train step", "…")]
        cells = [("loss", f"{v['loss']:.4f}"), self._per_byte(v)]
        cells += [(f"mtp loss {name.rpartition('/')[2]}", f"{value:.3f}") for name, value in v.items() if name.startswith("mtp_loss/")]
        if "balance_loss" in v:
            cells += [("balance", f"{v['balance_loss']:.3f}"), ("busiest expert", f"×{v['busiest_expert']:.2f}")]
        return cells + [("grad norm", f"{v['grad_norm']:.2f}"), ("learning rate", f"{v['learning_rate']:.2e}"),
                        ("tokens", f"{v['tokens_seen']:,.0f}"), ("tokens/s", f"{v['tokens_per_second']:,.0f}"),
                        ("data wait", f"{v['data_wait']:.0%}"), ("checkpoint", self._checkpoint)]
