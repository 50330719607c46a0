"""Reading metrics.jsonl, the record of a run; docs/report.md has the schema."""

import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from qwen3next_jax.errors import ExitCode


def each_event(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, event) of every event in `path` in the order written; none where there is no file. A line torn by a kill is
    not an event. One at a time: the record of a long run does not have to fit in memory."""
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("step"), int) and isinstance(event.get("event"), str):
                yield line, event


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """Every event in `path`."""
    return [event for _, event in each_event(path)]


def ended_badly(events: Iterable[dict[str, Any]], step: int) -> str:
    """Why the run of these `events` is no good although it reached `step`, its last: what its "stop" event says that came after
    the last evaluation there. "" where there is none."""
    reason = ""
    for event in events:
        if event["step"] == step and event["event"] in ("heldout", "stop"):
            reason = str(event.get("reason")) if event["event"] == "stop" and event.get("exit_code") == ExitCode.DIVERGED else ""
    return reason
