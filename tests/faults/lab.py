"""The bench on which faults are tried: a nano run, the undisturbed reference, processes to kill,
and what came of it.
"""

import dataclasses
import multiprocessing
import os
import pathlib
import shutil
import signal
import threading
import time
import uuid
import zlib
from typing import Any

import numpy as np

from qwen3next_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TelemetryConfig,
    TrainConfig,
    to_dict,
)
from tests.faults import worker

MODEL = ModelConfig(
    vocab_size=257,
    hidden_size=32,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=0,
    intermediate_size=64,
    mtp_depth=0,
    dtype="float32",
    max_position_embeddings=128,
)
STEPS, EVERY = 44, 4
PRELOADED = [
    "tests.faults.worker",
    "qwen3next_jax.runs.train",
    "qwen3next_jax.processes.distributed",
]


@dataclasses.dataclass(frozen=True)
class Trial:
    """What came of one fault. told: it was named or showed itself; harmless: it changed nothing
    that is used.
    """

    told: bool
    harmless: bool = False
    recovered: bool = False
    steps_lost: int | None = None
    # losses and final state against the undisturbed run; None: not compared
    bitwise: bool | None = None
    note: str = ""

    @property
    def silent(self) -> bool:
        return not self.told and not self.harmless


class Lab:
    """A folder with texts, the reference run, and room for trials."""

    def __init__(self, folder: pathlib.Path, steps: int = STEPS):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        texts = folder / "texts"
        if not texts.exists():
            rng = np.random.default_rng(0)
            texts.mkdir()
            for i in range(60):
                words = rng.choice(
                    ["def ", "return ", "x", "y", " = ", "\n", "(", ")", "é"],
                    int(rng.integers(10, 120)),
                )
                (texts / f"{i:02}.txt").write_text("".join(words) + "\n")
        self.config = Config(
            name="nano",
            model=MODEL,
            data=DataConfig(
                path=f"{texts}/*.txt", heldout_fraction=0.2, prepared_dir=str(folder / "prepared")
            ),
            train=TrainConfig(steps=steps, batch_size=8, sequence_length=64, log_every=1),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
            guards=GuardConfig(window=8),
            checkpoint=CheckpointConfig(every=EVERY, keep_last=4),
            eval=EvalConfig(every=10_000, rows=8, sample_tokens=0),
            telemetry=TelemetryConfig(diagnostics_every=0),
            parallel=ParallelConfig(heartbeat_timeout=100, start_timeout=200),
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._lock = threading.Lock()
        self._references: dict[str, pathlib.Path] = {}

    def with_(self, **sections: dict[str, Any]) -> Config:
        """The lab's configuration with changes: `with_(train={"steps": 8})`."""
        return dataclasses.replace(
            self.config,
            **{
                name: dataclasses.replace(getattr(self.config, name), **changes)
                for name, changes in sections.items()
            },
        )

    def new_folder(self) -> pathlib.Path:
        folder = self.folder / "trials" / uuid.uuid4().hex[:12]
        folder.mkdir(parents=True)
        return folder

    def start(self, workdir: pathlib.Path, config: Config | None = None, **faults: Any):
        """A process that trains in `workdir`."""
        spec = {
            "config": to_dict(config or self.config),
            "workdir": str(workdir),
            "log": str(self.log_file(workdir)),
            **faults,
        }
        process = self._context.Process(target=worker.main, args=(spec,), daemon=True)
        process.start()
        return process

    def run(
        self,
        workdir: pathlib.Path,
        config: Config | None = None,
        timeout: float = 240,
        **faults: Any,
    ) -> int:
        """Trains in a process until it ends. → its exit code."""
        process = self.start(workdir, config, **faults)
        return wait(process, timeout)

    def start_plain(self, target, folder: pathlib.Path, **arguments: Any):
        """A process that runs `target(folder, config, **arguments)`."""
        process = self._context.Process(
            target=target, args=(str(folder), to_dict(self.config)), kwargs=arguments, daemon=True
        )
        process.start()
        return process

    def log_file(self, workdir: pathlib.Path) -> pathlib.Path:
        """Not beside the run, whose disk may be full."""
        path = self.folder / "logs" / f"{zlib.crc32(str(workdir).encode()):08x}.log"
        path.parent.mkdir(exist_ok=True)
        return path

    def log(self, workdir: pathlib.Path) -> str:
        """What the processes of the run said."""
        path = self.log_file(workdir)
        return path.read_text(errors="replace") if path.exists() else ""

    def reference(
        self, name: str = "plain", config: Config | None = None, **faults: Any
    ) -> pathlib.Path:
        """The workdir of an undisturbed run (made once), with the same `config` and `faults`."""
        with self._lock:
            if name not in self._references:
                workdir = self.folder / f"reference-{name}"
                if not (workdir / "done").exists():
                    shutil.rmtree(workdir, ignore_errors=True)
                    code = self.run(workdir, config, **faults)
                    assert code == 0, (code, self.log(workdir)[-3000:])
                    (workdir / "done").touch()
                self._references[name] = workdir
        return self._references[name]

    def same(self, workdir: pathlib.Path, reference: pathlib.Path) -> bool:
        """Whether the two runs have the same losses at every step and the same final state, bit
        for bit.
        """
        return losses(workdir) == losses(reference) and self.final_state(
            workdir
        ) == self.final_state(reference)

    def final_state(self, workdir: pathlib.Path) -> list[tuple[str, bytes]]:
        import jax

        from qwen3next_jax.runs.checkpoint import Checkpoints
        from qwen3next_jax.sharding.mesh import single_device_mesh
        from qwen3next_jax.training.resolve import resolve_run

        with Checkpoints(workdir) as checkpoints:
            state = checkpoints.restore(
                self.config.train.steps,
                resolve_run(self.config, single_device_mesh()).abstract_state,
            )
        return [
            (jax.tree_util.keystr(path), np.asarray(leaf).tobytes())
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        ]


class Patience:
    """Raises TimeoutError after `seconds` in which this process ran: a machine may stand still,
    or be lent to another.
    """

    def __init__(self, seconds: float, what: str):
        self._left, self._what, self._before = seconds, what, time.monotonic()

    def wait(self, seconds: float = 0.002) -> None:
        time.sleep(seconds)
        now = time.monotonic()
        self._left -= min(now - self._before, seconds + 0.5)
        self._before = now
        if self._left < 0:
            raise TimeoutError(self._what)


def wait(process, timeout: float) -> int:
    """The exit code; a process that does not end in time is killed and an error."""
    patience = Patience(timeout, f"process did not end within {timeout} s")
    try:
        while process.is_alive():
            patience.wait(0.02)
    finally:
        process.kill()
        process.join()
    return process.exitcode


def events(workdir: pathlib.Path, kind: str | None = None) -> list[dict[str, Any]]:
    from qwen3next_jax.common.events import read_events

    return [e for e in read_events(workdir / "metrics.jsonl") if kind in (None, e["event"])]


def losses(workdir: pathlib.Path) -> list[tuple[int, float, float]]:
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events(workdir, "train")]


def lost_steps(workdir: pathlib.Path) -> int:
    """Steps that the last start took again."""
    return events(workdir, "start")[-1]["lost_steps"]


def wait_for(path: pathlib.Path, text: str, process=None, timeout: float = 200) -> bool:
    """Waits until `path` holds `text`; False where the process ended before."""
    patience = Patience(timeout, f"{path} did not come to hold {text!r}")
    while not (path.exists() and text in path.read_text(errors="replace")):
        if process is not None and not process.is_alive():
            return path.exists() and text in path.read_text(errors="replace")
        patience.wait()
    return True


def attempt(work) -> tuple[Any, str]:
    """(result, "") or (None, name of the error): for libraries, of which some raise `Exception`
    itself.
    """
    try:
        return work(), ""
    except Exception as error:
        return None, type(error).__name__


def kill(process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def flip_bit(path: pathlib.Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def random_bits(
    folder: pathlib.Path, count: int, seed: int, pattern: str = "*"
) -> list[tuple[pathlib.Path, int, int]]:
    """`count` random (file, byte, bit) among all bytes of the files in `folder`."""
    files = sorted(f for f in folder.rglob(pattern) if f.is_file())
    ends = np.cumsum([f.stat().st_size for f in files])
    rng = np.random.default_rng(seed)
    chosen = []
    for _ in range(count):
        at = int(rng.integers(ends[-1]))
        i = int(np.searchsorted(ends, at, side="right"))
        chosen.append((files[i], at - (int(ends[i - 1]) if i else 0), int(rng.integers(8))))
    return chosen
