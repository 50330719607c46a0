"""What a measured number is called, how it is written and which direction is better.

An evaluation declares its figures, and the event that records their values records the
declaration too. So whatever shows a run knows no evaluation by name, and shows those of another
checkout; what is not declared is shown plainly.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple


@dataclasses.dataclass(frozen=True)
class Figure:
    """One kind of number that an evaluation gives, at one place or at several ("accuracy",
    "accuracy/8 pairs").

    title: as text; a place is put behind it. unit: "share" is written in percent, "count" as a
    whole number and never charted, "nats" and "bits" with four decimals. main: shown where there
    is room for few, and compared by sweeps.
    """

    title: str
    unit: Literal["share", "nats", "bits", "count", ""] = ""
    better: Literal["higher", "lower", ""] = ""
    main: bool = False


class Value(NamedTuple):
    """One number of an evaluation. `name` as the evaluation gave it; `kind` without `place`,
    which is "" for all places.
    """

    name: str
    kind: str
    place: str
    figure: Figure
    value: float

    @property
    def label(self) -> str:
        return f"{self.figure.title} {self.place}".strip()

    def __str__(self) -> str:
        form = {"share": ".1%", "count": ",.0f", "nats": ".4f", "bits": ".4f"}.get(
            self.figure.unit, ".4g"
        )
        return format(self.value, form if math.isfinite(self.value) else "")


def named(values: Mapping[str, Any], figures: Mapping[str, Figure]) -> list[Value]:
    """Every number of `values` with its figure; what is not declared stands under its own name."""
    found = []
    for name, value in values.items():
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            or value in ("nan", "inf", "-inf")
        ):
            kind, _, place = name.partition("/")
            found.append(
                Value(
                    name,
                    kind,
                    place,
                    figures.get(kind) or Figure(kind.replace("_", " "), main=True),
                    float(value),
                )
            )
    return found


def main_values(values: Iterable[Value]) -> list[Value]:
    """Those of the main figures: over all places where there is such a value, else at every
    place.
    """
    values = list(values)
    whole = {value.name for value in values}
    return [
        value
        for value in values
        if value.figure.main and (not value.place or value.kind not in whole)
    ]


def record(values: Mapping[str, float], figures: Mapping[str, Figure]) -> dict[str, Any]:
    """What an event holds of an evaluation."""
    kinds = {value.kind for value in named(values, figures)}
    return {
        **values,
        "figures": {kind: dataclasses.asdict(figures[kind]) for kind in figures if kind in kinds},
    }


def recorded(event: Mapping[str, Any]) -> list[Value]:
    """Every number in an evaluation's event."""
    fields = {field.name for field in dataclasses.fields(Figure)}
    figures = {
        kind: Figure(**{name: value for name, value in figure.items() if name in fields})
        for kind, figure in event.get("figures", {}).items()
    }
    return named(
        {
            name: value
            for name, value in event.items()
            if name not in ("event", "step", "time", "suite")
        },
        figures,
    )


def evaluation(event: Mapping[str, Any]) -> str:
    """The name of the evaluation whose event this is, "" for any other event."""
    return (
        str(event.get("suite", ""))
        if event["event"] == "suite"
        else "heldout"
        if event["event"] == "heldout"
        else ""
    )
