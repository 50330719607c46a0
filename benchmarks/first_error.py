"""How long a mistake takes to be told: `uv run python benchmarks/first_error.py [--repeats=3]`.

Every command ends with one line and exit code 2. Seconds are of the whole process, the best of the repeats; CPU is what it took
of them, of all threads. "jax" says whether JAX was imported by then.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
TINY = "--config=configs/tiny.py"
# train.py and the others as they are run, but that the last line tells whether JAX was imported.
PROGRAM = """
import atexit, runpy, sys
atexit.register(lambda: print("jax" in sys.modules))
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def mistakes(folder: pathlib.Path) -> list[list[str]]:
    """Commands with a mistake each; `folder` gets what they need."""
    (folder / "broken.json").write_text("{")
    (folder / "empty").mkdir()
    (folder / "lost" / "checkpoints" / "10").mkdir(parents=True)
    (folder / "other").mkdir()
    (folder / "other" / "run.json").write_text("{}")
    (folder / "other" / "metrics.jsonl").write_text(json.dumps({"event": "train", "step": 1, "time": 1.0}) + "\n")
    train = ["train.py", TINY]
    return [
        ["train.py"], ["train.py", "--config=configs/tiy.py"], [*train, "--config.train.stesp=5"], [*train, "--config.trian.steps=5"],
        [*train, "--config.train.steps=many"], [*train, "--config.train.steps=0"], [*train, "--workdri=x"], [*train, "steps=5"],
        [*train, "--config.model.num_experts_per_tok=9"], [*train, "--config.train.sequence_length=1000000"],
        [*train, "--workdir=gs://bucket/run"], [*train, f"--workdir={folder / 'lost'}"], [*train, f"--workdir={folder / 'other'}"],
        [*train, "--config.data.path=texst/*.txt"], [*train, "--config.data.prepared_dir=gs://bucket/rows"],
        [*train, f"--config.data.tokenizer={folder / 'nowhere'}"], [*train, f"--config.data.tokenizer={folder / 'broken.json'}"],
        [*train, "--config.model.vocab_size=100"], [*train, f"--config.train.init_from={folder / 'nowhere'}"],
        [*train, f"--config.train.init_from={folder / 'empty'}"], [*train, "--process=1"], ["eval.py"],
        ["qwen3next_jax.export", "--workdir=gs://bucket/run", "--out=x"], ["qwen3next_jax.generate", "--prompt=x"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    worst = 0.0
    print("seconds   CPU  jax  command and what it says")
    with tempfile.TemporaryDirectory() as folder:
        for command in mistakes(pathlib.Path(folder)):
            best = min((_measure(command) for _ in range(repeats)), key=lambda measured: measured[0])
            seconds, cpu, jax, said = best
            worst = max(worst, seconds)
            print(f"{seconds:7.2f} {cpu:5.2f}  {'yes' if jax else 'no ':3}  {' '.join(command).replace(folder, '…')[:70]}: {said.replace(folder, '…')[:110]}")
    print(f"the slowest: {worst:.2f} s")


def _measure(command: list[str]) -> tuple[float, float, bool, str]:
    """(wall seconds, CPU seconds, whether JAX was imported, the one line)."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *command], cwd=ROOT, capture_output=True, text=True,
                           env=os.environ | {"JAX_PLATFORMS": "cpu"})
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = ended.stderr.strip().splitlines()
    assert ended.returncode == 2 and len(lines) == 1, (command, ended)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, ended.stdout.strip().endswith("True"), lines[0]


if __name__ == "__main__":
    main()
