"""Runs each point of a sweep in its own process, one after another or several at a time.

    WORKDIR/sweep.json          the points; the runner refuses a folder of another sweep
    WORKDIR/points/NAME/        the folder of a point's run, with its output in log.txt
    WORKDIR/report.html, results.csv, results.json      rewritten whenever a point ends

A point is done when its metrics.jsonl has the evaluations of the last step, whether this runner or
another process trained it. If the runner is stopped, its points save the current step and end; the
same command then continues the sweep. If the process of a point dies, the runner starts it again
from its newest checkpoint, up to `retries` times. If a restart would end in the same way (a wrong
setting, a diverged run, a full disk), the runner does not start the point again: the point has
failed.
"""

import functools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qwen3next_jax.common import json_files
from qwen3next_jax.common.child_processes import die_with_parent
from qwen3next_jax.common.errors import RESTARTED, ExitCode, UserError, check_format_number, require
from qwen3next_jax.common.storage import write_text_atomically
from qwen3next_jax.sweeps.check import find_unused
from qwen3next_jax.sweeps.folder import open_folder
from qwen3next_jax.sweeps.points import (
    FORMAT,
    Point,
    Sweep,
    check_unchanged,
    sweep_manifest,
    value_as_text,
)
from qwen3next_jax.sweeps.results import is_done

TRAIN = pathlib.Path(__file__).parents[2] / "train.py"  # in a checkout; a wheel has no such file
_POLL = 0.5  # seconds between two checks of the points' processes


def train_arguments(sweep: Sweep, point: Point, workdir: pathlib.Path) -> list[str]:
    """Returns the arguments with which `qwen3next train` runs this point."""
    settings = [
        f"--config.{name}={value_as_text(value)}" for name, value in point.overrides.items()
    ]
    # A setting without effect on this point has an effect on others (`check.check_settings`).
    allowed = ["--allow-unused"] if find_unused(sweep, point) else []
    return [
        f"--config={sweep.base}",
        *settings,
        *allowed,
        f"--workdir={point_folder(workdir, point)}",
    ]


def shell_command(sweep: Sweep, point: Point, workdir: pathlib.Path) -> str:
    """Returns the command that runs a point, for a shell or a cluster's scheduler. It contains
    relative paths, so it works only in the current folder of this process.
    """
    if not TRAIN.exists():
        train = ["qwen3next", "train"]
    elif pathlib.Path.cwd() == TRAIN.parent:
        train = ["uv", "run", "train.py"]
    else:
        train = ["uv", "run", f"--project={TRAIN.parent}", str(TRAIN)]
    return shlex.join([*train, *train_arguments(sweep, point, workdir)])


def shell_lines(sweep: Sweep, workdir: pathlib.Path) -> list[str]:
    """Returns the `shell_command` of every point.

    Raises:
      UserError: a command has several lines.
    """
    lines = [shell_command(sweep, point, workdir) for point in sweep.points]
    for point, line in zip(sweep.points, lines, strict=True):
        require(
            not {"\n", "\r"} & set(line),
            f"--emit: the command of point {point.name} has several lines, as one of its settings "
            "(or --workdir) has: expected one line; leave --emit out, or set it in the base file",
        )
    return lines


def point_folder(workdir: pathlib.Path, point: Point) -> pathlib.Path:
    """Returns the folder of a point's run."""
    return workdir / "points" / point.name


def open_sweep(sweep: Sweep, workdir: pathlib.Path) -> None:
    """Creates the folder of a sweep. If the folder exists, checks that it holds this sweep.

    Raises:
      UserError: the folder holds another sweep, or cannot be written.
    """
    path = workdir / "sweep.json"
    if path.exists():
        try:
            record = json_files.read(path)
            before = {point["name"]: dict(point["config"]) for point in record["points"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: damaged or foreign: give another --workdir") from error
        check_format_number(path, record.get("format"), FORMAT)
        check_unchanged(sweep, before, workdir)
        return
    try:
        (workdir / "points").mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(sweep_manifest(sweep), indent=1))
    except OSError as error:
        raise UserError(
            f"--workdir={workdir}: cannot be written to ({error.strerror}): give another folder"
        ) from error


class _Running(NamedTuple):
    """The process of a point.

    Attributes:
      point: the point.
      process: its process.
      started_at: time at which the process started, in seconds of `time.monotonic`.
      log_size: number of bytes in the point's log when the process started.
    """

    point: Point
    process: subprocess.Popen
    started_at: float
    log_size: int


class Runner:
    """Runs the points of a sweep.

    Args:
      sweep: the sweep.
      workdir: the folder of the sweep.
      workers: the number of points that run at the same time.
      retries: the most times that one point is started again after its process died.
      log: function that is called with a line of text at every start and end of a point.
      on_point_end: function that is called with {name of a failed point: why} whenever a point has
        ended, and at the end of the sweep. The runner holds the folder's lock during the call.
    """

    def __init__(
        self,
        sweep: Sweep,
        workdir: pathlib.Path,
        *,
        workers: int,
        retries: int,
        log: Callable[[str], None],
        on_point_end: Callable[[dict[str, str]], None],
    ):
        self.sweep, self.workdir, self.workers, self.retries = sweep, workdir, workers, retries
        self.log, self.on_point_end = log, on_point_end
        self.running: dict[str, _Running] = {}
        self.starts: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self._stopping = False
        self._folder = open_folder(workdir)

    def run(self) -> int:
        """Runs the points that are not done.

        Returns:
          The exit code: 0 if every point is done, 1 if a point failed, 130 if a signal stopped the
          runner.

        Raises:
          UserError: another runner holds the lock of the folder.
        """
        with self._folder.locked() as descriptors:
            return self._run(descriptors)

    def _run(self, lock: Sequence[int]) -> int:
        """Does the work of `run`. `lock`: file descriptors that the points' processes inherit."""
        handlers = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            waiting = [point for point in self.sweep.points if not self._is_done(point)]
            if done := len(self.sweep.points) - len(waiting):
                self.log(f"{done} of {len(self.sweep.points)} points are done already")
            while (waiting and not self._stopping) or self.running:
                while waiting and len(self.running) < self.workers and not self._stopping:
                    self._start(waiting.pop(0), lock)
                time.sleep(_POLL)
                waiting = [*self._collect_ended(), *waiting]
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.on_point_end(self.failed)
        if self._stopping:
            left = sum(not self._is_done(point) for point in self.sweep.points)
            self.log(
                f"Interrupted with {left} of {len(self.sweep.points)} points to go. The same "
                "command continues the sweep."
            )
            return ExitCode.INTERRUPTED
        return 1 if self.failed else 0

    def _is_done(self, point: Point) -> bool:
        config = point.config
        return is_done(point_folder(self.workdir, point), config.train.steps, config.eval.suites)

    def _start(self, point: Point, lock: Sequence[int]) -> None:
        """Starts a process for `point`, which appends its output to the point's log and inherits
        the file descriptors `lock`.
        """
        path = self._folder.log_of(point.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        train = [str(TRAIN)] if TRAIN.exists() else ["-m", "qwen3next_jax", "train"]
        self.starts[point.name] = self.starts.get(point.name, 0) + 1
        with path.open("ab") as log:
            size = os.fstat(log.fileno()).st_size
            process = subprocess.Popen(
                [sys.executable, *train, *train_arguments(self.sweep, point, self.workdir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=lock,
                preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        self.running[point.name] = _Running(point, process, time.monotonic(), size)
        if self._stopping:  # the signal came during the start, and did not reach the new process
            process.terminate()
        start = self.starts[point.name]
        self.log(f"{point.name}: started" + (f" (start {start})" if start > 1 else ""))

    def _collect_ended(self) -> list[Point]:
        """Removes ended processes from `running`. Returns the points to restart."""
        again = []
        for ended in list(self.running.values()):
            code = ended.process.poll()
            if code is None:
                continue
            del self.running[ended.point.name]
            self._folder.keep_log(ended.point.name)
            if self._must_restart(ended, code):
                again.append(ended.point)
            self.on_point_end(self.failed)
        return again

    def _must_restart(self, ended: _Running, code: int) -> bool:
        """Logs how the process of a point ended, and records the reason if the point failed.
        Returns True if `run` is to start the point again.

        Args:
          code: the exit code of the process, or minus the number of the signal that killed it.
        """
        name = ended.point.name
        seconds = time.monotonic() - ended.started_at
        if code == 0 and self._is_done(ended.point):
            self.log(f"{name}: done in {seconds:,.0f} s")
            return False
        if self._stopping:
            self.log(f"{name}: stopped")
            return False
        if (code >= 0 and code not in RESTARTED) or self.starts[name] > self.retries:
            path = point_folder(self.workdir, ended.point) / "log.txt"
            self.failed[name] = _last_line(self._folder.log_of(name), ended.log_size)
            self.log(
                f"{name}: failed with exit code {code}: {self.failed[name]} (all of it: {path})"
            )
            return False
        self.log(f"{name}: ended with exit code {code} after {seconds:,.0f} s; started again")
        return True

    def _stop(self, number: int, frame: Any) -> None:
        """Handles a signal. The first signal makes the points save and end; the second kills their
        processes.
        """
        for point in self.running.values():
            point.process.send_signal(signal.SIGKILL if self._stopping else signal.SIGTERM)
        self._stopping = True


def _last_line(path: pathlib.Path, begin: int) -> str:
    """Returns the last line that starts with "error:" in the log `path` from byte `begin` on, or
    the last line of the log if no line starts so; at most 300 characters. The bytes before `begin`
    are the output of earlier processes of the point.
    """
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return next(
        (line for line in reversed(lines) if line.startswith("error:")),
        lines[-1] if lines else "it printed nothing",
    )[:300]
