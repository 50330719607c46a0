"""Reading metrics.jsonl, the record of a run; docs/report.md has the schema."""

import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import ExitCode

_LARGEST = 2**63  # of a number: more is damage, and NumPy has no room for it


def each_event(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, event) of every event in `path` in the order written; none where there is no file.
    A line torn by a kill is not an event, nor is one whose fields are not what the schema says,
    so that no reader has to look twice. One at a time: the record of a long run does not have to
    fit in memory.

    Raises:
      OSError: `path` is something other than a regular file, or cannot be read.
    """
    if not path.exists():
        return
    json_files.check_regular(path)
    with path.open(errors="replace") as file:
        for line in file:
            try:
                event = json_files.parse(line)
            except ValueError:
                continue
            whole = _REQUIRED <= event.keys() and (event["event"] != "suite" or "suite" in event)
            if whole and all(_FIELDS.get(name, _is_plain)(value) for name, value in event.items()):
                yield line, event


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """Every event in `path`."""
    return [event for _, event in each_event(path)]


def ended_badly(events: Iterable[dict[str, Any]], step: int) -> str:
    """Why the run of these `events` is no good although it reached `step`, its last: what its
    "stop" event says that came after the last evaluation there. "" where there is none.
    """
    reason = ""
    for event in events:
        if event["step"] == step and event["event"] in ("heldout", "stop"):
            reason = (
                str(event.get("reason"))
                if event["event"] == "stop" and event.get("exit_code") == ExitCode.DIVERGED
                else ""
            )
    return reason


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_plain(value: Any) -> bool:
    """Numbers (NaN and infinity are text), text, nothing, or lists and objects of them: what a
    reader can draw or leave out.
    """
    return (
        value is None
        or isinstance(value, (str, bool, float))
        or _is_number(value)
        or isinstance(value, (list, dict))
        and all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    )


def _is_matrix(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list)
        and len(row) == len(value[0]) > 0
        and set(map(type, row)) <= {int, float}
        and -_LARGEST < min(row) <= max(row) < _LARGEST
        for row in value
    )


def _is_changes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(change, list) and len(change) == 3 and _is_text(change[0]) for change in value
    )


def _is_groups(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(group, dict) and all(map(_is_plain, group.values())) for group in value.values()
    )


def _is_figures(value: Any) -> bool:
    """What an evaluation declared of its numbers (`figures.Figure`)."""
    return isinstance(value, dict) and all(
        isinstance(figure, dict)
        and _is_text(figure.get("title"))
        and all(_is_text(figure.get(name, "")) for name in ("unit", "better"))
        for figure in value.values()
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and _is_plain(value)


def _or_none(check):
    return lambda value: value is None or check(value)


# What readers take for granted; any other field is as `_is_plain` has it.
_REQUIRED = {"event", "step", "time"}
_FIELDS = {
    "event": _is_text,
    "step": _is_count,
    "time": _is_number,
    "seconds": _is_number,
    "first_step": _is_count,
    "lost_steps": _is_count,
    "previous_end": _or_none(_is_number),
    "hosts": _is_count,
    "commit": _or_none(_is_text),
    "suite": _is_text,
    "changes": _is_changes,
    "groups": _is_groups,
    "figures": _is_figures,
    "router_entropy": _or_none(_is_list),
    "expert_load": _is_matrix,
}
