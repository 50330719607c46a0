"""A test that kernels must pass on the user's own GPU before they become the default there, because
they have run on few chips.

Before the first use of a kind of call, the kernels run once on a tiny input, and their results are
compared with those of the form in XLA. The outcome is stored in a file by chip, JAX release and the
kernels' sources. The outcome of a test that could not run is not stored, as the device may have
been full. Where several processes run one program, a kernel that fails in one of them is disabled
in all.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import sys
import threading
from collections.abc import Callable

import jax
import numpy as np

from qwen3next_jax.ops.compile_target import compile_target

PASSED = "right"  # what the file of a passed test holds
FAILED = "failed where it was tried on this GPU"
FOLDER = pathlib.Path(os.path.expanduser("~/.cache/qwen3next_jax/kernels"))
AVOID = f"a file {FOLDER}/avoid avoids all such kernels"
# Within so many seconds the other processes must reach the same test, and compile and run it.
TIMEOUT = 1800
_agreed_outcomes: dict = {}


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """One kind of call, and how to compare a tiny one with the form in XLA.

    Attributes:
      name: of the operator.
      avoid: what a user does to get the form in XLA.
      kind: everything that decides which program runs: widths, settings.
      modules: import strings of the kernels' sources. They are imported when the test runs, as a
        library may not be installed.
      max_error: runs both and returns the name of the output or gradient in which they differ most,
        and its relative L2 difference (`largest_error`).
      tolerance: the largest difference with which the test passes.
      ran_on: the hardware on which the kernels ran in training steps (docs/gpu.md); "" where they
        ran in none.
    """

    name: str
    avoid: str
    kind: tuple
    modules: tuple[str, ...]
    max_error: Callable[[], tuple[str, float]]
    tolerance: float
    ran_on: str = "an H200, jax 0.11.2"


def is_enabled(test: SelfTest, unsupported: str = "") -> bool:
    """Whether a call that names no implementation runs the kernels. Prints the decision and its
    reason once.

    Args:
      unsupported: why the kernels cannot run the call at all; "" where they can. Then no test runs.
    """
    if compile_target().described:  # a GPU that this process does not have: nothing can be tested
        return False
    reason = unsupported or outcome(jax.local_devices()[0], test)
    ran = f"which ran on {test.ran_on}" if test.ran_on else "which never ran a whole step"
    say(
        f"{test.name}: XLA's form, no kernel: the call {reason}"
        if reason
        else f"{test.name}: the kernels for Hopper GPUs, {ran}: {test.avoid}"
    )
    return not reason


def unsupported_chip() -> str:
    """Why kernels for Hopper GPUs cannot run in this process or in another one of the run; "" where
    they can, or where a CPU interprets them.
    """
    reason = ""
    if compile_target().platform != "cpu":
        chip = getattr(jax.local_devices()[0], "compute_capability", "unknown")
        if chip != "9.0":
            reason = f"on a GPU of compute capability {chip}: expected 9.0 (H100, H200)"
    return reason if jax.process_count() == 1 else _agreed("chip", lambda: reason)


@functools.cache
def say(line: str):
    """Prints a line to stderr, each line once."""
    print(line, file=sys.stderr, flush=True)


def largest_error(names, got, want) -> tuple[str, float]:
    """The name of the array that differs most between the two, and its relative L2 difference."""
    errors = {}
    for name, a, b in zip(names, got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32).reshape(np.shape(a))
        difference = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        errors[name] = difference if np.isfinite(difference) else np.inf
    return max(errors.items(), key=lambda item: item[1])


def outcome(device, test: SelfTest, folder: pathlib.Path = FOLDER) -> str:
    """What went wrong in the test, in any process; "" where the kernels passed in all."""
    return _agreed((test.name, test.kind), lambda: _stored_outcome(device, test, folder))


def _agreed(call, find: Callable[[], str]) -> str:
    """`find()`, evaluated once for each `call`; where it is "", the first text other than "" that
    another process got.
    """
    if call not in _agreed_outcomes:
        key = hashlib.sha256(repr(call).encode()).hexdigest()[:16]
        _agreed_outcomes[call] = _exchange(key, find())
    return _agreed_outcomes[call]


def _exchange(key: str, found: str) -> str:
    if jax.process_count() == 1:
        return found
    # the key-value store in which the processes met has no public name
    from jax._src import distributed

    store = distributed.global_state.client
    prefix = f"qwen3next_jax/kernel_self_test/{key}"
    store.key_value_set(f"{prefix}/{jax.process_index()}", found or PASSED, allow_overwrite=True)
    for process in range(jax.process_count()):
        try:
            other = store.blocking_key_value_get(f"{prefix}/{process}", 1000 * TIMEOUT)
        except jax.errors.JaxRuntimeError:
            other = f"has no result in {TIMEOUT} s"
        if other != PASSED:
            return found or f"{other} (process {process})"
    return ""


def _stored_outcome(device, test: SelfTest, folder: pathlib.Path) -> str:
    if (folder / "avoid").exists():
        return f"may take none, by {folder}/avoid"
    sources = b"".join(
        pathlib.Path(importlib.import_module(name).__file__).read_bytes() for name in test.modules
    )
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    kind = device.device_kind, versions, hashlib.sha256(sources).hexdigest(), test.name, test.kind
    file = folder / (hashlib.sha256(repr(kind).encode()).hexdigest()[:16] + ".txt")
    try:
        if stored := file.read_text():  # empty: another process is writing it
            return stored.removeprefix(PASSED)
    except OSError:
        pass
    results = []
    # In a thread of its own, as the caller may be tracing.
    thread = threading.Thread(target=lambda: results.append(_run(device, test)))
    thread.start()
    thread.join()
    (result,) = results
    if not result.startswith(FAILED):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(result or PASSED)
        except OSError:  # the next process tests again
            pass
    return result


def _run(device, test: SelfTest) -> str:
    try:
        with jax.default_device(device):
            name, error = test.max_error()
    except Exception as failure:
        text = " ".join(str(failure).split())[:200]
        return f"{FAILED} ({type(failure).__name__}: {text})"
    if error <= test.tolerance:
        return ""
    return (
        f"gave another {name} than XLA where it was tried on this GPU ({error:.2g} apart, at most "
        f"{test.tolerance})"
    )
