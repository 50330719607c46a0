"""What a run records: `metrics.jsonl` is the truth, and whatever shows a run (the terminal,
TensorBoard, Weights & Biases, report.html) is given its events. docs/report.md has the schema.
"""

import json
import math
import os
import pathlib
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from qwen3next_jax.common.errors import UserError, warn
from qwen3next_jax.common.events import iterate_events
from qwen3next_jax.common.rooms import warn_without
from qwen3next_jax.common.version import code_commit
from qwen3next_jax.config import to_dict
from qwen3next_jax.model.flops import flops_per_token
from qwen3next_jax.sharding.chips import find_chip
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage, tokens_seen

Event = Mapping[str, Any]
Listener = Callable[[Event], None]

# Events about the process that ran, not about the curve: they stay true when the steps after a
# checkpoint are taken again.
HISTORY = ("start", "stop", "damaged", "rewind", "save_failed", "hook_failed", "changed")


class MetricsFile:
    """Append-only JSON lines, one event each: {"event": "train" | "heldout" | "sample" | …,
    "step": …, "time": …, …}.

    Every event goes to the `listeners` too. Use as a context manager: it closes those listeners
    that have a `close`.
    """

    def __init__(
        self, path: pathlib.Path | None, first_step: int, listeners: Sequence[Listener] = ()
    ):
        """`path` None writes and tells nothing: the processes of a run other than its first.

        Events after `first_step` are dropped, but for HISTORY: the run that wrote them died, and
        they are about to be written again. What is known of that run goes into the "start" event
        (`start`).
        """
        self._path, self._listeners = path, tuple(listeners)
        self._file, self._unwritten = None, b""
        if path is not None:
            taken, end = 0, None
            for _, event in iterate_events(path):
                end = event.get("time", end)
                taken = event["step"] if event["event"] == "train" else taken
            self._before = {"previous_end": end, "lost_steps": max(taken - first_step, 0)}
            self._keep(first_step)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self._file is not None:
            os.close(self._file)
        for listener in self._listeners:
            if hasattr(listener, "close"):
                listener.close()

    def start(self, first_step: int, begun: float, **values: Any) -> None:
        """Writes the "start" event of a process that began at wall time `begun` and goes on
        after `first_step` steps.
        """
        if self._path is not None:
            self.write(
                "start", first_step, time=begun, first_step=first_step, **self._before, **values
            )

    def write(self, event: str, step: int, **values: Any) -> None:
        """Records an event; `values` are JSON-ready (floats, ints, text, lists and dicts of
        them, None). What a full disk does not take is kept, and written with a later event.
        """
        if self._path is None:
            return
        record = {
            "event": event,
            "step": step,
            "time": round(values.pop("time", time.time()), 3),
        } | _finite_or_text(values)
        told = bool(self._unwritten)
        self._unwritten += json.dumps(record).encode() + b"\n"
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if not told:
                warn(f"{self._path}: cannot be written ({error.strerror}); kept for later")
        for listener in self._listeners:
            listener(record)

    def rewind(self, step: int) -> None:
        """Drops the events after `step` (but for HISTORY), which are about to be written again."""
        if self._path is not None:
            os.close(self._file)
            self._keep(step)

    def _keep(self, last_step: int) -> None:
        temporary = self._path.with_suffix(".tmp")
        try:
            with temporary.open("w") as file:
                file.writelines(
                    line.rstrip("\n") + "\n"
                    for line, event in iterate_events(self._path)
                    if event["step"] <= last_step or event["event"] in HISTORY
                )
                file.flush()
                os.fsync(file.fileno())  # else a power failure may leave an empty one in its place
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot be written ({error.strerror}): make room, or give another "
                "--workdir"
            ) from error
        os.replace(temporary, self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)


def _finite_or_text(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text, so that every reader can parse
    the file.
    """
    if isinstance(value, dict):
        return {name: _finite_or_text(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_text(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Throughput:
    """Speed, model FLOP/s and memory of a stage of a run, for its "train" events."""

    def __init__(self, run: ResolvedRun, stage: ResolvedStage, bits_per_nat: float | None):
        """`bits_per_nat`: bits per byte for each nat per token, 1 / (ln 2 · bytes per token);
        None where tokens are no text.
        """
        self._stages = run.stages
        self._stage = stage
        self._flops_per_token = flops_per_token(run.model, stage.sequence_length)
        self._bits_per_nat = bits_per_nat
        chip = find_chip(run.mesh.devices.flat[0].device_kind)
        self._peak = chip.device_flops * run.mesh.size if chip else None

    def measure(
        self, step: int, loss: float, steps: int, seconds: float, waited: float
    ) -> dict[str, Any]:
        """What a "train" event holds beside the step's own metrics.

        Args:
          steps: the last ones, for which speed is measured.
          seconds: that these took.
          waited: seconds of them spent waiting for data.

        Returns:
          mfu and memory_limit are None where the chip is not known.
        """
        speed = steps * self._stage.tokens_per_step / seconds
        flops = speed * self._flops_per_token
        used, limit = memory()
        bits = {} if self._bits_per_nat is None else {"bits_per_byte": loss * self._bits_per_nat}
        stage = {"stage": self._stage.name} if self._stage.name else {}
        return (
            stage
            | bits
            | {
                "tokens_seen": tokens_seen(self._stages, step),
                "tokens_per_second": speed,
                "steps": steps,
                "seconds": seconds,
                "data_wait": waited / seconds,
                "model_flops_per_second": flops,
                "mfu": flops / self._peak if self._peak else None,
                "memory_bytes": used,
                "memory_limit": limit,
            }
        )


def memory() -> tuple[int, int | None]:
    """(largest use of this process's fullest device so far, that device's memory) in bytes; on a
    platform without such figures (CPU) the process's largest resident memory, and None.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    stats = [s for s in stats if s and "peak_bytes_in_use" in s]
    if stats:
        fullest = max(stats, key=lambda s: s["peak_bytes_in_use"])
        return int(fullest["peak_bytes_in_use"]), fullest.get("bytes_limit")
    kilobytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes, None


class ReportWriter:
    """Writes WORKDIR/report.html at every checkpoint, beside the run: a long record takes
    seconds to read.
    """

    def __init__(self, workdir: pathlib.Path):
        self._workdir = workdir
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        # While one is being written the next is left out; the end of the run writes the last one.
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
        # the run is worth more than its picture, whatever is wrong with that
        except Exception as error:
            warn(
                f"{self._workdir / 'report.html'} was not written: "
                f"{' '.join(str(error).split()) or type(error).__name__}"
            )


def open_metrics(
    run: ResolvedRun, workdir: pathlib.Path, first_step: int, display: Listener
) -> MetricsFile:
    """The run's metrics.jsonl, shown on `display` and wherever `config.telemetry` says. Only the
    first process writes.
    """
    if jax.process_index():
        return MetricsFile(None, first_step)
    listeners: list[Listener] = [display]
    config = run.config
    if config.telemetry.tensorboard:
        listeners.append(TensorBoard(workdir, first_step))
    if config.telemetry.wandb:
        project = config.telemetry.wandb
        listeners.append(WeightsAndBiases(project, config.name, to_dict(config), workdir))
    return MetricsFile(workdir / "metrics.jsonl", first_step, [*listeners, ReportWriter(workdir)])


def surroundings(mesh: Mesh) -> dict[str, Any]:
    """What a "start" event says about where the run runs."""
    return {
        "hosts": jax.process_count(),
        "devices": mesh.size,
        "device_kind": mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "commit": code_commit(),
    }


class TensorBoard:
    """Every number of every event as a scalar under WORKDIR/tensorboard, samples as text."""

    def __init__(self, workdir: pathlib.Path, first_step: int):
        import tensorboardX  # where it is missing, `preflight` has said so

        self._writer = tensorboardX.SummaryWriter(
            str(workdir / "tensorboard"), purge_step=first_step + 1
        )

    def __call__(self, event: Event) -> None:
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["step"], walltime=event["time"])
        if event["event"] == "sample":
            self._writer.add_text("sample", event["text"], event["step"], walltime=event["time"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Every number of every event to the W&B project; a resumed run goes on as the same W&B run."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], workdir: pathlib.Path):
        """`name` of the run, and its `settings`, for the page of `project`."""
        import wandb  # where it is missing, `preflight` has said so

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
        # W&B's own step may not go back, as a resumed run's does
        self._run.define_metric("*", step_metric="step")

    def __call__(self, event: Event) -> None:
        if values := scalars(event):
            self._run.log(values | {"step": event["step"]})

    def close(self) -> None:
        self._run.finish()


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event under names like train/loss; lists over layers as
    diagnostics/beta/layer_03.
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
