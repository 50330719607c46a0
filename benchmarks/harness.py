"""What the benchmarks share: their flags, time, tables, files, and programs in other interpreters.

Imports nothing but the standard library, and this project only where a function needs it: the
programs of the peers run in interpreters that have neither.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[1]
WARM_UP = 3
LOCK = pathlib.Path(tempfile.gettempdir()) / "qwen3next_timing.lock"
TRANSFORMERS_PEER = ROOT / "benchmarks" / "interop" / "transformers_peer.py"


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser whose help is a file's docstring, line by line."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def load_config(path: str | pathlib.Path):
    """The `Config` of a config file."""
    from qwen3next_jax.config import Config, from_dict
    from qwen3next_jax.config.files import load_config_file

    return from_dict(Config, load_config_file(pathlib.Path(path)))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Only one process of this machine is inside at a time, whatever it computes."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def seconds_of(call: Callable[[], object]) -> float:
    """The seconds of one call, which waits until its device has ended."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def median_seconds(call: Callable[[], object], rounds: int) -> tuple[float, list[float]]:
    """Times calls, after `WARM_UP` others.

    Returns:
      (the median, the seconds of every call).
    """
    for _ in range(WARM_UP):
        call()
    seconds = [seconds_of(call) for _ in range(rounds)]
    return statistics.median(seconds), seconds


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Times calls in turns, so that what slows the machine for a while slows all of them.

    Returns:
      name → the milliseconds of each round.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            milliseconds[name].append(1e3 * seconds_of(call))
    return milliseconds


def table_row(cells: Iterable[object]) -> str:
    """A row of a table in Markdown."""
    return "|" + "".join(f" {cell} |" if cell != "" else " |" for cell in cells)


def table_header(columns: Sequence[str]) -> str:
    """The first two lines of a table in Markdown."""
    return f"{table_row(columns)}\n{'|---' * len(columns)}|"


def print_header(*columns: str) -> None:
    print(table_header(columns), flush=True)


def print_row(*cells: object) -> None:
    print(table_row(cells), flush=True)


def write_json(file: pathlib.Path, found: object) -> None:
    """Writes what was measured, whole or not at all."""
    beside = file.with_name(file.name + ".tmp")
    beside.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    os.replace(beside, file)


def one_line(error: BaseException) -> str:
    """An error in one line of at most 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(lines[0].split())[:300]}"


@contextlib.contextmanager
def captured_output() -> Iterator[Callable[[], str]]:
    """Inside, what this process and its compilers write to standard output and error goes to a
    file. Afterwards the function that it gives returns the text.
    """
    texts: list[str] = []
    sys.stdout.flush()
    with tempfile.TemporaryFile(mode="w+") as said:
        before = [os.dup(1), os.dup(2)]
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        try:
            yield lambda: texts[0]
        finally:
            sys.stdout.flush()
            for stream, file in zip((1, 2), before):
                os.dup2(file, stream)
                os.close(file)
            said.seek(0)
            texts.append(said.read())


class Peer:
    """`transformers_peer.py` in an interpreter that has torch: it answers JSON lines with JSON
    lines, and its first line says the versions of its packages.
    """

    def __init__(self, python: str, *words: str):
        self.process = subprocess.Popen(
            [python, str(TRANSFORMERS_PEER), *words],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.versions = self._answer("its start")

    def ask(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer(str(command)[:200])

    def _answer(self, to: str):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(
                f"error: {TRANSFORMERS_PEER.name} ended with code {self.process.wait()} on {to}: "
                "does its interpreter have torch, transformers and safetensors?"
            )
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
