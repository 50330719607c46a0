"""Held-out loss of configs/tiny.py after 500 steps with each optimizer: three seeds at the best
learning rate of a search.

    python benchmarks/training/optimizers.py           # all; what runs/ holds is not trained again
    python benchmarks/training/optimizers.py adamw     # one optimizer alone

The search is the same for every optimizer, with seed 0: half, once and twice the config's rate,
then twice further in the direction of the best as long as that is the outermost. Batches, steps,
warm-up, schedule, decay and clipping are the config's. Prints every run as JSON, then the table.
"""

import json
import math
import pathlib
import statistics
import subprocess
import sys

from benchmarks import harness
from qwen3next_jax.common.errors import ExitCode
from qwen3next_jax.common.events import read_events
from qwen3next_jax.config.registry import OPTIMIZERS

RATES = (1.5e-3, 3e-3, 6e-3)
SEEDS = (0, 1, 2)


def run(optimizer: str, rate: float, seed: int, steps: int) -> dict:
    """Figures of one training, a process of its own. `loss` is infinite where the guards stopped
    it.
    """
    folder = (
        harness.ROOT / "runs" / "optimizers" / str(steps) / f"{optimizer},rate={rate:g},seed={seed}"
    )
    command = [
        sys.executable,
        "train.py",
        "--config=configs/tiny.py",
        f"--config.optimizer.name={optimizer}",
        f"--config.optimizer.learning_rate={rate:g}",
        f"--config.train.seed={seed}",
        f"--config.train.steps={steps}",
        f"--config.eval.every={steps}",
        f"--config.checkpoint.every={steps}",
        "--config.eval.sample_tokens=0",
        "--config.telemetry.diagnostics_every=0",
        f"--workdir={folder}",
    ]
    figures = _figures(folder, steps)
    if figures is None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a") as log:
            code = subprocess.run(command, cwd=harness.ROOT, stdout=log, stderr=log).returncode
        if code not in (ExitCode.DONE, ExitCode.DIVERGED):
            raise SystemExit(f"exit code {code}: see {folder / 'log.txt'}")
        figures = _figures(folder, steps)
    figures = {
        "optimizer": optimizer,
        "learning_rate": rate,
        "seed": seed,
        "steps": steps,
    } | figures
    print(json.dumps(figures), flush=True)
    return figures


def _figures(folder: pathlib.Path, steps: int) -> dict | None:
    """Of the last step; None where it was not reached."""
    events = read_events(folder / "metrics.jsonl")
    if any(event["event"] == "stop" for event in events):
        return {"loss": math.inf, "bits_per_byte": math.inf, "tokens_per_second": math.nan}
    heldout = [event for event in events if event["event"] == "heldout" and event["step"] == steps]
    if not heldout:
        return None
    speed = statistics.median(
        event["tokens_per_second"] for event in events if event["event"] == "train"
    )
    return {
        "loss": heldout[-1]["loss"],
        "bits_per_byte": heldout[-1]["bits_per_byte"],
        "tokens_per_second": speed,
    }


def compared(optimizer: str, steps: int) -> tuple[list[dict], list[dict]]:
    """(the search's runs by rate, those of all seeds at its best rate)."""
    tried = {rate: run(optimizer, rate, SEEDS[0], steps) for rate in RATES}
    while (best := min(tried, key=lambda rate: tried[rate]["loss"])) in (min(tried), max(tried)):
        further = best / 2 if best == min(tried) else best * 2
        tried[further] = run(optimizer, further, SEEDS[0], steps)
    return [tried[rate] for rate in sorted(tried)], [
        tried[best],
        *(run(optimizer, best, seed, steps) for seed in SEEDS[1:]),
    ]


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("optimizers", nargs="*", help=f"of {', '.join(OPTIMIZERS)} (default: all)")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    rows = {name: compared(name, options.steps) for name in options.optimizers or OPTIMIZERS}
    print()
    harness.print_header(
        "optimizer",
        "learning rate",
        "held-out loss, by seed",
        "mean",
        "bits per byte",
        "tokens/s",
        "search (seed 0)",
    )
    for name, (tried, runs) in rows.items():
        mean = {
            figure: statistics.fmean(r[figure] for r in runs)
            for figure in ("loss", "bits_per_byte", "tokens_per_second")
        }
        harness.print_row(
            name,
            f"{runs[0]['learning_rate']:g}",
            " ".join(f"{r['loss']:.4f}" for r in runs),
            f"{mean['loss']:.4f}",
            f"{mean['bits_per_byte']:.4f}",
            f"{mean['tokens_per_second']:,.0f}",
            ", ".join(f"{r['learning_rate']:g}: {r['loss']:.4f}" for r in tried),
        )


if __name__ == "__main__":
    main()
