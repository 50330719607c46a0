"""Shows a run while it trains: in a live panel (made with rich) on a terminal, or as plain lines if
the output is not a terminal.

The numbers in the panel and in the lines come from the events of metrics.jsonl.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console, Group
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from qwen3next_jax.common.errors import escape_control_in_lines
from qwen3next_jax.common.metrics import (
    MetricValue,
    displayed_mtp_depth,
    evaluation_name_of_event,
    metric_values_of_event,
    values_of_main_metrics,
)
from qwen3next_jax.sharding.compiler_options import compiler_options, options_text
from qwen3next_jax.sharding.mesh import mesh_text
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage, tokens_seen

CELL_WIDTH = 33  # number of characters of the longest name and value in a cell of the panel
# The number of seconds of compiling after which XLA prints a warning that looks like a failure.
XLA_WARNING_SECONDS = 120.0


def display_title(run: ResolvedRun, corpus: str, steps_before: int, parent: str = "") -> str:
    """Returns the title of the display: the run's name, number of parameters, devices, data and
    first step. If the train step is compiled with compiler options, a second line shows the
    options. Which kernels run is known when the step is traced; the display shows it then.

    Args:
      run: the resolved run.
      corpus: a description of the data.
      steps_before: number of steps of the run that are already taken.
      parent: the path of the parent, if this is a new run that begins at the parent's step; else
        "".
    """
    mesh = run.mesh
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.abstract_state["params"]))
    start = (
        f"new run after step {steps_before} of {parent}"
        if parent
        else f"resumed after step {steps_before}"
        if steps_before
        else "new run"
    )
    kind = mesh.devices.flat[0].device_kind
    devices = kind if mesh.size == 1 else f"{mesh.size} × {kind} ({mesh_text(dict(mesh.shape))})"
    options = compiler_options(run.config.parallel, mesh)
    return f"{run.config.name}: {parameters:,} parameters on {devices} · {corpus} · {start}" + (
        f"\n{options_text(options)}" if options else ""
    )


def _values_by_source(
    value_of_all: MetricValue, metric_values: Sequence[MetricValue], evaluation: str
) -> str:
    """Returns " (SOURCE VALUE, …)", the values of a metric of the held-out evaluation for each data
    source; "" for other evaluations or a single source.
    """
    if value_of_all.condition_in_key or not evaluation.startswith("heldout"):
        return ""
    parts = [
        f"{one.condition_in_key} {one}"
        for one in metric_values
        if one.metric_name == value_of_all.metric_name and one.condition_in_key
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _source_shares_text(event: Mapping[str, Any]) -> str:
    """Returns " (SOURCE SHARE, …)", the share of each data source in the rows of a stage, from its
    "stage" event; "" if there is one source.
    """
    shares = (f"{name} {share:.0%}" for name, share in event.get("mix", {}).items())
    text = ", ".join(shares)
    return f" ({text})" if text else ""


class _Activity:
    """What the run does while it takes no steps, and since when.

    Args:
      text: what the run does, such as "evaluating on held-out text".
      first: whether the run does this for the first time, and therefore compiles.
    """

    def __init__(self, text: str, first: bool):
        self.text, self._first = text, first
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def __str__(self) -> str:
        compiling = "; compiling first" * (self._first and not self.text.startswith("compiling"))
        return f"{self.text} {_format_duration(self.seconds)}{compiling}"


class Display:
    """Shows the events of a run. The run calls the display with each event. Use it as a context
    manager.
    """

    def __init__(
        self,
        title: str,
        stages: Sequence[ResolvedStage],
        steps_before: int,
        visible: bool = True,
        console: Console | None = None,
    ):
        """Makes a display.

        Args:
          title: the text above the events.
          stages: the stages of the run.
          steps_before: number of steps of the run that are already taken.
          visible: whether the display shows anything; only that of process 0 does.
          console: the rich console; None: standard output.
        """
        self._title = title
        self._steps = stages[-1].last_step
        self._tokens = tokens_seen(stages, self._steps)
        self._console = console or Console(highlight=False, quiet=not visible)
        self._train: dict[str, Any] = {}
        self._heldout: list[str] = []
        self._sample = ""
        # The checkpoint that this process began with, or the first one of a run with a parent.
        self._checkpoint = f"step {steps_before}" if steps_before else "none yet"
        # The step whose time includes the compilation of its stage's train step.
        self._compiled_in = steps_before + 1
        self._step = steps_before
        self._activity: _Activity | None = None
        self._activities_shown: set[str] = set()
        self._spinner = Spinner("dots")
        self._skipped = 0
        self._faults: list[str] = []
        self._operators: list[str] = []
        self._slow: list[str] = []
        self._live = None
        if visible and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("train", total=self._steps, completed=steps_before)
            self._live = Live(
                console=self._console, refresh_per_second=4, get_renderable=self._narrow_panel
            )
        self._compiling = threading.Timer(
            XLA_WARNING_SECONDS - 10,
            self.say,
            (
                "still compiling the train step, which takes minutes for a large model. XLA asks "
                '"Very slow compile?" on standard error: '
                "nothing is wrong",
            ),
        )
        self._compiling.daemon = True

    def __enter__(self):
        self._activity = _Activity("compiling the train step", first=True)
        if self._live:
            self._live.start()
        else:
            self.say(self._title)
            self.say("compiling the train step …")
        self._compiling.start()
        return self

    def __exit__(self, *exception):
        self._compiling.cancel()
        if self._live:
            self._live.stop()

    def advance_to(self, step: int) -> None:
        """Moves the progress bar to `step`, which must be the last step that has ended."""
        self._compiling.cancel()
        self._step = step
        if self._activity and step >= self._compiled_in:
            self.say_without_panel(
                f"step {step}  took {_format_duration(self._activity.seconds)} with its compilation"
            )
            self._activity = None
        if self._live:
            self._progress.update(self._task, completed=step)

    @contextlib.contextmanager
    def show_activity(self, text: str, compiles: bool = True) -> Iterator[None]:
        """Shows `text`, which says what the run does instead of training, until the `with` block
        ends.

        Args:
          text: what the run does, such as "saving a checkpoint".
          compiles: whether the block compiles when it runs for the first time; if so, a plain line
            announces the first time. The panel shows `text` each time.
        """
        before = self._activity
        first = compiles and text not in self._activities_shown
        self._activities_shown.add(text)
        self._activity = _Activity(text, first)
        if first:
            self.say_without_panel(f"step {self._step}  {text}; compiling first …")
        try:
            yield
        finally:
            self._activity = before

    def set_elapsed(self, seconds: float) -> None:
        """Makes the live panel show `seconds` as the time that the run has taken. Pictures of a
        recorded run need this method.
        """
        for task in self._progress.tasks:
            task.start_time, task.stop_time = 0.0, seconds

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Shows one event of metrics.jsonl."""
        kind, step = event["event"], event["step"]
        line = ""
        if kind == "train":
            self._train = dict(event)
            self._skipped = int(event.get("skipped", self._skipped))
            self.advance_to(step)
            line = "  ".join(
                (
                    f"step {step:>{len(str(self._steps))}}/{self._steps}",
                    *(
                        f"{name} {value}"
                        for name, value in self._cells()
                        if name in PLAIN_LINE_VALUES
                    ),
                )
            )
        elif name := evaluation_name_of_event(event):
            values = metric_values_of_event(event)
            shown = values_of_main_metrics(values) or [
                value for value in values if value.metric.unit != "count"
            ]
            texts = [
                f"{one.title_and_condition} {one}{_values_by_source(one, values, name)}"
                for one in shown
            ]
            line = "  ".join((f"step {step}  {name}", *texts))
            self._heldout.append(line)
        elif kind == "stage":
            self._compiled_in = step
            self._activity = _Activity(f"compiling the train step of stage {event['stage']}", True)
            shape = f"{event['batch_size']} × {event['sequence_length']:,}"
            line = (
                f"step {step}  stage {event['stage']} begins: {event['steps']:,} steps of {shape} "
                f"tokens{_source_shares_text(event)}; compiling for it"
            )
        elif kind == "sample":
            self._sample = event["text"]
            line = f"step {step}  sample {event['text']!r}"
        elif kind == "operators":
            self._operators = operator_lines(event["operators"])
            self._slow = missing_kernel_lines(event["operators"])
            line = "\n".join((*self._operators, *(f"warning: {text}" for text in self._slow)))
        elif kind == "checkpoint":
            self._checkpoint = f"step {step}"
        elif kind in FAULT_LABELS:
            if kind in ("skip", "no_targets"):
                self._skipped = event.get("skipped", self._skipped + 1)
            if kind == "rewind":
                self._compiled_in = event.get("to_step", step) + 1
            if kind == "spike" and event.get("skipped"):
                return  # a "skip" event says the same
            line = f"step {step}  {FAULT_LABELS[kind]}" + (
                f": {event['reason']}" if event.get("reason") else ""
            )
            self._faults.append(line)
        if line:
            self.say_without_panel(line)

    def say_without_panel(self, line: str) -> None:
        """Prints a line if there is no live panel, which would show the content of the line in
        another form.
        """
        if not self._live:
            self.say(line)

    def say(self, line: str) -> None:
        """Prints a plain line that stays on the screen, above the panel if there is one."""
        # Standard output may be a file on a full disk; the run continues without the line.
        with contextlib.suppress(OSError):
            self._console.print(escape_control_in_lines(line), markup=False, soft_wrap=True)
            sys.stdout.flush()

    def _narrow_panel(self) -> Constrain:
        """Returns the panel with a width that leaves room for two "^C", which a terminal prints
        behind the last line when the user presses Ctrl-C. Without room for "^C" the terminal would
        begin a new line, and the next panel would be drawn one line lower, below a leftover border.
        """
        return Constrain(self.panel(), self._console.width - len("^C^C"))

    def panel(self) -> Panel:
        """Returns the live panel as it is now."""
        columns = max((self._console.width - 4) // (CELL_WIDTH + 1), 1)
        grid = Table.grid(padding=(0, 1), expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1, no_wrap=True)
        cells = [Text.assemble((name + " ", "dim"), value) for name, value in self._cells()]
        for i in range(0, len(cells), columns):
            grid.add_row(*cells[i : i + columns])
        parts: list[Any] = [Text(self._title, style="dim")]
        parts += [Text(line, style="dim") for line in self._operators]
        parts += [Text(text, style="yellow") for text in self._slow]
        parts.append(self._progress)
        if self._activity:
            self._spinner.update(text=Text(str(self._activity), style="bold"))
            parts.append(self._spinner)
        if cells:
            parts.append(grid)
        if self._heldout:
            parts += [
                Text(""),
                Text("\n".join(self._heldout[-4:]), no_wrap=True, overflow="ellipsis"),
            ]
        if self._faults:
            parts += [
                Text(""),
                Text(
                    "\n".join(self._faults[-3:]), style="yellow", no_wrap=True, overflow="ellipsis"
                ),
            ]
        if self._sample:
            text = Text("\n".join(self._sample.splitlines()[:6]), no_wrap=True, overflow="ellipsis")
            parts.append(Panel(text, title="sample", title_align="left", border_style="dim"))
        return Panel(Group(*parts))

    def _cells(self) -> list[tuple[str, str]]:
        """Returns the (name, value) pairs of the newest "train" event that the panel shows."""
        v = self._train
        if not v:
            return []
        cells = [("stage", v["stage"])] if "stage" in v else []
        cells += [
            ("loss", _format_number(v["loss"], ".4f")),
            ("bits/byte", _format_number(v["bits_per_byte"], ".4f"))
            if "bits_per_byte" in v
            else ("accuracy", _format_number(v["top1"], ".1%")),
        ]
        cells += [
            (
                MTP_LOSS_LABEL + displayed_mtp_depth(int(name.rpartition("/")[2])),
                _format_number(value, ".4f"),
            )
            for name, value in v.items()
            if name.startswith("mtp_loss/")
        ]
        cells += [
            (name.replace("/", " ", 1), _format_number(value, ".3g"))
            for name, value in v.items()
            if name.partition("/")[0] == "epochs"
        ]
        if "balance_loss" in v:
            cells += [
                ("balance", _format_number(v["balance_loss"], ".3f")),
                ("busiest expert", f"{_format_number(v['busiest_expert'], '.2f')} × fair share"),
            ]
        left = "–"  # unknown while the only measured step is one that was also compiled
        if v["step"] != self._compiled_in:
            left = _format_duration((self._tokens - v["tokens_seen"]) / v["tokens_per_second"])
        memory = (
            _format_scaled(v["memory_bytes"])
            + "B"
            + (f" of {_format_scaled(v['memory_limit'])}B" if v["memory_limit"] else "")
        )
        return cells + [
            ("grad norm", _format_number(v["grad_norm"], ".3g")),
            ("lr", f"{v['learning_rate']:.2e}"),
            ("tokens", _format_scaled(v["tokens_seen"])),
            ("tokens/s", f"{v['tokens_per_second']:,.0f}"),
            ("model FLOP/s", _format_scaled(v["model_flops_per_second"])),
            ("MFU", f"{v['mfu']:.1%}" if v["mfu"] is not None else "–"),
            ("left", left),
            ("memory", memory),
            ("data wait", f"{v['data_wait']:.0%}"),
            ("checkpoint", self._checkpoint),
            ("skipped", f"{self._skipped}"),
        ]


MTP_LOSS_LABEL = "mtp loss "
# The cells of the panel that the plain line of a "train" event shows, too.
PLAIN_LINE_VALUES = (
    "stage",
    "loss",
    "bits/byte",
    "accuracy",
    MTP_LOSS_LABEL + displayed_mtp_depth(0),
    "grad norm",
    "lr",
    "tokens/s",
    "model FLOP/s",
    "MFU",
    "memory",
    "left",
)
# kind of an event that reports a fault → what the display shows
FAULT_LABELS = {
    "skip": "update skipped",
    "spike": "loss spike",
    "no_targets": "nothing to predict",
    "rewind": "rewound",
    "damaged": "skipped a damaged checkpoint",
    "stop": "stopping",
    "save_failed": "checkpoint not saved",
    "hook_failed": "hook failed",
}


def operator_lines(operators: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines that say which implementation runs each operator, and why. There is one line
    for each reason.

    Args:
      operators: the field of an "operators" event.
    """
    names: dict[str, list[str]] = {}
    for entry in operators:
        name = f"{entry['operator']} {entry['implementation']}"
        if name not in names.setdefault(entry["why"], []):
            names[entry["why"]].append(name)
    return [f"{', '.join(same)}: {why}" for why, same in names.items()]


def missing_kernel_lines(operators: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the consequences of operators that run without kernels, such as slow steps. Each
    consequence appears once, with the first reason for it.

    Args:
      operators: the field of an "operators" event.
    """
    slow: dict[str, str] = {}
    for entry in operators:
        if entry["consequence"]:
            slow.setdefault(entry["consequence"], f"{entry['consequence']} ({entry['why']})")
    return list(slow.values())


def _format_number(value: float | str | None, form: str) -> str:
    """Formats a number of an event. NaN and infinity, which events hold as text, are returned
    unchanged; None becomes "–".
    """
    if value is None:
        return "–"
    return value if isinstance(value, str) else format(value, form)


def _format_scaled(value: float) -> str:
    """Formats a number of 1000 or more with three significant digits and a unit prefix ("1.23 G"),
    and a smaller one as a whole number.
    """
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} "


def _format_duration(seconds: float) -> str:
    """Formats seconds as days, hours, minutes and seconds: 2 d 3:04:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{seconds:02}"
