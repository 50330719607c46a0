"""How large and how fast the report of a long run is: writes the record of a made-up run, its
report, and opens that in headless Chromium.

    uv run python benchmarks/report.py [--steps=100000] [--layers=48] [--experts=512]
    [--log_every=10]
"""

import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import time

import numpy as np
from absl import app, flags

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


CLOCK = """<script>addEventListener("load", () => { document.body.getBoundingClientRect();
document.documentElement.dataset.openMs = Math.round(performance.now()); });</script>"""


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
    """The record of a run that never was, with numbers that look like one. `restarts`: steps at
    which it died.
    """
    rng = np.random.default_rng(seed)
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
    full = np.array(
        [mixer == model.full_mixer for mixer in model.mixers] + [True] * (mtp_depth > 0)
    )
    depth = np.linspace(0, 1, len(full))
    seconds, now, each = 0.5, 1.8e9, max(steps // 1000, 1)
    with (workdir / "metrics.jsonl").open("w") as file:

        def write(event, step, **values):
            file.write(
                json.dumps({"event": event, "step": step, "time": round(now, 3)} | values) + "\n"
            )

        def listed(values, where):
            return [float(f"{v:.4g}") if w else None for v, w in zip(values, where)]

        start = {
            "hosts": 1,
            "devices": 8,
            "device_kind": "TPU v5p",
            "jax": "0.12.0",
            "commit": "0" * 40,
        }
        write("start", 0, first_step=0, previous_end=None, lost_steps=0, **start)
        now += 40
        for step in range(log_every, steps + 1, log_every):
            done = step / steps
            now += seconds * log_every
            loss = (
                2.2
                + 8.8 * np.exp(-60 * done)
                + 0.5 * (1 - done)
                + 0.05 * rng.normal() / (1 + 5 * done)
            )
            tokens = 4096 * 1024
            write(
                "train",
                step,
                loss=loss,
                total_loss=loss * 1.1,
                top1=1 / loss,
                grad_norm=float(np.exp(0.3 * rng.normal() - done)),
                learning_rate=3e-4
                * min(step / (0.02 * steps), 1)
                * (0.55 + 0.45 * np.cos(np.pi * done)),
                balance_loss=1 + 0.2 * np.exp(-9 * done),
                router_z=20 + 5 * done,
                busiest_expert=2.5,
                idle_experts=0,
                tokens_seen=step * tokens,
                steps=log_every,
                **{f"mtp_loss/{d}": loss * (1.15 + 0.1 * d) for d in range(mtp_depth)},
                **{f"mtp_top1/{d}": 0.8 / loss for d in range(mtp_depth)},
                bits_per_byte=loss / 2.9,
                seconds=seconds * log_every,
                tokens_per_second=tokens / seconds * (1 + 0.02 * rng.normal()),
                data_wait=0.01 * rng.random(),
                model_flops_per_second=1.5e15,
                mfu=0.41 + 0.01 * rng.normal(),
                memory_bytes=60_000_000_000,
                memory_limit=None,
            )
            if rng.random() < 2e-4 or step == 3 * each * log_every:
                write("skip", step, reason="spike: loss 9.31 (z 11.0), gradient norm 80.1 (z 14.2)")
            if step % each < log_every or step == steps:
                load = np.exp(
                    0.3 * rng.normal(size=(int(len(full)), experts)) * (1 + depth[:, None])
                )
                load *= rng.random(load.shape) > 0.003
                load *= experts / load.sum(axis=1, keepdims=True)
                write(
                    "diagnostics",
                    step,
                    first_token_share=listed(0.05 + 0.3 * depth * done, full),
                    first_token_heads=listed(0.2 * depth, full),
                    gate_mean=listed(0.3 - 0.1 * depth, full),
                    gate_closed=listed(0.2 + 0.4 * depth * done, full),
                    half_life=listed(3 + 200 * depth * done, ~full),
                    half_life_min=listed(1 + depth, ~full),
                    half_life_max=listed(30 + 5000 * depth, ~full),
                    beta=listed(0.5 + 0.2 * depth * done, ~full),
                    state_norm=listed(0.1 + 5 * depth * done, ~full),
                    activation_max=listed(1 + 90 * depth * done, full | True),
                    activation_ratio=listed(8 + 600 * depth * done, full | True),
                    router_entropy=listed(0.95 - 0.3 * done * depth, full | True),
                    router_z=listed(20 + 4 * depth, full | True),
                    load_cv=listed(load.std(axis=1), full | True),
                    load_max_violation=listed(load.max(axis=1) - 1, full | True),
                    dead_experts=listed((load == 0).sum(axis=1), full | True),
                    grad_norm=listed(np.exp(-depth - done), full | True),
                    param_norm=listed(20 + 5 * depth + 9 * done, full | True),
                    expert_load=load.round(2).tolist(),
                    groups={
                        name: {"grad_norm": float(np.exp(-done)), "param_norm": 30 + 9 * done}
                        for name in ("embedding", "final_norm", "head")
                    },
                )
            if step % (10 * each) < log_every or step == steps:
                now += 10 * seconds
                write(
                    "heldout",
                    step,
                    loss=loss + 0.03,
                    perplexity=np.exp(loss),
                    accuracy=0.5,
                    bits_per_byte=loss / 2.85,
                    **{f"mtp_loss/{d}": loss * 1.2 for d in range(mtp_depth)},
                    **{
                        f"mtp_acceptance/{d}": (0.9 - 0.2 * d) * (1 - np.exp(-9 * done))
                        for d in range(mtp_depth)
                    },
                )
                write(
                    "suite",
                    step,
                    suite="mqar",
                    **{
                        f"accuracy/{pairs} pairs": 1 / (1 + np.exp(pairs / 3 - 20 * done))
                        for pairs in (4, 8, 16)
                    },
                )
                write("sample", step, text=f"def step_{step}(x):\n    return <b>x</b> + {step}\n")
                write("checkpoint", step)
            if any(step - log_every < died <= step for died in restarts):
                previous, now = now, now + 300 * seconds
                write(
                    "start",
                    step,
                    first_step=step,
                    previous_end=previous,
                    lost_steps=log_every,
                    **start,
                )
                now += 40


def open_in_chromium(page: pathlib.Path, *options: str, timeout: float = 120) -> tuple[str, float]:
    """(the page's DOM once loaded, as text; seconds the browser took in all). `options` go to
    Chromium.
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


def main(_) -> None:
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "long"
        write_run(
            workdir,
            steps=_STEPS.value,
            layers=_LAYERS.value,
            experts=_EXPERTS.value,
            log_every=_LOG_EVERY.value,
            mtp_depth=3,
            restarts=(_STEPS.value // 3, _STEPS.value // 2),
        )
        begun = time.perf_counter()
        page = workdir / "report.html"
        write_report([workdir], page)
        print(
            f"{_STEPS.value:,} steps logged every {_LOG_EVERY.value}, {_LAYERS.value} layers, "
            f"{_EXPERTS.value} experts: "
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
    _STEPS = flags.DEFINE_integer("steps", 100_000, "steps of the made-up run")
    _LAYERS = flags.DEFINE_integer("layers", 48, "its layers")
    _EXPERTS = flags.DEFINE_integer("experts", 512, "experts of each layer")
    _LOG_EVERY = flags.DEFINE_integer("log_every", 10, "steps between its train events")
    app.run(main)
