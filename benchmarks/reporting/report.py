"""Measures the size and the speed of the report of a long run: writes the record of a made-up run
and its report, and opens the report in headless Chromium.

    uv run python benchmarks/reporting/report.py [--steps=100000] [--layers=48] [--experts=512]
        [--log_every=10]
"""

import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
from typing import TextIO

import numpy as np

from benchmarks import harness
from qwen3next_jax.config import Config, ModelConfig, TrainConfig, to_dict
from qwen3next_jax.reporting.page import write_report

CHROMIUM = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


# Added to the page, it records how long loading and layout took.
CLOCK = """<script>addEventListener("load", () => { document.body.getBoundingClientRect();
document.documentElement.dataset.openMs = Math.round(performance.now()); });</script>"""


STEP_SECONDS, STEP_TOKENS = 0.5, 4096 * 1024
START_SECONDS = 40  # from the start of a process to its first step
START = {
    "hosts": 1,
    "devices": 8,
    "device_kind": "TPU v5p",
    "jax": "0.12.0",
    "commit": "0" * 40,
}
SKIP_REASON = "spike: loss 9.31 (z 11.0), gradient norm 80.1 (z 14.2)"


def write_run(
    workdir: pathlib.Path,
    *,
    steps: int,
    layers: int = 4,
    experts: int = 8,
    log_every: int = 10,
    mtp_depth: int = 1,
    restarts: tuple[int, ...] = (),
    seed: int = 0,
    **train: float,
) -> None:
    """Writes run.json and metrics.jsonl of a made-up run with plausible numbers.

    Args:
      workdir: the folder of the run.
      log_every: steps between its "train" events.
      restarts: steps after which the run was killed and started again.
      seed: of the noise in the numbers.
      train: further settings of `TrainConfig`.
    """
    model = ModelConfig(
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=min(10, experts),
        mtp_depth=mtp_depth,
    )
    config = Config(name=workdir.name, model=model, train=TrainConfig(steps=steps, **train))
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "run.json").write_text(
        json.dumps({"config": to_dict(config), "data_fingerprint": "0" * 20})
    )
    every = max(steps // 1000, 1)  # steps between "diagnostics" events
    with (workdir / "metrics.jsonl").open("w") as file:
        run = _MadeUpRun(file, model, steps, log_every, seed)
        run.write("start", 0, first_step=0, previous_end=None, lost_steps=0, **START)
        run.now += START_SECONDS
        for step in range(log_every, steps + 1, log_every):
            run.now += STEP_SECONDS * log_every
            loss = run.write_train(step)
            if run.rng.random() < 2e-4 or step == 3 * every * log_every:
                run.write("skip", step, reason=SKIP_REASON)
            if step % every < log_every or step == steps:
                run.write_diagnostics(step)
            if step % (10 * every) < log_every or step == steps:
                run.now += 10 * STEP_SECONDS
                run.write_evaluations(step, loss)
            if any(step - log_every < killed <= step for killed in restarts):
                run.write_restart(step)


class _MadeUpRun:
    """Writes the events of a made-up run.

    Attributes:
      now: the time of the next event, in seconds since 1970.
      rng: the source of the noise.
    """

    def __init__(self, file: TextIO, model: ModelConfig, steps: int, log_every: int, seed: int):
        self.now = 1.8e9
        self.rng = np.random.default_rng(seed)
        self._file = file
        self._model = model
        self._steps = steps
        self._log_every = log_every
        mixers = [mixer == model.full_mixer for mixer in model.mixers]
        # per layer, the module's last: whether it has attention, and its depth from 0 to 1
        self._is_attention = np.array(mixers + [True] * (model.mtp_depth > 0))
        self._depth = np.linspace(0, 1, len(self._is_attention))

    def write(self, event: str, step: int, **values) -> None:
        """Writes one event."""
        header = {"event": event, "step": step, "time": round(self.now, 3)}
        self._file.write(json.dumps(header | values) + "\n")

    def write_train(self, step: int) -> float:
        """Writes a "train" event and returns its loss."""
        rng, done = self.rng, step / self._steps
        loss = (
            2.2 + 8.8 * np.exp(-60 * done) + 0.5 * (1 - done) + 0.05 * rng.normal() / (1 + 5 * done)
        )
        decay = 0.55 + 0.45 * np.cos(np.pi * done)
        self.write(
            "train",
            step,
            loss=loss,
            total_loss=loss * 1.1,
            top1=1 / loss,
            grad_norm=float(np.exp(0.3 * rng.normal() - done)),
            learning_rate=3e-4 * min(step / (0.02 * self._steps), 1) * decay,
            balance_loss=1 + 0.2 * np.exp(-9 * done),
            router_z=20 + 5 * done,
            busiest_expert=2.5,
            idle_experts=0,
            tokens_seen=step * STEP_TOKENS,
            steps=self._log_every,
            **{f"mtp_loss/{d}": loss * (1.15 + 0.1 * d) for d in range(self._model.mtp_depth)},
            **{f"mtp_top1/{d}": 0.8 / loss for d in range(self._model.mtp_depth)},
            bits_per_byte=loss / 2.9,
            seconds=STEP_SECONDS * self._log_every,
            tokens_per_second=STEP_TOKENS / STEP_SECONDS * (1 + 0.02 * rng.normal()),
            data_wait=0.01 * rng.random(),
            model_flops_per_second=1.5e15,
            mfu=0.41 + 0.01 * rng.normal(),
            memory_bytes=60_000_000_000,
            memory_limit=None,
        )
        return loss

    def write_diagnostics(self, step: int) -> None:
        """Writes a "diagnostics" event."""
        done, depth = step / self._steps, self._depth
        load = self._expert_load()
        every_layer = np.full(len(depth), True)
        by_layers = {
            "first_token_share": (0.05 + 0.3 * depth * done, self._is_attention),
            "first_token_heads": (0.2 * depth, self._is_attention),
            "gate_mean": (0.3 - 0.1 * depth, self._is_attention),
            "gate_closed": (0.2 + 0.4 * depth * done, self._is_attention),
            "half_life": (3 + 200 * depth * done, ~self._is_attention),
            "half_life_min": (1 + depth, ~self._is_attention),
            "half_life_max": (30 + 5000 * depth, ~self._is_attention),
            "beta": (0.5 + 0.2 * depth * done, ~self._is_attention),
            "state_norm": (0.1 + 5 * depth * done, ~self._is_attention),
            "activation_max": (1 + 90 * depth * done, every_layer),
            "activation_ratio": (8 + 600 * depth * done, every_layer),
            "router_entropy": (0.95 - 0.3 * done * depth, every_layer),
            "router_z": (20 + 4 * depth, every_layer),
            "load_cv": (load.std(axis=1), every_layer),
            "load_max_violation": (load.max(axis=1) - 1, every_layer),
            "dead_experts": ((load == 0).sum(axis=1), every_layer),
            "grad_norm": (np.exp(-depth - done), every_layer),
            "param_norm": (20 + 5 * depth + 9 * done, every_layer),
        }
        group = {"grad_norm": float(np.exp(-done)), "param_norm": 30 + 9 * done}
        self.write(
            "diagnostics",
            step,
            **{name: _listed(values, where) for name, (values, where) in by_layers.items()},
            expert_load=load.round(2).tolist(),
            groups=dict.fromkeys(("embedding", "final_norm", "head"), group),
        )

    def _expert_load(self) -> np.ndarray:
        """Returns [layers, experts], the load of each expert relative to an equal share."""
        experts = self._model.num_experts
        noise = 0.3 * self.rng.normal(size=(len(self._depth), experts))
        load = np.exp(noise * (1 + self._depth[:, None]))
        load *= self.rng.random(load.shape) > 0.003
        return load * (experts / load.sum(axis=1, keepdims=True))

    def write_evaluations(self, step: int, loss: float) -> None:
        """Writes the events of an evaluation, and of the checkpoint after it."""
        done, depths = step / self._steps, range(self._model.mtp_depth)
        accepted = 1 - np.exp(-9 * done)
        self.write(
            "heldout",
            step,
            loss=loss + 0.03,
            perplexity=np.exp(loss),
            accuracy=0.5,
            bits_per_byte=loss / 2.85,
            **{f"mtp_loss/{d}": loss * 1.2 for d in depths},
            **{f"mtp_acceptance/{d}": (0.9 - 0.2 * d) * accepted for d in depths},
        )
        recall = {pairs: 1 / (1 + np.exp(pairs / 3 - 20 * done)) for pairs in (4, 8, 16)}
        accuracy = {f"accuracy/{pairs} pairs": value for pairs, value in recall.items()}
        self.write("suite", step, suite="mqar", **accuracy)
        self.write("sample", step, text=f"def step_{step}(x):\n    return <b>x</b> + {step}\n")
        self.write("checkpoint", step)

    def write_restart(self, step: int) -> None:
        """Writes the "start" event of a process that begins 300 steps' time after a kill."""
        previous, self.now = self.now, self.now + 300 * STEP_SECONDS
        self.write(
            "start",
            step,
            first_step=step,
            previous_end=previous,
            lost_steps=self._log_every,
            **START,
        )
        self.now += START_SECONDS


def _listed(values: np.ndarray, where: np.ndarray) -> list[float | None]:
    """Returns the values as a list with four digits, None for layers that have none."""
    return [float(f"{v:.4g}") if has_value else None for v, has_value in zip(values, where)]


def open_in_chromium(page: pathlib.Path, *options: str, timeout: float = 120) -> tuple[str, float]:
    """Opens a page in headless Chromium.

    Args:
      options: further options of Chromium.
      timeout: seconds.

    Returns:
      Chromium's standard output (with --dump-dom, the page's DOM once loaded), and the seconds
      from its start to its end.
    """
    with tempfile.TemporaryDirectory() as profile:
        begun = time.perf_counter()
        result = subprocess.run(
            [
                shutil.which("chromium"),
                *CHROMIUM,
                f"--user-data-dir={profile}",
                *options,
                page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
        )
        return result.stdout, time.perf_counter() - begun


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the made-up run")
    parser.add_argument("--layers", type=int, default=48, help="its layers")
    parser.add_argument("--experts", type=int, default=512, help="experts of each layer")
    parser.add_argument("--log_every", type=int, default=10, help="steps between its train events")
    args = parser.parse_args()
    if not shutil.which("chromium"):
        parser.error("needs the program chromium, to open the page in (apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "long"
        write_run(
            workdir,
            steps=args.steps,
            layers=args.layers,
            experts=args.experts,
            log_every=args.log_every,
            mtp_depth=3,
            restarts=(args.steps // 3, args.steps // 2),
        )
        begun = time.perf_counter()
        page = workdir / "report.html"
        write_report([workdir], page)
        print(
            f"{args.steps:,} steps logged every {args.log_every}, {args.layers} layers, "
            f"{args.experts} experts: "
            f"metrics.jsonl {(workdir / 'metrics.jsonl').stat().st_size / 1e6:.1f} MB, report "
            f"{page.stat().st_size / 1e6:.2f} MB, written in {time.perf_counter() - begun:.1f} s"
        )
        watched = workdir / "watched.html"
        watched.write_text(page.read_text().replace("</head>", CLOCK + "</head>"))
        for _ in range(3):
            dom, _ = open_in_chromium(watched, "--dump-dom", "--window-size=1280,900")
            _, seconds = open_in_chromium(
                page, f"--screenshot={workdir / 'page.png'}", "--window-size=1280,6000"
            )
            print(
                "opened: loaded and laid out after "
                f"{int(re.search(r'data-open-ms="(\d+)"', dom)[1]) / 1e3:.2f} s; "
                f"the browser from its start to a picture of 1280 × 6000 points {seconds:.2f} s"
            )


if __name__ == "__main__":
    main()
