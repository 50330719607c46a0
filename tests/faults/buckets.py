"""Rows 30 … 35: runs whose folder is in a bucket (`tests.bucket`), with requests that fail,
outages, two owners, and hosts that are cut off.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import threading
import time
import uuid

import numpy as np

from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.common.storage import BucketPath, to_path
from qwen3next_jax.config import Config
from tests.bucket import Bucket
from tests.faults.kills import CHAIN
from tests.faults.lab import EVERY, Lab, Patience, Trial, events, kill, lost_steps, wait, wait_for
from tests.faults.runs import _launches

PATIENCE = 8.0  # seconds, in these rows
PACE = 0.15  # seconds a batch
MOMENTS = ("start", "step", "save", "evaluation", "end")

_served: list[Bucket] = []
_serving = threading.Lock()


def _storage() -> Bucket:
    """The bucket of this process, through which it reads what the runs wrote, without faults."""
    with _serving:
        if not _served:
            _served.append(Bucket().__enter__())
            os.environ.update(_served[0].environment)
        return _served[0]


@contextlib.contextmanager
def _entrance(seed: int = 0, **faults: float):
    """A server of the same objects with faults of its own."""
    with Bucket(seed=seed, beside=_storage()) as bucket:
        bucket.faults.update(faults)
        yield bucket


def _new_run() -> BucketPath:
    return to_path(f"gs://bucket/{uuid.uuid4().hex[:12]}/run")


def _config(lab: Lab, **sections) -> Config:
    checkpoint = {"patience": PATIENCE} | sections.pop("checkpoint", {})
    return lab.with_(checkpoint=checkpoint, **sections)


def _progress(lab: Lab) -> pathlib.Path:
    return lab.new_folder() / "progress"


def _newest(workdir: BucketPath) -> int:
    steps = [p.parent.name for p in (workdir / "checkpoints").glob("*/manifest.json")]
    return max(map(int, steps), default=0)


def _leftovers(lab: Lab, workdir: BucketPath) -> set[str]:
    """Folders of arrays that no checkpoint names."""
    from qwen3next_jax.runs import manifest

    named = {manifest.arrays_folder(p).name for p in (workdir / "checkpoints").iterdir()}
    return {p.name for p in (workdir / "arrays").iterdir()} - named


def kills(lab: Lab, seed: int, count: int = CHAIN) -> list[Trial]:
    """Ten SIGKILLs along one run while 2 % of all requests fail: each while it starts, saves, or
    at a random time, in which metrics are written. Then the run goes on to its end.
    """
    rng = np.random.default_rng(seed)
    workdir, config, last = _new_run(), _config(lab), lab.config.train.steps
    trials, first = [], 0
    with _entrance(seed, fail=0.02) as bucket:
        for _ in range(count):
            progress = _progress(lab)
            kind = rng.choice(("start", "save", "metrics"))
            process = lab.start(
                workdir,
                config,
                pace=PACE,
                progress=str(progress),
                environment=bucket.environment,
            )
            following = min(first + EVERY, last - 2 * EVERY)
            text, seconds = {
                "start": ("pid ", rng.uniform(0, 8)),
                "save": (f"save {following}\n", rng.uniform(0, 1.5)),
                "metrics": (f"step {following + 2}\n", rng.uniform(0, 6 * PACE)),
            }[kind]
            wait_for(progress, text, process)
            time.sleep(seconds)
            if not process.is_alive():
                assert process.exitcode == 0, lab.log(workdir)[-2000:]
                break
            kill(process)
            newest = _newest(workdir)
            steps = [e["step"] for e in events(workdir, "train")]
            lost = max(max(steps, default=0) - newest, 0)
            trials.append(Trial(told=True, recovered=newest >= first, steps_lost=lost, note=kind))
            first = newest
            if first >= last - 2 * EVERY:
                break
        code = lab.run(workdir, config, environment=bucket.environment)
        assert code == 0, (code, lab.log(workdir)[-2000:])
    same = lab.same(workdir, lab.reference()) and not _leftovers(lab, workdir)
    return [dataclasses.replace(trial, bitwise=same) for trial in trials]


def outage(lab: Lab, argument: int) -> list[Trial]:
    """An outage of half, or of twice, the patience. The first delays, and nothing is lost; the
    second ends the run by its exit code, and the same command goes on.

    argument: the index of the moment × 2, + 1 for the long outage.
    """
    moment, is_long = MOMENTS[argument // 2], argument % 2
    workdir, last = _new_run(), lab.config.train.steps
    config = _config(lab, eval={"every": 10, "rows": 8})
    reference = lab.reference("evaluated", lab.with_(eval={"every": 10, "rows": 8}))
    text = {
        "start": "pid ",
        "step": "step 6\n",
        "save": f"save {2 * EVERY}\n",
        "evaluation": "step 11\n",
        "end": f"save {last}\n",
    }[moment]
    progress = _progress(lab)
    with _entrance(seed=argument) as bucket:
        process = lab.start(
            workdir,
            config,
            pace=PACE,
            progress=str(progress),
            environment=bucket.environment,
        )
        wait_for(progress, text, process)
        bucket.faults["fail"] = 1.0
        patience = Patience(60, "no request met the outage")
        while not bucket.injected and process.is_alive():
            patience.wait(0.01)
        time.sleep(PATIENCE * (2.5 if is_long else 0.5))
        bucket.faults["fail"] = 0.0
        code = wait(process, 240)
        log = lab.log(workdir)
        told = code == (ExitCode.STORAGE if is_long else 0) or "did not answer" in log
        told = told and ("patience" in log or "did not answer" in log or not is_long)
        if code:
            assert lab.run(workdir, config, environment=bucket.environment) == 0
    lost = lost_steps(workdir) if code and len(events(workdir, "start")) > 1 else 0
    same = lab.same(workdir, reference)
    kind = "twice" if is_long else "half"
    return [
        Trial(
            told=told, recovered=True, steps_lost=lost, bitwise=same, note=f"{moment} {kind} {code}"
        )
    ]


def two_runs(lab: Lab, seed: int) -> list[Trial]:
    """Two runs started in one workdir: one trains, the other is refused."""
    workdir, config = _new_run(), _config(lab)
    with _entrance(seed) as bucket:
        processes = [
            lab.start(workdir, config, pace=PACE, environment=bucket.environment) for _ in range(2)
        ]
        codes = sorted(wait(process, 240) for process in processes)
    told = codes == [0, ExitCode.USER_ERROR] and "another process" in lab.log(workdir)
    return [
        Trial(
            told=told,
            recovered=True,
            bitwise=lab.same(workdir, lab.reference()),
            note=f"{codes}",
        )
    ]


def frozen_owner(lab: Lab, seed: int) -> list[Trial]:
    """An owner that is stopped (SIGSTOP) past its lease, while another process takes the run over
    and trains, and then woken: it writes nothing, and says why it ends.
    """
    rng = np.random.default_rng(seed)
    workdir, config, progress = _new_run(), _config(lab), _progress(lab)
    with _entrance(seed) as bucket:
        options = {"pace": PACE, "environment": bucket.environment}
        first = lab.start(workdir, config, progress=str(progress), **options)
        # in the middle of a save, in which threads are writing
        wait_for(progress, f"save {int(rng.integers(1, 4)) * EVERY}\n", first)
        time.sleep(rng.uniform(0, 0.6))
        os.kill(first.pid, signal.SIGSTOP)
        taken = _progress(lab)
        second = lab.start(workdir, config, progress=str(taken), **options)
        wait_for(taken, f"step {int(rng.integers(16, 24))}\n", second)
        os.kill(first.pid, signal.SIGCONT)
        codes = [wait(first, 60), wait(second, 240)]
        told = codes == [ExitCode.TAKEN_OVER, 0]
        assert lab.run(workdir, config, environment=bucket.environment) == 0
    same = lab.same(workdir, lab.reference())
    return [Trial(told=told, recovered=codes[1] == 0, bitwise=same, note=f"{codes}")]


def one_host_cut_off(lab: Lab, argument: int) -> list[Trial]:
    """Of two processes one loses the bucket for longer than the patience: all end, and both go on
    from the newest checkpoint. argument: the process that is cut off.
    """
    workdir, config = _new_run(), _config(lab, parallel={"heartbeat_timeout": 20})
    reference = _two_processes(lab)
    with _entrance(1) as healthy, _entrance(2) as failing:
        entrances = [failing if i == argument else healthy for i in range(2)]
        progress = [_progress(lab) for _ in range(2)]
        processes = [
            lab.start(
                workdir,
                config,
                pace=PACE,
                progress=str(progress[i]),
                environment=entrances[i].environment,
                **launch,
            )
            for i, launch in enumerate(_launches(2))
        ]
        wait_for(progress[argument], f"step {2 * EVERY + 2}\n", processes[argument])
        failing.faults["fail"] = 1.0
        codes = [wait(process, 240) for process in processes]
        failing.faults["fail"] = 0.0
        told = codes[argument] == ExitCode.STORAGE and all(codes)
        again = [
            lab.start(workdir, config, environment=entrances[i].environment, **launch)
            for i, launch in enumerate(_launches(2))
        ]
        ended = [wait(process, 240) for process in again]
    same = ended == [0, 0] and lab.same(workdir, reference)
    return [
        Trial(
            told=told,
            recovered=ended == [0, 0],
            steps_lost=lost_steps(workdir),
            bitwise=same,
            note=f"{codes}",
        )
    ]


_making = threading.Lock()


def _two_processes(lab: Lab) -> pathlib.Path:
    """An undisturbed run of two processes in a local folder."""
    workdir = lab.folder / "reference-two" / "run"
    with _making:
        if not (workdir / "done").exists():
            workdir.parent.mkdir(exist_ok=True)
            processes = [lab.start(workdir, **launch) for launch in _launches(2)]
            codes = [wait(process, 240) for process in processes]
            assert codes == [0, 0], lab.log(workdir)[-2000:]
            (workdir / "done").touch()
    return workdir


def throttled(lab: Lab, seed: int) -> list[Trial]:
    """A bucket that takes one write a second to an object, and refuses a tenth of all requests."""
    workdir, config = _new_run(), _config(lab)
    with _entrance(seed, once_a_second=1.0, fail=0.1) as bucket:
        code = lab.run(workdir, config, pace=PACE, environment=bucket.environment)
    same = lab.same(workdir, lab.reference())
    return [Trial(told=False, harmless=True, recovered=code == 0, bitwise=same, note=f"{code}")]


def read_only(lab: Lab, seed: int) -> list[Trial]:
    """A bucket that turns read-only while a run trains: the run ends by its exit code; when the
    bucket may be written again, the same command goes on.
    """
    rng = np.random.default_rng(seed)
    workdir, config, progress = _new_run(), _config(lab), _progress(lab)
    with _entrance(seed) as bucket:
        options = {"pace": PACE, "environment": bucket.environment}
        process = lab.start(workdir, config, progress=str(progress), **options)
        wait_for(progress, f"step {int(rng.integers(2, 3 * EVERY))}\n", process)
        bucket.faults["read_only"] = 1.0
        code = wait(process, 240)
        bucket.faults["read_only"] = 0.0
        told = code == ExitCode.STORAGE and "403" in lab.log(workdir)
        assert lab.run(workdir, config, environment=bucket.environment) == 0
    same = lab.same(workdir, lab.reference())
    return [
        Trial(
            told=told,
            recovered=True,
            steps_lost=lost_steps(workdir),
            bitwise=same,
            note=f"{code}",
        )
    ]
