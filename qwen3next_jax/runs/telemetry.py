"""Writes `metrics.jsonl`, the record of a run. The terminal, TensorBoard, Weights & Biases and
report.html show the events of this file. docs/reference/metrics.md describes the events.
"""

import json
import math
import os
import pathlib
import resource
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from qwen3next_jax.common.errors import UserError, warn
from qwen3next_jax.common.events import iterate_events
from qwen3next_jax.common.storage import BucketPath
from qwen3next_jax.common.subpackages import warn_without
from qwen3next_jax.common.version import code_commit
from qwen3next_jax.config import to_dict
from qwen3next_jax.model.flops import flops_per_token
from qwen3next_jax.sharding.chips import find_chip
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage, tokens_seen

Event = Mapping[str, Any]
Listener = Callable[[Event], None]

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


class MetricsFile:
    """A file of JSON lines, one per event:
    {"event": "train" | "heldout" | "sample" | …, "step": …, "time": …, …}.

    `write` appends an event to the file and passes it to the listeners. Use the object as a context
    manager: its exit calls the `close` method of each listener that has one.
    """

    def __init__(
        self,
        path: pathlib.Path | None,
        steps_before: int,
        listeners: Sequence[Listener] = (),
        pieces: Any = None,
        repeated: Collection[str] = (),
    ):
        """Opens the file and removes events after step `steps_before`, because this process repeats
        the steps of these events. Events of the kinds in HISTORY stay. `start` records how many
        steps are repeated.

        Args:
          path: the path of metrics.jsonl. None on all processes except process 0: then nothing is
            written and no listener is called.
          steps_before: number of steps of the run that are already taken.
          listeners: functions that are called with each event.
          pieces: the pieces of the file, if it is in a bucket.
          repeated: kinds of events that this process writes again for step `steps_before`; these
            are removed as well.
        """
        self._path, self._listeners = path, tuple(listeners)
        self._file, self._unwritten, self._pieces = None, b"", pieces
        if pieces is not None:
            before = self._remove_events_from_pieces(steps_before, repeated)
            lost_steps = max(before["step"] - steps_before, 0)
            self._previous = {"previous_end": before["end"], "lost_steps": lost_steps}
        elif path is not None:
            last_step, end = 0, None
            for _, event in iterate_events(path):
                end = event.get("time", end)
                last_step = event["step"] if event["event"] == "train" else last_step
            lost_steps = max(last_step - steps_before, 0)
            self._previous = {"previous_end": end, "lost_steps": lost_steps}
            self._remove_events_after(steps_before, repeated)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._file is not None:
            os.close(self._file)
        if self._pieces is not None:
            self._pieces.close()
        for listener in self._listeners:
            if hasattr(listener, "close"):
                listener.close()

    def start(self, steps_before: int, start_time: float, **values: Any) -> None:
        """Writes the "start" event of a process.

        Args:
          steps_before: number of steps of the run that are already taken.
          start_time: the time at which `runs.train.train` was called in this process, in seconds
            since 1970.
          values: the other fields of the event.
        """
        if self._path is not None:
            self.write(
                "start",
                steps_before,
                time=start_time,
                first_step=steps_before,
                **self._previous,
                **values,
            )

    def write(self, event: str, step: int, **values: Any) -> None:
        """Writes an event and calls the listeners. If the disk is full, the event stays in memory
        and is written with a later one.

        Args:
          event: the kind of event.
          step: the step of the event.
          values: the other fields, JSON-ready: floats, ints, text, None, lists and dicts of them.
        """
        if self._path is None:
            return
        record = {
            "event": event,
            "step": step,
            "time": round(values.pop("time", time.time()), 3),
        } | _finite_or_text(values)
        line = json.dumps(record).encode() + b"\n"
        if self._pieces is not None:
            self._pieces.append(line)
        else:
            self._append(line)
        for listener in self._listeners:
            listener(record)

    def flush(self) -> None:
        """Returns when every event so far is in the bucket; a local file has it already."""
        if self._pieces is not None:
            self._pieces.flush()

    def _append(self, line: bytes) -> None:
        has_warned = bool(self._unwritten)
        self._unwritten += line
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if not has_warned:
                warn(f"{self._path}: cannot be written ({error.strerror}); trying again later")

    def rewind(self, step: int) -> None:
        """Removes the events after `step`, because the run repeats their steps. Events of the kinds
        in HISTORY stay.
        """
        if self._pieces is not None:
            self._remove_events_from_pieces(step)
        elif self._path is not None:
            os.close(self._file)
            self._remove_events_after(step)

    def _remove_events_from_pieces(self, last_step: int, repeated: Collection[str] = ()) -> Event:
        """Does what `_remove_events_after` does; returns what `MetricsPieces.keep` returns."""
        return self._pieces.keep(
            lambda event: _is_kept(event, last_step, repeated),
            # Events before this one are about earlier steps.
            lambda event: event["event"] == "train" and event["step"] <= last_step,
        )

    def _remove_events_after(self, last_step: int, repeated: Collection[str] = ()) -> None:
        """Rewrites the file without the events after `last_step` and those of `last_step` of the
        kinds in `repeated`, but with all events of the kinds in HISTORY, and opens it.

        Raises:
          UserError: the file cannot be written.
        """
        temporary = self._path.with_suffix(".tmp")
        try:
            with temporary.open("w") as file:
                file.writelines(
                    line.rstrip("\n") + "\n"
                    for line, event in iterate_events(self._path)
                    if _is_kept(event, last_step, repeated)
                )
                file.flush()
                os.fsync(file.fileno())  # without this, a power failure may leave an empty file
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot be written ({error.strerror}): make room, or give another "
                "--workdir"
            ) from error
        os.replace(temporary, self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)


def _is_kept(event: Event, last_step: int, repeated: Collection[str]) -> bool:
    """Whether a process that begins after `last_step` keeps an event of the one before it."""
    if event["event"] in HISTORY:
        return True
    is_repeated = event["step"] == last_step and event["event"] in repeated
    return event["step"] <= last_step and not is_repeated


def _finite_or_text(value: Any) -> Any:
    """Returns `value` with NaN and infinity as text, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {name: _finite_or_text(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_text(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Throughput:
    """Measures speed, model FLOP/s and memory during one stage of a run, for its "train" events."""

    def __init__(self, run: ResolvedRun, stage: ResolvedStage, bits_per_nat: float | None):
        """Makes a meter for `stage`.

        Args:
          bits_per_nat: the factor from nats per token to bits per byte,
            1 / (ln 2 · bytes per token); None if the tokens are not text.
        """
        self._stages = run.stages
        self._stage = stage
        self._flops_per_token = flops_per_token(run.model, stage.sequence_length)
        self._bits_per_nat = bits_per_nat
        chip = find_chip(run.mesh.devices.flat[0].device_kind)
        self._peak = chip.device_flops * run.mesh.size if chip else None

    def measure(
        self, step: int, loss: float | None, steps: int, seconds: float, data_wait: float
    ) -> dict[str, Any]:
        """Returns the fields of a "train" event that are not metrics of the step. "mfu" is None if
        the peak FLOP/s of the chip are unknown. "memory_limit" is None if the platform does not
        report the memory of its devices.

        Args:
          step: the number of the step.
          loss: the loss of the step, in nats per token; None if it had no token to predict.
          steps: the number of steps since the last event.
          seconds: the time of these steps.
          data_wait: the part of this time in which the loop waited for data, in seconds.
        """
        speed = steps * self._stage.tokens_per_step / seconds
        flops = speed * self._flops_per_token
        used, limit = device_memory()
        bits = {}
        if self._bits_per_nat is not None:
            bits["bits_per_byte"] = None if loss is None else loss * self._bits_per_nat
        stage = {"stage": self._stage.name} if self._stage.name else {}
        return (
            stage
            | bits
            | {
                "tokens_seen": tokens_seen(self._stages, step),
                "tokens_per_second": speed,
                "steps": steps,
                "seconds": seconds,
                "data_wait": data_wait / seconds,
                "model_flops_per_second": flops,
                "mfu": flops / self._peak if self._peak else None,
                "memory_bytes": used,
                "memory_limit": limit,
            }
        )


def device_memory() -> tuple[int, int | None]:
    """Returns the peak memory use so far and the memory limit, in bytes, of one device of this
    process: the device with the highest peak. On a platform without memory statistics (CPU),
    returns the peak resident memory of the process, and None.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    stats = [s for s in stats if s and "peak_bytes_in_use" in s]
    if stats:
        fullest = max(stats, key=lambda s: s["peak_bytes_in_use"])
        return int(fullest["peak_bytes_in_use"]), fullest.get("bytes_limit")
    kilobytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes, None


class ReportWriter:
    """Writes WORKDIR/report.html at every checkpoint and at the end of the run. The checkpoints'
    reports are written in a thread, because a long metrics.jsonl takes seconds to read. In a bucket
    a report would read the whole record over the network, so there is one at the end alone.
    """

    def __init__(self, workdir: pathlib.Path):
        self._workdir = workdir
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        # If the thread is still writing a report, there is no new report at this checkpoint.
        # `close` writes a report at the end of the run in any case.
        if isinstance(self._workdir, BucketPath):
            return
        if event["event"] == "checkpoint" and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._write, name="report", daemon=True)
            self._thread.start()

    def close(self) -> None:
        if self._thread:
            self._thread.join()
        self._write()

    def _write(self) -> None:
        if not warn_without("reporting", "report.html is not written"):
            return
        from qwen3next_jax.reporting.page import write_report

        try:
            write_report([self._workdir], self._workdir / "report.html")
        # No error in the report may end the run.
        except Exception as error:
            warn(
                f"{self._workdir / 'report.html'} was not written: "
                f"{' '.join(str(error).split()) or type(error).__name__}"
            )


def open_metrics(
    run: ResolvedRun,
    workdir: pathlib.Path,
    steps_before: int,
    display: Listener,
    lock: Any,
    repeated: Collection[str] = (),
) -> MetricsFile:
    """Opens the run's metrics.jsonl, with the display and the loggers of `config.telemetry` as
    listeners. Only process 0 writes. `lock` is the lock of `workdir`; `repeated` is as in
    `MetricsFile`.
    """
    if jax.process_index():
        return MetricsFile(None, steps_before)
    listeners: list[Listener] = [display]
    config = run.config
    if config.telemetry.tensorboard:
        listeners.append(TensorBoard(workdir, steps_before))
    if config.telemetry.wandb:
        project = config.telemetry.wandb
        listeners.append(WeightsAndBiases(project, config.name, to_dict(config), workdir))
    path, pieces = workdir / "metrics.jsonl", None
    if isinstance(path, BucketPath):
        from qwen3next_jax.runs.metrics_pieces import MetricsPieces

        pieces = MetricsPieces(path, lock, config.checkpoint.patience)
    return MetricsFile(path, steps_before, [*listeners, ReportWriter(workdir)], pieces, repeated)


def describe_environment(mesh: Mesh) -> dict[str, Any]:
    """Returns the fields of a "start" event about hosts, devices and versions."""
    return {
        "hosts": jax.process_count(),
        "devices": mesh.size,
        "device_kind": mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "commit": code_commit(),
    }


class TensorBoard:
    """Writes the numbers of each event as scalars to WORKDIR/tensorboard, and samples as text."""

    def __init__(self, workdir: pathlib.Path, steps_before: int):
        import tensorboardX  # `preflight` has checked that it is installed

        self._writer = tensorboardX.SummaryWriter(
            str(workdir / "tensorboard"), purge_step=steps_before + 1
        )

    def __call__(self, event: Event) -> None:
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["step"], walltime=event["time"])
        if event["event"] == "sample":
            self._writer.add_text("sample", event["text"], event["step"], walltime=event["time"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Sends every number of every event to the W&B project; a resumed run continues its W&B run."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], workdir: pathlib.Path):
        """Opens the W&B run `name` of `project`; its page shows the `settings`."""
        import wandb  # `preflight` has checked that it is installed

        id_file = workdir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(f"{name}-{time.time_ns():x}")
        self._run = wandb.init(
            project=project,
            name=name,
            id=id_file.read_text(),
            resume="allow",
            dir=str(workdir),
            config=settings,
        )
        # W&B requires that its own step never decreases, but the step of a run decreases when the
        # run resumes or rewinds. So charts use the value "step" of the events.
        self._run.define_metric("*", step_metric="step")

    def __call__(self, event: Event) -> None:
        if values := scalars(event):
            self._run.log(values | {"step": event["step"]})

    def close(self) -> None:
        self._run.finish()


def scalars(event: Event) -> dict[str, float]:
    """Returns name → value for the numbers of an event, with names such as "train/loss". A list
    over layers gives one name per layer, such as "diagnostics/beta/layer_03".
    """
    kind = f"suite/{event['suite']}" if event["event"] == "suite" else event["event"]
    result = {}
    for name, value in event.items():
        if name in ("event", "step", "time"):
            continue
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            result[f"{kind}/{name}"] = value
        elif isinstance(value, list) and name != "expert_load":
            result |= {
                f"{kind}/{name}/layer_{i:02}": v
                for i, v in enumerate(value)
                if isinstance(v, (int, float))
            }
    return result
