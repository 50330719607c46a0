"""Reads metrics.jsonl, the record of a run. Each line is one JSON object, an event.

In a bucket, where nothing can be appended to an object, the lines are in numbered pieces
(`runs.store.bucket_events`): WORKDIR/metrics/000000.jsonl, …

docs/reference/metrics.md lists the events and their fields.
"""

import concurrent.futures
import contextlib
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from qwen3next_jax.common import json_files
from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.common.storage import BucketPath

# Numbers of larger magnitude mean that the file is damaged; NumPy's integers cannot hold them.
_LARGEST = 2**63
_PIECES_AT_ONCE = 8  # read ahead from a bucket


def iterate_events(path: pathlib.Path | BucketPath) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (line, event) for every valid event in the file, in the order of writing.

    Yields nothing if the file does not exist. Skips incomplete lines, which a killed process may
    leave, and events with fields of wrong types, so a caller need not check the types again. Reads
    one line at a time, because the file of a long run may not fit in memory.

    Raises:
      OSError: `path` is not a regular file, or cannot be read.
    """
    for line in _lines_of_all_pieces(path):
        try:
            event = json_files.parse(line)
        except ValueError:
            continue
        if is_valid_event(event):
            yield line, event


def _lines_of_all_pieces(path: pathlib.Path | BucketPath) -> Iterator[str]:
    """Yields the lines of all pieces. Several threads open the next pieces ahead, because opening
    an object of a bucket reads it.
    """
    paths = events_file_pieces(path)
    with (
        concurrent.futures.ThreadPoolExecutor(_PIECES_AT_ONCE) as pool,
        contextlib.ExitStack() as s,
    ):
        s.callback(pool.shutdown, wait=False, cancel_futures=True)
        waiting = [pool.submit(_open_events_file, piece) for piece in paths[:_PIECES_AT_ONCE]]
        for i in range(len(paths)):
            piece = waiting.pop(0).result()
            if i + _PIECES_AT_ONCE < len(paths):
                waiting.append(pool.submit(_open_events_file, paths[i + _PIECES_AT_ONCE]))
            with piece:
                yield from piece


def _open_events_file(path: pathlib.Path | BucketPath) -> IO[str]:
    json_files.check_regular_file(path)
    return path.open(errors="replace")


def events_file_pieces(path: pathlib.Path | BucketPath) -> list[Any]:
    """Returns the files that hold the lines of `path` (WORKDIR/metrics.jsonl), in order. On a file
    system, the only file is `path` itself, if it exists. In a bucket, the files are the numbered
    pieces. If a run was copied from a file system to the bucket, the object `path` also exists and
    comes first.
    """
    if not isinstance(path, BucketPath):
        return [path] if path.exists() else []
    pieces = [
        p for p in path.with_suffix("").iterdir() if p.suffix == ".jsonl" and p.stem.isdigit()
    ]
    first = [path] if path.is_file() else []
    return first + sorted(pieces, key=lambda p: int(p.stem))


def has_events_file(path: pathlib.Path | BucketPath) -> bool:
    """Whether the file of events, or a numbered piece of it, exists."""
    return bool(events_file_pieces(path))


def read_events(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns every valid event in the file."""
    return [event for _, event in iterate_events(path)]


def training_devices(events: Iterable[dict[str, Any]]) -> frozenset[str]:
    """Returns the devices that trained a run, such as {"8 × TPU v5"}, according to its "start"
    events.
    """
    return frozenset(
        f"{event['devices']} × {event.get('device_kind')}"
        for event in events
        if event["event"] == "start" and event.get("devices")
    )


def divergence_reason(events: Iterable[dict[str, Any]], step: int) -> str:
    """Returns the reason why a run ended as diverged after its last step, `step`; "" if it did not.

    A run can take its last step and still have diverged. A run that diverged at its last step
    writes a "stop" event with the exit code DIVERGED at this step. A held-out evaluation that a
    later start of the run records at this step cancels the "stop" event.
    """
    reason = ""
    for event in events:
        if event["step"] != step:
            continue
        if event["event"] == "heldout":
            reason = ""
        elif event["event"] == "stop":
            diverged = event.get("exit_code") == ExitCode.DIVERGED
            reason = str(event.get("reason")) if diverged else ""
    return reason


def heldout_losses(events: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Returns step → held-out loss after this step, in nats per token. Steps whose loss is not a
    finite number are left out.
    """
    losses = {}
    for event in events:
        if event["event"] != "heldout":
            continue
        losses.pop(event["step"], None)  # of an earlier evaluation of the same step
        loss = event.get("loss")
        if _is_number(loss) and math.isfinite(loss):
            losses[event["step"]] = loss
    return losses


def is_valid_event(event: dict[str, Any]) -> bool:
    """Whether an object has the fields that every event has, all of the right types."""
    if not event.keys() >= _REQUIRED:
        return False
    if event["event"] == "suite" and "suite" not in event:
        return False
    return all(_FIELD_CHECKS.get(name, _is_reportable)(value) for name, value in event.items())


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_reportable(value: Any) -> bool:
    """Whether the report can handle `value`: a number, text, a truth value, null, or a list or
    object of such values. The magnitude of an integer must be less than _LARGEST.
    """
    if isinstance(value, dict):
        return all(map(_is_reportable, value.values()))
    if isinstance(value, list):
        return all(map(_is_reportable, value))
    return value is None or isinstance(value, (str, bool, float)) or _is_number(value)


def _is_matrix(value: Any) -> bool:
    """Whether `value` is a list of rows of numbers, all of the same length."""
    return isinstance(value, list) and all(
        isinstance(row, list)
        and len(row) == len(value[0]) > 0
        and set(map(type, row)) <= {int, float}
        and -_LARGEST < min(row) <= max(row) < _LARGEST
        for row in value
    )


def _is_setting_changes(value: Any) -> bool:
    """Whether `value` is a list of [setting, old value, new value]."""
    return isinstance(value, list) and all(
        isinstance(change, list) and len(change) == 3 and _is_text(change[0]) for change in value
    )


def _is_bad_record_list(value: Any) -> bool:
    """Whether `value` is a list of [glob, number of bad records, description]."""
    return isinstance(value, list) and all(
        isinstance(entry, list)
        and len(entry) == 3
        and _is_text(entry[0])
        and _is_count(entry[1])
        and _is_text(entry[2])
        for entry in value
    )


def _is_operator_decisions(value: Any) -> bool:
    """Whether `value` is the list in an "operators" event, which says which implementation runs
    each operator.
    """
    names = ("operator", "implementation", "why", "consequence", "call")
    return isinstance(value, list) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in names)
        for entry in value
    )


def _is_parameter_groups(value: Any) -> bool:
    """Whether `value` maps names of parameter groups to {statistic: number}."""
    return isinstance(value, dict) and all(
        isinstance(group, dict) and all(map(_is_reportable, group.values()))
        for group in value.values()
    )


def _is_metric_declarations(value: Any) -> bool:
    """Whether `value` maps kinds of numbers to the fields of a `metrics.Metric`."""
    return isinstance(value, dict) and all(
        isinstance(metric, dict)
        and _is_text(metric.get("title"))
        and all(_is_text(metric.get(name, "")) for name in ("unit", "better"))
        for metric in value.values()
    )


def _is_reportable_list(value: Any) -> bool:
    return isinstance(value, list) and _is_reportable(value)


def _check_accepting_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns a check that also accepts None."""
    return lambda value: value is None or check(value)


# `_REQUIRED` has the fields that every event must have. `_FIELD_CHECKS` has a check for each field
# whose type readers rely on; the values of all other fields must pass `_is_reportable`.
_REQUIRED = {"event", "step", "time"}
_FIELD_CHECKS = {
    "event": _is_text,
    "step": _is_count,
    "time": _is_number,
    "seconds": _is_number,
    "first_step": _is_count,
    "lost_steps": _is_count,
    "previous_end": _check_accepting_none(_is_number),
    "hosts": _is_count,
    "commit": _check_accepting_none(_is_text),
    "suite": _is_text,
    "changes": _is_setting_changes,
    "bad_records": _is_bad_record_list,
    "operators": _is_operator_decisions,
    "groups": _is_parameter_groups,
    "figures": _is_metric_declarations,
    "router_entropy": _check_accepting_none(_is_reportable_list),
    "expert_load": _is_matrix,
}
