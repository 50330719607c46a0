"""`EventLog`, the interface through which a run writes the lines of metrics.jsonl."""

import abc
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

Event = Mapping[str, Any]

# The kinds of events that are about a process, not about a step. These events stay in metrics.jsonl
# when a run resumes or rewinds and takes steps again.
PROCESS_EVENTS = (
    "start",
    "operators",
    "stop",
    "damaged",
    "rewind",
    "save_failed",
    "hook_failed",
    "changed",
)


class EarlierProgress(NamedTuple):
    """How far an earlier process of the run came, according to the events that
    `EventLog.remove_events_after` found.

    Attributes:
      last_time: the time of the newest event, in seconds since 1970; None if there is none.
      last_train_step: the step of the newest "train" event; 0 if there is none.
    """

    last_time: float | None
    last_train_step: int


class EventLog(abc.ABC):
    """Writes the lines of a run's metrics.jsonl. Call `remove_events_after` before the first
    `append`.
    """

    @abc.abstractmethod
    def remove_events_after(
        self, last_step: int, repeated: Collection[str] = ()
    ) -> EarlierProgress:
        """Removes the events of steps after `last_step` (see `is_kept`), because this process takes
        these steps again. Returns how far the earlier process came.

        Args:
          last_step: the number of steps that this process does not take again.
          repeated: kinds of events of `last_step` that are removed, too.

        Raises:
          UserError: the file cannot be written.
        """

    @abc.abstractmethod
    def append(self, line: bytes) -> None:
        """Adds a line, which is written now or soon. If the line cannot be written, it stays in
        memory and is written together with a later line.
        """

    @abc.abstractmethod
    def flush(self) -> None:
        """Waits until all lines added so far would survive the end of this process."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the log."""


def is_kept(event: Event, last_step: int, repeated: Collection[str]) -> bool:
    """Whether `event`, which an earlier process wrote, stays when this process begins after
    `last_step`. Events of the kinds in PROCESS_EVENTS stay. An event of any other kind stays if it
    is about a step before `last_step`, or if it is about `last_step` and its kind is not in
    `repeated`.
    """
    if event["event"] in PROCESS_EVENTS:
        return True
    is_repeated = event["step"] == last_step and event["event"] in repeated
    return event["step"] <= last_step and not is_repeated
