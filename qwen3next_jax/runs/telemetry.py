"""Writes the events of a run to `metrics.jsonl`. The terminal, TensorBoard, Weights & Biases and
report.html show the events of a run. docs/reference/metrics.md describes the events.
"""

import json
import math
import pathlib
import resource
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from qwen3next_jax.common.errors import warn
from qwen3next_jax.common.subpackages import has_subpackage_or_warn
from qwen3next_jax.common.version import code_commit
from qwen3next_jax.config import to_dict
from qwen3next_jax.model.flops import flops_per_token
from qwen3next_jax.runs.store.events import Event, EventLog
from qwen3next_jax.runs.store.store import RunStore
from qwen3next_jax.sharding.chips import find_chip
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage, tokens_seen

EventListener = Callable[[Event], None]


class MetricsFile:
    """A file of JSON lines, one per event:
    {"event": "train" | "heldout" | "sample" | …, "step": …, "time": …, …}.

    `write` appends an event to the file and passes it to the listeners. Use the object as a context
    manager: its exit calls the `close` method of each listener that has one.
    """

    def __init__(
        self,
        log: EventLog | None,
        steps_before: int,
        listeners: Sequence[EventListener] = (),
        repeated: Collection[str] = (),
    ):
        """Opens the file and removes the events of steps after `steps_before`, because this process
        takes these steps again. Events of the kinds in `store.events.PROCESS_EVENTS` stay.
        `write_start` records how many steps are repeated.

        Args:
          log: writes the lines of metrics.jsonl; None on all processes except process 0. Without
            `log`, nothing is written and no listener is called.
          steps_before: number of steps of the run that are already taken.
          listeners: functions that are called with each event.
          repeated: kinds of events that this process writes again for step `steps_before`, whose
            old events of these kinds are removed as well.
        """
        self._log, self._listeners = log, tuple(listeners)
        if log is not None:
            before = log.remove_events_after(steps_before, repeated)
            lost_steps = max(before.last_train_step - steps_before, 0)
            self._previous = {"previous_end": before.last_time, "lost_steps": lost_steps}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._log is not None:
            self._log.close()
        for listener in self._listeners:
            if hasattr(listener, "close"):
                listener.close()

    def write_start(self, steps_before: int, start_time: float, **values: Any) -> None:
        """Writes the event "start" of this process.

        Args:
          steps_before: number of steps of the run that are already taken.
          start_time: the time at which `runs.train.train` was called in this process, in seconds
            since 1970.
          values: the other fields of the event.
        """
        if self._log is not None:
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
        and is written with a later event.

        Args:
          event: the kind of event.
          step: the step of the event.
          values: the other fields, JSON-ready: floats, ints, text, None, lists and dicts of them.
        """
        if self._log is None:
            return
        record = {
            "event": event,
            "step": step,
            "time": round(values.pop("time", time.time()), 3),
        } | _non_finite_as_text(values)
        self._log.append(json.dumps(record).encode() + b"\n")
        for listener in self._listeners:
            listener(record)

    def add_listener(self, listener: EventListener) -> None:
        """Calls `listener` with each later event."""
        self._listeners += (listener,)

    def flush(self) -> None:
        """Waits until every event so far is in the file or in the bucket."""
        if self._log is not None:
            self._log.flush()

    def remove_events_after(self, step: int) -> None:
        """Removes the events of steps after `step`, because the run takes these steps again. Events
        of the kinds in `store.events.PROCESS_EVENTS` stay.
        """
        if self._log is not None:
            self._log.remove_events_after(step)


def _non_finite_as_text(value: Any) -> Any:
    """Returns `value` with text in place of NaN and infinity, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {name: _non_finite_as_text(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_non_finite_as_text(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Throughput:
    """Measures speed, model FLOP/s and memory during one stage of a run, for its "train" events."""

    def __init__(self, run: ResolvedRun, stage: ResolvedStage, bits_per_nat: float | None):
        """Makes the object that measures `stage`.

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

    def train_event_fields(
        self, step: int, loss: float | None, num_steps: int, seconds: float, data_wait: float
    ) -> dict[str, Any]:
        """Returns the fields of a "train" event that are not metrics of the step. "mfu" is None if
        the peak FLOP/s of the chip are unknown. "memory_limit" is None if the platform does not
        report the memory of its devices.

        Args:
          step: the number of the step.
          loss: the loss of the step, in nats per token; None if the step had no token to predict.
          num_steps: the number of steps since the last event.
          seconds: the time of these steps.
          data_wait: the part of this time in which the loop waited for data, in seconds.
        """
        speed = num_steps * self._stage.tokens_per_step / seconds
        flops = speed * self._flops_per_token
        used, limit = device_memory_peak_and_limit()
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
                "steps": num_steps,
                "seconds": seconds,
                "data_wait": data_wait / seconds,
                "model_flops_per_second": flops,
                "mfu": flops / self._peak if self._peak else None,
                "memory_bytes": used,
                "memory_limit": limit,
            }
        )


def device_memory_peak_and_limit() -> tuple[int, int | None]:
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
    """Writes WORKDIR/report.html at every checkpoint and at the end of the run. At a checkpoint a
    thread writes the report, because reading a long metrics.jsonl takes seconds. If the run is in a
    bucket, the report is written only at the end, because every report reads all events over the
    network.
    """

    def __init__(self, workdir: pathlib.Path, at_checkpoints: bool):
        self._workdir, self._at_checkpoints = workdir, at_checkpoints
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        # If the thread is still writing a report, there is no new report at this checkpoint.
        # `close` always writes a report at the end of the run.
        if event["event"] != "checkpoint" or not self._at_checkpoints:
            return
        if not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._write, name="report", daemon=True)
            self._thread.start()

    def close(self) -> None:
        if self._thread:
            self._thread.join()
        self._write()

    def _write(self) -> None:
        if not has_subpackage_or_warn("reporting", "report.html is not written"):
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
    store: RunStore,
    steps_before: int,
    display: EventListener,
    repeated: Collection[str] = (),
) -> MetricsFile:
    """Opens the run's metrics.jsonl. The listeners of the file are the display, the report, and the
    loggers that `config.telemetry` turns on. Only process 0 writes.

    Args:
      steps_before, repeated: as for `MetricsFile`.
      display: is called with each event.
    """
    if jax.process_index():
        return MetricsFile(None, steps_before)
    listeners: list[EventListener] = [display]
    config, workdir = run.config, store.workdir
    if config.telemetry.tensorboard:
        listeners.append(TensorBoard(workdir, steps_before))
    if config.telemetry.wandb:
        project = config.telemetry.wandb
        listeners.append(WeightsAndBiases(project, config.name, to_dict(config), workdir))
    listeners.append(ReportWriter(workdir, at_checkpoints=store.is_quick_to_read))
    return MetricsFile(store.open_events(), steps_before, listeners, repeated)


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
        import tensorboardX  # `start.decide_start` has checked that it is installed

        self._writer = tensorboardX.SummaryWriter(
            str(workdir / "tensorboard"), purge_step=steps_before + 1
        )

    def __call__(self, event: Event) -> None:
        for name, value in scalars_of_event(event).items():
            self._writer.add_scalar(name, value, event["step"], walltime=event["time"])
        if event["event"] == "sample":
            self._writer.add_text("sample", event["text"], event["step"], walltime=event["time"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Sends every number of every event to the W&B project; a resumed run continues its W&B run."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], workdir: pathlib.Path):
        """Opens the W&B run `name` of `project`; its page shows the `settings`."""
        import wandb  # `start.decide_start` has checked that it is installed

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
        if values := scalars_of_event(event):
            self._run.log(values | {"step": event["step"]})

    def close(self) -> None:
        self._run.finish()


def scalars_of_event(event: Event) -> dict[str, float]:
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
