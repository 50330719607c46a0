"""Runs what README.md beside this file lists, in its order, within a number of minutes.

    uv run --extra gpu python benchmarks/gpu/measure_all.py --folder=FOLDER [--minutes=10]
    python benchmarks/gpu/measure_all.py --folder=FOLDER --tiny     on a CPU; its times say nothing

First the doctor alone, whose tests of the kernels all others read; then two commands at a time, as
most of their time is the compiler's, and only one of them times at a time. A command that fails, or
takes longer than its share, ends without the others. When the minutes are over, what still runs is
ended. FOLDER/log.txt gets the output of a command when it ends, and FOLDER the JSON files of the
commands that write one.
"""

import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from benchmarks import harness
from benchmarks.gpu.measuring import wait_or_kill

HERE = pathlib.Path(__file__).parent
SHOWN = 40  # of the last lines of a command


class Part(NamedTuple):
    """A command.

    Attributes:
      name: its name, also of its JSON file.
      words: the words of the command after "python".
      tiny: words that are added to run it on a CPU.
      minutes: that it may take.
      json: whether it writes a JSON file.
    """

    name: str
    words: tuple[str, ...]
    tiny: tuple[str, ...]
    minutes: float
    json: bool = False


def script(name: str, *words: str) -> tuple[str, ...]:
    return str(HERE / f"{name}.py"), *words


TINY = ("--tiny",)
DOCTOR = Part("doctor", ("-m", "qwen3next_jax", "doctor"), (), 3)
PARTS = (
    Part("correctness", script("correctness"), ("--interpret",), 3),
    Part("attention", script("attention"), TINY, 4, json=True),
    Part("period", script("step", "--shape=period"), TINY, 5, json=True),
    Part("packed", script("step", "--shape=packed"), TINY, 5, json=True),
    Part("tune_experts", script("tune_experts", "--only=released"), TINY, 5),
    Part("delta_rule", script("delta_rule", "--only=1 x 32768"), TINY, 3),
)


def run(part: Part, options: argparse.Namespace, ends: float, lock: threading.Lock) -> bool:
    """Runs a command until `ends` (`time.monotonic()`) at most, and appends its output to the log.
    Returns whether it ended well.
    """
    seconds = min(60 * part.minutes, ends - time.monotonic())
    if seconds < 1:
        say(options, lock, f"== {part.name}: no time left")
        return False
    words = [sys.executable, *part.words]
    if options.tiny:  # with sizes of its own
        words = [*(word for word in words if not word.startswith("--only")), *part.tiny]
    if part.json:
        words.append(f"--json={options.folder / part.name}.json")
    search = [str(harness.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PYTHONPATH": os.pathsep.join(search),
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # two processes share the GPU's memory
    }
    if options.tiny:
        environment["JAX_PLATFORMS"] = "cpu"
    begun = time.monotonic()
    with (options.folder / f".{part.name}").open("w+") as output:
        child = subprocess.Popen(
            words,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = wait_or_kill(child, seconds)
        output.seek(0)
        lines = output.read().splitlines()
    pathlib.Path(output.name).unlink()
    ended = f"ended after {seconds:.0f} s, before it was done" if code is None else f"code {code}"
    head = f"== {part.name}: {ended}, {time.monotonic() - begun:.0f} s: {' '.join(words[1:])}"
    say(options, lock, head, *lines)
    return code == 0


def say(options: argparse.Namespace, lock: threading.Lock, head: str, *lines: str) -> None:
    """Appends to the log, and prints the end of it."""
    with lock, (options.folder / "log.txt").open("a") as log:
        print(head, *lines, sep="\n", file=log)
        print(head, *lines[-SHOWN:], sep="\n", flush=True)


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="for the results")
    parser.add_argument("--minutes", type=float, default=10, help="that all may take")
    parser.add_argument("--only", default="", help="commands of these names, by commas")
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    options = parser.parse_args()
    known = [part.name for part in (DOCTOR, *PARTS)]
    names = [name for name in options.only.split(",") if name] or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--only: {unknown[0]!r}: expected some of {', '.join(known)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    ends, lock = time.monotonic() + 60 * options.minutes, threading.Lock()
    passed = [run(DOCTOR, options, ends, lock)] if DOCTOR.name in names else []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        parts = [part for part in PARTS if part.name in names]
        passed += pool.map(lambda part: run(part, options, ends, lock), parts)
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
