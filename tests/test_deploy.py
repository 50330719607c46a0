"""The files in deploy/, as far as parsers go: nothing here builds an image or starts a pod."""

import math
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml

from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.config import MESH_AXES, default_config
from qwen3next_jax.processes.launch import Launch, find_launch

ROOT = pathlib.Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def _jobset(name: str):
    """(the job's replicas, its Job spec, its pod spec, its only container) of a manifest."""
    manifest = yaml.safe_load((DEPLOY / name).read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    return manifest, job, spec, pod, container


def _flags(args: list[str]) -> dict[str, str]:
    return dict(arg.removeprefix("--").split("=", 1) for arg in args)


@pytest.mark.parametrize("name", ["tpu-jobset.yaml", "gpu-jobset.yaml"])
def test_a_jobset_starts_all_pods(name):
    _, _, spec, pod, container = _jobset(name)
    assert spec["parallelism"] == spec["completions"]
    assert spec["completionMode"] == "Indexed"
    # A pod failure policy is only valid with pods that never restart.
    assert spec["podFailurePolicy"]
    assert pod["restartPolicy"] == "Never"
    flags = _flags(container["args"])
    assert (ROOT / flags["config"]).is_file()
    assert flags["workdir"].startswith("gs://")
    for flag in flags:
        group = default_config()
        for part in flag.split(".")[1:]:
            group = group[part]


@pytest.mark.parametrize("name", ["tpu-jobset.yaml", "gpu-jobset.yaml"])
def test_pods_do_not_repeat_what_fails_again(name):
    _, _, spec, _, _ = _jobset(name)
    (rule,) = spec["podFailurePolicy"]["rules"]
    fails_again = {ExitCode.USER_ERROR, ExitCode.DIVERGED, ExitCode.HOOK_FAILED}
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert set(rule["onExitCodes"]["values"]) == fails_again


def test_a_tpu_pod_has_every_chip_of_its_host():
    _, job, spec, pod, container = _jobset("tpu-jobset.yaml")
    grid = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(map(int, grid.split("x")))
    assert spec["parallelism"] * container["resources"]["limits"]["google.com/tpu"] == chips
    mesh = {
        axis: int(_flags(container["args"]).get(f"config.parallel.mesh.{axis}", 1))
        for axis in MESH_AXES
    }
    assert job["replicas"] > 1
    assert chips % math.prod(mesh.values()) == 0


def test_gpu_pods_find_each_other():
    manifest, job, spec, _, container = _jobset("gpu-jobset.yaml")
    flags = _flags(container["args"])
    first_pod = f"{manifest['metadata']['name']}-{job['name']}-0-0.{manifest['metadata']['name']}"
    assert flags["process"] == "$(JOB_COMPLETION_INDEX)"
    launch = find_launch({}, flags["coordinator"], int(flags["processes"]), 3)
    assert isinstance(launch, Launch)
    assert launch.num_processes == spec["parallelism"]
    assert launch.coordinator.rpartition(":")[0] == first_pod


def chosen_extras(platform):
    """The process that chooses the extras of an image."""
    text = (DEPLOY / "Dockerfile").read_text()
    script = re.search(r"case .* esac", text.replace("\\\n", ""), re.DOTALL).group()
    return subprocess.run(
        ["sh", "-c", f"PLATFORM={platform}; {script}; echo $extras"],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_an_image_has_extras_that_exist(platform):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = set(chosen_extras(platform).stdout.strip().split(","))
    assert names <= project["optional-dependencies"].keys()
    assert "remote" in names
    assert (platform in names) == (platform != "cpu")


def test_an_unknown_platform_gives_no_image():
    done = chosen_extras("abacus")
    assert done.returncode == 2
    assert "abacus" in done.stderr


def test_the_slurm_script_asks_for_its_folder():
    script = DEPLOY / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    refused = subprocess.run(["bash", script], capture_output=True, text=True)
    assert refused.returncode
    assert "slurm.sh" in refused.stderr
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"].startswith("TERM@")


# What srun does since SLURM 22.05: a task gets one core, unless srun itself is told how many; what
# the job asked for (SLURM_CPUS_PER_TASK) does not count.
SRUN = """#!/bin/bash
cpus=1
while [[ $1 == --* ]]; do
  [[ $1 == --cpus-per-task=* ]] && cpus=${1#*=}
  shift
done
for task in 0 1; do SLURM_PROCID=$task CPUS=$cpus "$@"; done
"""


def _sbatch(
    folder: pathlib.Path, path: pathlib.Path, *arguments: str
) -> subprocess.CompletedProcess:
    """Runs slurm.sh in `folder` as a job's batch step, with the programs of `path`."""
    return subprocess.run(
        ["/bin/bash", DEPLOY / "slurm.sh", *(arguments or ["gs://bucket/run"])],
        cwd=folder,
        env={"PATH": str(path), "SLURM_CPUS_PER_TASK": "12"},
        capture_output=True,
        text=True,
    )


def _write_program(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose Python prints the task, its cores and its arguments; beside it srun."""
    _write_program(tmp_path / "programs/srun", SRUN)
    _write_program(tmp_path / ".venv/bin/python", '#!/bin/bash\necho "$SLURM_PROCID $CPUS $@"\n')
    (tmp_path / "train.py").touch()
    return tmp_path


def test_each_slurm_task_gets_its_cores(checkout):
    done = _sbatch(checkout, checkout / "programs")
    command = "train.py --config=configs/small.py --workdir=gs://bucket/run"
    assert done.stdout.splitlines() == [f"{task} 12 {command}" for task in range(2)]


def test_a_slurm_job_takes_flags_of_train(checkout):
    flags = ["--config=configs/tiny.py", "--config.data.path=a b,c"]
    done = _sbatch(checkout, checkout / "programs", "runs/a", *flags)
    command = f"train.py {' '.join(flags)} --workdir=runs/a"
    assert done.stdout.splitlines() == [f"{task} 12 {command}" for task in range(2)]
    done = _sbatch(checkout, checkout / "programs", *flags)
    assert done.returncode == 2
    assert flags[0] in done.stderr


def test_a_missing_srun_is_named(tmp_path):
    done = _sbatch(tmp_path, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: srun")


def test_a_missing_environment_is_named(tmp_path):
    _write_program(tmp_path / "programs/srun", SRUN)
    done = _sbatch(tmp_path, tmp_path / "programs")
    assert done.returncode == 2
    assert ".venv" in done.stderr
    assert "uv sync" in done.stderr


def test_gpu_pods_find_the_driver_or_end():
    container = _jobset("gpu-jobset.yaml")[-1]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["JAX_PLATFORMS"].split(",")[0] == "cuda"
    assert environment["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["requests"].keys()
