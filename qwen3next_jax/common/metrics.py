"""Declares what an evaluation measures: each metric's title, its unit, and which direction is
better.

An evaluation declares its metrics. The event that records the measured values also records the
declarations of their metrics, under the key "figures". The display, the report and sweeps read the
declarations from the event, so they need no list of evaluations, and they can show evaluations that
another version of this code wrote.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

# Fields of an event that say where the event comes from; every other number in it is a measured
# value.
_EVENT_HEADER = ("event", "step", "time", "suite")
_FORMATS = {"share": ".1%", "count": ",.0f", "nats": ".4f", "bits": ".4f"}


@dataclasses.dataclass(frozen=True)
class Metric:
    """The declaration of one metric, such as accuracy, that an evaluation measures.

    If an evaluation measures the same metric under several conditions, it returns one value for
    each condition, under "metric/condition": "accuracy/8 pairs" is the metric "accuracy" measured
    with 8 pairs.

    Attributes:
      title: what a chart or table calls the metric.
      unit: "share" is printed in percent; "nats" and "bits" are printed with four decimals;
        "count" is printed as a whole number and has no chart.
      better: whether higher or lower values are better; "" if neither direction is better.
      main: whether the evaluation is judged by this metric. Sweeps compare the main metrics. While
        a run trains, its display shows only main metrics, or, if an evaluation has none, all of its
        values that are not counts.
    """

    title: str
    unit: Literal["share", "nats", "bits", "count", ""] = ""
    better: Literal["higher", "lower", ""] = ""
    main: bool = False


class MetricValue(NamedTuple):
    """One number that an evaluation measured.

    Attributes:
      key: the key under which the evaluation returned the number: "accuracy/8 pairs".
      metric_name: the part of the key that names the metric: "accuracy".
      condition_in_key: the part of the key after the "/", such as "8 pairs"; "" for a value over
        all conditions.
      metric: the declaration of the metric.
      value: the measured number.
    """

    key: str
    metric_name: str
    condition_in_key: str
    metric: Metric
    value: float

    @property
    def displayed_condition(self) -> str:
        """The condition as readers see it (`displayed_condition`)."""
        return displayed_condition(self.metric_name, self.condition_in_key)

    @property
    def title_and_condition(self) -> str:
        """The metric's title followed by the condition."""
        return f"{self.metric.title} {self.displayed_condition}".strip()

    def __str__(self) -> str:
        """Returns the number in the format of its unit."""
        if not math.isfinite(self.value):
            return str(self.value)
        return format(self.value, _FORMATS.get(self.metric.unit, ".4g"))


def displayed_condition(kind: str, condition: str) -> str:
    """Returns the condition under which a metric was measured, for readers: "t+2" in place of the
    depth 0 of multi-token prediction, any other condition as it is.
    """
    if kind.startswith("mtp_") and condition.isdecimal():
        return displayed_mtp_depth(int(condition))
    return condition


def displayed_mtp_depth(depth: int) -> str:
    """Returns the name that displays show for a depth of multi-token prediction, after the token
    that the depth predicts: "t+2" for depth 0. t+1 is the next token. Fields of events have the
    depth: "mtp_loss/0".
    """
    return f"t+{depth + 2}"


def pair_with_declarations(
    values: Mapping[str, Any], metrics: Mapping[str, Metric]
) -> list[MetricValue]:
    """Pairs every number of `values` with the declaration of its metric.

    Texts and booleans are left out; NaN and infinity are kept. A number whose metric is not
    declared gets a declaration made from its name.
    """
    found = []
    for name, value in values.items():
        if not _is_number(value):
            continue
        kind, _, condition = name.partition("/")
        metric = metrics.get(kind) or Metric(kind.replace("_", " "), main=True)
        found.append(MetricValue(name, kind, condition, metric, float(value)))
    return found


def values_of_main_metrics(values: Iterable[MetricValue]) -> list[MetricValue]:
    """Selects the values of main metrics.

    If a metric has a value over all conditions, only that value is selected. For any other metric,
    the value under each condition is selected.
    """
    values = list(values)
    names = {value.key for value in values}
    return [
        value
        for value in values
        if value.metric.main and (not value.condition_in_key or value.metric_name not in names)
    ]


def evaluation_event_fields(
    values: Mapping[str, float], metrics: Mapping[str, Metric]
) -> dict[str, Any]:
    """Returns the fields of the event that records `values`: the numbers, and under "figures"
    the declarations of their metrics.
    """
    kinds = {value.metric_name for value in pair_with_declarations(values, metrics)}
    declarations = {kind: dataclasses.asdict(metrics[kind]) for kind in metrics if kind in kinds}
    return {**values, "figures": declarations}


def metric_values_of_event(event: Mapping[str, Any]) -> list[MetricValue]:
    """Returns every number that an evaluation's event records, with its declaration."""
    known = {field.name for field in dataclasses.fields(Metric)}
    metrics = {
        kind: Metric(**{name: value for name, value in declaration.items() if name in known})
        for kind, declaration in event.get("figures", {}).items()
    }
    values = {name: value for name, value in event.items() if name not in _EVENT_HEADER}
    return pair_with_declarations(values, metrics)


def evaluation_name_of_event(event: Mapping[str, Any]) -> str:
    """Returns the name of the evaluation that wrote the event; "" if no evaluation did."""
    if event["event"] == "suite":
        return str(event.get("suite", ""))
    return event["event"] if event["event"] in ("heldout", "heldout_average") else ""


def _is_number(value: Any) -> bool:
    """Whether `value` is a number of an event. In an event, NaN and infinity are text."""
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")
