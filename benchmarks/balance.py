"""How evenly the experts of a small model are used, and its held-out loss, with a balance loss, with
router biases that follow the sign of the load, and with quantile balancing: three seeds of each.

    python benchmarks/balance.py            # twelve runs; what a folder already holds is not run again

The model is that of configs/tiny.py with two layers of width 64 and 16 experts, 2 for each token,
with sigmoid scores. Prints each run as JSON, then the table. "Busiest expert" is the load of the
busiest expert of any layer, in equal shares (1: even), as a mean over the second half of the steps;
"idle" is the number of experts of all layers that no token of a batch chose.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

from qwen3next_jax.common.events import read_events

ROOT = pathlib.Path(__file__).parents[1]
SEEDS = (0, 1, 2)
SMALL = {
    "model.hidden_size": 64,
    "model.num_hidden_layers": 2,
    "model.full_attention_interval": 2,
    "model.num_experts": 16,
    "model.moe_intermediate_size": 64,
    "model.shared_expert_intermediate_size": 64,
    "model.moe.scoring_func": "sigmoid",
    "model.mtp_depth": 0,
    "train.batch_size": 8,
    "train.sequence_length": 128,
    "train.log_every": 1,
    "optimizer.warmup_steps": 20,
    "eval.sample_tokens": 0,
    "telemetry.diagnostics_every": 0,
}
METHODS = {
    "loss, weight 0.001": {"train.balance_loss_weight": 0.001},
    "loss, weight 0.01": {"train.balance_loss_weight": 0.01},
    "sign, rate 0.001": {"train.balance_loss_weight": 0, "model.moe.router_bias": True},
    "quantile": {
        "train.balance_loss_weight": 0,
        "model.moe.router_bias": True,
        "train.router_bias_update": "quantile",
    },
}


def run(method: str, seed: int, steps: int) -> dict:
    """Trains one model in a process of its own, and returns its figures."""
    name = method.replace(", ", "-").replace(" ", "-")
    folder = ROOT / "runs" / "balance" / str(steps) / f"{name},seed={seed}"
    settings = SMALL | METHODS[method]
    settings |= {
        "train.seed": seed,
        "train.steps": steps,
        "eval.every": steps,
        "checkpoint.every": steps,
    }
    command = [sys.executable, "train.py", "--config=configs/tiny.py", f"--workdir={folder}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    if not (folder / "report.html").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a") as log:
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode
        if code:
            raise SystemExit(f"exit code {code}: see {folder / 'log.txt'}")
    events = list(read_events(folder / "metrics.jsonl"))
    late = [e for e in events if e["event"] == "train" and e["step"] > steps // 2]
    figures = {
        "busiest": statistics.fmean(e["busiest_expert"] for e in late),
        "idle": statistics.fmean(e["idle_experts"] for e in late),
        "loss": [e["loss"] for e in events if e["event"] == "heldout"][-1],
    }
    print(json.dumps({"method": method, "seed": seed, "steps": steps} | figures), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    runs = {method: [] for method in METHODS}
    for seed in SEEDS:
        for method in METHODS:
            runs[method].append(run(method, seed, steps))
    print(
        f"\n| {steps} steps | busiest expert, by seed | mean | idle | held-out loss, by seed | mean |"
    )
    print("|---|---|---|---|---|---|")
    for method, figures in runs.items():
        busiest, idle, loss = ([f[name] for f in figures] for name in ("busiest", "idle", "loss"))
        print(
            f"| {method} | {' '.join(f'{x:.2f}' for x in busiest)} | "
            f"{statistics.fmean(busiest):.2f} | {statistics.fmean(idle):.1f} | "
            f"{' '.join(f'{x:.4f}' for x in loss)} | {statistics.fmean(loss):.4f} |"
        )


if __name__ == "__main__":
    main()
