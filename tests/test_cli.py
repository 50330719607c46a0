"""The commands as a user types them: mistakes cost one line and no compute."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TINY = "--config=configs/tiny.py"


def _run(*command):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command, message", [
    (["train.py"], "--config is missing: expected a file such as --config=configs/tiny.py"),
    (["train.py", TINY, "--config.train.stesp=5"], "--config.train.stesp: no such setting (did you mean 'steps'?)"),
    (["train.py", TINY, "--config.trian.steps=5"], "--config.trian: no such setting (did you mean 'train'?)"),
    (["train.py", TINY, "--config.train.steps=many"], "config.train.steps"),
    (["train.py", TINY, "--workdri=x"], "workdri"),
    (["train.py", "--config=configs/tiy.py"], "--config=configs/tiy.py: no such file (did you mean 'configs/tiny.py'?)"),
    (["train.py", TINY, "steps=5"], "unexpected argument 'steps=5'"),
    (["train.py", TINY, "--config.model.num_experts_per_tok=9"], "model.num_experts_per_tok = 9: expected 1 … model.num_experts = 8"),
    (["eval.py", TINY, "--workdir=nowhere"], "nowhere: not the folder of a run"),
    (["-m", "qwen3next_jax.generate", "--model=nowhere", "--prompt=x"], "nowhere"),
    (["-m", "qwen3next_jax.export", "--workdir=nowhere", "--out=x"], "nowhere"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_a_mistake_is_one_line(command, message):
    result = _run(*command)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], result.stderr
    assert result.stdout == ""
