"""Compiles a plan in a process of its own, so that a compiler which aborts takes nothing else
along.

libtpu ends its process where one of its checks fails; the planner then still has a line to say,
and in a search other plans.
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
from qwen3next_jax.planner.planning import Plan, used_cpu_seconds, make_plan
from qwen3next_jax.planner.schedule import enable_schedule_dump
from qwen3next_jax.planner.topology import Topology, describe_topology


def make_plan_in_subprocess(
    config: Config, topology: Topology, optimization_level: str = ""
) -> Plan:
    """`make_plan` in a new process, which ends with this one. Where the compiler takes that
    down, the plan has `failed`.
    """
    start, cpu_then = time.perf_counter(), used_cpu_seconds(resource.RUSAGE_CHILDREN)
    # The answer is a file without a name: nothing is left of it however both end.
    with (
        tempfile.TemporaryFile() as answer,
        tempfile.TemporaryDirectory(prefix="schedules-") as dumped,
    ):
        fd = answer.fileno()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "qwen3next_jax.planner.subprocess_plan",
                str(os.getpid()),
                str(fd),
                dumped,
            ],
            pass_fds=(fd,),
            stderr=subprocess.PIPE,
            input=pickle.dumps((config, topology.name, optimization_level)),
        )
        answer.seek(0)
        try:
            found = pickle.load(answer)
        except (EOFError, pickle.UnpicklingError):  # it ended before, or in the middle
            found = None
    if isinstance(found, UserError):
        raise found
    if found:
        return dataclasses.replace(found, topology=topology)
    return Plan(
        config,
        topology,
        mesh=config.parallel.mesh.sizes(len(topology.devices)),
        lower_seconds=0.0,
        optimization_level=optimization_level or "default",
        compile_seconds=time.perf_counter() - start,
        compile_cpu_seconds=used_cpu_seconds(resource.RUSAGE_CHILDREN) - cpu_then,
        fits=False,
        failed=True,
        reason=_last_words(done.returncode, done.stderr.decode(errors="replace")),
    )


def _last_words(code: int, text: str) -> str:
    """Why a process ended without an answer. What Python said goes on to standard error: that is
    no fault of the compiler.
    """
    check = re.search(r"Check failed.*", text)
    if code < 0 and check:
        return f"the compiler aborted: {check.group()[:300]}"
    if code < 0:
        return f"the compiler's process was ended by signal {-code} ({signal.strsignal(-code)})" + (
            ": perhaps the machine ran out of memory" if code == -signal.SIGKILL else ""
        )
    sys.stderr.write(text)
    return f"the planner crashed: {(text.strip().splitlines() or ['it said nothing'])[-1][:300]}"


def _answer(planner: int, fd: int, dumped: str) -> None:
    """In the new process: reads what to compile from standard input, leaves the plan, or a
    UserError, in the open file `fd`.

    It ends with the process `planner`, however that dies.
    """
    die_with_parent(planner, signal.SIGKILL)
    jax.config.update("jax_platforms", "cpu")
    # such programs can be written to it, but not read back
    jax.config.update("jax_enable_compilation_cache", False)
    config, name, optimization_level = pickle.load(sys.stdin.buffer)
    enable_schedule_dump(dumped)
    try:
        found = dataclasses.replace(
            make_plan(config, describe_topology(name), optimization_level, dumped), topology=None
        )
    except UserError as error:
        found = error
    with open(fd, "wb") as answer:
        pickle.dump(found, answer)


if __name__ == "__main__":
    try:
        _answer(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    except KeyboardInterrupt:
        sys.exit(130)  # the planner says so
