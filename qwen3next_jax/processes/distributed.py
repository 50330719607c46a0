"""The processes of a run, on one host or many, as one: joining, being alike, going first,
stopping together.

Everything here is a no-op where there is one process. What concerns all processes must be called
by all, in the same order; the words in passing go through the key-value store of
`jax.distributed`, so nothing is compiled for them.
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
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import ExitCode, UserError, error_message
from qwen3next_jax.common.trees import flatten
from qwen3next_jax.config import ParallelConfig
from qwen3next_jax.processes.launch import TPU_VM, Launch

# seconds; for waits on work of unknown length: a dead process ends them earlier, by its heartbeat
_LONG = 24 * 3600.0
# seconds; for which a network file system may go on saying that there is no such file
_CACHED = 70.0
# seconds for the others to leave, too, when this process does; when it fails
_LEAVE, _LEAVE_ALONE = 30, 10
# all processes exchange the same messages in the same order, so a number names one
_messages = itertools.count()


def initialize(launch: Launch | None, config: ParallelConfig) -> None:
    """Joins the other processes of the run; call it before anything asks JAX for a device.

    A process that the others do not reach within `config.start_timeout` seconds is ended with
    one line and `ExitCode.UNREACHABLE`: the runtime itself would abort it with a stack trace.

    Raises:
      UserError: the coordinator's port is taken, a TPU slice of several hosts cannot be joined,
      or JAX's store is not to be found.
    """
    if launch is None or launch.num_processes == 1:
        return
    _client()  # missing, it is told before anyone waits
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX would catch SIGTERM from here on, and only that; the loop catches it and SIGINT, and
    # `StopVote` spreads the word.
    jax.config.update("jax_enable_preemption_service", False)
    # The runtime aborts whoever waits at a coordinator that leaves, so process 0 is the last to
    # lose patience.
    patience = config.start_timeout + (
        min(config.start_timeout, _LEAVE_ALONE) if launch.process_id == 0 else 0
    )
    timer = threading.Timer(patience, _give_up, (launch, patience))
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
            shutdown_timeout_seconds=_LEAVE,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if launch.coordinator:
            raise UserError(
                f"process {launch.process_id} cannot use {launch.coordinator} (from "
                f"{launch.source}) to meet the others: {_first_line(error)}; give another "
                "--coordinator=HOST:PORT"
            ) from error
        # else a machine with chips, but without a slice's metadata
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
    """Joins the other processes (`start`), and makes sure that all have the same `settings` and
    code.

    A process that fails alone inside the block leaves after a while, with its own exit code; the
    runtime ends the others. Without that it would wait at its end for all others, which wait for
    it in the middle of a step.
    """
    initialize(launch, parallel)
    try:
        alike = _compared_settings(settings) | _code_digests()
        run_on_all(lambda: None, alike, parallel.start_timeout)
        yield
        barrier()  # process 0 may have to seal a checkpoint yet
    except BaseException as error:
        if jax.process_count() > 1:
            timer = threading.Timer(
                _LEAVE_ALONE, _leave, (getattr(error, "exit_code", ExitCode.CRASHED),)
            )
            timer.daemon = True
            timer.start()
        raise


def _leave(code: ExitCode) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _give_up(launch: Launch, seconds: float) -> None:
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
        f"error: {why} within {seconds:g} s (parallel.start_timeout); where to meet came from "
        f"{launch.source}: check that "
        "every process was started, and that the hosts reach each other on this port",
        file=sys.stderr,
        flush=True,
    )
    # the main thread sits in the runtime, which no exception reaches
    os._exit(ExitCode.UNREACHABLE)


def is_process_0() -> bool:
    """Whether this is process 0, which alone writes the run's files and shows it."""
    return jax.process_index() == 0


def broadcast_from_process_0(work: Callable[[], Any]) -> Any:
    """What `work()` returns on process 0 (JSON-ready), on every process; only process 0 calls it.

    Raises:
      UserError: on every process, when `work` raised on process 0.
    """
    if jax.process_count() == 1:
        return work()
    key = _new_key()
    if is_process_0():
        _, answer = _try_work(work, keep="value")
        _client().key_value_set(key, json.dumps(answer))
    else:
        answer = json.loads(_client().blocking_key_value_get(key, _milliseconds(_LONG)))
    if "error" in answer:
        raise UserError(answer["error"], ExitCode(answer["code"]))
    return answer["value"]


def run_on_all(
    work: Callable[[], Any], about: dict[str, str] | None = None, timeout: float = _LONG
) -> Any:
    """`work()` on every process at once. → what it returned here.

    Args:
      about: name → text that must be the same in every process.
      timeout: seconds that process 0 waits for each of the others.

    Raises:
      UserError: on every process: `work` raised on one of them, they differ in `about` (the
      first such name is told), or a
        process did not come in time.
    """
    if jax.process_count() == 1:
        return work()
    result, outcome = _try_work(work)
    key, me = _new_key(), jax.process_index()
    _client().key_value_set(
        f"{key}/{me}", json.dumps(outcome | {"about": about or {}, "host": socket.gethostname()})
    )
    broadcast_from_process_0(lambda: _check_reports(key, timeout))
    return result


def process_0_first(work: Callable[[], Any]) -> Any:
    """`work()` on process 0 and, once that is done, on the others. → what it returned here.
    Raises as `run_on_all` does.
    """
    done: list[Any] = []
    broadcast_from_process_0(lambda: done.append(work()))
    return run_on_all(lambda: done[0] if done else work())


def barrier(timeout: float = _LONG) -> None:
    """Returns when all processes have called it."""
    if jax.process_count() > 1:
        _client().wait_at_barrier(_new_key(), _milliseconds(timeout))


def check_shared_folder(folder: pathlib.Path, patience: float) -> None:
    """Makes sure that all processes see the same `folder`.

    Raises:
      UserError: on every process, when one of them has not seen within `patience` seconds what
      process 0 wrote there.
    """
    if jax.process_count() == 1:
        return
    mark = folder / "shared.tmp"

    def seen() -> None:
        until = time.monotonic() + min(patience, _CACHED)
        while not (mark.exists() and mark.read_text() == token):
            if time.monotonic() > until:
                raise UserError(
                    f"--workdir={folder}: process {jax.process_index()} on {socket.gethostname()} "
                    "does not see what "
                    "process 0 wrote there: expected a folder that all hosts share"
                )
            time.sleep(0.1)

    token = broadcast_from_process_0(lambda: _write(mark, uuid.uuid4().hex))
    try:
        run_on_all(seen)
    finally:
        if is_process_0():
            mark.unlink()


class StopVote:
    """Whether any process wants to stop, known to all of them at the same step and without waiting.

    One word goes through an all-reduce of its own, handed over before a step and read after it,
    when it has long been there. JAX's preemption service would tell by the coordinator instead,
    but hears SIGTERM only.
    """

    def __init__(self):
        devices = np.array(jax.devices())
        mesh = jax.sharding.Mesh(devices, ("device",))

        def everywhere(vote: bool) -> jax.Array:
            spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
            return jax.make_array_from_callback(devices.shape, spread, lambda _: np.full(1, vote))

        self._votes = {vote: everywhere(vote) for vote in (False, True)}
        self._any = jax.jit(
            jnp.any, out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        )

    def cast(self, stop: bool) -> jax.Array | bool:
        """Hands over this process's vote; `bool()` of the result is that of all. Every process
        votes once a step.
        """
        return self._any(self._votes[stop]) if jax.process_count() > 1 else stop


def _code_digests() -> dict[str, str]:
    """Name → text of what must be the same wherever the run computes: the package's files
    (digests), and the versions of the libraries that compute, of those that are installed.
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
    """Name → text of every setting that all processes must have alike: all but where rows are
    kept.
    """
    return {
        name: repr(value)
        for name, value in flatten(settings, "config.").items()
        if name != "config.data.prepared_dir"
    }


def _write(path: pathlib.Path, text: str) -> str:
    path.write_text(text)
    return text


def _try_work(work: Callable[[], Any], keep: str | None = None) -> tuple[Any, dict[str, Any]]:
    """(result, record of it for the others: its error, whose traceback is shown here unless it
    is the user's, or the result itself as `keep`).
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
    return result, {keep: result} if keep else {}


def _check_reports(key: str, timeout: float) -> None:
    """Process 0 reads what the others say of themselves, and raises where something is wrong."""
    first: dict[str, Any] = {}
    for process in range(jax.process_count()):
        try:
            said = json.loads(
                _client().blocking_key_value_get(f"{key}/{process}", _milliseconds(timeout))
            )
        except jax.errors.JaxRuntimeError as error:
            raise UserError(
                f"process {process} of {jax.process_count()} said nothing for {timeout:g} s: look "
                f"at its log ({_first_line(error)})",
                ExitCode.UNREACHABLE,
            ) from error
        if "error" in said:
            raise UserError(
                f"{said['error']} (process {process} on {said['host']})", ExitCode(said["code"])
            )
        first = first or said
        for name in sorted(first["about"].keys() | said["about"].keys()):
            here, there = first["about"].get(name, "nothing"), said["about"].get(name, "nothing")
            if here != there:
                raise UserError(
                    f"processes disagree on {name}: process 0 on {first['host']} has {here}, "
                    f"process {process} on "
                    f"{said['host']} {there}; start all with the same command, code and files"
                )


def _new_key() -> str:
    return f"qwen3next_jax/{next(_messages)}"


def _client() -> Any:
    """The key-value store of `jax.distributed`, which has no public name: it was here in JAX
    0.11.2 and 0.12.0, and Orbax takes it from here, too. None before the processes have met.

    Raises:
      UserError: this JAX has it elsewhere.
    """
    try:
        from jax._src import distributed

        return distributed.global_state.client
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"JAX {jax.__version__} has no jax._src.distributed.global_state.client ({error}), "
            "which runs in several processes need: install a JAX that has it, such as 0.12.0"
        ) from error


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200]
