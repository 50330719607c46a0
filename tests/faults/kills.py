"""Rows 1, 2, 3, 14, 25 … 29: processes killed, told to end, stopped, and stalled."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np

from qwen3next_jax.common import digests
from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.config import Config, Stage, to_dict
from qwen3next_jax.runs import manifest
from tests.faults.lab import (
    EVERY,
    Lab,
    Patience,
    Trial,
    attempt,
    events,
    kill,
    losses,
    lost_steps,
    wait,
    wait_for,
)

CHAIN = 10  # kills along one run
PACE = 0.004  # seconds a batch
APART = 0.2  # the same, so long that a save is over before the next begins


def kill_during_saves(lab: Lab, seed: int, kills: int = CHAIN) -> list[Trial]:
    """Ten SIGKILLs along one run, each at a random time after a save began; then the run goes on
    to its end.
    """
    rng = np.random.default_rng(seed)
    reference = lab.reference()
    longest = 2 * max(e["seconds"] for e in events(reference, "checkpoint"))
    return _killed_along(
        lab, PACE, lambda first: f"save {first + EVERY}\n", lambda: rng.uniform(0, longest), kills
    )


def kill_between_saves(lab: Lab, seed: int) -> list[Trial]:
    """The same between saves: at a random step, and a random time into it."""
    rng = np.random.default_rng(seed)
    return _killed_along(
        lab,
        APART,
        lambda first: f"step {first + 2 * EVERY - 1 - int(rng.integers(2))}\n",
        lambda: rng.uniform(0, APART),
    )


def _killed_along(lab: Lab, pace: float, moment, delay, kills: int = CHAIN) -> list[Trial]:
    reference = lab.reference()
    workdir = lab.new_folder() / "run"
    phases, lost, sealed, first = [], [], [], 0
    for i in range(kills):
        progress = workdir.parent / f"progress-{i}"
        process = lab.start(workdir, pace=pace, progress=str(progress))
        if not wait_for(progress, moment(min(first, lab.config.train.steps - 2 * EVERY)), process):
            assert process.exitcode == 0, lab.log(workdir)[-2000:]
            break  # it reached its end before: no kill
        time.sleep(delay())
        kill(process)
        first = _newest(workdir)
        if first == lab.config.train.steps:
            break  # the kill came after its last save: the next start has nothing to do
        phases.append(_phase(workdir))
        sealed.append(first)
        lost.append(max((e["step"] for e in events(workdir, "train")), default=0) - first)
    assert lab.run(workdir) == 0, lab.log(workdir)[-2000:]
    same = lab.same(workdir, reference)
    # Told: the start after a kill says that it goes on from the newest checkpoint that was whole
    # when the kill came.
    starts = [e["first_step"] for e in events(workdir, "start")][1:]
    left = [p.name for p in (workdir / "checkpoints").iterdir() if not p.name.isdigit()]
    return [
        Trial(told=start == step, recovered=not left, steps_lost=n, bitwise=same, note=phase)
        for start, step, n, phase in zip(starts, sealed, lost, phases, strict=True)
    ]


# the step of its parent with which the staged branch begins, and where its stages end
BEGUN_WITH, ENDS = 8, (18, 31)


def staged_branch(lab: Lab) -> Config:
    """What goes on, after 8 steps of another run, by stages: longer rows, then another schedule."""
    parent = lab.reference("parent", lab.with_(train={"steps": BEGUN_WITH}))
    stages = (
        Stage(ENDS[0]),
        Stage(ENDS[1] - ENDS[0], "long", batch_size=4, sequence_length=128),
        Stage(lab.config.train.steps - ENDS[1], "anneal", schedule="linear", final_fraction=0.0),
    )
    return lab.with_(
        train={"stages": stages, "init_from": str(parent), "init_state": "all"},
        optimizer={"schedule": "constant"},
    )


def kill_staged_branch(lab: Lab, seed: int) -> list[Trial]:
    """Ten SIGKILLs along a staged run that begins with another one, at random times: while it
    starts, trains, saves, changes stage.
    """
    rng = np.random.default_rng(seed)

    def moment(saves, newest):
        # behind the last but one the run would be over before the kill
        if rng.random() < 0.25 or newest == saves[-2]:
            return "pid ", rng.uniform(0, 4 if newest < saves[-2] else 1)
        return f"save {min(step for step in saves if step > newest)}\n", rng.uniform(0, 0.5)

    return _staged_killed_along(lab, moment, CHAIN)


def kill_at_boundaries(lab: Lab, seed: int) -> list[Trial]:
    """The same at the stages' ends: while the last step of one is saved, and before the first
    step of the next one is.
    """
    rng = np.random.default_rng(seed)

    def moment(saves, newest):
        end = min((end for end in ENDS if end >= newest), default=None)
        if end is None:
            return None
        return (
            (f"save {end}\n", rng.uniform(0, 0.3))
            if newest < end
            else (f"save {min(s for s in saves if s > end)}\n", 0.0)
        )

    return _staged_killed_along(lab, moment, 8)


def _staged_killed_along(lab: Lab, moment, kills: int) -> list[Trial]:
    return _branch_killed_along(lab, "staged", staged_branch(lab), moment, kills)


def kill_whole_state_branch(lab: Lab, seed: int, kills: int = 6) -> list[Trial]:
    """SIGKILLs along a run that begins with the whole state of another one: while it reads that
    state, saves its own copy, trains, saves. The other run stays as it is, byte for byte.
    """
    rng = np.random.default_rng(seed)
    config = whole_state_branch(lab)
    before = digests_of(pathlib.Path(config.train.init_from))
    early = iter((("pid ", rng.uniform(0, 3)), (f"save {BEGUN_WITH}\n", rng.uniform(0, 0.1))))

    def moment(saves, newest):
        if when := next(early, None):
            return when
        if newest == saves[-2]:  # behind it the run would be over before the kill
            return "pid ", rng.uniform(0, 1)
        following = min(step for step in saves[1:] if step > newest)
        return f"save {following}\n", rng.uniform(0, 0.3)

    trials = _branch_killed_along(lab, "whole-state", config, moment, kills)
    same = digests_of(pathlib.Path(config.train.init_from)) == before
    return [
        dataclasses.replace(t, recovered=t.recovered and same, bitwise=t.bitwise and same)
        for t in trials
    ]


def whole_state_branch(lab: Lab) -> Config:
    """What goes on with the whole state after 8 steps of another run, at another learning rate."""
    parent = lab.reference("parent", lab.with_(train={"steps": BEGUN_WITH}))
    return lab.with_(
        train={"init_from": str(parent), "init_state": "all"}, optimizer={"learning_rate": 1e-3}
    )


def digests_of(folder: pathlib.Path) -> dict[str, str]:
    """Path → digest of every file in `folder`, but for the locks that processes leave."""
    return {
        path.relative_to(folder).as_posix(): digests.sha256_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def _branch_killed_along(lab: Lab, name: str, config: Config, moment, kills: int) -> list[Trial]:
    reference = lab.reference(name, config)
    saves = [e["step"] for e in events(reference, "checkpoint")]
    workdir = lab.new_folder() / "run"
    trials, begins = [], None  # begins: with which step the next start has to go on
    for i in range(kills):
        if (when := moment(saves, _newest(workdir))) is None or _newest(workdir) == saves[-1]:
            break
        progress, starts = workdir.parent / f"progress-{i}", len(events(workdir, "start"))
        process = lab.start(workdir, config, pace=PACE, progress=str(progress))
        wait_for(progress, when[0], process)
        time.sleep(when[1])
        kill(process)
        told = [e["first_step"] for e in events(workdir, "start")][starts:] in (
            [],
            [begins or BEGUN_WITH],
        )
        begins = _newest(workdir)
        lost = max((e["step"] for e in events(workdir, "train")), default=0) - (
            begins or BEGUN_WITH
        )
        trials.append(
            Trial(told=told, recovered=True, steps_lost=max(lost, 0), note=_phase(workdir))
        )
    assert lab.run(workdir, config) == 0, lab.log(workdir)[-2000:]
    left = [p.name for p in (workdir / "checkpoints").iterdir() if not p.name.isdigit()]
    same = lab.same(workdir, reference)
    return [dataclasses.replace(trial, recovered=not left, bitwise=same) for trial in trials]


# Notes its process id, then becomes the process that trains.
SUPERVISED = """
import pathlib, sys
from qwen3next_jax.processes import supervisor
from qwen3next_jax.runs.store import open_store
supervisor.FIRST_PAUSE, supervisor.LONGEST_PAUSE, supervisor.MAX_FRUITLESS_STARTS = 0.2, 0.2, 100
workdir, pids, spec = sys.argv[1:]
command = ["/bin/sh", "-c", 'echo $$ >> "$0"; exec "$@"', pids]
command += [sys.executable, "-m", "tests.faults.worker", spec]
workdir = pathlib.Path(workdir)
sys.exit(supervisor.supervise(workdir, 100, command, open_store(workdir).run_file_identities))
"""


def kill_supervised_restart(lab: Lab, seed: int, kills: int = 5) -> list[Trial]:
    """SIGKILLs of the processes that `--restart --max-restarts` starts over another run: while one
    imports, before it moves that run, while it moves it, before its first checkpoint, later. The
    supervisor ends with the new run, and the other one is moved as it was, byte for byte.
    """
    rng = np.random.default_rng(seed)
    moments = [
        ("", rng.uniform(0, 3)),
        ("pid ", rng.uniform(0, 0.5)),
        ("move\n" * int(rng.integers(1, 6)), rng.uniform(0, APART / 4)),
        (f"step {int(rng.integers(1, EVERY))}\n", rng.uniform(0, APART)),
        (f"save {EVERY}\n", rng.uniform(0, 0.5)),
    ]
    chosen = sorted(rng.choice(len(moments), kills, replace=False))
    config = lab.with_(train={"steps": BEGUN_WITH, "seed": 7})
    workdir = lab.new_folder() / "run"
    shutil.copytree(lab.reference("replaced", config), workdir)
    (workdir / "done").unlink()
    before = digests_of(workdir)
    progress, pids, said = (workdir.parent / name for name in ("progress", "pids", "said"))
    spec = {
        "config": to_dict(lab.config),
        "workdir": str(workdir),
        "log": str(lab.log_file(workdir)),
        "pace": APART / 4,
        "progress": str(progress),
        "restart": True,
    }
    trials = []
    with said.open("w") as file:
        supervisor = subprocess.Popen(
            [sys.executable, "-c", SUPERVISED, str(workdir), str(pids), json.dumps(spec)],
            stderr=file,
        )
    try:
        for n, (text, seconds) in enumerate(moments[i] for i in chosen):
            patience = Patience(60, f"start {n} did not come")
            while not pids.exists() or pids.read_text().count("\n") <= n:
                patience.wait(0.01)
            if text:
                wait_for(progress, text)
            time.sleep(seconds)
            os.kill(int(pids.read_text().split()[n]), signal.SIGKILL)
            progress.write_text("")  # for the next start
            trials.append(Trial(told=True, note=f"{text or 'import'} {seconds:.2f}"))
        patience = Patience(240, "the supervisor did not end")
        while supervisor.poll() is None:
            patience.wait(0.05)
    finally:
        supervisor.poll() is None and supervisor.kill()
    aside = list(workdir.glob("before-*"))
    recovered = supervisor.returncode == 0 and len(aside) == 1 and digests_of(aside[0]) == before
    told = said.read_text().count("SIGKILL") == len(trials)
    same = recovered and lab.same(workdir, lab.reference())
    return [dataclasses.replace(t, told=told, recovered=recovered, bitwise=same) for t in trials]


def kill_while_moving(lab: Lab, seed: int) -> list[Trial]:
    """Row 27 in short: a SIGKILL while `--restart` moves a run; the next start is not told to
    restart, and moves the rest.
    """
    moves = "move\n" * int(np.random.default_rng(seed).integers(1, 6))
    workdir, progress = lab.new_folder() / "run", lab.new_folder() / "progress"
    shutil.copytree(lab.reference(), workdir)
    (workdir / "done").unlink()
    before = digests_of(workdir)
    process = lab.start(workdir, restart=True, pace=APART, progress=str(progress))
    wait_for(progress, moves, process)
    kill(process)
    told = len(list(workdir.glob("before-*.partial"))) == 1
    code = lab.run(workdir)
    (aside,) = workdir.glob("before-*")
    recovered = code == 0 and digests_of(aside) == before
    same = recovered and lab.same(workdir, lab.reference())
    return [Trial(told=told, recovered=recovered, bitwise=same, note=moves)]


def kill_exports(lab: Lab, seed: int, kills: int = 4) -> list[Trial]:
    """SIGKILLs of an export: each leaves nothing under its name, and the run as it was; the same
    command then writes what an undisturbed export writes.
    """
    rng = np.random.default_rng(seed)
    workdir = lab.reference()
    undisturbed = lab.folder / "exported"
    if not undisturbed.exists():
        assert wait(_start_export(lab, workdir, undisturbed), 120) == 0
    before, wanted = digests_of(workdir), digests_of(undisturbed)
    out, trials = lab.new_folder() / "exported", []
    partial = out.parent / f".{out.name}.partial"
    for _ in range(kills):
        process = _start_export(lab, workdir, out, pace=0.02)
        files = len(list(partial.glob("*.safetensors"))) + int(rng.integers(0, 4))
        patience = Patience(120, "the export wrote nothing")
        while process.is_alive() and len(list(partial.glob("*.safetensors"))) < files:
            patience.wait()
        time.sleep(rng.uniform(0, 0.06 if files else 2.0))
        if not process.is_alive():
            break  # it reached its end before: no kill
        kill(process)
        whole = not out.exists() or digests_of(out) == wanted
        found = len(list(partial.glob("*.safetensors")))
        trials.append(
            Trial(told=whole, recovered=digests_of(workdir) == before, note=f"{found} files")
        )
    if not out.exists():
        assert wait(_start_export(lab, workdir, out), 120) == 0
    same = digests_of(out) == wanted and digests_of(workdir) == before and not partial.exists()
    return [dataclasses.replace(trial, bitwise=same) for trial in trials]


def _start_export(lab: Lab, workdir: pathlib.Path, out: pathlib.Path, pace: float = 0.0):
    return lab.start_plain(export, out, workdir=str(workdir), pace=pace)


def export(out: str, config: dict, workdir: str, pace: float) -> None:
    """The command, in a process of its own, into files of 20 kB: one every `pace` seconds."""
    from absl import flags

    from qwen3next_jax.commands import export
    from qwen3next_jax.interop import writing

    write = writing.LocalExport.write

    def slow(self, name, blocks):
        time.sleep(pace)
        write(self, name, blocks)

    writing.MAX_SHARD_BYTES, writing.LocalExport.write = 20_000, slow
    flags.FLAGS(["export", f"--workdir={workdir}", f"--out={out}"])
    raise SystemExit(export.main())


def _phase(workdir: pathlib.Path) -> str:
    """What the kill met, by what it left on the disk."""
    folder = workdir / "checkpoints"
    names = [p.name for p in folder.iterdir()] if folder.exists() else []
    if any("tmp" in name for name in names):
        return "arrays being written"
    if any(name.isdigit() and not (folder / name / manifest.FILE_NAME).exists() for name in names):
        return "written, not sealed"
    return "deletion" if any(name.startswith(".") for name in names) else "no save open"


def _newest(workdir: pathlib.Path) -> int:
    sealed = (workdir / "checkpoints").glob(f"*/{manifest.FILE_NAME}")
    return max((int(p.parent.name) for p in sealed if p.parent.name.isdigit()), default=0)


def sigterm(lab: Lab, seed: int) -> list[Trial]:
    """SIGTERM at a random step: it is saved, and the same command goes on from there."""
    rng = np.random.default_rng(seed)
    reference = lab.reference()
    workdir = lab.new_folder() / "run"
    process = lab.start(workdir, pace=PACE, progress=str(workdir.parent / "progress"))
    wait_for(
        workdir.parent / "progress",
        f"step {int(rng.integers(2, lab.config.train.steps - 4))}\n",
        process,
    )
    os.kill(process.pid, signal.SIGTERM)
    code = wait(process, 240)
    assert lab.run(workdir) == 0, lab.log(workdir)[-2000:]
    return [
        Trial(
            told=code == ExitCode.INTERRUPTED,
            recovered=True,
            steps_lost=lost_steps(workdir),
            bitwise=lab.same(workdir, reference),
        )
    ]


def stalled_loader(lab: Lab, seed: int) -> list[Trial]:
    """A batch that never comes: the watchdog ends the process with the stacks; a restart goes
    on.
    """
    rng = np.random.default_rng(seed)
    reference = lab.reference()
    workdir = lab.new_folder() / "run"
    config = lab.with_(train={"step_timeout": 1.5})
    code = lab.run(workdir, config, stall=int(rng.integers(6, lab.config.train.steps - 1)))
    stacks = [p.read_text() for p in workdir.glob("hang-*.txt")]
    # the frame that sleeps
    told = code == ExitCode.HANG and len(stacks) == 1 and "spoiled" in stacks[0]
    assert lab.run(workdir) == 0, lab.log(workdir)[-2000:]
    return [
        Trial(
            told=told,
            recovered=True,
            steps_lost=lost_steps(workdir),
            bitwise=lab.same(workdir, reference),
        )
    ]


def stopped_and_continued(lab: Lab, seed: int) -> list[Trial]:
    """SIGSTOP for longer than the limit of a step, then SIGCONT: no hang, and nothing differs."""
    reference = lab.reference()
    workdir = lab.new_folder() / "run"
    process = lab.start(
        workdir,
        lab.with_(train={"step_timeout": 1.5}),
        pace=0.05,
        progress=str(workdir.parent / "progress"),
    )
    wait_for(workdir.parent / "progress", f"step {10 + seed % 20}\n", process)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(process.pid, signal.SIGCONT)
    code = wait(process, 240)
    same = code == 0 and losses(workdir) == losses(reference) and lab.same(workdir, reference)
    return [Trial(told=False, harmless=same, recovered=same, steps_lost=0, bitwise=same)]


# ---- the plain stack


def plain_sigterm(lab: Lab, seed: int) -> list[Trial]:
    """SIGTERM to a plain loop that saves with Orbax every 4 steps."""
    from tests.faults.plain import train_plain

    folder = lab.new_folder()
    process = lab.start_plain(train_plain, folder, steps=40, pace=0.02)
    wait_for(folder / "progress", "step 11\n", process)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    steps = [int(line.split()[1]) for line in (folder / "progress").read_text().splitlines()]
    saved = max(
        (int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit()), default=0
    )
    return [Trial(told=process.exitcode != 0, recovered=True, steps_lost=max(steps) - saved)]


def plain_stalled_loader(lab: Lab, seed: int) -> list[Trial]:
    from tests.faults.plain import train_plain

    folder = lab.new_folder()
    process = lab.start_plain(train_plain, folder, steps=40, stall=9)
    wait_for(folder / "progress", "step 8\n", process)
    process.join(6)  # four times the limit that ends ours
    alive = process.is_alive()
    kill(process)
    return [Trial(told=not alive, note="waits for ever" if alive else "")]


def plain_kill_during_saves(lab: Lab, seed: int) -> list[Trial]:
    """Does the latest step of Orbax's manager read back after each of five kills during a save?"""
    return [_plain_kill(lab, "save", i) for i in range(5)]


def plain_kill_between_saves(lab: Lab, seed: int) -> list[Trial]:
    return [_plain_kill(lab, "between", i) for i in range(5)]


def _plain_kill(lab: Lab, when: str, seed: int) -> Trial:
    import orbax.checkpoint as ocp

    from tests.faults.plain import train_plain

    folder, step = lab.new_folder(), 16 if when == "save" else 18
    process = lab.start_plain(train_plain, folder, steps=40, pace=0.05 if when == "save" else 0.3)
    wait_for(folder / "progress", f"step {step}\n", process)
    time.sleep(float(np.random.default_rng(seed).uniform(0, 0.2)))
    kill(process)
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        latest = manager.latest_step() or 0
        _, error = attempt(lambda: manager.restore(latest, args=ocp.args.StandardRestore()))
    reached = int((folder / "progress").read_text().split()[-1])
    return Trial(
        told=True,
        recovered=not error,
        steps_lost=reached - latest,
        note=f"latest does not read: {error}" if error else "",
    )
