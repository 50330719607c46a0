"""Rows 3, 11, 15: runs of several processes and devices, interrupted, moved, and with a dead
peer.
"""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading

import numpy as np

from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.config import to_dict
from tests.faults.lab import Lab, Patience, Trial, events, losses, lost_steps, wait, wait_for

COUNTS = (1, 2, 4)
_making_references = threading.Lock()


def _port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _launches(count: int) -> list[dict]:
    if count == 1:
        return [{}]
    where = f"127.0.0.1:{_port()}"
    return [
        {
            "launch": {
                "source": "the fault table",
                "coordinator": where,
                "num_processes": count,
                "process_id": i,
            }
        }
        for i in range(count)
    ]


def _start_all(lab: Lab, workdir, count: int, name: str, **faults):
    """One process per launch, each with a progress file and its own log beside the run."""
    return [
        lab.start(workdir, progress=str(workdir.parent / f"{name}-{i}"), **launch, **faults)
        for i, launch in enumerate(_launches(count))
    ]


def _end_all(processes, timeout: float = 240) -> list[int]:
    return [wait(process, timeout) for process in processes]


def _run_all(lab: Lab, workdir, count: int, name: str) -> None:
    codes = _end_all(_start_all(lab, workdir, count, name))
    assert codes == [0] * count, (codes, lab.log(workdir)[-3000:])


def _rows(workdir, names: list[str], counts: list[int]) -> dict[int, list[str]]:
    """batch index → check sums of its rows, joined in the order of the processes, of several
    starts of one run (the last one to take a batch counts).
    """
    taken: dict[int, list[str]] = {}
    for name, count in zip(names, counts, strict=True):
        parts: dict[int, list[str]] = {}
        for i in range(count):
            for line in (workdir.parent / f"{name}-{i}").read_text().splitlines():
                word, _, rest = line.partition(" ")
                if word == "rows":
                    index, *sums = rest.split()
                    parts.setdefault(int(index), []).extend(sums)
        taken |= parts
    return taken


def _interrupted(lab: Lab, workdir, count: int, seed: int, name: str) -> list[int]:
    """Starts `count` processes and sends SIGTERM to one of them at a random step. → exit codes."""
    rng = np.random.default_rng(seed)
    processes = _start_all(lab, workdir, count, name, pace=0.02)
    victim = int(rng.integers(count))
    wait_for(
        workdir.parent / f"{name}-{victim}", f"step {int(rng.integers(9, 30))}\n", processes[victim]
    )
    os.kill(processes[victim].pid, signal.SIGTERM)
    return _end_all(processes)


def _undisturbed(lab: Lab, count: int):
    """The reference of `count` processes, whose sums are taken in another order than one
    process's.
    """
    if count == 1:
        return lab.reference()
    workdir = lab.folder / f"reference-{count}-processes" / "run"
    with _making_references:
        if not (workdir / "done").exists():
            workdir.parent.mkdir(exist_ok=True)
            _run_all(lab, workdir, count, "whole")
            (workdir / "done").touch()
    return workdir


def sigterm_of_many(lab: Lab, argument: int) -> list[Trial]:
    """argument: processes × 10 + seed. All save the same step and leave with 130; the same
    processes go on from there.
    """
    count = argument // 10
    workdir = lab.new_folder() / "run"
    codes = _interrupted(lab, workdir, count, argument, "first")
    steps = {e["step"] for e in events(workdir, "checkpoint")}
    _run_all(lab, workdir, count, "second")
    resumed_at = events(workdir, "start")[-1]["first_step"]
    told = codes == [ExitCode.INTERRUPTED] * count and resumed_at == max(steps)
    return [
        Trial(
            told=told,
            recovered=True,
            steps_lost=lost_steps(workdir),
            bitwise=lab.same(workdir, _undisturbed(lab, count)),
            note=f"{count} processes",
        )
    ]


def process_counts(lab: Lab, _: int) -> list[Trial]:
    """Interrupted with p processes, finished with q: the same rows in the same order, the same
    losses up to their sums.
    """
    whole = lab.new_folder() / "run"
    _run_all(lab, whole, 1, "whole")
    right, trials = _rows(whole, ["whole"], [1]), []
    for p in COUNTS:
        for q in set(COUNTS) - {p}:
            workdir = lab.new_folder() / "run"
            _interrupted(lab, workdir, p, 10 * p + q, "first")
            _run_all(lab, workdir, q, "second")
            same_rows = _rows(workdir, ["first", "second"], [p, q])
            same_rows = all(same_rows[i] == right[i] for i in range(lab.config.train.steps))
            close = np.allclose(
                [e[1] for e in losses(workdir)], [e[1] for e in losses(whole)], rtol=2e-5
            )
            trials.append(
                Trial(
                    told=False,
                    harmless=same_rows and close,
                    recovered=close,
                    steps_lost=lost_steps(workdir),
                    note=f"{p} to {q}",
                )
            )
    return trials


def device_counts(lab: Lab, _: int) -> list[Trial]:
    """Saved on n devices, restored on m: the same bits; and the run goes on there with the same
    losses up to their sums.
    """
    import jax

    from qwen3next_jax.runs.checkpoint import Checkpoints
    from qwen3next_jax.sharding.mesh import make_mesh, single_device_mesh
    from qwen3next_jax.training.resolve import resolve_run

    trials, counts = [], (1, 2, 4, 8)
    for n in counts:
        workdir = lab.new_folder() / "run"
        process = lab.start(
            workdir, devices=n, pace=0.02, progress=str(workdir.parent / "progress")
        )
        wait_for(workdir.parent / "progress", "step 15\n", process)
        os.kill(process.pid, signal.SIGTERM)
        assert wait(process, 240) == ExitCode.INTERRUPTED, lab.log(workdir)[-2000:]
        with Checkpoints(workdir) as checkpoints:
            step = checkpoints.newest_valid_step()
            saved = jax.device_get(
                checkpoints.restore(
                    step, resolve_run(lab.config, single_device_mesh()).abstract_state
                )
            )
            for m in counts:
                mesh = make_mesh(lab.config.parallel, jax.devices()[:m])
                state = checkpoints.restore(step, resolve_run(lab.config, mesh).abstract_state)
                spread = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {m}
                same = all(
                    np.array_equal(a, b)
                    for a, b in zip(
                        jax.tree.leaves(jax.device_get(state)), jax.tree.leaves(saved), strict=True
                    )
                )
                trials.append(
                    Trial(
                        told=False,
                        harmless=same and spread,
                        recovered=same,
                        steps_lost=0,
                        bitwise=same,
                        note=f"{n} to {m}",
                    )
                )
        other = counts[(counts.index(n) + 1) % 4]
        assert lab.run(workdir, devices=other) == 0, lab.log(workdir)[-2000:]
        close = np.allclose(
            [e[1] for e in losses(workdir)], [e[1] for e in losses(lab.reference())], rtol=2e-5
        )
        trials.append(
            Trial(
                told=False,
                harmless=close,
                recovered=close,
                steps_lost=lost_steps(workdir),
                note=f"goes on, {n} to {other}",
            )
        )
    return trials


SUPERVISED = """
import json, pathlib, sys
from qwen3next_jax.processes import supervisor
sys.exit(supervisor.supervise(pathlib.Path(sys.argv[1]), 6, [sys.executable, "-m", "tests.faults.worker", sys.argv[2]]))
"""  # noqa: E501


def dead_peer(lab: Lab, seed: int) -> list[Trial]:
    """SIGKILL to one of two processes, each under its supervisor: the other ends too, and both
    go on together.
    """
    workdir = lab.new_folder() / "run"
    reference, victim = _undisturbed(lab, 2), seed % 2
    supervisors = []
    for i, launch in enumerate(_launches(2)):
        spec = {
            "config": to_dict(lab.with_(parallel={"heartbeat_timeout": 10})),
            "workdir": str(workdir),
            "log": str(lab.log_file(workdir)),
            "pace": 0.05,
            "progress": str(workdir.parent / f"progress-{i}"),
            **launch,
        }
        with (workdir.parent / f"supervisor-{i}").open("w") as log:
            supervisors.append(
                subprocess.Popen(
                    [sys.executable, "-c", SUPERVISED, str(workdir), json.dumps(spec)], stderr=log
                )
            )
    progress = workdir.parent / f"progress-{victim}"
    patience = Patience(240, "the processes did not reach step 14")
    while not (progress.exists() and "step 14\n" in progress.read_text()):
        assert all(s.poll() is None for s in supervisors), lab.log(workdir)[-3000:]
        patience.wait(0.01)
    pid = next(
        int(line.split()[1])
        for line in progress.read_text().splitlines()
        if line.startswith("pid ")
    )
    os.kill(pid, signal.SIGKILL)
    try:
        patience = Patience(400, "the supervisors did not end")
        while any(s.poll() is None for s in supervisors):
            patience.wait(0.1)
        codes = [s.wait() for s in supervisors]
    finally:
        for s in supervisors:
            s.poll() is None and s.terminate()
    said = "".join((workdir.parent / f"supervisor-{i}").read_text() for i in (0, 1))
    return [
        Trial(
            told="SIGKILL" in said,
            recovered=codes == [0, 0],
            steps_lost=lost_steps(workdir),
            bitwise=codes == [0, 0] and lab.same(workdir, reference),
            note=f"process {victim} killed; {said.count('restart ')} restarts",
        )
    ]


def other_file_systems(lab: Lab, _: int) -> list[Trial]:
    """Two processes, of which one sees another folder under the same name (a lost mount):
    refused on both, by name, and the run that is there is left as it was.
    """
    from qwen3next_jax.interop.huggingface import save_hf
    from qwen3next_jax.runs.checkpoint import load_trained

    trials, longer = (
        [],
        lab.with_(parallel={"start_timeout": 60}, train={"steps": lab.config.train.steps + 1}),
    )
    for what in (
        "the workdir of process 1",
        "the workdir of process 0",
        "checkpoints",
        "data.path",
        "train.init_from",
    ):
        hosts = [lab.new_folder(), lab.new_folder()]
        workdir, config = lab.new_folder() / "run", lab.with_(parallel={"start_timeout": 60})
        there, says = None, "process 1 on"
        if what.startswith("the workdir"):
            workdir = pathlib.Path("run-" + hosts[0].name)  # relative: each process has its own
            there = hosts[1 - int(what[-1])] / workdir
            shutil.copytree(lab.reference(), there)
            config, says = longer, "does not see what process 0 wrote"
        elif what == "checkpoints":
            there = workdir
            shutil.copytree(lab.reference(), workdir)
            (workdir / "checkpoints").rename(hosts[0] / "mounted")
            (hosts[1] / "mounted").mkdir()
            (workdir / "checkpoints").symlink_to("/proc/self/cwd/mounted")
            config, says = longer, "does not see what process 0 wrote"
        elif what == "data.path":
            shutil.copytree(lab.folder / "texts", hosts[0] / "texts")
            config = lab.with_(
                parallel={"start_timeout": 60},
                data={"path": "texts/*.txt", "prepared_dir": "prepared"},
            )
        else:
            save_hf(load_trained(lab.reference())[0], hosts[0] / "hf")
            config = lab.with_(
                parallel={"start_timeout": 60},
                data={"tokenizer": "bytes"},
                train={"init_from": "hf"},
            )
        metrics = (there / "metrics.jsonl").read_bytes() if there else None
        processes = [
            lab.start(workdir, config, cwd=str(host), **launch)
            for host, launch in zip(hosts, _launches(2), strict=True)
        ]
        codes, log = _end_all(processes), lab.log(workdir)
        untouched = there is None or (there / "metrics.jsonl").read_bytes() == metrics
        trials.append(
            Trial(
                told=codes == [ExitCode.USER_ERROR] * 2 and log.count(says) >= 2 and untouched,
                note=f"{what}: {codes}",
            )
        )
    return trials
