"""Reads run.json and metrics.jsonl of a run, and computes what the report shows: curves of few
points, the use of wall time, faults, stages and settings.

Letters: N points or events, L layers.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import UserError, join_first, similar_folder_hint
from qwen3next_jax.common.events import iterate_events
from qwen3next_jax.common.trees import flatten

POINTS = 400  # the largest number of points of a line; a chart is not many more pixels wide
FAULTS = ("skip", "spike", "no_targets", "rewind", "damaged", "save_failed", "hook_failed", "stop")
# The uses of wall time. TRAINING is the time of training steps, except for steps whose result was
# lost because the process died or the run was rewound. The share of TRAINING is the goodput.
TRAINING, STARTING, OTHER, LOST, DOWN = (
    "training",
    "starting and compiling",
    "evaluating, saving, other",
    "lost work",
    "down",
)
USES = (TRAINING, STARTING, OTHER, LOST, DOWN)


class Series(NamedTuple):
    """A quantity over steps, reduced to few points. Each point summarises several recorded values.

    Attributes:
      steps: [N], the steps, increasing.
      means: [N], the mean of the finite values that a point stands for; NaN if none is finite.
      smallest, largest: [N], the smallest and the largest of these finite values.
    """

    steps: np.ndarray
    means: np.ndarray
    smallest: np.ndarray
    largest: np.ndarray


class Fault(NamedTuple):
    """A fault, a restart, or a change of settings.

    Attributes:
      step: the step that the event records.
      unix_seconds: the time of the event, in seconds since 1970.
      kind: what happened, in a word or two.
      details: the reason or the details; may be empty.
    """

    step: int
    unix_seconds: float
    kind: str
    details: str


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings and events that the folder of a run records.

    Attributes:
      name: the name of the run's folder.
      config: the settings, as nested dicts.
      all_events: all events, in the order they were written. Only the newest of the events with the
        field "expert_load" keeps this field.
      events_by_kind: kind of event → the events of this kind, in the order they were written.
      tokenizer_identity: the fingerprint of the run's tokenizer, or the setting data.tokenizer if
        the run recorded no fingerprint. Runs with different values of `tokenizer_identity` have
        different tokenizers.
    """

    name: str
    config: dict[str, Any]
    all_events: list[dict[str, Any]]
    events_by_kind: dict[str, list[dict[str, Any]]]
    tokenizer_identity: str = ""

    def series(self, kind: str, name: str, points: int = POINTS) -> Series | None:
        """Returns the field `name` of the events of `kind` over steps, reduced to at most `points`
        points; None if no event has this field.
        """
        values = [
            (event["step"], _float_or_nan(event[name]))
            for event in self.events_by_kind.get(kind, ())
            if event.get(name) is not None
        ]
        return downsample(*np.array(values, float).T, points) if values else None

    def field_names(self, kind: str, prefix: str) -> list[str]:
        """Returns, in sorted order, the names of fields that start with `prefix`, in events of
        `kind`. Only the first and the last event of `kind` are read.
        """
        events = self.events_by_kind.get(kind, ())
        names = {name for event in (*events[:1], *events[-1:]) for name in event}
        return sorted(name for name in names if name.startswith(prefix))

    def layer_values(self, name: str, points: int = 120) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the values of a quantity that "diagnostics" events record for every layer. If an
        event has another number of layers than the newest event, the event is left out.

        Args:
          name: the name of the quantity.
          points: the largest number of events to return; if there are more, events at equal
            distances are chosen.

        Returns:
          Steps [N] and values [N, L]. If a layer has no value in an event, the value is NaN. None
          if no event records the quantity.
        """
        lists = [
            (event["step"], event[name])
            for event in self.events_by_kind.get("diagnostics", ())
            if isinstance(event.get(name), list)
        ]
        lists = [(step, values) for step, values in lists if any(v is not None for v in values)]
        if not lists:
            return None
        newest_length = len(lists[-1][1])
        lists = [(step, values) for step, values in lists if len(values) == newest_length]
        chosen = np.linspace(0, len(lists) - 1, min(points, len(lists))).round().astype(int)
        lists = [lists[i] for i in np.unique(chosen)]
        steps = np.array([step for step, _ in lists])
        return steps, np.array([[_float_or_nan(v) for v in values] for _, values in lists])

    def newest_value(self, kind: str, name: str, step: int | None = None) -> Any:
        """Returns the newest value of the field `name` in the events of `kind`; None if there is
        none. If `step` is given, only the events at this step are searched.
        """
        for event in reversed(self.events_by_kind.get(kind, ())):
            if event.get(name) is not None and step in (None, event["step"]):
                return event[name]
        return None

    @property
    def layer_names(self) -> list[str]:
        """The name of every entry of a list over layers: the layer's number, or "MTP" for the
        multi-token prediction module, whose entry is the last.
        """
        model = self.config.get("model", {})
        count = model.get("num_hidden_layers", 0)
        return [str(i) for i in range(count)] + (["MTP"] if model.get("mtp_depth") else [])


def load_run(workdir: pathlib.Path) -> Run:
    """Reads a run's settings from run.json and its events from metrics.jsonl in `workdir`.

    Raises:
      UserError: `workdir` is not the folder of a run, the run has recorded nothing yet, or a file
        cannot be read.
    """
    path = workdir / "run.json"
    try:
        record = json_files.read(path)
        config = record["config"]
        layers = config.get("model", {}).get("num_hidden_layers", 0)
        steps = config.get("train", {}).get("steps", 0)
        if type(layers) is not int or not 0 <= layers < 10**5:
            raise ValueError("num_hidden_layers is not a number of layers")
        if type(steps) is not int or not 0 <= steps < 2**63:
            raise ValueError("train.steps is not a number of steps")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{workdir}: not the folder of a run (it has no run.json){similar_folder_hint(workdir)}"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: damaged or foreign (expected JSON with config)") from error
    events, newest = [], {}
    try:
        for _, event in iterate_events(workdir / "metrics.jsonl"):
            # The load of all experts is by far the largest field; the report draws only the newest.
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
    run = run_from_events(workdir.resolve().name, config, events)
    tokenizer = record.get("tokenizer") or flatten(config).get("data.tokenizer", "")
    return dataclasses.replace(run, tokenizer_identity=str(tokenizer))


def run_from_events(name: str, config: dict[str, Any], events: list[dict[str, Any]]) -> Run:
    """Makes a Run.

    Args:
      name: the name of the run.
      config: the settings, as nested dicts.
      events: all events, in the order they were written.
    """
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    return Run(name, config, events, by_kind)


def downsample(x: np.ndarray, y: np.ndarray, points: int) -> Series:
    """Reduces a curve to at most `points` points.

    The range of x is divided into intervals. Each point of the result has the mean, the smallest
    and the largest of the finite values in one interval, so that no finite spike is lost. If an
    interval has no finite value, its mean, smallest and largest value are NaN.

    Args:
      x: [N]; each number is at least as large as the one before it.
      y: [N], may contain NaN and infinity.
    """
    if len(x) <= points:
        y = np.where(np.isfinite(y), y, np.nan)
        return Series(x, y, y, y)
    edges = np.linspace(x[0], x[-1], points + 1)[1:-1]
    starts = np.unique(np.concatenate(([0], np.searchsorted(x, edges))))
    starts = starts[starts < len(x)]
    finite = np.isfinite(y)
    count = np.add.reduceat(finite.astype(float), starts)
    count[count == 0] = np.nan

    with np.errstate(over="ignore"):
        mean = np.add.reduceat(np.where(finite, y, 0.0), starts) / count
    low = np.minimum.reduceat(np.where(finite, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, y, -np.inf), starts)
    low, high = (np.where(np.isfinite(v), v, np.nan) for v in (low, high))
    ends = np.append(starts[1:], len(x)) - 1
    middle = (x[starts] + x[ends]) / 2
    middle[0], middle[-1] = x[0], x[-1]  # the curve reaches from the first step to the last
    return Series(middle, mean, low, high)


def _float_or_nan(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


class Span(NamedTuple):
    """A period of wall time with one use, such as training or starting.

    Attributes:
      begin_seconds, end_seconds: the begin and the end, in seconds since the run's first event.
      use: the use, an entry of USES.
    """

    begin_seconds: float
    end_seconds: float
    use: str


class _SpanRecorder:
    """Collects spans of wall time; each span begins where the previous span ends."""

    def __init__(self, start: float):
        self.spans: list[Span] = []
        self._start = self._now = start

    def add_span_until(self, end: float, use: str) -> None:
        """Adds a span of wall time with the use `use`, from the end of the last span until `end`.
        If `end` is not later than the end of the last span, nothing is added.

        Args:
          end: a time, in seconds since 1970.
        """
        if end > self._now:
            self.spans.append(Span(self._now - self._start, end - self._start, use))
            self._now = end


def wall_time_spans(run: Run) -> list[Span]:
    """Divides the run's wall time, from the first event to the last, into spans by use."""
    if not run.all_events:
        return []
    recorder = _SpanRecorder(run.all_events[0].get("time", 0.0))
    starting = True  # whether the process has only started and compiled so far
    first_step = 0
    for event in run.all_events:
        kind, time = event["event"], event.get("time", 0.0)
        if kind == "start":
            if event.get("previous_end"):
                recorder.add_span_until(
                    event["previous_end"], LOST if event.get("lost_steps") else OTHER
                )
            recorder.add_span_until(time, DOWN)
            starting, first_step = True, event.get("first_step", 0)
        elif kind == "train":
            # If the first step is logged, its seconds include the compilation.
            is_compilation = starting and event["step"] == first_step + 1
            # `seconds` excludes evaluations and saves since the last "train" event. They are drawn
            # before the training time, wherever they were in between.
            recorder.add_span_until(
                time - event.get("seconds", 0.0), STARTING if starting else OTHER
            )
            recorder.add_span_until(time, STARTING if is_compilation else TRAINING)
            starting = is_compilation
        elif kind == "rewind":
            recorder.add_span_until(time, LOST)
    recorder.add_span_until(run.all_events[-1].get("time", 0.0), STARTING if starting else OTHER)
    return recorder.spans


def wall_time_shares(spans: Iterable[Span]) -> dict[str, float]:
    """Returns use → the share of the wall time that this use takes. The share of TRAINING is the
    goodput.
    """
    seconds = dict.fromkeys(USES, 0.0)
    for begin, end, use in spans:
        seconds[use] += end - begin
    total = max(sum(seconds.values()), 1e-9)
    return {use: value / total for use, value in seconds.items()}


def wall_time_shares_by_column(spans: Sequence[Span], columns: int) -> tuple[float, np.ndarray]:
    """Divides the wall time into columns of equal length.

    Returns:
      The length of a column in seconds, and the share of each use in each column, [columns, uses].
    """
    width = max(spans[-1][1], 1e-9) / columns if spans else 1.0
    shares = np.zeros((columns, len(USES)))
    for begin, end, use in spans:
        for column in range(int(begin / width), min(int(end / width) + 1, columns)):
            overlap = min(end, (column + 1) * width) - max(begin, column * width)
            shares[column, USES.index(use)] += max(overlap, 0.0) / width
    return width, shares


def faults_and_restarts(run: Run) -> list[Fault]:
    """Returns every fault, every restart and every change of settings, in the order of time."""
    found = []
    for event in run.all_events:
        kind, step, time = event["event"], event["step"], event.get("time", 0.0)
        # A spike whose update was skipped has a "skip" event, too.
        if kind in FAULTS and not (kind == "spike" and event.get("skipped")):
            found.append(Fault(step, time, kind.replace("_", " "), str(event.get("reason", ""))))
        elif kind == "changed":
            changes = event.get("changes", ())
            text = "; ".join(f"{name}: {old!r} → {new!r}" for name, old, new in changes)
            found.append(Fault(step, time, "settings changed", text))
        elif kind == "start" and event.get("previous_end"):
            text = f"from step {event.get('first_step', step)}"
            if event.get("lost_steps"):
                text += f"; {event['lost_steps']} steps taken again"
            found.append(Fault(step, time, "restart", text))
    return sorted(found, key=lambda fault: fault.unix_seconds)


def stage_starts(run: Run) -> list[tuple[int, str]]:
    """Returns (number of steps taken before the stage, name) of every stage that has begun."""
    return [
        (event["step"] - 1, str(event.get("stage")))
        for event in run.events_by_kind.get("stage", ())
        if event["step"]
    ]


# The settings that choose the held-out text and the rows of it that are evaluated.
HELDOUT_SETTINGS = (
    "data.source",
    "data.path",
    "data.text_field",
    "data.messages_field",
    "data.template_date",
    "data.heldout_fraction",
    "data.seed",
    "data.synthetic.pairs",
    "data.synthetic.modulus",
    "data.synthetic.max_moved",
    "data.synthetic.gap_power",
    "train.sequence_length",
    "eval.rows",
)


class IncomparableReason(NamedTuple):
    """Why numbers of several runs cannot be compared.

    Attributes:
      chart_note: the reason in a few words, for the note of a chart.
      full_sentence: the reason as a whole sentence, which names the runs.
    """

    chart_note: str
    full_sentence: str


def incomparable_reasons(runs: Sequence[Run]) -> dict[str, IncomparableReason]:
    """Returns the reasons why numbers of the given runs cannot be compared. The result has the key
    "tokenizer" if the runs have different tokenizers, and the key "heldout" if the runs were
    evaluated on different text.
    """
    found = {}
    if len({run.tokenizer_identity for run in runs}) > 1:
        found["tokenizer"] = IncomparableReason(
            "Different tokenizers: not comparable.",
            "The runs have different tokenizers "
            f"({_grouped_run_names(runs, [r.tokenizer_identity for r in runs])}): "
            "losses per token and accuracies of one tokenizer say nothing about another's. Compare "
            "bits per byte.",
        )
    settings = [flatten(run.config) for run in runs]
    if differing := differing_heldout_settings(settings):
        texts = [", ".join(str(s.get(name) or "") for name in differing) for s in settings]
        found["heldout"] = IncomparableReason(
            "Different held-out text.",
            f"The runs were evaluated on different text ({', '.join(differing)}: "
            f"{_grouped_run_names(runs, texts)}): a lower loss may be easier text.",
        )
    return found


def differing_heldout_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of `HELDOUT_SETTINGS` that have different values in several runs. If there
    are any, the runs were evaluated on different text.

    Args:
      settings: for each run, dotted name of a setting → value. A setting that an older run does not
        have is as one that is left empty.
    """
    return [
        name for name in HELDOUT_SETTINGS if len({str(s.get(name) or "") for s in settings}) > 1
    ]


def _grouped_run_names(runs: Sequence[Run], keys: Sequence[str]) -> str:
    """Returns the names of the runs as text, such as "a, b | c": runs with equal keys form a group.
    The text names at most three groups, and three runs of each group.
    """
    groups: dict[str, list[str]] = {}
    for run, key in zip(runs, keys, strict=True):
        groups.setdefault(key, []).append(run.name)
    return join_first((join_first(names, 3) for names in groups.values()), 3, " | ")


def runs_without_layer_statistics(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs that trained but did not measure their layers. If no run measured its
    layers, returns [].
    """
    if not any(run.events_by_kind.get("diagnostics") for run in runs):
        return []
    return [
        r for r in runs if r.events_by_kind.get("train") and not r.events_by_kind.get("diagnostics")
    ]


def setting_differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Returns (setting, its value in each run) for the settings in which the runs differ. A value
    is None if the run does not have the setting.
    """
    configs = [flatten(run.config) for run in runs]
    names = sorted({name for config in configs for name in config})
    values = {name: [config.get(name) for config in configs] for name in names}
    return [(name, row) for name, row in values.items() if any(v != row[0] for v in row[1:])]
