"""The processes of a run, on one host or many, as one: joining, being alike, going first, stopping together.

Everything here is a no-op where there is one process. What concerns all processes must be called by all, in the same
order; the words in passing go through the key-value store of `jax.distributed`, so nothing is compiled for them.
"""

import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed as _jax_distributed  # the key-value store has no public name; Orbax takes it from here, too

from qwen3next_jax.config import ParallelConfig
from qwen3next_jax.errors import ExitCode, UserError
from qwen3next_jax.parallel.launch import Launch

_LONG = 24 * 3600.0  # seconds; for waits on work of unknown length: a dead process ends them earlier, by its heartbeat
_LEAVE = 30  # seconds; for the others to leave, too, when this process does
_messages = itertools.count()  # all processes exchange the same messages in the same order, so a number names one


def start(launch: Launch | None, config: ParallelConfig) -> None:
    """Joins the other processes of the run; call it before anything asks JAX for a device.

    A process that the others do not reach within `config.start_timeout` seconds is ended with one line and
    `ExitCode.UNREACHABLE`: the runtime itself would abort it with a stack trace.

    Raises:
      UserError: the coordinator's port is taken, or a TPU slice of several hosts cannot be joined.
    """
    if launch is None or launch.processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX would catch SIGTERM from here on, and only that; the loop catches it and SIGINT, and `StopVote` spreads the word.
    jax.config.update("jax_enable_preemption_service", False)
    timer = threading.Timer(config.start_timeout, _give_up, (launch, config.start_timeout))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            launch.coordinator, launch.processes, launch.process, launch.local_devices or None,
            cluster_detection_method="deactivate" if launch.coordinator else None,
            initialization_timeout=int(config.start_timeout) + 60, heartbeat_timeout_seconds=int(config.heartbeat_timeout),
            shutdown_timeout_seconds=_LEAVE)
    except (RuntimeError, ValueError, OSError) as error:
        if launch.coordinator:
            raise UserError(f"process {launch.process} cannot use {launch.coordinator} (from {launch.source}) to meet the "
                            f"others: {_first_line(error)}; give another --coordinator=HOST:PORT") from error
        if jax.process_count() > 1:
            raise UserError(f"this TPU slice has {jax.process_count()} hosts, but JAX cannot tell where they meet: "
                            f"{_first_line(error)}; give --coordinator, --processes and --process") from error
    finally:
        timer.cancel()


def _give_up(launch: Launch, seconds: float) -> None:
    if launch.coordinator is None:
        reason = "the other hosts of the TPU slice did not all answer"
    elif launch.process == 0:
        reason = f"not all of the other {launch.processes - 1} processes came to {launch.coordinator}"
    else:
        host, _, port = launch.coordinator.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            reason = f"process 0 answers at {launch.coordinator}, but not all of {launch.processes} processes came"
        except OSError as error:
            reason = f"process 0 does not answer at {launch.coordinator} ({error.strerror or error})"
    print(f"error: {reason} within {seconds:g} s (parallel.start_timeout); where to meet came from {launch.source}: check that "
          "every process was started, and that the hosts reach each other on this port", file=sys.stderr, flush=True)
    os._exit(ExitCode.UNREACHABLE)  # the main thread sits in the runtime, which no exception reaches


def is_leader() -> bool:
    """Whether this is process 0, which alone writes the run's files and shows it."""
    return jax.process_index() == 0


def agree(about: dict[str, Any], timeout: float) -> None:
    """Compares `about` (name → JSON value) among all processes.

    Raises:
      UserError: in every process, naming the first thing that differs; or a process did not come within `timeout` seconds.
    """
    settle(None, timeout, about)


def leader_first(work: Callable[[], Any], timeout: float) -> Any:
    """`work()` on process 0, and when that is done on the others. → what it returned here.

    Raises:
      UserError: in every process, when it did so in one.
    """
    _from_leader(lambda: work() and None) if False else None
    return work()


def barrier(timeout: float = _LONG) -> None:
    """Returns when all processes have called it."""
    if jax.process_count() > 1:
        _client().wait_at_barrier(f"qwen3next_jax/{next(_messages)}", int(timeout * 1000))
