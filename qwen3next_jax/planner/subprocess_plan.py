"""Makes a plan in a process of its own, because libtpu ends its process when one of its internal
checks fails. The planner can then report the failure in one line, and a search can continue with
its other candidates.
"""

import dataclasses
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time

import jax

from qwen3next_jax.common.child_processes import die_with_parent
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import Config
from qwen3next_jax.planner.planning import Plan, make_plan, used_cpu_seconds
from qwen3next_jax.planner.schedule import enable_schedule_dump
from qwen3next_jax.planner.topology import Topology, describe_topology


def make_plan_in_subprocess(
    config: Config, topology: Topology, optimization_level: str = "", skew: float = 0.0
) -> Plan:
    """Calls `make_plan` in a new process and returns its plan. If the new process ends without a
    plan, for example because the compiler aborts it, the plan's `failed` is true. When this process
    ends, the new process ends, too.

    Raises:
      UserError: `make_plan` raised it.
    """
    start, cpu_then = time.perf_counter(), used_cpu_seconds(resource.RUSAGE_CHILDREN)
    # The new process writes its answer to a temporary file without a name, so no file is left
    # behind, however the processes end.
    with (
        tempfile.TemporaryFile() as answer,
        tempfile.TemporaryDirectory(prefix="schedules-") as dump_folder,
    ):
        fd = answer.fileno()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "qwen3next_jax.planner.subprocess_plan",
                str(os.getpid()),
                str(fd),
                dump_folder,
            ],
            pass_fds=(fd,),
            stderr=subprocess.PIPE,
            input=pickle.dumps((config, topology.name, topology.slices, optimization_level, skew)),
        )
        answer.seek(0)
        try:
            found = pickle.load(answer)
        except (EOFError, pickle.UnpicklingError):  # the process ended before it wrote everything
            found = None
    if isinstance(found, UserError):
        raise found
    if found:
        return dataclasses.replace(found, topology=topology)
    return Plan(
        config.name,
        config.model,
        config.train,
        topology,
        mesh=config.parallel.mesh.axis_sizes(len(topology.devices), topology.slices),
        lower_seconds=0.0,
        optimization_level=optimization_level or "default",
        compile_seconds=time.perf_counter() - start,
        compile_cpu_seconds=used_cpu_seconds(resource.RUSAGE_CHILDREN) - cpu_then,
        fits=False,
        failed=True,
        failure_reason=_failure_reason(done.returncode, done.stderr.decode(errors="replace")),
    )


def _failure_reason(code: int, text: str) -> str:
    """Returns the reason why a process ended without an answer. If the process ended with an exit
    code, Python raised an exception: the mistake is in the planner, not in the compiler, so the
    function also prints `text`.

    Args:
      code: the exit code of the process, or -n if signal n ended it.
      text: the standard error of the process.
    """
    if code < 0:
        if check := re.search(r"Check failed.*", text):
            return f"the compiler aborted: {check.group()[:300]}"
        why = f"the compiler's process was ended by signal {-code} ({signal.strsignal(-code)})"
        hint = ": perhaps the machine ran out of memory" if code == -signal.SIGKILL else ""
        return why + hint
    sys.stderr.write(text)
    last = (text.strip().splitlines() or ["it printed nothing"])[-1]
    return f"the planner crashed: {last[:300]}"


def _make_plan_for_parent(planner_pid: int, fd: int, dump_folder: str) -> None:
    """Runs in the new process: reads the configuration, the name of the topology, the number of its
    slices, the optimization level and the skew from standard input, and writes the plan, or a
    UserError, to the open file `fd`.

    The process ends when the process with the id `planner_pid` ends, for whatever reason.
    """
    die_with_parent(planner_pid, signal.SIGKILL)
    jax.config.update("jax_platforms", "cpu")
    # JAX can write programs for described devices to its compilation cache, but cannot read them.
    jax.config.update("jax_enable_compilation_cache", False)
    config, name, slices, optimization_level, skew = pickle.load(sys.stdin.buffer)
    enable_schedule_dump(dump_folder)
    try:
        found = dataclasses.replace(
            make_plan(
                config, describe_topology(name, slices), optimization_level, dump_folder, skew
            ),
            topology=None,
        )
    except UserError as error:
        found = error
    with open(fd, "wb") as answer:
        pickle.dump(found, answer)


if __name__ == "__main__":
    try:
        _make_plan_for_parent(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    except KeyboardInterrupt:
        sys.exit(130)  # the planner's own process reports the interrupt
