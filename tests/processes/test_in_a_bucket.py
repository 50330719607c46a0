"""configs/tiny.py with its run, rows and tokenizer in a bucket does what it does on a disk: killed,
resumed by two processes, evaluated, exported and loaded, it has the same bits.
"""

import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tokenizers

from qwen3next_jax.common.events import read_events
from qwen3next_jax.common.storage import to_path
from tests.bucket import Bucket

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
STEPS, SAVED = 40, 20


def _start(arguments, program="train.py"):
    return subprocess.Popen(
        [sys.executable, str(ROOT / program), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process):
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output[-3000:]
    return output


def _life(where, texts):
    """Trains, kills, resumes, evaluates, exports and loads. Returns (folder of the run, generated
    text).
    """
    arguments = [
        "--config=configs/tiny.py",
        f"--workdir={where}/run",
        f"--config.data.prepared_dir={where}/rows",
        f"--config.data.path={texts}/*.txt",
        f"--config.data.tokenizer={where}/tokenizer.json",
        "--config.model.vocab_size=0",
        "--config.model.hidden_size=32",
        f"--config.train.steps={STEPS}",
        "--config.train.log_every=1",
        "--config.train.batch_size=4",
        "--config.train.sequence_length=64",
        f"--config.checkpoint.every={SAVED}",
        "--config.eval.rows=8",
        "--config.eval.sample_tokens=0",
    ]
    alone = _start(arguments)
    run = to_path(f"{where}/run")
    while alone.poll() is None:
        if (run / f"checkpoints/{SAVED}/manifest.json").exists():
            break
        time.sleep(0.05)
    assert alone.poll() is None, "it ended before it was killed: " + alone.stdout.read()[-3000:]
    alone.send_signal(signal.SIGKILL)
    alone.wait()
    # Both lives continue from the same step.
    assert not (run / f"checkpoints/{STEPS}/manifest.json").exists()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        _start(
            [*arguments, f"--coordinator=localhost:{port}", "--processes=2", f"--process={i}"],
        )
        for i in range(2)
    ]
    for process in processes:
        _finish(process)
    _finish(_start([f"--workdir={where}/run", "--rows=8"], "eval.py"))
    export = [sys.executable, "-m", "qwen3next_jax", "export"]
    subprocess.run(
        [*export, f"--workdir={where}/run", f"--out={where}/hf"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    text = subprocess.run(
        [sys.executable, "-m", "qwen3next_jax", "generate", f"--model={where}/hf"]
        + ["--prompt=def ", "--max_new_tokens=8"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return run, text


@pytest.fixture
def bucket(monkeypatch):
    pytest.importorskip("gcsfs")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Bucket() as served:
        for variable, value in served.environment.items():
            monkeypatch.setenv(variable, value)
        yield served


def test_tiny_lives_in_a_bucket_as_on_a_disk(bucket, tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for i in range(20):
        words = rng.choice(["def ", "return ", "x", " = ", "\n", "größe"], 3000)
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(words))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train([str(path) for path in (tmp_path / "texts").iterdir()], trainer)
    lives = []
    for where in (f"{tmp_path}/disk", "gs://bucket/life"):
        folder = to_path(where)
        if isinstance(folder, pathlib.Path):
            folder.mkdir()
        (folder / "tokenizer.json").write_text(tokenizer.to_str())
        lives.append(_life(where, tmp_path / "texts"))
    losses = []
    for run, _ in lives:
        events = read_events(run / "metrics.jsonl")
        losses.append([(e["step"], e["loss"]) for e in events if e["event"] == "train"])
    assert [step for step, _ in losses[0]] == list(range(1, STEPS + 1))
    assert losses[0] == losses[1]
    assert lives[0][1] == lives[1][1]
    both = [
        to_path(f"{where}/hf/model.safetensors")
        for where in (f"{tmp_path}/disk", "gs://bucket/life")
    ]
    assert both[0].read_bytes() == both[1].read_bytes()
