"""Share of wall time that a run spends on steps that count, while it is killed again and again
under its supervisor.

    uv run python benchmarks/goodput.py --minutes=30 --kill_every=120

trains configs/tiny.py for so long, sends SIGKILL to the training process (not to the supervisor)
every `kill_every` seconds, ends it with SIGTERM, and reads metrics.jsonl: the seconds of the
steps that were kept, over the wall time.
"""

import argparse
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time

from qwen3next_jax.common.events import read_events

ROOT = pathlib.Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kill_every", type=float, default=120, help="seconds")
    parser.add_argument("--checkpoint_every", type=int, default=20, help="steps")
    parser.add_argument("--workdir", default="runs/goodput")
    options = parser.parse_args()
    workdir = ROOT / options.workdir
    shutil.rmtree(workdir, ignore_errors=True)
    command = [
        sys.executable,
        "train.py",
        "--config=configs/tiny.py",
        f"--workdir={workdir}",
        "--config.train.steps=100000",
        f"--config.checkpoint.every={options.checkpoint_every}",
        "--config.train.log_every=1",
        "--config.eval.every=1000000",
        "--max-restarts=1000",
    ]
    loads, kills, begun = [], 0, time.time()
    with (ROOT / "runs" / "goodput.log").open("w") as log:
        supervisor = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        )
        end, next_kill = begun + 60 * options.minutes, begun + options.kill_every
        while time.time() < end and supervisor.poll() is None:
            time.sleep(1)
            loads.append(os.getloadavg()[0])
            if time.time() >= next_kill:
                next_kill += options.kill_every
                kills += _kill_child(supervisor.pid)
        supervisor.send_signal(signal.SIGTERM)
        code = supervisor.wait()
    wall = time.time() - begun
    _report(read_events(workdir / "metrics.jsonl"), wall, kills, code, loads)


def _kill_child(parent: int) -> int:
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    return len(children)


def _report(events: list[dict], wall: float, kills: int, code: int, loads: list[float]) -> None:
    steps = [e for e in events if e["event"] == "train"]
    starts = [e for e in events if e["event"] == "start"]
    productive = sum(e["seconds"] for e in steps)
    lost = [e["lost_steps"] for e in starts[1:]]
    away = [e["time"] - e["previous_end"] for e in starts[1:] if e["previous_end"]]
    print(
        f"{wall / 60:.1f} minutes, {kills} SIGKILLs, {len(starts)} starts, exit code {code}, last "
        f"step {steps[-1]['step']}"
    )
    print(
        f"goodput {productive / wall:.1%}: {productive:.0f} s of steps that count in {wall:.0f} s"
    )
    if lost:
        print(
            f"steps lost a kill: mean {statistics.mean(lost):.1f}, most {max(lost)}; from the "
            f"last event to the next start: median {statistics.median(away):.1f} s"
        )
    print(
        f"a step: median {statistics.median(e['seconds'] / e['steps'] for e in steps):.2f} s; "
        f"load of the machine: mean {statistics.mean(loads):.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
