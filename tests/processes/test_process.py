"""The process of a run from outside: signals, hangs, the supervisor. Real processes, real
signals, no training.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.processes.watchdog import SignalHandler

ROOT = pathlib.Path(__file__).parents[2]


def _start(program, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def _wait_for(path, process, seconds=20):
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, process.communicate()
        time.sleep(0.01)


BLOCKED = """
import ctypes, pathlib, sys, threading, time
from qwen3next_jax.processes.watchdog import SignalHandler
with SignalHandler(lambda line: print(line, file=sys.stderr, flush=True)) as signals:
    def report():
        while not signals.caught: time.sleep(0.01)
        pathlib.Path(sys.argv[2]).touch()
    threading.Thread(target=report, daemon=True).start()
    pathlib.Path(sys.argv[1]).touch()
    while True:
        ctypes.CDLL(None).usleep(900_000)  # as in XLA: no Python handler runs before it returns
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_at_once_and_the_second_ends_the_process(tmp_path, number):
    process = _start(BLOCKED, tmp_path / "ready", tmp_path / "noted")
    _wait_for(tmp_path / "ready", process)
    process.send_signal(number)
    _wait_for(tmp_path / "noted", process, 0.8)
    process.send_signal(number)  # at once: a dying parent with threads sends it once for each
    time.sleep(0.4)
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(0.8) == ExitCode.ABORTED
    errors = process.communicate()[1]
    assert f"{number.name}: saving after the current step; again to stop now" in errors
    assert "second signal" in errors


def test_the_last_signal_of_a_parent_that_dies_slowly_is_no_second_one(monkeypatch):
    parents, ended = iter((7, 7, 1, 1)), []  # at the start, and with each signal
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "_exit", ended.append)
    with SignalHandler(lambda line: None):
        for expected in ([], [], [ExitCode.ABORTED]):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            assert ended == expected


COMPILING = """
import hashlib, pathlib, signal, sys, threading
from qwen3next_jax.commands import cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs start without
def main(arguments):
    threading.Timer(0.3, pathlib.Path(arguments[0]).touch).start()  # when this thread is in the line below
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)  # as XLA's compiler: Python's handler waits until it is back
cli.run_command(sys.modules["__main__"], "FILE")
"""  # noqa: E501


def test_any_command_answers_the_first_ctrl_c_and_ends_at_the_second(tmp_path):
    process = _start(COMPILING, tmp_path / "ready")
    _wait_for(tmp_path / "ready", process)
    process.send_signal(signal.SIGINT)
    assert "again to stop now" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(2) == ExitCode.INTERRUPTED


HANGING = """
import functools, pathlib, sys, time
from qwen3next_jax.processes.watchdog import Watchdog
from qwen3next_jax.runs.store import open_store
store = open_store(pathlib.Path(sys.argv[1]))
with Watchdog(functools.partial(store.write_thread_stacks, 0), tick=0.05) as watchdog:
    watchdog.set_time_limit(0, "a step", 1)  # no limit
    time.sleep(0.3)
    def stalled_loader(): time.sleep(60)
    pathlib.Path(sys.argv[1], "ready").touch()
    watchdog.set_time_limit(0.6, "a step", 7)
    stalled_loader()
"""


def test_the_watchdog_dumps_the_stacks_and_a_stopped_process_is_no_hang(tmp_path):
    process = _start(HANGING, tmp_path)
    _wait_for(tmp_path / "ready", process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)  # longer than the limit
    process.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    assert process.poll() is None
    assert process.wait(5) == ExitCode.HANG
    assert "a step at step 7 did not end within 0.6 s" in process.communicate()[1]
    (stacks,) = tmp_path.glob("hang-*-0.txt")
    assert "stalled_loader" in stacks.read_text()
    assert '"exit_code": 4' in (tmp_path / "metrics.jsonl").read_text()


SUPERVISED = """
import pathlib, sys
from qwen3next_jax.processes import supervisor
from qwen3next_jax.runs.store import open_store
supervisor.FIRST_PAUSE = 0.05
workdir, command = pathlib.Path(sys.argv[1]), ["/bin/sh", "-c", sys.argv[3]]
find_run = open_store(workdir).run_file_identities if sys.argv[4:] else None
sys.exit(supervisor.supervise(workdir, int(sys.argv[2]), command, find_run))
"""
# Each start saves the next of three checkpoints; the third ends well.
PROGRESS = (
    "n=$(ls {0}/checkpoints | wc -l); mkdir -p {0}/checkpoints/$n; touch "
    "{0}/checkpoints/$n/manifest.json; [ $n = 3 ] || "
)


@pytest.mark.parametrize(
    "restarts, script, code, starts",
    [
        (9, PROGRESS + "kill -9 $$", 0, 3),
        (1, PROGRESS + "kill -9 $$", ExitCode.GAVE_UP, 2),
        # The newest one there was, 9, is found damaged at the first start: what follows below it is
        # progress.
        (9, "rm -rf {0}/checkpoints/9; " + PROGRESS.replace("= 3", "= 5") + "kill -9 $$", 0, 5),
        (9, "exit 4", ExitCode.GAVE_UP, 3),  # hangs, and never gets anywhere
        (9, "exit 2", ExitCode.USER_ERROR, 1),
        (9, "exit 3", ExitCode.DIVERGED, 1),
    ],
)
def test_the_supervisor_restarts_what_a_restart_can_help(tmp_path, restarts, script, code, starts):
    (tmp_path / "checkpoints" / "0").mkdir(parents=True)
    if "checkpoints/9" in script:
        (tmp_path / "checkpoints" / "9").mkdir()
        (tmp_path / "checkpoints" / "9" / "manifest.json").touch()
    script = f"echo started; {script}".replace("{0}", str(tmp_path))
    process = _start(SUPERVISED, tmp_path, restarts, script)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output.count("started")) == (code, starts), errors


@pytest.mark.parametrize(
    "old_run, deeds, told_again",
    [
        ("run.json checkpoints", [":", "mv run.json aside"], 2),
        ("run.json checkpoints", [":", "mv run.json checkpoints aside && mkdir checkpoints"], 1),
        ("aside", [":", ":"], 0),  # nothing is to be moved
    ],
)
def test_a_restart_is_repeated_until_the_old_run_is_moved(tmp_path, old_run, deeds, told_again):
    for name in ("aside", *old_run.split()):
        (tmp_path / name).mkdir(exist_ok=True)
    # the first two starts do their deed and die; $0 is what the supervisor adds to the command
    script = (
        f"cd {tmp_path}; echo $0; echo >> starts; case $(wc -l < starts) in 1) {deeds[0]};; "
        f"2) {deeds[1]};; *) exit 0;; esac; kill -9 $$"
    )
    output, errors = _start(SUPERVISED, tmp_path, 9, script, "restart").communicate(timeout=20)
    expected = ["/bin/sh"] * (1 + told_again) + ["--norestart"] * (2 - told_again)
    assert output.split() == expected, errors


def test_the_supervisor_passes_signals_on_and_dies_with_its_run(tmp_path):
    script = (
        f"trap 'exit 130' TERM; echo $$ > {tmp_path}/child; touch {tmp_path}/ready; while true; "
        "do sleep 0.05; done"
    )
    process = _start(SUPERVISED, tmp_path, 5, script)
    _wait_for(tmp_path / "ready", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == ExitCode.INTERRUPTED

    (tmp_path / "ready").unlink()
    process = _start(SUPERVISED, tmp_path, 5, script)
    _wait_for(tmp_path / "ready", process)
    child = int((tmp_path / "child").read_text())
    process.kill()
    end = time.monotonic() + 5
    while pathlib.Path(f"/proc/{child}").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert process.wait() == -signal.SIGKILL
