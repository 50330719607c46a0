"""The lines of metrics.jsonl, as a run writes them: what a disk and a bucket have in common."""

import abc
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

Event = Mapping[str, Any]

# Events about a process, not about a step. They stay in the file when a run resumes or rewinds and
# repeats steps.
HISTORY = (
    "start",
    "operators",
    "stop",
    "damaged",
    "rewind",
    "save_failed",
    "hook_failed",
    "changed",
)


class Before(NamedTuple):
    """What an earlier process wrote, before `EventLog.keep` removed a part of it.

    Attributes:
      end: the time of the newest event; None if there is none.
      step: the step of the newest "train" event; 0 if there is none.
    """

    end: float | None
    step: int


class EventLog(abc.ABC):
    """Writes the lines of one run's metrics.jsonl. Call `keep` before the first `append`."""

    @abc.abstractmethod
    def keep(self, last_step: int, repeated: Collection[str] = ()) -> Before:
        """Removes the events that `is_kept` does not keep.

        Raises:
          UserError: the file cannot be written.
        """

    @abc.abstractmethod
    def append(self, line: bytes) -> None:
        """Takes a line, which is written now or soon. If it cannot be written, it stays in memory
        and is written with a later one.
        """

    @abc.abstractmethod
    def flush(self) -> None:
        """Returns when the lines so far do not depend on this process any more."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the writing."""


def is_kept(event: Event, last_step: int, repeated: Collection[str]) -> bool:
    """Whether a process that begins after `last_step` keeps an event of the one before it: the
    events up to that step, without those of `last_step` of the kinds in `repeated`, and all events
    of the kinds in HISTORY.
    """
    if event["event"] in HISTORY:
        return True
    is_repeated = event["step"] == last_step and event["event"] in repeated
    return event["step"] <= last_step and not is_repeated
