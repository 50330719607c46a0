"""Reading metrics.jsonl, the record of a run; docs/report.md has the schema."""

import json
import pathlib
from typing import Any


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """The events in `path` in the order written; [] where there is no file. A line torn by a kill is not an event."""
    if not path.exists():
        return []
    events = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("step"), int) and isinstance(event.get("event"), str):
            events.append(event)
    return events
