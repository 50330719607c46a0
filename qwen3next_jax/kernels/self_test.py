"""A test of kernels on the user's own GPU. A call that names no implementation runs the kernels
only if they passed their test. The tests are needed because the kernels have run on few chips so
far.

Each kind of call has its own test. A kind of call is a combination of widths, dtypes and settings
that the kernels are compiled for. The test runs the kernels and the XLA implementation on a tiny
input and compares the results. The outcome is stored in a file whose name depends on the kind of
call, the chip, the releases of PACKAGES and the source code of the kernels; later processes read
the file. If the kernels raised an error, no outcome is stored, because a full memory of the device
may have caused the error. While JAX traces a training step, no test runs; after the trace, the
tests run in parallel (`implementations.trace_and_record`). If several processes run one program and
the kernels fail in one process, all processes use the XLA implementation.
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

from qwen3next_jax.ops import implementations
from qwen3next_jax.ops.compile_target import compile_target

PASSED = "passed"  # the content of the file that stores a passed test
FAILED = f"failed {implementations.WHERE_TRIED}"
FOLDER = pathlib.Path(os.path.expanduser("~/.cache/qwen3next_jax/kernels"))
AVOID = f"a file {FOLDER}/avoid avoids all such kernels"
# The number of seconds that a process waits for the outcome of another process. In that time the
# other process must reach the same test, compile it and run it.
TIMEOUT = 1800
# The packages that compile the kernels. An outcome holds only for the same releases of all.
PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-triton", "triton"),
    *("nvidia-cuda-nvcc", "nvidia-nvjitlink"),
)
_agreed_outcomes: dict = {}


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """The test of one kind of call, which compares the kernels with the XLA implementation.

    Attributes:
      name: name of the operator, for messages and for the name of the stored file.
      how_to_avoid: text that tells a user how to run the XLA implementation instead.
      call_kind: the widths, dtypes and settings on which the compiled kernels depend.
      modules: import strings of the modules that hold the kernels' source code. The modules are
        imported only when the outcome is looked up, because some of them need tokamax, which may
        not be installed.
      max_error: function that runs the kernels and the XLA implementation on a tiny input. The
        function returns the name of the output or gradient in which the kernels and XLA differ
        most, and the relative L2 difference (`largest_error`).
      tolerance: the largest difference with which the test passes.
      trained_on: the GPU and the JAX release with which the kernels have run training steps
        (docs/gpu.md); "" if the kernels have never run a training step.
      warning: a drawback of the kernels, printed although the kernels passed the test; "" if the
        kernels have no drawback.
    """

    name: str
    how_to_avoid: str
    call_kind: tuple
    modules: tuple[str, ...]
    max_error: Callable[[], tuple[str, float]]
    tolerance: float
    trained_on: str = "an H200, jax 0.11.2"
    warning: str = ""


def kernels_run_by_default(test: SelfTest, unsupported: str = "") -> bool:
    """Returns whether a call that names no implementation runs the kernels. If the kernels can run
    the call and no outcome of the test is stored, the function runs the test. While
    `trace_and_record` traces, the function runs no test and assumes a pass. The function prints the
    decision and the reason for the decision, each text once in a process; while `trace_and_record`
    traces, it prints nothing. If the program is compiled for a GPU that this process does not have,
    the function returns False and prints nothing.

    Args:
      test: the test on which the decision depends.
      unsupported: the reason why the kernels cannot run the call; "" if they can.
    """
    if compile_target().may_lack_device:  # compiled for a GPU that is not here: no test can run
        return False
    reason = unsupported or failure_or_assumed_pass(test)
    ran = f"which ran on {test.trained_on}" if test.trained_on else "which never ran a whole step"
    trained = (
        f"have trained on {test.trained_on}" if test.trained_on else "have never trained a model"
    )
    warning = f"; {test.warning}" if test.warning else ""
    passed = f"the kernels passed their test on this GPU and {trained}{warning}"
    implementations.record_why_default(not reason, reason or passed)
    print_once(
        f"{test.name}: XLA computes it without the kernel: the call {reason}"
        if reason
        else f"{test.name}: the kernels for this GPU, {ran}: {test.how_to_avoid}{warning}"
    )
    return not reason


def failure_or_assumed_pass(test: SelfTest) -> str:
    """Returns what went wrong in the test; "" if the kernels passed. While `trace_and_record`
    traces, the function runs no test: if the outcome of the test is not known yet, the function
    assumes a pass and returns "".
    """
    device = jax.local_devices()[0]
    kind = _test_key(test)
    if kind not in _agreed_outcomes:
        put_off = functools.partial(find_failure, device, test)
        if implementations.postpone_kernel_test(kind, put_off):
            return ""
    return find_failure(device, test)


def known_failure(test: SelfTest) -> str:
    """Returns what went wrong in the test if the test has run in this process; otherwise ""."""
    return _agreed_outcomes.get(_test_key(test), "")


def unsupported_chip_reason() -> str:
    """Returns why kernels for Hopper GPUs cannot run in this process or in another process of the
    same run. Returns "" if the kernels can run, or if the program is compiled for a CPU, which
    interprets kernels.
    """
    reason = ""
    if compile_target().platform != "cpu":
        chip = getattr(jax.local_devices()[0], "compute_capability", "unknown")
        if chip != "9.0":
            reason = f"on a GPU of compute capability {chip}: expected 9.0 (H100, H200)"
    return agree_on_reason("chip", reason)


def agree_on_reason(question: str, reason: str) -> str:
    """Tells all processes why a process cannot run some kernels. `reason` is the reason of this
    process; "" if it can run the kernels. Returns `reason` if it is not "". Otherwise returns the
    first reason that another process gave for the same `question`, or "" if all processes can run
    the kernels.
    """
    if jax.process_count() == 1:
        return reason
    return _failure_in_any_process((compile_target().platform, question), lambda: reason)


def print_once(line: str):
    """Prints a line to stderr, unless this process has printed the same line before. The function
    prints nothing while `trace_and_record` traces.
    """
    if not implementations.is_recording_decisions():
        _print_first_time(line)


@functools.cache
def _print_first_time(line: str):
    print(line, file=sys.stderr, flush=True)


def largest_error(names, got, want) -> tuple[str, float]:
    """Returns the name of the array in which `got` and `want` differ most, and the array's relative
    L2 difference |got - want| / |want|. The difference counts as infinite if |got - want| / |want|
    is not a finite number, for example because `got` has NaN or because `want` is all zeros.

    Args:
      names: one name for each array.
      got: the arrays to test.
      want: the arrays to compare `got` with, each with as many elements as its counterpart in
        `got`.
    """
    errors = {}
    for name, a, b in zip(names, got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32).reshape(np.shape(a))
        difference = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        errors[name] = difference if np.isfinite(difference) else np.inf
    return max(errors.items(), key=lambda item: item[1])


def find_failure(device, test: SelfTest, folder: pathlib.Path | None = None) -> str:
    """Returns what went wrong in the test in this process or, if the kernels passed here, in
    another process of the same run; "" if the kernels passed in all processes. `folder` holds the
    stored outcomes; None: FOLDER.
    """
    return _failure_in_any_process(
        _test_key(test), lambda: _stored_or_new_failure(device, test, folder or FOLDER)
    )


def _test_key(test: SelfTest) -> tuple:
    return compile_target().platform, test.name, test.call_kind


def _failure_in_any_process(call, find: Callable[[], str]) -> str:
    """Calls `find()` once for each value of `call` and exchanges the results of all processes. A
    result is "" or says what went wrong. Returns this process's result if it is not "". Otherwise
    returns the first result of another process that is not "", or "" if all results are "". A
    process that gives no result in TIMEOUT seconds counts as a failure.
    """
    if call not in _agreed_outcomes:
        key = hashlib.sha256(repr(call).encode()).hexdigest()[:16]
        _agreed_outcomes[call] = _exchange_failures(key, find())
    return _agreed_outcomes[call]


def _exchange_failures(key: str, found: str) -> str:
    """Exchanges the results of all processes under the name `key`. A result is "" or says what went
    wrong. Returns this process's result `found` if it is not ""; otherwise the first result of
    another process that is not "", or "" if all results are "".
    """
    if jax.process_count() == 1:
        return found
    # JAX has no public name for the key-value store of the processes.
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


def _stored_or_new_failure(device, test: SelfTest, folder: pathlib.Path) -> str:
    """Returns what went wrong in the test; "" if the kernels passed. The function reads the
    stored outcome. If no outcome is stored, the function runs the test, and stores the outcome
    unless the kernels raised an error. If the folder has a file `avoid`, the function runs no test
    and returns a text that names this file.
    """
    if (folder / "avoid").exists():
        return f"is kept from the kernels by the file {folder}/avoid"
    try:
        modules = [importlib.import_module(name) for name in test.modules]
    except Exception as failure:  # a library that the kernels import is broken or incomplete
        return _failure_text(failure)
    sources = b"".join(pathlib.Path(module.__file__).read_bytes() for module in modules)
    versions = [_package_version(name) for name in PACKAGES]
    kind = (
        device.device_kind,
        versions,
        hashlib.sha256(sources).hexdigest(),
        test.name,
        test.call_kind,
    )
    file = folder / (hashlib.sha256(repr(kind).encode()).hexdigest()[:16] + ".txt")
    try:
        if stored := file.read_text():  # empty: another process is writing it
            return stored.removeprefix(PASSED)
    except OSError:
        pass
    results = []
    # The test runs in a thread of its own, because the caller's thread may be tracing a function.
    thread = threading.Thread(target=lambda: results.append(_run_test(device, test)))
    print(
        f"testing the kernels of {test.name} on this GPU; if this does not end, {AVOID}",
        file=sys.stderr,
        flush=True,
    )
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


def _package_version(package: str) -> str:
    """Returns the release of a package; "" if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _run_test(device, test: SelfTest) -> str:
    """Runs the test on `device`. Returns "" if the kernels passed. If the kernels did not pass,
    returns the error that they raised, or their largest difference from the XLA implementation.
    """
    try:
        with jax.default_device(device):
            name, error = test.max_error()
    except Exception as failure:
        return _failure_text(failure)
    if error <= test.tolerance:
        return ""
    return (
        f"gave another {name} than XLA {implementations.WHERE_TRIED} ({error:.2g} apart, at most "
        f"{test.tolerance})"
    )


def _failure_text(failure: Exception) -> str:
    """Returns what went wrong in a test that raised `failure`."""
    if "RESOURCE_EXHAUSTED" in str(failure):
        return f"{FAILED}: {implementations.NO_MEMORY}"
    text = " ".join(str(failure).split())[:200]
    return f"{FAILED} ({type(failure).__name__}: {text})"
