"""Runs a sweep's points as processes of their own, one after another or several at a time, and
survives what happens.

    WORKDIR/sweep.json          the points; another sweep in the same folder is refused
    WORKDIR/points/NAME/        a run's folder each (see README), with log.txt of what it printed
    WORKDIR/report.html, results.csv    rewritten whenever a point ends

A point is done when its metrics.jsonl has the held-out evaluation of the last step, whoever
trained it. Stopping the runner stops its points after the step under way, saved; the same
command goes on from there. A point that dies is started again, from its newest checkpoint, up to
`retries` times; one that would only end the same way again has failed.
"""

import fcntl
import functools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from qwen3next_jax.common import json_files
from qwen3next_jax.common.child_processes import die_with_parent
from qwen3next_jax.common.errors import RESTARTED, ExitCode, UserError, require
from qwen3next_jax.sweeps.check import unread_settings
from qwen3next_jax.sweeps.points import Point, Sweep, as_text, check_unchanged, manifest
from qwen3next_jax.sweeps.results import is_done

TRAIN = pathlib.Path(__file__).parents[2] / "train.py"
_POLL = 0.5  # seconds


def train_arguments(sweep: Sweep, point: Point, workdir: pathlib.Path) -> list[str]:
    """The arguments of the train.py that is this point."""
    settings = [f"--config.{name}={as_text(value)}" for name, value in point.overrides.items()]
    # other points read them (`check.check_settings`)
    allowed = ["--allow-unread"] if unread_settings(sweep, point) else []
    return [
        f"--config={sweep.base}",
        *settings,
        *allowed,
        f"--workdir={point_folder(workdir, point)}",
    ]


def shell_command(sweep: Sweep, point: Point, workdir: pathlib.Path) -> str:
    """The same as a line for a shell or a cluster's scheduler, in the folder that this process is
    in.
    """
    train = ["uv", "run", "train.py"]
    if pathlib.Path.cwd() != TRAIN.parent:
        train = ["uv", "run", f"--project={TRAIN.parent}", str(TRAIN)]
    return shlex.join([*train, *train_arguments(sweep, point, workdir)])


def shell_lines(sweep: Sweep, workdir: pathlib.Path) -> list[str]:
    """`shell_command` of every point.

    Raises:
      UserError: one of them is longer than a line.
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
    return workdir / "points" / point.name


def open_sweep(sweep: Sweep, workdir: pathlib.Path) -> None:
    """Starts the folder of a sweep, or checks that the one there is of this very sweep.

    Raises:
      UserError: it is another sweep's, or cannot be written to.
    """
    path = workdir / "sweep.json"
    if path.exists():
        try:
            before = {
                point["name"]: dict(point["config"]) for point in json_files.read(path)["points"]
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: damaged or foreign: give another --workdir") from error
        check_unchanged(sweep, before, workdir)
        return
    try:
        (workdir / "points").mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(manifest(sweep), indent=1))
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"--workdir={workdir}: cannot be written to ({error.strerror}): give another folder"
        ) from error


class Runner:
    """`tell(line)` gets a line about every start and end; `after({failed point: why})` is called
    when a point has ended and at the end, always under the folder's lock.
    """

    def __init__(
        self,
        sweep: Sweep,
        workdir: pathlib.Path,
        *,
        workers: int,
        retries: int,
        tell: Callable[[str], None],
        after: Callable[[dict[str, str]], None],
    ):
        self.sweep, self.workdir, self.workers, self.retries = sweep, workdir, workers, retries
        self.tell, self.after = tell, after
        # point, process, begun at, size of its log then
        self.running: dict[str, tuple[Point, subprocess.Popen, float, int]] = {}
        self.starts: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self._stopping = False

    def run(self) -> int:
        """Runs what is not done. → exit code: 0 where every point is done, 1 where some failed,
        130 where it was stopped.
        """
        lock = self._lock()
        before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            waiting = [point for point in self.sweep.points if not self._is_done(point)]
            if done := len(self.sweep.points) - len(waiting):
                self.tell(f"{done} of {len(self.sweep.points)} points are done already")
            while (waiting and not self._stopping) or self.running:
                while waiting and len(self.running) < self.workers and not self._stopping:
                    self._start(waiting.pop(0), lock)
                time.sleep(_POLL)
                waiting = [*self._ended(), *waiting]
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.after(self.failed)
            os.close(lock)
        if self._stopping:
            left = sum(not self._is_done(point) for point in self.sweep.points)
            self.tell(
                f"Interrupted with {left} of {len(self.sweep.points)} points to go. The same "
                "command goes on from there."
            )
            return ExitCode.INTERRUPTED
        return 1 if self.failed else 0

    def _is_done(self, point: Point) -> bool:
        config = point.config
        return is_done(point_folder(self.workdir, point), config.train.steps, config.eval.suites)

    def _lock(self) -> int:
        """A lock that the points inherit, so that it holds as long as any of them runs, even
        where this process is killed.
        """
        descriptor = os.open(self.workdir / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{self.workdir}: another runner, or a point it left, is at work there: wait for "
                "it or stop it"
            ) from error
        return descriptor

    def _start(self, point: Point, lock: int) -> None:
        where = point_folder(self.workdir, point)
        where.mkdir(parents=True, exist_ok=True)
        self.starts[point.name] = self.starts.get(point.name, 0) + 1
        with (where / "log.txt").open("ab") as log:
            size = os.fstat(log.fileno()).st_size
            process = subprocess.Popen(
                [sys.executable, str(TRAIN), *train_arguments(self.sweep, point, self.workdir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
                preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        self.running[point.name] = point, process, time.monotonic(), size
        # the signal came while the point was being started, and did not reach it
        if self._stopping:
            process.terminate()
        self.tell(
            f"{point.name}: started"
            + (f" (start {self.starts[point.name]})" if self.starts[point.name] > 1 else "")
        )

    def _ended(self) -> list[Point]:
        """Takes note of processes that have ended. → points to start again."""
        again = []
        for name, (point, process, begun, size) in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[name]
            seconds = time.monotonic() - begun
            where = point_folder(self.workdir, point)
            if code == 0 and self._is_done(point):
                self.tell(f"{name}: done in {seconds:,.0f} s")
            elif self._stopping:
                self.tell(f"{name}: stopped")
            else:
                last = _last_line(where / "log.txt", size)
                if (code >= 0 and code not in RESTARTED) or self.starts[name] > self.retries:
                    self.failed[name] = last
                    self.tell(
                        f"{name}: failed with exit code {code}: {last} (all of it: "
                        f"{where / 'log.txt'})"
                    )
                else:
                    self.tell(
                        f"{name}: ended with exit code {code} after {seconds:,.0f} s; started again"
                    )
                    again.append(point)
            self.after(self.failed)
        return again

    def _stop(self, number: int, frame: Any) -> None:
        """The points save and end; a second signal ends them at once."""
        for _, process, _, _ in self.running.values():
            process.send_signal(signal.SIGKILL if self._stopping else signal.SIGTERM)
        self._stopping = True


def _last_line(path: pathlib.Path, begin: int) -> str:
    """The error, or else the last line, of what the file holds from byte `begin` on: what an
    earlier start said is not why.
    """
    with path.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return next(
        (line for line in reversed(lines) if line.startswith("error:")),
        lines[-1] if lines else "it printed nothing",
    )[:300]
