"""Runs of several real processes on this machine: gloo between them, four devices in all whatever their number."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
DEVICES = 4
# Notes which rows of a batch this process reads, then is train.py.
PROGRAM = """
import json, os, runpy, sys
from qwen3next_jax.data import pipeline
before = pipeline._Steps.__init__
def noting(self, row, batch_size, share):
    with open(os.environ["SHARES"], "a") as file:
        file.write(json.dumps(list(share)) + "\\n")
    before(self, row, batch_size, share)
pipeline._Steps.__init__ = noting
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""
NANO = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from configs.tiny import get_config as tiny

def get_config():
    config = tiny()
    config.name = "nano"
    config.model.update(hidden_size=32, num_hidden_layers=2, full_attention_interval=2, head_dim=16, num_experts=4,
                        num_attention_heads=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                        linear_key_head_dim=16, linear_value_head_dim=16)
    config.train.update(steps=8, batch_size=4, sequence_length=32, log_every=1)
    config.checkpoint.every = 4
    config.eval.update(every=8, rows=8, sample_tokens=0)
    return config
"""


class Processes:
    """The processes of one run. `environments` and `flags` are what differs between them."""

    def __init__(self, folder, arguments, environments, flags=(), program=("-c", PROGRAM)):
        devices = DEVICES // len(environments)
        shared = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {
            "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "SHARES": str(folder / "shares"),
            "XLA_FLAGS": f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}",
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}
        flags = flags or [()] * len(environments)
        self.all = [subprocess.Popen([sys.executable, *program, *arguments, *own], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, env=shared | {"SHARES": str(folder / f"shares.{i}")} | environment)
                    for i, (environment, own) in enumerate(zip(environments, flags, strict=True))]

    def wait(self, timeout=120):
        """→ [(exit code, standard output, standard error)]."""
        try:
            return [(p.returncode, *said) for p, said in [(p, p.communicate(timeout=timeout)) for p in self.all]]
        finally:
            for p in self.all:
                p.kill()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def by_flags(count):
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    return [{}] * count, [(coordinator, f"--processes={count}", f"--process={i}") for i in range(count)]


def by_slurm(count):
    """The variables of `srun --ntasks=count` on one node."""
    job = str(free_port())  # its number chooses the port
    return [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count), "SLURM_PROCID": str(i),
             "SLURM_LOCALID": str(i), "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost",
             "SLURM_STEP_TASKS_PER_NODE": str(count)} for i in range(count)], ()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (folder / "nano.py").write_text(NANO)
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"document {i} " + "abcdefgh "[i % 7:] * (10 + i))
    return folder


def arguments(corpus, workdir, *more):
    return [f"--config={corpus / 'nano.py'}", f"--config.data.path={corpus / '*.txt'}", f"--workdir={workdir}",
            f"--config.data.prepared_dir={corpus / 'prepared'}", *more]


def test_a_coordinator_that_nobody_reaches_costs_a_bounded_wait(corpus, tmp_path):
    began = time.monotonic()
    for process, reason in ((1, r"process 0 does not answer at 127.0.0.1:\d+ \(Connection refused\) within 1 s"),
                            (0, r"not all of the other 1 processes came to 127.0.0.1:\d+ within 2 s")):
        run = Processes(tmp_path, arguments(corpus, tmp_path / "run", "--config.parallel.start_timeout=1"), [{}],
                        [by_flags(2)[1][process]])
        (code, out, err), = run.wait()
        assert (code, out) == (7, "") and re.fullmatch(f"error: {reason} .*came from flags: .*\n", err), err
    assert time.monotonic() - began < 60
    assert not (tmp_path / "run").exists()
