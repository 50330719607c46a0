"""Finds the coordinator's address and the index of this process in a run of several processes: from
flags, Open MPI, SLURM, or a TPU slice.

The functions of this file depend only on their arguments, such as the environment variables. This
file does not import JAX, so a user learns of a mistake before JAX loads.
"""

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence

from qwen3next_jax.common.errors import UserError

# The highest 4,096 ports. The job's id selects one of them, so all processes of a job use the same
# port.
_FIRST_PORT, _PORTS = 61440, 4096

GKE, TPU_VM = "GKE's variables", "the TPU VM's metadata"
Environment = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Launch:
    """The arguments of `jax.distributed.initialize`: the coordinator's address, the number of
    processes, and the index of this process.

    Attributes:
      source: where the arguments come from, for messages: "flags", "SLURM", …
      coordinator: "host:port" on which process 0 listens. `coordinator`, `num_processes` and
        `process_id` are None on a TPU slice, where JAX reads them from the slice's metadata.
      num_processes: number of processes of the run.
      process_id: index of this process.
      local_device_ids: indices of the GPUs that this process uses, among the GPUs that are visible
        to it; () means all visible GPUs.
    """

    source: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] = ()


def find_launch(
    environment: Environment,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    tpu_chips: bool = False,
) -> Launch | None:
    """Finds this process's `Launch`; None if the run has one process. Flags take precedence over
    the environment.

    Args:
      environment: `os.environ`.
      coordinator: the value of the flag --coordinator.
      processes: the value of the flag --processes.
      process: the value of the flag --process.
      tpu_chips: whether this machine has TPU chips.

    Raises:
      UserError: flags or variables contradict each other, are malformed, or are incomplete.
    """
    if processes is not None or process is not None:
        return _from_flags(coordinator, processes, process)
    # Open MPI comes first: under mpirun inside a SLURM job, all ranks have the same SLURM
    # variables, which describe the job's first task.
    found = _from_open_mpi(environment, coordinator) or _from_slurm(environment, coordinator)
    if found is None and coordinator is not None:
        raise UserError(
            "--coordinator without --processes and --process, and neither SLURM nor Open MPI says "
            "how many processes there are: give all three"
        )
    return found or _from_tpu(environment, tpu_chips)


def _from_tpu(environment: Environment, tpu_chips: bool) -> Launch | None:
    """Returns the `Launch` on a TPU slice; None elsewhere. On GKE, environment variables list the
    hosts of the slice. On a TPU VM, JAX asks the VM's metadata server for the hosts.
    """
    hosts = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES"))
    if (
        _integer_variable(environment, "MEGASCALE_NUM_SLICES", 1) > 1
        or "TPU_PROCESS_ADDRESSES_PATH" in environment
        or "," in (hosts or "")
    ):
        return Launch(GKE)
    platforms = environment.get("JAX_PLATFORMS", "")
    return (
        Launch(TPU_VM)
        if hosts is None and tpu_chips and (not platforms or "tpu" in platforms)
        else None
    )


def _from_flags(coordinator: str | None, processes: int | None, process: int | None) -> Launch:
    """Returns the `Launch` that the flags --coordinator, --processes and --process give.

    Raises:
      UserError: a flag is missing or has a wrong value.
    """
    values = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    if missing := [name for name, value in values.items() if value is None]:
        raise UserError(
            f"{' and '.join(missing)} missing: expected --coordinator=HOST:PORT of process 0, "
            "--processes=N and --process=0 … N-1 together"
        )
    if processes < 1 or not 0 <= process < processes:
        raise UserError(
            f"--process={process} --processes={processes}: expected process 0 … processes - 1"
        )
    return Launch("flags", _checked_coordinator(coordinator), processes, process)


def _from_open_mpi(environment: Environment, coordinator: str | None) -> Launch | None:
    """Returns the `Launch` of a process that Open MPI's mpirun started; None if there is only one
    process.
    """
    processes = _integer_variable(environment, "OMPI_COMM_WORLD_SIZE", 1)
    if processes == 1:
        return None
    process = _integer_variable(environment, "OMPI_COMM_WORLD_RANK")
    local, here = (
        _integer_variable(environment, f"OMPI_COMM_WORLD_LOCAL_{name}") for name in ("RANK", "SIZE")
    )
    address = (
        _checked_coordinator(coordinator)
        if coordinator
        else _open_mpi_coordinator(environment, on_one_host=here == processes)
    )
    return Launch(
        "Open MPI", address, processes, process, gpus_of_process(environment, local, here)
    )


def _open_mpi_coordinator(environment: Environment, on_one_host: bool) -> str:
    """Returns the address "host:port" on which process 0 is to listen, if Open MPI started the run.

    Raises:
      UserError: the environment does not say on which host process 0 runs.
    """
    # Open MPI 4 sets this to, for example, "1531576320.0;tcp://10.0.0.1,10.1.0.1:34911".
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    port = _port_of_job(uri.split(";")[0] or environment.get("PMIX_NAMESPACE", ""))
    if on_one_host:
        return f"127.0.0.1:{port}"
    if match := re.search(r"tcp://([^,:]+)|tcp6://\[([^],]+)", uri):
        return f"{match[1]}:{port}" if match[1] else f"[{match[2]}]:{port}"
    if nodes := environment.get("SLURM_JOB_NODELIST"):
        return f"{first_node(nodes)}:{port}"
    raise UserError(
        "Open MPI does not say on which host rank 0 runs: add --coordinator=HOST:PORT with that "
        "host and a free port"
    )


def _from_slurm(environment: Environment, coordinator: str | None) -> Launch | None:
    """Returns the `Launch` of a process that `srun` started; None if there is only one process."""
    # The code reads SLURM_STEP_NUM_TASKS and not SLURM_NTASKS. A batch script and an interactive
    # shell are single processes but have SLURM_NTASKS, too; only `srun` starts several processes.
    processes = _integer_variable(environment, "SLURM_STEP_NUM_TASKS", 1)
    if processes == 1:
        return None
    process, local_id = (
        _integer_variable(environment, "SLURM_PROCID"),
        _integer_variable(environment, "SLURM_LOCALID"),
    )
    tasks_here = tasks_on_node(
        _required_variable(environment, "SLURM_STEP_TASKS_PER_NODE"),
        _integer_variable(environment, "SLURM_NODEID"),
    )
    if coordinator is None:
        job, step = (
            _required_variable(environment, f"SLURM_{name}_ID") for name in ("JOB", "STEP")
        )
        port = _port_of_job(f"{job}.{step}")
        address = f"{first_node(_required_variable(environment, 'SLURM_STEP_NODELIST'))}:{port}"
    else:
        address = _checked_coordinator(coordinator)
    return Launch(
        "SLURM", address, processes, process, gpus_of_process(environment, local_id, tasks_here)
    )


def first_node(nodes: str) -> str:
    """Returns the first node of SLURM's list of nodes: "gpu[07-12,15],cpu1" → "gpu07".

    Raises:
      UserError: the list has another form.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise UserError(
            f"SLURM's list of nodes is {nodes!r}: expected something like node[01-04]; give "
            "--coordinator=HOST:PORT"
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Returns the number of tasks on one node.

    Args:
      tasks_per_node: SLURM's list: "4(x2),3" means two nodes of 4 tasks and one node of 3.
      node: the index of the node, from 0.

    Raises:
      UserError: the list has another form, or has no such node.
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(
                f"SLURM_STEP_TASKS_PER_NODE = {tasks_per_node!r}: expected something like 4(x2),3"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(counts):
        raise UserError(
            f"SLURM_NODEID = {node}, but SLURM_STEP_TASKS_PER_NODE = {tasks_per_node!r} lists "
            f"{len(counts)} node{'s' if len(counts) > 1 else ''}"
        )
    return counts[node]


def gpus_of_process(environment: Environment, local: int, here: int) -> tuple[int, ...]:
    """Returns the indices of the GPUs that this process should use, among the GPUs that are visible
    to it; () means all visible GPUs.

    A process that is alone on its host, or that sees only one GPU, uses all GPUs that it sees. If
    CUDA_VISIBLE_DEVICES lists several GPUs, the processes of the host share them evenly. Without
    CUDA_VISIBLE_DEVICES each process takes one GPU.

    Args:
      environment: the environment variables.
      local: index of this process on its host.
      here: number of processes on this host.

    Raises:
      UserError: the number of processes does not divide the number of GPUs in the list.
    """
    listed: Sequence[str] | None = None
    if "CUDA_VISIBLE_DEVICES" in environment:
        listed = [gpu for gpu in environment["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip()]
    if here == 1 or (listed is not None and len(listed) <= 1):
        return ()
    if listed is None:
        return (local,)
    if len(listed) % here:
        raise UserError(
            f"{here} processes on this host share the {len(listed)} GPUs of CUDA_VISIBLE_DEVICES = "
            f"{environment['CUDA_VISIBLE_DEVICES']}: expected a number of processes that divides "
            "them"
        )
    share = len(listed) // here
    return tuple(range(local * share, (local + 1) * share))


def _port_of_job(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _checked_coordinator(coordinator: str) -> str:
    """Returns the value of --coordinator; raises UserError if its form is not HOST:PORT."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"--coordinator={coordinator}: expected HOST:PORT of process 0, such as 10.0.0.2:8476"
        )
    return coordinator


def _required_variable(environment: Environment, name: str) -> str:
    """Returns the environment variable `name`; raises UserError if the variable is not set."""
    if name not in environment:
        raise UserError(
            f"{name} is not set, although the launcher's other variables are: give "
            "--coordinator=HOST:PORT, --processes=N and --process=I"
        )
    return environment[name]


def _integer_variable(environment: Environment, name: str, default: int | None = None) -> int:
    text = (
        _required_variable(environment, name)
        if default is None
        else environment.get(name, str(default))
    )
    if not text.isdecimal():
        raise UserError(f"{name} = {text!r}: expected a number")
    return int(text)
