"""Seconds from a command's start to its first error, for mistakes that users make, and what is
said.

    uv run python benchmarks/first_error.py [--repeats=3] [--over=2]

Real commands in processes of their own; the best of the repeats counts, since other processes
only ever add. A mistake that is no single line with exit code 2, or that takes longer than
`--over` seconds, is marked, and the exit code is then 1.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
TRAIN, EVAL, MODULE = ["train.py", "--config=configs/tiny.py"], ["eval.py"], ["-m"]
GENERATE = ["-m", "qwen3next_jax", "generate", "--prompt=x"]


def mistakes(folder: pathlib.Path) -> dict[str, list[str]]:
    """Name → arguments after `python`. Files that a mistake needs are written to `folder`."""
    config = folder / "mine.py"
    config.write_text(
        "from configs.tiny import get_config as tiny\n\n\ndef get_config():\n    config = tiny()\n"
        "    config.train.steps = 10 / 0\n    return config\n"
    )
    (folder / "nothing.py").write_text("def get_config():\n    pass\n")
    (folder / "sweep.py").write_text("def get_sweep():\n    return [1]\n")
    (folder / "not_utf8.py").write_bytes(b"x = '\xff'\n")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    shutil.copy(
        ROOT / "tests" / "fixtures" / "qwen3_next_tiny" / "model.safetensors", folder / "foreign"
    )
    (folder / "lost" / "checkpoints" / "10").mkdir(parents=True)
    return {
        "no config": ["train.py"],
        "a config that is not there": ["train.py", "--config=configs/tinny.py"],
        "a config with an error": ["train.py", f"--config={config}"],
        "a config that returns nothing": ["train.py", f"--config={folder / 'nothing.py'}"],
        "a config that is no text": ["train.py", f"--config={folder / 'not_utf8.py'}"],
        "a misspelled flag": [*TRAIN, "--wrokdir=x"],
        "a misspelled setting": [*TRAIN, "--config.train.stpes=5"],
        "a setting of another type": [*TRAIN, "--config.train.steps=many"],
        "settings that contradict": [*TRAIN, "--config.model.num_key_value_heads=3"],
        "a name that is a path": [*TRAIN, "--config.name=../../elsewhere"],
        "data that are not there": [*TRAIN, f"--config.data.path={folder}/texts/*.txt"],
        "a tokenizer that is none": [
            *TRAIN,
            f"--config.data.tokenizer={folder / 'tokenizer.json'}",
        ],
        "a vocabulary that is too small": [*TRAIN, "--config.model.vocab_size=100"],
        "a workdir that is remote": [*TRAIN, "--workdir=http://host/run"],
        "a workdir whose run.json is gone": [*TRAIN, f"--workdir={folder / 'lost'}"],
        "init_from that is not there": [*TRAIN, f"--config.train.init_from={folder / 'nowhere'}"],
        "init_from of another architecture": [
            *TRAIN,
            f"--config.train.init_from={folder / 'foreign'}",
        ],
        "eval of no run": [*EVAL, f"--workdir={folder}"],
        "eval with results to nowhere": [
            *EVAL,
            f"--workdir={folder / 'foreign'}",
            "--json=/nowhere/results.json",
        ],
        "generate without a model": [*GENERATE, "--model=runs/nowhere"],
        "generate at a wrong temperature": [*GENERATE, "--model=runs/nowhere", "--temperature=hot"],
        "export of no run": [
            "-m",
            "qwen3next_jax",
            "export",
            "--workdir=runs/nowhere",
            f"--out={folder / 'out'}",
        ],
        "a sweep file that returns a list": [
            "-m",
            "qwen3next_jax",
            "sweep",
            str(folder / "sweep.py"),
        ],
        "a model of another architecture": [*GENERATE, f"--model={folder / 'foreign'}"],
    }


def first_error(arguments: list[str]) -> tuple[float, int, list[str]]:
    """→ (seconds to the first line on standard error, exit code, all its lines)."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    first = process.stderr.readline()
    seconds = time.perf_counter() - begun
    lines = [first, *process.stderr.readlines()]
    return seconds, process.wait(), [line.strip() for line in lines if line.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--over", type=float, default=2.0, help="seconds from which a mistake is marked"
    )
    arguments = parser.parse_args()
    slow, wrong = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, command in mistakes(pathlib.Path(folder)).items():
            seconds, code, lines = min(
                (first_error(command) for _ in range(arguments.repeats)), key=lambda found: found[0]
            )
            right = code == 2 and len(lines) == 1 and lines[0].startswith("error: ")
            slow, wrong = slow + [name] * (seconds > arguments.over), wrong + [name] * (not right)
            mark = " " if right and seconds <= arguments.over else "!"
            print(
                f"{seconds:6.2f} s {mark} {name}: "
                f"{lines[-1][:160] if lines else 'nothing was said'}",
                flush=True,
            )
    print(
        f"{len(slow)} took more than {arguments.over:g} s{': ' + ', '.join(slow) if slow else ''}; "
        f"{len(wrong)} were no single line{': ' + ', '.join(wrong) if wrong else ''}"
    )
    return int(bool(slow or wrong))


if __name__ == "__main__":
    sys.exit(main())
