"""Runs a function over many items in worker processes of this machine.

The workers are plain Python processes, which get items and send results through pipes. This module
does not use `multiprocessing`: a forked process would break JAX's threads, and a spawned process
would run the user's script again. Workers never import JAX.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from qwen3next_jax.common.child_processes import die_with_parent
from qwen3next_jax.common.errors import UserError

Progress = Callable[[int], None]


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_in_workers(
    function: Callable[[Any, Progress], Any],
    items: Sequence[Any],
    workers: int,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Iterator[tuple[int, Any]]:
    """Calls `function` for every item, and yields (i, result for items[i]) as soon as each result
    is there.

    Args:
      function: called with an item and with a function that reports the item's progress. With
        several workers, the function, the items and the results are pickled.
      items: the items.
      workers: number of worker processes; if at most one, the calling process calls `function`
        itself.
      progress: called with (i, the progress that `function` reports for items[i]).

    Raises:
      UserError: a worker process died; the other workers are stopped.
      Exception: any error that `function` raises; all workers are stopped.
    """
    if min(workers, len(items)) <= 1:
        for i, item in enumerate(items):
            yield i, function(item, lambda done: progress(i, done))
        return
    todo: queue.SimpleQueue = queue.SimpleQueue()
    for i, item in enumerate(items):
        todo.put((i, item))
    messages: queue.SimpleQueue = queue.SimpleQueue()
    # This thread starts the workers, because Linux kills them when the thread that started them
    # ends.
    children = [_start_worker() for _ in range(min(workers, len(items)))]
    try:
        for child in children:
            threading.Thread(
                target=_feed_worker,
                args=(child, pickle.dumps(function), todo, messages),
                daemon=True,
            ).start()
        missing = len(items)
        while missing:
            what, i, value = messages.get()
            if what == "error":
                raise value
            if what == "progress":
                progress(i, value)
            else:
                missing -= 1
                yield i, value
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def _start_worker() -> subprocess.Popen:
    code = f"from qwen3next_jax.data import workers; workers._run_worker({os.getpid()})"
    # Each worker uses one core. Without this setting, the tokenizers library would start a thread
    # per core in every worker.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _feed_worker(
    child: subprocess.Popen,
    function: bytes,
    todo: queue.SimpleQueue,
    messages: queue.SimpleQueue,
) -> None:
    """Sends the items to a worker one after the other, and puts the worker's answers into
    `messages`.
    """
    assert child.stdin and child.stdout
    try:
        child.stdin.write(function)
        while True:
            try:
                i, item = todo.get_nowait()
            except queue.Empty:
                return
            pickle.dump(item, child.stdin)
            child.stdin.flush()
            what = "progress"
            while what == "progress":
                what, value = pickle.load(child.stdout)
                messages.put((what, i, value))
            if what == "error":
                return
    except (OSError, EOFError, pickle.UnpicklingError):
        code = child.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        message = (
            f"a worker that prepares data ended {how}: if it was killed for its memory, use fewer "
            "workers; what is finished stays, so start again"
        )
        messages.put(("error", -1, UserError(message)))


def _run_worker(parent: int) -> None:
    """The main loop of a worker process: calls the function for each item that the parent sends,
    until the parent closes the pipe.
    """
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends its workers
    incoming: BinaryIO = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # text that a library prints goes to stderr, not into the pipe

    def answer(what: str, value: Any) -> None:
        pickle.dump((what, value), answers)
        answers.flush()

    function = pickle.load(incoming)
    with contextlib.suppress(EOFError):
        while True:
            item = pickle.load(incoming)
            try:
                answer("done", function(item, lambda done: answer("progress", done)))
            except Exception as error:
                answer("error", error)
