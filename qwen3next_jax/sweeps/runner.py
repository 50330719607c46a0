"""Runs each point of a sweep in its own process, one after another or several at a time.

    WORKDIR/sweep.json          the points; the runner refuses a folder of another sweep
    WORKDIR/points/NAME/        the folder of a point's run, with its output in log.txt
    WORKDIR/report.html, results.csv, results.json      rewritten whenever a point ends

A point is done when its metrics.jsonl has the evaluations of the last step, whether this runner or
another process trained it. If the runner is stopped, its points save the current step and end; the
same command then continues the sweep. If the process of a point dies, the runner starts the point
again, up to `retries` times, and the run continues from its newest checkpoint. If a restart would
end in the same way (a wrong setting, a diverged run, a full disk), the runner does not start the
point again: the point has failed.
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
from qwen3next_jax.sweeps.check import find_unused_settings
from qwen3next_jax.sweeps.folder import open_sweep_folder
from qwen3next_jax.sweeps.points import (
    FORMAT,
    Point,
    Sweep,
    check_same_sweep,
    sweep_manifest,
    value_as_flag_text,
)
from qwen3next_jax.sweeps.results import is_done

TRAIN = pathlib.Path(__file__).parents[2] / "train.py"  # in a checkout; a wheel has no such file
_POLL = 0.5  # seconds between two checks of the points' processes


def train_arguments(sweep: Sweep, point: Point, workdir: pathlib.Path) -> list[str]:
    """Returns the arguments with which `qwen3next train` trains this point."""
    settings = [
        f"--config.{name}={value_as_flag_text(value)}" for name, value in point.overrides.items()
    ]
    # A setting that has no effect on this point has an effect on another one
    # (`check.check_settings_have_effect`).
    allowed = ["--allow-unused"] if find_unused_settings(sweep, point) else []
    return [
        f"--config={sweep.base_path}",
        *settings,
        *allowed,
        f"--workdir={point_folder(workdir, point)}",
    ]


def shell_command(sweep: Sweep, point: Point, workdir: pathlib.Path) -> str:
    """Returns the command that runs a point, for a shell or a cluster's scheduler. The command may
    contain relative paths, so it works only in the folder in which this process runs.
    """
    if not TRAIN.exists():
        train = ["qwen3next", "train"]
    elif pathlib.Path.cwd() == TRAIN.parent:
        train = ["uv", "run", "train.py"]
    else:
        train = ["uv", "run", f"--project={TRAIN.parent}", str(TRAIN)]
    return shlex.join([*train, *train_arguments(sweep, point, workdir)])


def one_line_commands(sweep: Sweep, workdir: pathlib.Path) -> list[str]:
    """Returns for every point the command that runs it, as one line for a shell.

    Raises:
      UserError: a command has several lines, because the value of a setting has several lines.
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


def create_or_check_sweep_folder(sweep: Sweep, workdir: pathlib.Path) -> None:
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
        check_same_sweep(sweep, before, workdir)
        return
    try:
        (workdir / "points").mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(sweep_manifest(sweep), indent=1))
    except OSError as error:
        raise UserError(
            f"--workdir={workdir}: cannot be written to ({error.strerror}): give another folder"
        ) from error


class _RunningPoint(NamedTuple):
    """The process of a point.

    Attributes:
      point: the point.
      process: the process that trains the point.
      started_at: time at which the process started, in seconds of `time.monotonic`.
      log_size_at_start: number of bytes in the point's log when the process started.
    """

    point: Point
    process: subprocess.Popen
    started_at: float
    log_size_at_start: int


class Runner:
    """Runs the points of a sweep.

    Args:
      sweep: the sweep.
      workdir: the folder of the sweep.
      workers: the number of points that run at the same time.
      retries: the most times that one point is started again after its process died.
      log: function that is called with a line of text whenever a point starts or ends.
      on_point_end: function that is called whenever a point has ended, and at the end of the sweep,
        with {name of a failed point: why it failed}. The runner holds the folder's lock during the
        call.
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
        self.running: dict[str, _RunningPoint] = {}
        self.starts: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self._stopping = False
        self._folder = open_sweep_folder(workdir)

    def run(self) -> int:
        """Runs the points that are not done.

        Returns:
          The exit code: 0 if every point is done, 1 if a point failed, 130 if a signal stopped the
          runner.

        Raises:
          UserError: another runner holds the lock of the folder.
        """
        with self._folder.locked() as descriptors:
            return self._run_points(descriptors)

    def _run_points(self, lock: Sequence[int]) -> int:
        """Runs the points that are not done, while the folder is locked, and returns the exit code
        of `run`. `lock`: file descriptors that the processes of the points inherit.
        """
        handlers = {
            number: signal.signal(number, self._handle_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            waiting = [point for point in self.sweep.points if not self._is_done(point)]
            if done := len(self.sweep.points) - len(waiting):
                self.log(f"{done} of {len(self.sweep.points)} points are done already")
            while (waiting and not self._stopping) or self.running:
                while waiting and len(self.running) < self.workers and not self._stopping:
                    self._start_process(waiting.pop(0), lock)
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

    def _start_process(self, point: Point, lock: Sequence[int]) -> None:
        """Starts a process for `point`, which appends its output to the point's log and inherits
        the file descriptors `lock`.
        """
        path = self._folder.log_path(point.name)
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
        self.running[point.name] = _RunningPoint(point, process, time.monotonic(), size)
        if self._stopping:  # the signal came during the start, and did not reach the new process
            process.terminate()
        start = self.starts[point.name]
        self.log(f"{point.name}: started" + (f" (start {start})" if start > 1 else ""))

    def _collect_ended(self) -> list[Point]:
        """Removes from `running` the points whose processes have ended. Returns the points that
        must be started again.
        """
        again = []
        for ended in list(self.running.values()):
            code = ended.process.poll()
            if code is None:
                continue
            del self.running[ended.point.name]
            self._folder.store_ended_log(ended.point.name)
            if self._must_restart(ended, code):
                again.append(ended.point)
            self.on_point_end(self.failed)
        return again

    def _must_restart(self, ended: _RunningPoint, code: int) -> bool:
        """Returns whether the point must be started again. Logs how the process of the point ended
        and, if the point failed, stores the reason in `failed`.

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
            self.failed[name] = _error_line_of_log(
                self._folder.log_path(name), ended.log_size_at_start
            )
            self.log(
                f"{name}: failed with exit code {code}: {self.failed[name]} (all of it: {path})"
            )
            return False
        self.log(f"{name}: ended with exit code {code} after {seconds:,.0f} s; started again")
        return True

    def _handle_signal(self, number: int, frame: Any) -> None:
        """Handles SIGINT and SIGTERM. The first signal makes the points save their step and end;
        the second signal kills their processes.
        """
        for point in self.running.values():
            point.process.send_signal(signal.SIGKILL if self._stopping else signal.SIGTERM)
        self._stopping = True


def _error_line_of_log(path: pathlib.Path, begin: int) -> str:
    """Returns the last line of the log `path` that starts with "error:"; if no line starts with it,
    the last line. At most 300 characters are returned. The bytes before `begin`, which are the
    output of earlier processes of the point, are not read.
    """
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return next(
        (line for line in reversed(lines) if line.startswith("error:")),
        lines[-1] if lines else "it printed nothing",
    )[:300]
