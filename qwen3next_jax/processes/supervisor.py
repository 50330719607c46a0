"""Restarts a training process that died, on one host: `python train.py --config=…
--max-restarts=N`.

The supervisor starts the same command as a process of its own and waits. A process that was
killed, crashed or hung is started again and goes on from the last good checkpoint. Anything a
restart would only repeat (the end, a mistake in what was given, a diverged run, a disk without
room) is passed on, and so are signals.
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
from qwen3next_jax.common.errors import RESTARTED, ExitCode

# seconds before a restart; doubled while there is no progress
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
FRUITLESS = 3  # restarts in a row without a new checkpoint, after which it gives up


def define_flag() -> Callable[[], int]:
    """Defines `--max-restarts`; call the result for its value."""
    holder = flags.DEFINE_integer(
        "max-restarts",
        0,
        "restart the run as often when it dies (0: run it unsupervised)",
        lower_bound=0,
    )
    return lambda: holder.value


def supervise(
    workdir: pathlib.Path,
    max_restarts: int,
    command: Sequence[str] = (),
    find_run: Callable[[], Mapping[str, Any]] | None = None,
) -> int:
    """Runs `command` (default: this very one, unsupervised) until it ends for good. → exit code.

    Args:
      find_run: given where `command` moves the run in `workdir` aside and trains anew: finds the
        files of the run that is there (name → what identifies the file). A process that dies
        before it has moved them is followed by one that moves the rest; after that the new run
        continues.
    """
    old_run = find_run().items() if find_run else ()
    own: list[str] = []
    command = list(command) or [
        *(sys.executable, "-m", "qwen3next_jax", "train", *sys.argv[1:]),
        "--max-restarts=0",
    ]
    stop, child, early = threading.Event(), None, None
    # the signal after which a run saves
    with_us = functools.partial(die_with_parent, os.getpid(), signal.SIGTERM)

    def forward(number: int, frame: object) -> None:
        nonlocal early
        stop.set()
        if child is None:
            early = number
        elif child.poll() is None:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        restarts = fruitless = 0
        sealed, _ = _newest_checkpoint(workdir)
        while True:
            child = None
            child = subprocess.Popen(command + own, preexec_fn=with_us, start_new_session=True)
            if early is not None:  # it came while the run was being started
                child.send_signal(early)
            code = child.wait()
            if stop.is_set() or (code >= 0 and code not in RESTARTED):
                return code if code >= 0 else 128 - code
            # By time: where damaged checkpoints were moved aside, progress begins below the step
            # there once was.
            before_it, (sealed, reached) = sealed, _newest_checkpoint(workdir)
            fruitless = 0 if sealed > before_it else fruitless + 1
            sealed = max(sealed, before_it)
            if restarts == max_restarts or fruitless == FRUITLESS:
                why = (
                    f"{restarts} restarts were allowed"
                    if restarts == max_restarts
                    else f"{fruitless} starts saved nothing new"
                )
                _say(f"{_how(code)}; gives up: {why}. Last good step: {reached}")
                return ExitCode.GAVE_UP
            restarts += 1
            still_old = bool(find_run) and not old_run.isdisjoint(find_run().items())
            own = ["--norestart"] if find_run and not still_old else []
            begins = "anew: the run before is still there" if still_old else f"from step {reached}"
            pause = min(FIRST_PAUSE * 2**fruitless, LONGEST_PAUSE)
            _say(f"{_how(code)}; restart {restarts} of {max_restarts} in {pause:g} s, {begins}")
            if stop.wait(pause):
                return ExitCode.INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _newest_checkpoint(workdir: pathlib.Path) -> tuple[int, int]:
    """(when the last checkpoint was sealed, in nanoseconds, and its step); zeros if there is
    none.
    """
    newest = (0, 0)
    for path in (workdir / "checkpoints").glob("*/manifest.json"):
        # another process of the run may be deleting it
        with contextlib.suppress(FileNotFoundError):
            newest = (
                max(newest, (path.stat().st_mtime_ns, int(path.parent.name)))
                if path.parent.name.isdecimal()
                else newest
            )
    return newest


def _how(code: int) -> str:
    if code < 0:
        return f"the run was ended by {signal.Signals(-code).name}"
    return "the run hung" if code == ExitCode.HANG else f"the run crashed (exit code {code})"


def _say(line: str) -> None:
    print(f"supervisor {time.strftime('%H:%M:%S')}: {line}", file=sys.stderr, flush=True)
