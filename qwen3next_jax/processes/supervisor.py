"""Restarts a training process that died, on one host: `python train.py --config=…
--max-restarts=N`.

The supervisor runs the same command as a child process and waits for it. If the child is killed,
crashes or hangs, the supervisor starts it again, and the run continues from its last good
checkpoint. If a restarted child would end in the same way as the last, for example because the run
is complete, a setting is wrong or the disk is full, the supervisor exits with the child's exit
code. The supervisor passes SIGINT and SIGTERM on to the child process.
"""

import contextlib
import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from qwen3next_jax.common.child_processes import die_with_parent
from qwen3next_jax.common.errors import RESTARTED, ExitCode, UserError
from qwen3next_jax.common.storage import StoreUnavailable

# The first and the longest pause before a restart, in seconds. The pause doubles with every start
# that saves no new checkpoint.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# After this many starts in a row without a new checkpoint the supervisor gives up.
MAX_FRUITLESS_STARTS = 3


def define_max_restarts_flag() -> Callable[[], int]:
    """Defines the flag `--max-restarts` and returns a function that reads it."""
    holder = flags.DEFINE_integer(
        "max-restarts",
        0,
        "how often a run that died is started again (0: never; no supervisor)",
        lower_bound=0,
    )
    return lambda: holder.value


def supervise(
    workdir: pathlib.Path,
    max_restarts: int,
    command: Sequence[str] = (),
    find_run: Callable[[], Mapping[str, Any]] | None = None,
) -> int:
    """Runs `command` as a child process, and runs it again if the child was killed, crashed or
    hung, or if the processes of the run could not connect to each other.

    Args:
      workdir: the run's folder; its checkpoints show progress.
      max_restarts: number of times that the command may be started again.
      command: the command to run; () means `train` with this process's own arguments, without a
        supervisor.
      find_run: None without the flag `--restart`. With `--restart`, the first child moves the files
        of the old run to another folder and begins a new run; `find_run` is then a function that
        returns name → identity of the files of the run in `workdir`. If the child dies while files
        of the old run are still there, the next child gets `--restart` again and moves the
        remaining files; otherwise the next child continues the new run.

    Returns:
      The exit code of the last child, or `ExitCode.GAVE_UP`.

    Raises:
      UserError: `workdir` is in a bucket, and the bucket did not answer for minutes.
    """
    command = list(command) or [
        *(sys.executable, "-m", "qwen3next_jax", "train", *sys.argv[1:]),
        "--max-restarts=0",
    ]
    restarts = fruitless = 0
    last_flag: list[str] = []
    with _ChildProcess() as child:
        old_run = _retry_until_storage_answers(find_run, child.stop).items() if find_run else ()
        saved_at, _ = _retry_until_storage_answers(
            lambda: _newest_checkpoint_time_and_step(workdir), child.stop
        )
        while True:
            code = child.run(command + last_flag)
            if child.stop.is_set() or (code >= 0 and code not in RESTARTED):
                return code if code >= 0 else 128 - code
            # Progress is measured by the time of the newest checkpoint and not by its step, because
            # a run continues from an earlier step after damaged checkpoints were moved aside.
            previous = saved_at
            saved_at, step = _retry_until_storage_answers(
                lambda: _newest_checkpoint_time_and_step(workdir), child.stop
            )
            fruitless = 0 if saved_at > previous else fruitless + 1
            saved_at = max(saved_at, previous)
            if restarts == max_restarts or fruitless == MAX_FRUITLESS_STARTS:
                if restarts == max_restarts:
                    why = f"{restarts} restarts were allowed"
                else:
                    why = f"{fruitless} starts saved nothing new"
                _print_with_time(f"{_describe_end(code)}; gives up: {why}. Last good step: {step}")
                return ExitCode.GAVE_UP
            restarts += 1
            pause = min(FIRST_PAUSE * 2**fruitless, LONGEST_PAUSE)
            begin = f"from step {step}"
            if find_run:
                old_run_remains = not old_run.isdisjoint(
                    _retry_until_storage_answers(find_run, child.stop).items()
                )
                last_flag = [] if old_run_remains else ["--norestart"]
                if old_run_remains:
                    begin = "anew: files of the old run are still there"
            _print_with_time(
                f"{_describe_end(code)}; restart {restarts} of {max_restarts} in {pause:g} s, "
                f"{begin}"
            )
            if child.stop.wait(pause):
                return ExitCode.INTERRUPTED


class _ChildProcess:
    """Runs one child process after another and forwards SIGINT and SIGTERM to the running child.
    Use the class as a context manager: its exit restores the previous signal handlers.

    Attributes:
      stop: an event that is set once SIGINT or SIGTERM has come.
    """

    def __init__(self):
        self.stop = threading.Event()
        self._process: subprocess.Popen | None = None
        self._early_signal: int | None = None

    def __enter__(self):
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._handlers = {number: signal.signal(number, self._forward_signal) for number in numbers}
        return self

    def __exit__(self, *exception):
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Runs `command` to its end and returns its exit code, or minus the number of the signal
        that killed it. If the supervisor dies, the child gets SIGTERM, so that it saves a
        checkpoint and stops.
        """
        self._process = None
        self._process = subprocess.Popen(
            command,
            preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
            start_new_session=True,
        )
        if self._early_signal is not None:
            self._process.send_signal(self._early_signal)
        return self._process.wait()

    def _forward_signal(self, number: int, frame: object) -> None:
        self.stop.set()
        if self._process is None:  # the child is being started
            self._early_signal = number
        elif self._process.poll() is None:
            self._process.send_signal(number)


def _retry_until_storage_answers(read: Callable[[], Any], stop: threading.Event) -> Any:
    """Returns `read()`, which reads files of the run. If the bucket does not answer, the function
    calls `read` again after LONGEST_PAUSE seconds, at most MAX_FRUITLESS_STARTS times in all,
    unless `stop` is set.

    Raises:
      UserError: the bucket did not answer.
    """
    for left in reversed(range(MAX_FRUITLESS_STARTS)):
        try:
            return read()
        except StoreUnavailable as error:
            _print_with_time(f"{error.filename} does not answer ({error.strerror})")
            if not left or stop.wait(LONGEST_PAUSE):
                raise UserError(
                    f"{error.filename}: did not answer ({error.strerror}): the same command "
                    "continues the run when it does",
                    ExitCode.STORAGE,
                ) from error


def _newest_checkpoint_time_and_step(workdir: pathlib.Path) -> tuple[int, int]:
    """Returns (modification time of the newest checkpoint's manifest, in nanoseconds; step of this
    checkpoint); (0, 0) if there is no checkpoint.
    """
    newest = (0, 0)
    for path in (workdir / "checkpoints").glob("*/manifest.json"):
        if not path.parent.name.isdecimal():
            continue
        with contextlib.suppress(FileNotFoundError):  # another process may just have deleted it
            newest = max(newest, (path.stat().st_mtime_ns, int(path.parent.name)))
    return newest


def _describe_end(code: int) -> str:
    if code < 0:
        return f"the run was ended by {signal.Signals(-code).name}"
    return "the run hung" if code == ExitCode.HANG else f"the run crashed (exit code {code})"


def _print_with_time(line: str) -> None:
    print(f"supervisor {time.strftime('%H:%M:%S')}: {line}", file=sys.stderr, flush=True)
