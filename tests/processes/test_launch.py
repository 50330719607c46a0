"""What this process's launcher told it, from the environment alone, and what processes must
agree on before they start.
"""

import json
import types

import jax
import pytest

from qwen3next_jax.common import installation
from qwen3next_jax.config import Config, to_dict
from qwen3next_jax.kernels import self_test
from qwen3next_jax.processes import distributed
from qwen3next_jax.processes.launch import (
    GKE,
    TPU_VM,
    Launch,
    find_launch,
    first_node,
    gpus_of_process,
    tasks_on_node,
)
from tests.refusals import refused

# As `srun --nodes=2 --ntasks-per-node=4` sets them for the task 6; the batch script's own tasks are
# another number.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-12]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OPEN_MPI_4 = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
OPEN_MPI_5 = OPEN_MPI | {"PMIX_NAMESPACE": "prterun-head-4242@1"}


def _host(launch):
    return launch.coordinator.rpartition(":")[0]


def test_alone():
    # a batch script without srun
    for environment in (
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
    ):
        assert find_launch(environment) is None, environment


def test_flags_hold_against_any_environment():
    assert find_launch(SLURM, "10.0.0.2:8476", 2, 1) == Launch("flags", "10.0.0.2:8476", 2, 1)
    assert find_launch({}, "[fe80::1]:8476", 1, 0) == Launch("flags", "[fe80::1]:8476", 1, 0)


def test_slurm():
    launch = find_launch(SLURM)
    assert (
        launch.source,
        _host(launch),
        launch.num_processes,
        launch.process_id,
        launch.local_device_ids,
    ) == ("SLURM", "gpu07", 8, 6, (2,))
    assert find_launch(SLURM | {"SLURM_PROCID": "0"}).coordinator == launch.coordinator
    # two steps may share a host
    assert find_launch(SLURM | {"SLURM_STEP_ID": "1"}).coordinator != launch.coordinator
    assert find_launch(SLURM, coordinator="other:1234").coordinator == "other:1234"


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-12,15],cpu1", "gpu07"),
        ("n[3,5]", "n3"),
        ("rack[2-3]n[01-04]-ib,x", "rack2n01-ib"),
    ],
)
def test_first_host(nodes, first):
    assert first_node(nodes) == first


def test_tasks_on_node():
    assert [tasks_on_node("4(x2),3", node) for node in range(3)] == [4, 4, 3]


@pytest.mark.parametrize(
    "visible, here, per_process",
    [
        (None, 1, [()]),
        (None, 2, [(0,), (1,)]),
        ("0,1,2,3", 1, [()]),
        ("0,1,2,3", 2, [(0, 1), (2, 3)]),
        ("4,5,6,7", 4, [(0,), (1,), (2,), (3,)]),
        ("3", 4, [()] * 4),
        ("", 2, [(), ()]),
    ],
)
def test_own_gpus(visible, here, per_process):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpus_of_process(environment, local, here) for local in range(here)] == per_process


def test_open_mpi():
    four = find_launch(OPEN_MPI_4)
    assert (
        four.source,
        _host(four),
        four.num_processes,
        four.process_id,
        four.local_device_ids,
    ) == (
        "Open MPI",
        "10.96.0.1",
        4,
        3,
        (1,),
    )
    six = find_launch(
        OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "13145.0;tcp6://[fe80::b9b,2620:10d::2]:43370"}
    )
    assert _host(six) == "[fe80::b9b]"
    assert _host(find_launch(OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})) == "127.0.0.1"
    # mpirun in a batch script: SLURM's variables are those of its first task, in every rank.
    inside = find_launch(SLURM | OPEN_MPI_5 | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"})
    assert (_host(inside), inside.process_id) == ("gpu07", 3)
    assert find_launch(OPEN_MPI_5, coordinator="10.0.0.2:8476").coordinator == "10.0.0.2:8476"


@pytest.mark.parametrize(
    "environment, many",
    [
        ({"TPU_WORKER_HOSTNAMES": "w-0,w-1", "TPU_WORKER_ID": "1"}, True),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
    ],
)
def test_tpu_slice_on_gke(environment, many):
    assert find_launch(environment, tpu_chips=True) == (Launch(GKE) if many else None)


def test_a_machine_with_chips_asks_its_metadata():
    assert find_launch({}, tpu_chips=True) == Launch(TPU_VM)
    assert find_launch({"JAX_PLATFORMS": "cpu"}, tpu_chips=True) is None


@pytest.mark.parametrize(
    "environment, flags, names",
    [
        ({}, ("10.0.0.2:8476", 2, None), ["--process"]),
        ({}, (None, 2, 1), ["--coordinator"]),
        ({}, ("10.0.0.2:8476", None, None), ["--coordinator", "--processes"]),
        ({}, ("10.0.0.2:8476", 2, 2), ["--process=2 --processes=2"]),
        ({}, ("10.0.0.2", 2, 1), ["--coordinator=10.0.0.2"]),
        ({}, ("host:99999", 2, 1), ["host:99999"]),
        (
            OPEN_MPI_5,
            (None, None, None),
            ["Open MPI", "--coordinator"],
        ),
        (
            SLURM | {"SLURM_PROCID": "six"},
            (None, None, None),
            ["SLURM_PROCID = 'six'"],
        ),
        (
            {k: v for k, v in SLURM.items() if k != "SLURM_NODEID"},
            (None, None, None),
            ["SLURM_NODEID"],
        ),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4"}, (None, None, None), ["1 node"]),
        (
            SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2"},
            (None, None, None),
            ["4 processes", "3 GPUs"],
        ),
    ],
)
def test_mistakes_are_named(environment, flags, names):
    with refused(*names):
        find_launch(environment, *flags)


@pytest.mark.parametrize(
    "name",
    [
        "code: qwen3next_jax/model/language_model.py",
        "optax",
        "libtpu",
        "config.optimizer.learning_rate",
    ],
)
def test_processes_that_differ_are_refused(monkeypatch, name):
    digests = distributed._code_and_library_versions() | distributed._compared_settings(
        to_dict(Config())
    )
    assert name in digests
    said = [
        {"host": f"host{i}", "compared": compared}
        for i, compared in enumerate((digests, digests | {name: "another"}))
    ]
    monkeypatch.setattr(distributed.jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        distributed,
        "_key_value_client",
        lambda: types.SimpleNamespace(
            blocking_key_value_get=lambda key, _: json.dumps(said[int(key.rpartition("/")[2])])
        ),
    )
    with refused(name, "process 0 on host0", digests[name], "process 1 on host1"):
        distributed._check_reports("start", 1.0)


CHIP = "on a GPU of compute capability 8.0: expected 9.0 (H100, H200)"


@pytest.mark.parametrize(
    "chip, other, told, refused",
    [
        ("9.0", self_test.PASSED, self_test.PASSED, ""),
        ("8.0", self_test.PASSED, CHIP, CHIP),
        ("9.0", CHIP, self_test.PASSED, f"{CHIP} (process 1)"),
    ],
)
def test_a_chip_without_the_kernels_is_known_to_all(monkeypatch, chip, other, told, refused):
    said = {}
    monkeypatch.setattr(
        "jax._src.distributed.global_state.client",
        types.SimpleNamespace(
            key_value_set=lambda key, text, allow_overwrite: said.update({key: text}),
            blocking_key_value_get=lambda key, _: said.get(key, other),
        ),
    )
    monkeypatch.setattr(self_test, "_agreed_outcomes", {})
    devices = [types.SimpleNamespace(compute_capability=chip)]
    for name, value in (
        ("process_count", 2),
        ("default_backend", "gpu"),
        ("local_devices", devices),
    ):
        monkeypatch.setattr(jax, name, lambda value=value: value)
    assert (self_test.unsupported_chip_reason(), list(said.values())) == (refused, [told])


def test_a_jax_without_a_store_is_refused(monkeypatch):
    monkeypatch.delattr("jax._src.distributed.global_state")
    with refused("jax._src.distributed.global_state.client"):
        distributed.initialize(Launch("flags", "localhost:1", num_processes=2, process_id=0), None)


def test_whatever_one_process_meets_is_told_to_all(capsys):
    assert distributed._try_work(lambda: 1 / 0) == (
        None,
        {"error": "ZeroDivisionError: division by zero", "code": 1},
    )
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("platforms", ["cuda,cpu", "gpu", "tpu,cpu"])
def test_an_accelerator_asked_for_must_be_there(platforms):
    with refused(f"JAX_PLATFORMS={platforms}", "cpu"):
        distributed.check_platform(platforms, {})


@pytest.mark.parametrize("platforms", ["", "cpu", "cpu,cuda"])
def test_a_cpu_that_nobody_excluded_is_taken(platforms):
    distributed.check_platform(platforms, {})


def test_a_gpu_that_the_user_did_not_ask_for_is_not_required(monkeypatch, tmp_path):
    """The commands leave TPUs out. The device file may be of a GPU that CUDA does not serve."""
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(installation, "GPU_DEVICES", (tmp_path / "kfd",))
    monkeypatch.setattr(installation, "has_tpu_chips", lambda: False)
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: name)
    environment = {}
    installation.exclude_absent_tpu_from_jax(environment)
    assert environment["JAX_PLATFORMS"] == "cuda,cpu"
    distributed.check_platform("cuda,cpu", environment)
    assert installation.unused_gpu_message(environment, "cpu") == ""
