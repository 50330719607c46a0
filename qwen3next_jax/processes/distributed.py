"""Coordinates the processes of one run, on one host or many: connects them, checks that they have
the same settings and code, lets one process work before the others, and stops all at the same step.

In a run of several processes, all processes must call the functions of this file in the same order.
Messages between processes go through the key-value store of `jax.distributed`, so no message needs
a compiled program. In a run of one process the functions of this file exchange no messages; they
only call the function `work` that they are given.
"""

import contextlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import ExitCode, UserError, error_message
from qwen3next_jax.common.installation import command_line_start, user_chose_jax_platforms
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import ParallelConfig
from qwen3next_jax.processes.launch import TPU_VM, Launch

# Timeout, in seconds, of a wait for work of unknown length. If a process dies, the wait ends
# earlier, because the heartbeat of that process stops.
_WORK_TIMEOUT = 24 * 3600.0
# Number of seconds for which a network file system may cache that a file does not exist.
_FILE_CACHE_SECONDS = 70.0
# Number of seconds for which this process waits for the others before it exits: after its work is
# done, and after an error.
_SHUTDOWN_TIMEOUT, _ERROR_TIMEOUT = 30, 10
# {platform in JAX_PLATFORMS: what JAX calls its backend}, for accelerators.
_BACKENDS = {"cuda": "gpu", "rocm": "gpu", "gpu": "gpu", "tpu": "tpu"}
# The numbers of the messages. All processes exchange the same messages in the same order, so a
# number names the same message in each process.
_message_numbers = itertools.count()


def initialize(launch: Launch | None, config: ParallelConfig) -> None:
    """Connects this process to the other processes of the run (`jax.distributed.initialize`). Call
    this function before any other code asks JAX for a device.

    If not all processes have connected within `config.start_timeout` seconds, this process prints
    one line and exits with `ExitCode.UNREACHABLE`. (JAX's runtime itself would abort a process that
    cannot connect, and print a stack trace.)

    Args:
      launch: the coordinator's address and the index of this process; None for a run of one
        process.

    Raises:
      UserError: the coordinator's port is taken, JAX cannot find the other hosts of a TPU slice, or
        this version of JAX lacks the private attribute that holds the client of the key-value
        store.
    """
    if launch is None or launch.num_processes == 1:
        return
    _key_value_client()  # raises an error before any process waits, if JAX has no such client
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service would catch SIGTERM, but not SIGINT. The training loop catches both,
    # and `StopVote` tells the other processes.
    jax.config.update("jax_enable_preemption_service", False)
    # If the coordinator exits, the runtime aborts every process that waits for it. So process 0,
    # the coordinator, waits longest.
    patience = config.start_timeout + (
        min(config.start_timeout, _ERROR_TIMEOUT) if launch.process_id == 0 else 0
    )
    timer = threading.Timer(patience, _exit_unreachable, (launch, patience))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.num_processes,
            launch.process_id,
            launch.local_device_ids or None,
            cluster_detection_method="deactivate" if launch.coordinator else None,
            initialization_timeout=int(patience) + 60,
            heartbeat_timeout_seconds=int(config.heartbeat_timeout),
            shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if launch.coordinator:
            raise UserError(
                f"process {launch.process_id} cannot use {launch.coordinator} (from "
                f"{launch.source}) to meet the others: {_first_line(error)}; give another "
                "--coordinator=HOST:PORT"
            ) from error
        # In all other cases this machine has TPU chips but belongs to no slice of several hosts, so
        # it trains alone.
        if launch.source != TPU_VM or jax.process_count() > 1:
            raise UserError(
                f"there are other TPU hosts, but JAX cannot tell from {launch.source} where to "
                f"meet them: {_first_line(error)}; give --coordinator, --processes and --process"
            ) from error
    finally:
        timer.cancel()


@contextlib.contextmanager
def distributed_run(
    launch: Launch | None, parallel: ParallelConfig, settings: dict[str, Any]
) -> Iterator[None]:
    """Context manager that connects the processes of a run (`initialize`) and checks that all
    processes have the same settings, code and libraries.

    A process that fails inside the `with` block exits after a few seconds with its own exit code,
    and JAX's runtime ends the other processes. If the failed process did not exit by itself, it
    would wait at its end for the other processes, which wait for it in the middle of a step: a
    deadlock.

    Args:
      launch: the argument of `initialize`.
      parallel: the settings `parallel.*`, which include the timeouts.
      settings: the configuration as nested dictionaries; `data.prepared_dir` may differ between
        hosts.

    Raises:
      UserError: `initialize` or `check_platform` raised an error, or two processes have different
        settings, code or libraries; the message names the first difference.
    """
    initialize(launch, parallel)
    try:
        check_platform(jax.config.jax_platforms or "", os.environ)
        compared = _compared_settings(settings) | _code_and_library_versions()
        run_on_all(lambda: None, compared, parallel.start_timeout)
        yield
        barrier()  # process 0 may still be writing the manifest of a checkpoint
    except BaseException as error:
        # `jax.process_count` would ask for the devices, which may be what failed.
        if jax.distributed.is_initialized():
            timer = threading.Timer(
                _ERROR_TIMEOUT, _flush_and_exit, (getattr(error, "exit_code", ExitCode.CRASHED),)
            )
            timer.daemon = True
            timer.start()
        raise


def check_platform(platforms: str, environment: Mapping[str, str]) -> None:
    """Checks that JAX computes on the first platform of the list JAX_PLATFORMS. If the first
    platform has no device, JAX itself silently takes the next platform of the list.

    If `installation.exclude_absent_tpu_from_jax`, not the user, has set JAX_PLATFORMS, and no GPU
    works, the function makes JAX compute on the CPU, as JAX does by default.

    Args:
      platforms: the value of JAX_PLATFORMS, such as "cuda,cpu"; "" if it is not set.
      environment: the environment variables of the process, `os.environ`.

    Raises:
      UserError: JAX has no device of the first platform of the list.
    """
    first = platforms.partition(",")[0]
    if first not in _BACKENDS:
        return
    try:
        backend = jax.default_backend()
    except (RuntimeError, AssertionError):  # the latter if no platform of the list has a device
        backend = ""
    if not user_chose_jax_platforms(platforms, environment):
        if not backend:
            jax.config.update("jax_platforms", "cpu")
        return
    if backend != _BACKENDS[first]:
        fallback = f", only {backend}" if backend else ""
        raise UserError(
            f"JAX_PLATFORMS={platforms} asks for {first}, but JAX finds no such device{fallback}: "
            f"`{command_line_start('doctor')}` says why. JAX_PLATFORMS=cpu asks for the CPU"
        )


def _flush_and_exit(code: ExitCode) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_unreachable(launch: Launch, seconds: float) -> None:
    """Prints why the processes did not connect, and exits. A timer's thread calls this function."""
    if launch.coordinator is None:
        why = "the other hosts of the TPU slice did not all answer"
    elif launch.process_id == 0:
        others = launch.num_processes - 1
        why = f"not all of the other {others} processes came to {launch.coordinator}"
    else:
        host, _, port = launch.coordinator.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            why = (
                f"process 0 answers at {launch.coordinator}, but not all of {launch.num_processes} "
                "processes came"
            )
        except OSError as error:
            why = f"process 0 does not answer at {launch.coordinator} ({error.strerror or error})"
    print(
        f"error: {why} within {seconds:g} s (parallel.start_timeout); the address came from "
        f"{launch.source}: check that every process was started, and that the hosts reach each "
        "other on this port",
        file=sys.stderr,
        flush=True,
    )
    # The main thread waits inside JAX's distributed runtime, where no exception can reach it.
    os._exit(ExitCode.UNREACHABLE)


def is_process_0() -> bool:
    """Whether this is process 0, which prints the run's output and writes the files that only one
    process may write.
    """
    return jax.process_index() == 0


def broadcast_from_process_0(work: Callable[[], Any]) -> Any:
    """Calls `work` on process 0 alone and returns its result on every process.

    Args:
      work: function whose result must be JSON-serializable.

    Raises:
      UserError: `work` raised an error on process 0; every process raises a UserError with the
        message of this error.
    """
    if jax.process_count() == 1:
        return work()
    key = _next_message_key()
    if is_process_0():
        result, report = _try_work(work)
        _key_value_client().key_value_set(key, json.dumps(report or {"value": result}))
    else:
        text = _key_value_client().blocking_key_value_get(key, _milliseconds(_WORK_TIMEOUT))
        report = json.loads(text)
        result = report.get("value")
    if "error" in report:
        raise UserError(report["error"], ExitCode(report["code"]))
    return result


def run_on_all(
    work: Callable[[], Any],
    compared: dict[str, str] | None = None,
    timeout: float = _WORK_TIMEOUT,
) -> Any:
    """Calls `work` on all processes at the same time, and returns the result of this process.

    Args:
      work: function to call; its result is not sent to the other processes.
      compared: name → text that must be the same in every process.
      timeout: number of seconds for which process 0 waits for the report of each process.

    Raises:
      UserError: `work` raised an error on one process, two processes have different texts in
        `compared` (the message gives the first such name), or a process did not report in time.
        Every process raises the same UserError.
    """
    if jax.process_count() == 1:
        return work()
    result, report = _try_work(work)
    report |= {"compared": compared or {}, "host": socket.gethostname()}
    key = _next_message_key()
    _key_value_client().key_value_set(f"{key}/{jax.process_index()}", json.dumps(report))
    broadcast_from_process_0(lambda: _check_reports(key, timeout))
    return result


def gather_from_all(value: Any) -> list[Any]:
    """Sends `value`, which must be JSON-serializable, to all processes. Returns, on every process,
    the list of the values of all processes, in the order of the process indices.
    """
    if jax.process_count() == 1:
        return [value]
    key = _next_message_key()
    _key_value_client().key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
    timeout = _milliseconds(_WORK_TIMEOUT)
    return [
        json.loads(_key_value_client().blocking_key_value_get(f"{key}/{process}", timeout))
        for process in range(jax.process_count())
    ]


def process_0_first(work: Callable[[], Any]) -> Any:
    """Calls `work` on process 0, and then on all other processes. Returns the result of `work` on
    this process.

    Raises:
      UserError: `work` raised an error on one process; every process raises this UserError.
    """
    done: list[Any] = []
    broadcast_from_process_0(lambda: done.append(work()))
    return run_on_all(lambda: done[0] if done else work())


def barrier(timeout: float = _WORK_TIMEOUT) -> None:
    """Waits until all processes have called this function, for at most `timeout` seconds."""
    if jax.process_count() > 1:
        _key_value_client().wait_at_barrier(_next_message_key(), _milliseconds(timeout))


def check_shared_folder(folder: pathlib.Path, patience: float) -> None:
    """Checks that all processes see the same `folder`: process 0 writes a file to it, and the other
    processes read the file.

    Raises:
      UserError: a process has not seen the file of process 0 within `patience` seconds; every
        process raises the same UserError.
    """
    if jax.process_count() == 1:
        return
    mark = folder / "shared.tmp"

    def wait_for_token() -> None:
        until = time.monotonic() + min(patience, _FILE_CACHE_SECONDS)
        while not (mark.exists() and mark.read_text() == token):
            if time.monotonic() > until:
                raise UserError(
                    f"--workdir={folder}: process {jax.process_index()} on {socket.gethostname()} "
                    "does not see what process 0 wrote there: expected a folder that all hosts "
                    "share"
                )
            time.sleep(0.1)

    token = broadcast_from_process_0(lambda: _write_and_return_text(mark, uuid.uuid4().hex))
    try:
        run_on_all(wait_for_token)
    finally:
        if is_process_0():
            mark.unlink()


class StopVote:
    """Tells all processes, at the same step, whether any of them wants to stop.

    Before each training step the devices compute an all-reduce of one boolean. A process casts its
    vote before it dispatches a step and reads the result after the dispatch, so the step need not
    wait for the vote. (JAX's preemption service also makes all processes stop at the same step, but
    it notices only SIGTERM.)
    """

    def __init__(self):
        devices = np.array(jax.devices())
        mesh = jax.sharding.Mesh(devices, ("device",))
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))

        def on_all_devices(vote: bool) -> jax.Array:
            return jax.make_array_from_callback(devices.shape, split, lambda _: np.full(1, vote))

        self._votes = {vote: on_all_devices(vote) for vote in (False, True)}
        self._any = jax.jit(
            jnp.any, out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        )

    def cast(self, wants_stop: bool) -> jax.Array | bool:
        """Casts the vote of this process. Every process must call `cast` once per step. `bool()` of
        the result says whether any process voted to stop.
        """
        return self._any(self._votes[wants_stop]) if jax.process_count() > 1 else wants_stop


def _code_and_library_versions() -> dict[str, str]:
    """Returns a dict that must be equal in all processes of a run: the SHA-256 digest of each file
    of this package, and the version of each installed library that affects the results (JAX, Flax,
    CUDA, …).
    """
    package = pathlib.Path(__file__).parents[1]
    files = {
        f"code: qwen3next_jax/{path.relative_to(package)}": digests.sha256_file(path)[:12]
        for path in sorted(package.rglob("*.py"))
    }
    versions = {d.name: d.version for d in importlib.metadata.distributions()}
    computing = re.compile("jax|jaxlib|libtpu|flax|optax|tokamax|jax-cuda.*|nvidia-.*")
    return files | {
        name: version for name, version in versions.items() if computing.fullmatch(name)
    }


def _compared_settings(settings: dict[str, Any]) -> dict[str, str]:
    """Returns name → value as text, for the settings that must be equal in all processes: all
    except `data.prepared_dir`, which may be a local folder of each host.
    """
    return {
        name: repr(value)
        for name, value in flatten(settings, "config.").items()
        if name != "config.data.prepared_dir"
    }


def _write_and_return_text(path: pathlib.Path, text: str) -> str:
    path.write_text(text)
    return text


def _try_work(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Calls `work`. Returns (result, report for the other processes). The report describes the
    error that `work` raised; it is {} if `work` raised no error.

    If `work` raised an error that is not a `UserError`, this function prints the traceback.
    """
    try:
        result = work()
    except UserError as error:
        return None, {"error": str(error), "code": int(error.exit_code)}
    except Exception as error:
        traceback.print_exc()
        return None, {
            "error": f"{type(error).__name__}: {error_message(error)}",
            "code": int(ExitCode.CRASHED),
        }
    return result, {}


def _check_reports(key: str, timeout: float) -> None:
    """Runs on process 0: reads the reports of all processes from the key-value store, at the keys
    "KEY/PROCESS".

    Raises:
      UserError: a process did not report in time, reports an error, or differs from process 0.
    """
    first: dict[str, Any] = {}
    for process in range(jax.process_count()):
        try:
            text = _key_value_client().blocking_key_value_get(
                f"{key}/{process}", _milliseconds(timeout)
            )
        except jax.errors.JaxRuntimeError as error:
            raise UserError(
                f"process {process} of {jax.process_count()} did not report within {timeout:g} s: "
                f"look at its log ({_first_line(error)})",
                ExitCode.UNREACHABLE,
            ) from error
        report = json.loads(text)
        if "error" in report:
            raise UserError(
                f"{report['error']} (process {process} on {report['host']})",
                ExitCode(report["code"]),
            )
        first = first or report
        expected, found = first["compared"], report["compared"]
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise UserError(
                    f"processes disagree on {name}: process 0 on {first['host']} has "
                    f"{expected.get(name, 'nothing')}, process {process} on {report['host']} "
                    f"{found.get(name, 'nothing')}; start all with the same command, code and files"
                )


def _next_message_key() -> str:
    return f"qwen3next_jax/{next(_message_numbers)}"


def _key_value_client() -> Any:
    """Returns the client of the key-value store of `jax.distributed`; None before `initialize` has
    run.

    JAX has no public name for the client. JAX 0.11.2 and 0.12.0 have the client in `jax._src`, and
    Orbax reads it from there, too.

    Raises:
      UserError: this version of JAX does not have the client in `jax._src`.
    """
    try:
        from jax._src import distributed

        return distributed.global_state.client
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"JAX {jax.__version__} has no jax._src.distributed.global_state.client ({error}), "
            "which a run of several processes needs: install a JAX that has it, such as 0.12.0"
        ) from error


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]
