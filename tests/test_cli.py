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
    (["train.py", "--config=configs/tiy.py"], "--config=configs/tiy.py: no such file (did you mean 'tiny.py'?)"),
    (["train.py", TINY, "steps=5"], "unexpected argument 'steps=5'"),
    (["train.py", TINY, "--config.model.num_experts_per_tok=9"], "model.num_experts_per_tok = 9: expected 1 … model.num_experts = 8"),
    (["train.py", "--config=configs"], "--config=configs: a folder"),
    (["eval.py"], "--workdir is missing"),
    (["eval.py", TINY, "--workdir=nowhere"], "nowhere: not the folder of a run"),
    (["-m", "qwen3next_jax.generate", "--model=nowhere", "--prompt=x"], "nowhere"),
    (["-m", "qwen3next_jax.report", "nowhere"], "nowhere: not the folder of a run"),
    (["-m", "qwen3next_jax.export", "--workdir=nowhere", "--out=x"], "nowhere"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_a_mistake_is_one_line(command, message):
    result = _run(*command)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("text, message", [
    ("from configs.tiny import get_config as tiny\ndef get_config():\n  c = tiny()\n  c.trian.steps = 3\n  return c\n", "trian"),
    ("def get_config(:\n", "invalid syntax"), ("x = 1\n", "get_config"),
], ids=("misspelled key", "syntax error", "no get_config"))
def test_a_mistake_in_the_config_file_is_one_line(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    result = _run("train.py", f"--config={tmp_path / 'mine.py'}")
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1 and message in result.stderr, result.stderr
