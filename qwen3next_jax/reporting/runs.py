"""Data reduction: the events of a run → series short enough to draw, the use of its wall time,
its faults, its settings.

Letters: N points or events, L layers.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.events import each_event
from qwen3next_jax.common.trees import flatten

POINTS = 400  # of a drawn line: about the pixels of a chart
FAULTS = ("skip", "spike", "no_targets", "rewind", "damaged", "save_failed", "hook_failed", "stop")
# How wall time is spent. Training counts towards goodput: the time of steps that are part of the
# run as it now is.
TRAINING, STARTING, OTHER, LOST, DOWN = (
    "training",
    "starting and compiling",
    "evaluating, saving, other",
    "lost work",
    "down",
)
USES = (TRAINING, STARTING, OTHER, LOST, DOWN)


class Series(NamedTuple):
    """x [N] increasing, y [N] means of what stands there, low and high [N] the range of it; NaN
    where nothing finite does.
    """

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Fault(NamedTuple):
    """Something that went wrong, or a restart."""

    step: int
    time: float
    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its folder records it. `events` by kind, in the order written; `config` nested
    dicts; `log` all events.
    """

    name: str
    config: dict[str, Any]
    log: list[dict[str, Any]]
    events: dict[str, list[dict[str, Any]]]

    def series(self, kind: str, name: str, points: int = POINTS) -> Series | None:
        """`name` of the events of `kind` over steps, in at most `points` points; None where no
        event has it.
        """
        found = [
            (e["step"], _number(e[name]))
            for e in self.events.get(kind, ())
            if e.get(name) is not None
        ]
        return shorten(*np.array(found, float).T, points) if found else None

    def names(self, kind: str, prefix: str) -> list[str]:
        """The names that start with `prefix` in events of `kind`, in order."""
        events = self.events.get(kind, ())
        return sorted(
            {name for e in (*events[:1], *events[-1:]) for name in e if name.startswith(prefix)}
        )

    def layers(self, name: str, points: int = 120) -> tuple[np.ndarray, np.ndarray] | None:
        """(steps [N], values [N, L]) of a list over layers in the "diagnostics" events, at most
        `points` of them evenly chosen; layers without a value are NaN. None where no event has
        it.
        """
        events = [
            e
            for e in self.events.get("diagnostics", ())
            if isinstance(e.get(name), list) and any(v is not None for v in e[name])
        ]
        if not events:
            return None
        events = [e for e in events if len(e[name]) == len(events[-1][name])]
        events = [
            events[i]
            for i in np.unique(
                np.linspace(0, len(events) - 1, min(points, len(events))).round().astype(int)
            )
        ]
        return np.array([e["step"] for e in events]), np.array(
            [[_number(v) for v in e[name]] for e in events]
        )

    def last(self, kind: str, name: str) -> Any:
        """The newest value of `name` in events of `kind`; None where there is none."""
        return next(
            (e[name] for e in reversed(self.events.get(kind, ())) if e.get(name) is not None), None
        )

    @property
    def layer_names(self) -> list[str]:
        """Of every entry of a list over layers: "3", and "MTP" for the module after the last."""
        model = self.config.get("model", {})
        count = model.get("num_hidden_layers", 0)
        return [str(i) for i in range(count)] + (["MTP"] if model.get("mtp_depth") else [])


def load_run(workdir: pathlib.Path) -> Run:
    """Reads WORKDIR/run.json and WORKDIR/metrics.jsonl.

    Raises:
      UserError: `workdir` is not the folder of a run, or nothing has been recorded there yet, or
      it cannot be read.
    """
    path = workdir / "run.json"
    if not path.exists():
        raise UserError(f"{workdir}: not the folder of a run (it has no run.json)")
    try:
        config = json_files.read(path)["config"]
        layers, steps = (
            config.get("model", {}).get("num_hidden_layers", 0),
            config.get("train", {}).get("steps", 0),
        )
        if not (
            type(layers) is int
            and 0 <= layers < 10**5
            and type(steps) is int
            and 0 <= steps < 2**63
        ):
            raise ValueError("no numbers of layers and steps")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: damaged or foreign (expected JSON with config)") from error
    events, newest = [], {}
    try:
        for _, event in each_event(workdir / "metrics.jsonl"):
            # by far the largest thing there; only the newest one is drawn
            if "expert_load" in event:
                newest.pop("expert_load", None)
                newest = event
            events.append(event)
    except OSError as error:
        raise UserError(
            f"{workdir / 'metrics.jsonl'}: cannot be read ({error.strerror})"
        ) from error
    if not events:
        raise UserError(
            f"{workdir}: nothing has been recorded yet (metrics.jsonl is absent or empty)"
        )
    return make_run(workdir.resolve().name, config, events)


def make_run(name: str, config: dict[str, Any], events: list[dict[str, Any]]) -> Run:
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    return Run(name, config, events, by_kind)


def shorten(x: np.ndarray, y: np.ndarray, points: int) -> Series:
    """At most `points` points: each is the mean of a stretch of x, with the smallest and largest
    value there, so that no spike is lost. x must not decrease.
    """
    if len(x) <= points:
        return Series(
            x, np.where(np.isfinite(y), y, np.nan), *(np.where(np.isfinite(y), y, np.nan),) * 2
        )
    edges = np.linspace(x[0], x[-1], points + 1)[1:-1]
    starts = np.unique(np.concatenate(([0], np.searchsorted(x, edges))))
    starts = starts[starts < len(x)]
    finite = np.isfinite(y)
    count = np.add.reduceat(finite.astype(float), starts)
    count[count == 0] = np.nan

    def empty_is_nan(values):
        return np.where(np.isfinite(values), values, np.nan)

    with np.errstate(over="ignore"):
        mean = np.add.reduceat(np.where(finite, y, 0.0), starts) / count
    low = empty_is_nan(np.minimum.reduceat(np.where(finite, y, np.inf), starts))
    high = empty_is_nan(np.maximum.reduceat(np.where(finite, y, -np.inf), starts))
    ends = np.append(starts[1:], len(x)) - 1
    middle = (x[starts] + x[ends]) / 2
    middle[0], middle[-1] = x[0], x[-1]  # the curve reaches from the first step to the last
    return Series(middle, mean, low, high)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def wall_time(run: Run) -> list[tuple[float, float, str]]:
    """(begin, end, use) in seconds since the first start, back to back, of every stretch of the
    run's wall time.
    """
    spans, now, zero, fresh, first = [], None, None, True, 0

    def until(end: float, use: str) -> None:
        nonlocal now
        if end > now:
            spans.append((now - zero, end - zero, use))
            now = end

    for event in run.log:
        kind, time = event["event"], event.get("time", 0.0)
        if now is None:
            now = zero = time
        if kind == "start":
            if event.get("previous_end"):
                until(event["previous_end"], LOST if event.get("lost_steps") else OTHER)
            until(time, DOWN)
            fresh, first = True, event.get("first_step", 0)
        elif kind == "train":
            # logged at once: its time holds the compilation
            compiles = fresh and event["step"] == first + 1
            # `seconds` leaves out what was evaluated and saved since the last such event; where in
            # between does not matter.
            until(time - event.get("seconds", 0.0), STARTING if fresh else OTHER)
            until(time, STARTING if compiles else TRAINING)
            fresh = compiles
        elif kind == "rewind":
            until(time, LOST)
    if now is not None:
        until(run.log[-1].get("time", 0.0), STARTING if fresh else OTHER)
    return spans


def goodput(spans: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Share of the wall time by use; the share of TRAINING is the goodput."""
    seconds = dict.fromkeys(USES, 0.0)
    for begin, end, use in spans:
        seconds[use] += end - begin
    total = max(sum(seconds.values()), 1e-9)
    return {use: value / total for use, value in seconds.items()}


def wall_time_columns(
    spans: Sequence[tuple[float, float, str]], columns: int
) -> tuple[float, np.ndarray]:
    """(seconds of a column, [columns, uses] share of each use in it)."""
    width = max(spans[-1][1], 1e-9) / columns if spans else 1.0
    shares = np.zeros((columns, len(USES)))
    for begin, end, use in spans:
        for column in range(int(begin / width), min(int(end / width) + 1, columns)):
            shares[column, USES.index(use)] += (
                max(min(end, (column + 1) * width) - max(begin, column * width), 0.0) / width
            )
    return width, shares


def faults(run: Run) -> list[Fault]:
    """Every restart, what was changed at it, and everything that went wrong, in order of time."""
    found = []
    for event in run.log:
        kind, reason = event["event"], str(event.get("reason", ""))
        # a "skip" event says the same
        if kind in FAULTS and not (kind == "spike" and event.get("skipped")):
            found.append(
                Fault(event["step"], event.get("time", 0.0), kind.replace("_", " "), reason)
            )
        elif kind == "changed":
            text = "; ".join(
                f"{name}: {old!r} → {new!r}" for name, old, new in event.get("changes", ())
            )
            found.append(Fault(event["step"], event.get("time", 0.0), "settings changed", text))
        elif kind == "start" and event.get("previous_end"):
            lost = f"; {event['lost_steps']} steps taken again" if event.get("lost_steps") else ""
            found.append(
                Fault(
                    event["step"],
                    event["time"],
                    "restart",
                    f"from step {event.get('first_step', event['step'])}{lost}",
                )
            )
    return sorted(found, key=lambda fault: fault.time)


def stages(run: Run) -> list[tuple[int, str]]:
    """(steps taken before it, name) of every stage that has begun."""
    return [
        (event["step"] - 1, str(event.get("stage")))
        for event in run.events.get("stage", ())
        if event["step"]
    ]


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """(setting, its value in each run; None where absent) of the settings that differ."""
    configs = [flatten(run.config) for run in runs]
    names = sorted({name for config in configs for name in config})
    rows = [(name, [config.get(name) for config in configs]) for name in names]
    return [
        (name, values) for name, values in rows if any(value != values[0] for value in values[1:])
    ]
