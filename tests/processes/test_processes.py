"""Runs of several real processes on this machine: gloo between them, four devices in all
whatever their number.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DEVICES = 4
# train.py, but that it notes the rows of a batch that it reads, and that batch SIGTERM_AT brings it
# a signal.
PROGRAM = """
import itertools, json, os, runpy, signal, sys
from qwen3next_jax.sharding.batch_layout import BatchLayout
to_global, calls = BatchLayout.to_global, itertools.count(1)
def noting(share, batch):
    with open(os.environ["SHARES"], "a") as file:
        file.write(json.dumps([share.rows, len(batch["tokens"])]) + "\\n")
    if next(calls) == int(os.environ.get("SIGTERM_AT", 0)):
        os.kill(os.getpid(), signal.SIGTERM)
    return to_global(share, batch)
BatchLayout.to_global = noting
sys.argv[0] = "train.py"
runpy.run_path(f"{os.environ['PYTHONPATH']}/train.py", run_name="__main__")
"""
NANO = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from configs.tiny import get_config as tiny

def get_config():
    config = tiny()
    config.name = "nano"
    config.model.update(
        hidden_size=32, num_hidden_layers=1, full_attention_interval=1, head_dim=16,
        num_attention_heads=2, num_experts=4, mtp_depth=0, moe_intermediate_size=16,
        shared_expert_intermediate_size=16)
    config.train.update(steps=16, batch_size=4, sequence_length=32, log_every=1)
    config.checkpoint.every = 10
    config.eval.update(every=8, rows=8, sample_tokens=0)
    return config
"""


class Processes:
    """The processes of one run; `environments`, `flags` and `folders` (where each starts) are
    what differs between them.
    """

    def __init__(self, environments, flags, arguments, folders=None, shares=None, program=PROGRAM):
        shared = os.environ | {
            "PYTHONPATH": str(ROOT),
            "SHARES": str(shares or os.devnull),
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} "
            f"--xla_force_host_platform_device_count={DEVICES // len(environments)}",
        }
        self.all = [
            subprocess.Popen(
                [sys.executable, "-c", program, *arguments, *own],
                cwd=folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=shared | environment,
            )
            for environment, own, folder in zip(
                environments, flags, folders or [ROOT] * len(flags), strict=True
            )
        ]

    def wait(self, timeout=300):
        """→ [(exit code, standard output, standard error)]."""
        try:
            return [
                (p.returncode, *said)
                for p, said in [(p, p.communicate(timeout=timeout)) for p in self.all]
            ]
        finally:
            for p in self.all:
                p.kill()

    def succeed(self):
        ended = self.wait()
        assert [code for code, _, _ in ended] == [0] * len(ended), ended
        return ended


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# What each launcher leaves `count` processes on this host: (environments, flags).


def alone():
    return [{}], [()]


def by_flags(count):
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    return [{}] * count, [
        (coordinator, f"--processes={count}", f"--process={i}") for i in range(count)
    ]


def by_slurm(count):
    job = str(free_port())  # its number chooses the port
    return [
        {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_PROCID": str(i),
            "SLURM_LOCALID": str(i),
            "SLURM_NODEID": "0",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_TASKS_PER_NODE": str(count),
        }
        for i in range(count)
    ], [()] * count


def by_open_mpi(count):
    job = f"prterun-here-{free_port()}@1"
    return [
        {
            "PMIX_NAMESPACE": job,
            "OMPI_COMM_WORLD_SIZE": str(count),
            "OMPI_COMM_WORLD_RANK": str(i),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
        }
        for i in range(count)
    ], [()] * count


def by_gke(count):
    port = str(free_port())  # on pods it is always the same one
    return [
        {
            "TPU_WORKER_HOSTNAMES": ",".join(["localhost"] * count),
            "TPU_WORKER_ID": str(i),
            "JAX_COORDINATOR_PORT": port,
            "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
            "MEGASCALE_NUM_SLICES": "1",
            "MEGASCALE_SLICE_ID": "0",
            "JAX_FORCE_TPU_INIT": "1",
        }
        for i in range(count)
    ], [()] * count


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (folder / "nano.py").write_text(NANO)
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"document {i} " + "abcdefgh "[i % 7 :] * (10 + i))
    return folder


def arguments(corpus, workdir, *more):
    return [
        f"--config={corpus / 'nano.py'}",
        f"--config.data.path={corpus / '*.txt'}",
        f"--workdir={workdir}",
        f"--config.data.prepared_dir={corpus / 'prepared'}",
        *more,
    ]


def events(workdir, kind):
    return [
        e
        for e in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
        if e["event"] == kind
    ]


def assert_same_curve(workdir, expected):
    """Each step once, and equal but for the order of sums between devices: a few float32
    roundings, far from what another batch would do.
    """
    found, wanted = (
        [(e["step"], e["loss"], e["grad_norm"]) for e in events(w, "train")]
        for w in (workdir, expected)
    )
    assert [step for step, _, _ in found] == list(range(1, 17))
    assert found == [
        (step, pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))
        for step, loss, norm in wanted
    ]
    heldout, wanted = (
        [event["loss"] for event in events(w, "heldout")] for w in (workdir, expected)
    )
    assert heldout == pytest.approx(wanted, rel=1e-5)
    for kind, said in (("suite", "accuracy/2 pairs"), ("sample", "text")):
        assert [event[said] for event in events(workdir, kind)] == [
            event[said] for event in events(expected, kind)
        ]


def shares(path):
    """{(rows of a batch, number of rows read)} of all processes."""
    return {(tuple(rows), read) for rows, read in map(json.loads, path.read_text().splitlines())}


def assert_saved_by_all(folder, count):
    names = {p.name for p in folder.iterdir()}
    assert {"manifest.json", *(f"ocdbt.process_{i}" for i in range(count))} <= names


@pytest.fixture(scope="module")
def one(corpus):
    """The folder of the run in one process."""
    Processes(*alone(), arguments(corpus, corpus / "one")).succeed()
    return corpus / "one"


def with_signal_to_one(launch, step):
    environments, flags = launch
    return [*environments[:-1], environments[-1] | {"SIGTERM_AT": str(step)}], flags


@pytest.mark.slow
def test_two_processes_interrupted_by_a_signal_to_one_go_on_as_one_process(one, corpus, tmp_path):
    run, note = tmp_path / "run", tmp_path / "shares"
    ended = Processes(
        *with_signal_to_one(by_slurm(2), 5), arguments(corpus, run), shares=note
    ).wait()
    assert [code for code, _, _ in ended] == [130, 130], ended
    # both saved the same one, with nothing after it
    (step,) = (int(p.name) for p in (run / "checkpoints").iterdir())
    assert 5 <= step <= 7
    assert events(run, "train")[-1]["step"] == events(run, "checkpoint")[-1]["step"] == step
    assert_saved_by_all(run / "checkpoints" / str(step), 2)
    assert f"Interrupted: saved after step {step} " in ended[0][1]
    assert "step" not in ended[1][1]
    assert shares(note) == {((0, 1), 2), ((2, 3), 2)}

    Processes(*alone(), arguments(corpus, run)).succeed()
    assert [(e["first_step"], e["hosts"], e["devices"]) for e in events(run, "start")] == [
        (0, 2, DEVICES),
        (step, 1, DEVICES),
    ]
    assert_same_curve(run, one)


@pytest.mark.slow
def test_one_process_goes_on_as_two(one, corpus, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(one, run)
    shutil.rmtree(run / "checkpoints" / "16")
    (_, out, _), (_, other, _) = Processes(*by_open_mpi(2), arguments(corpus, run)).succeed()
    assert "Trained 16 steps" in out
    assert "step" not in other
    assert [(e["first_step"], e["hosts"]) for e in events(run, "start")] == [(0, 1), (10, 2)]
    assert_same_curve(run, one)
    assert_saved_by_all(run / "checkpoints" / "16", 2)


@pytest.mark.slow
def test_a_branch_over_two_processes_goes_on_as_its_parent(one, corpus, tmp_path):
    """With its whole state; and then by a stage of longer rows."""
    run, stages = (
        tmp_path / "run",
        "--config.train.stages=({'steps': 13}, {'steps': 3, 'sequence_length': 64})",
    )
    (_, out, _), _ = Processes(
        *by_flags(2),
        arguments(
            corpus,
            run,
            f"--config.train.init_from={one}@10",
            "--config.train.init_state=all",
            stages,
        ),
    ).succeed()
    assert f"new run after step 10 of {one}" in out
    assert "step 14  stage 2 begins: 3 steps of 4 × 64 tokens" in out
    found, wanted = (
        [(e["step"], e["loss"], e["grad_norm"]) for e in events(w, "train") if e["step"] > 10]
        for w in (run, one)
    )
    assert found[:3] == [
        (step, pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))
        for step, loss, norm in wanted[:3]
    ]
    assert [step for step, _, _ in found] == list(range(11, 17))
    assert_saved_by_all(run / "checkpoints" / "16", 2)


def test_processes_that_differ_are_refused_by_name(corpus, tmp_path):
    other = tmp_path / "other"  # a host with another state of the same file
    other.mkdir()
    shutil.copy(corpus / "0.txt", tmp_path / "text.txt")
    (other / "text.txt").write_text((corpus / "0.txt").read_text() + "one more line")
    run = Processes(
        *by_gke(2),
        arguments(corpus, tmp_path / "run", "--config.data.path=text.txt"),
        folders=[tmp_path, other],
    )
    for code, _, err in run.wait():
        line = (
            r"^error: processes disagree on data fingerprint: process 0 on \S+ has \S+, process 1 "
            r"on \S+ \S+; start"
        )
        assert code == 2, err
        assert re.search(line, err), err
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_two_processes_ends(corpus, tmp_path):
    Processes(*by_flags(2), arguments(corpus, tmp_path / "run", "--dry-run")).succeed()
    assert not (tmp_path / "run").exists()


FAILING = """
import jax

def add(trainer):
    def fail(info):
        if jax.process_index():
            raise KeyError("nothing there")
    trainer.add_hook(fail, every=2, name="my hook")
"""


@pytest.mark.slow
def test_a_hook_that_fails_on_one_process_ends_all(corpus, tmp_path):
    (tmp_path / "failing_hooks.py").write_text(FAILING)
    run, hook = tmp_path / "run", "--config.train.hooks=('failing_hooks:add',)"
    processes = Processes(*by_flags(2), arguments(corpus, run, hook), folders=[tmp_path] * 2)
    for code, _, err in processes.wait():
        assert code == 10, err
        assert re.search(r"^error: .*my hook.*KeyError.*process 1 ", err, re.M), err
    (failed,) = events(run, "hook_failed")
    assert failed["step"] == 2
    assert [e["step"] for e in events(run, "checkpoint")] == [3]


@pytest.mark.slow
def test_a_coordinator_that_nobody_reaches_costs_a_bounded_wait(corpus, tmp_path):
    began = time.monotonic()
    _, (first, second) = by_flags(2)
    runs = [
        Processes(
            [{}], [flags], arguments(corpus, tmp_path / "run", "--config.parallel.start_timeout=1")
        )
        for flags in (
            second,
            [flag.replace(f":{first[0].rpartition(':')[2]}", f":{free_port()}") for flag in first],
        )
    ]
    for run, reason in zip(
        runs,
        (
            r"process 0 does not answer at 127.0.0.1:\d+ \(Connection refused\) within 1 s",
            r"not all of the other 1 processes came to 127.0.0.1:\d+ within 2 s",
        ),
        strict=True,
    ):
        ((code, out, err),) = run.wait()
        assert (code, out) == (7, ""), err
        assert re.fullmatch(f"error: {reason} .*came from flags: .*\n", err), err
    assert time.monotonic() - began < 60
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, expected",
    [
        ((), {((i,), 1) for i in range(4)}),
        (("--config.parallel.mesh.tensor=2",), {((0, 1), 2), ((2, 3), 2)}),
        (("--config.parallel.mesh.slice=2",), {((i,), 1) for i in range(4)}),
    ],
    ids=("data", "data and tensor", "two slices"),
)
def test_four_processes_train_as_one(corpus, tmp_path, mesh, expected):
    """Interrupted by a signal to one of them. With `tensor` over processes two of them read the
    same rows. All of them evaluate and sample, each with its part of the parameters.
    """
    one, four, note = tmp_path / "one", tmp_path / "four", tmp_path / "shares"
    mesh = (*mesh, "--config.eval.sample_tokens=4", "--config.eval.suites=('mqar',)")
    mesh = (*mesh, "--config.eval.suite_rows=3", "--config.eval.suite_pairs=(2,)")
    Processes(*alone(), arguments(corpus, one, *mesh)).succeed()
    ended = Processes(*with_signal_to_one(by_flags(4), 5), arguments(corpus, four, *mesh)).wait()
    assert [code for code, _, _ in ended] == [130] * 4, ended
    assert_saved_by_all(next((four / "checkpoints").iterdir()), 4)
    Processes(*by_flags(4), arguments(corpus, four, *mesh), shares=note).succeed()
    assert_same_curve(four, one)
    assert shares(note) == expected


@pytest.mark.slow
def test_a_dead_process_ends_the_other_and_the_run_goes_on(one, corpus, tmp_path):
    """One of two is killed after a checkpoint; the same command, started again, ends as if
    nothing had been.
    """
    run = tmp_path / "run"
    two = Processes(
        *by_flags(2),
        arguments(
            corpus, run, "--config.parallel.heartbeat_timeout=5", "--config.checkpoint.every=2"
        ),
    )
    until = time.monotonic() + 150
    while not list((run / "checkpoints").glob("*/manifest.json")) and time.monotonic() < until:
        time.sleep(0.01)
    two.all[1].kill()
    # the runtime or gloo notices, whichever is first
    assert two.wait(timeout=60)[0][0] not in (0, 2, 130)
    Processes(*by_flags(2), arguments(corpus, run)).succeed()
    assert_same_curve(run, one)


@pytest.mark.slow
def test_two_processes_export_evaluate_and_begin_with_weights_as_one(one, corpus, tmp_path):
    """`one` lies on 4 devices as `data`: two processes hold two parts each of nearly everything."""
    said = {}
    for name, launch in (("alone", alone), ("two", lambda: by_flags(2))):
        folder = tmp_path / name
        folder.mkdir()

        def command(verb, *own):
            program = (
                "import sys; from qwen3next_jax.__main__ import run_verb; "
                f"run_verb({verb!r}, sys.argv[1:])"
            )
            return Processes(*launch(), own, program=program).succeed()

        exported = command("export", f"--workdir={one}", f"--out={folder / 'hf'}")
        command(
            "eval",
            f"--workdir={one}",
            f"--json={folder / 'run.json'}",
            "--suite=heldout,mqar",
            "--pairs=2",
            "--rows=4",
        )
        generated = command(
            "generate",
            f"--model={folder / 'hf'}",
            "--prompt=document",
            "--temperature=0",
            "--max_new_tokens=4",
        )
        Processes(
            *launch(),
            arguments(
                corpus,
                folder / "run",
                f"--config.train.init_from={folder / 'hf'}",
                "--config.train.steps=2",
            ),
        ).succeed()
        # Gloo's own lines come in two pieces, between which the text may begin.
        gloo = (
            r"\[Gloo\] Rank |\d+ is connected to \d+ peer ranks\. Expected number of connected "
            r"peer ranks is : \d+\n"
        )
        first, *others = [re.sub(gloo, "", out) for _, out, _ in (*generated, *exported[1:])]
        assert not any(others)  # the first alone speaks
        said[name] = first
    assert said["alone"] == said["two"]
    assert said["alone"].startswith("document")
    for file in (tmp_path / "alone" / "hf").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / "hf" / file.name).read_bytes(), file.name
    found, wanted = (
        json.loads((tmp_path / name / "run.json").read_text()) for name in ("two", "alone")
    )
    assert {name: pytest.approx(values, rel=1e-5) for name, values in wanted.items()} == found
    losses = [
        [event["loss"] for event in events(tmp_path / name / "run", "train")]
        for name in ("two", "alone")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] < events(one, "train")[0]["loss"] - 0.1  # not from random weights
