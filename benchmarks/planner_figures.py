"""The tables of docs/planner.md, and the plot of step time against chips, from the plans beside it.

    python benchmarks/planner_figures.py [--compile=v6e_16x16,v5e_16x16 | --compile=all] [--scaling=docs/planner/scaling.png]

A plan is what `python -m qwen3next_jax.plan … --json=docs/planner/NAME.json` wrote; `--compile` makes those of POINTS that
are not there yet, one after another, a few minutes each on 2 idle cores.
"""

import argparse
import json
import pathlib
import subprocess
import sys

BATCH, LENGTH, MICRO = (f"--config.train.{name}=" for name in ("batch_size", "sequence_length", "gradient_accumulation"))
# name: (slice, mesh, settings over configs/qwen3_next_80b_a3b.py)
POINTS = {
    "v5p_8x8x8": ("v5p:8x8x8", "data=64,expert=8", ()),
    "v6e_16x16": ("v6e:16x16", "data=32,expert=8", ()),
    "tpu7x_4x4x4": ("tpu7x:4x4x4", "data=16,expert=8", ()),
    "v5e_16x16": ("v5e:16x16", "data=16,expert=8,tensor=2", (MICRO + "4",)),
    "v5p_8x8x8_long": ("v5p:8x8x8", "data=2,expert=8,context=32", (BATCH + "16", LENGTH + "262144")),
    "v5p_4x4x4": ("v5p:4x4x4", "data=8,expert=8", (BATCH + "64",)),
    "v5p_4x4x8": ("v5p:4x4x8", "data=16,expert=8", (BATCH + "128",)),
    "v5p_4x8x8": ("v5p:4x8x8", "data=32,expert=8", (BATCH + "256",)),
}
SCALING = ("v5p_4x4x4", "v5p_4x4x8", "v5p_4x8x8", "v5p_8x8x8")  # one row of 4096 tokens a chip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=pathlib.Path, default=pathlib.Path("docs/planner"))
    parser.add_argument("--scaling", type=pathlib.Path, help="PNG to draw from the plans of SCALING")
    parser.add_argument("--compile", default="", help="names of POINTS, or all")
    arguments = parser.parse_args()
    for name in POINTS if arguments.compile == "all" else filter(None, arguments.compile.split(",")):
        make(name, arguments.plans / f"{name}.json")
    plans = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.plans.glob("*.json"))}
    print("| slice | chips | mesh | tokens a step | remat × micro-batches | peak GiB | step s | tokens/s | MFU | waits for | compile s (CPU s), level unless default |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for p in plans.values():
        print("| " + " | ".join(row(p)) + " |")
    parts = next(p["memory_bytes"] for p in plans.values() if p["fits"])
    print("\n| GiB a device | " + " | ".join(parts) + " | usable |\n|---|---|---|---|---|---|---|---|---|")
    for p in plans.values():
        if p["fits"]:
            parts = " | ".join(f"{size / 2**30:.2f}" for size in p["memory_bytes"].values())
            print(f"| {p['topology']} {mesh(p)} | {parts} | {p['usable_hbm_bytes'] / 2**30:.2f} |")
    print("\n| slice | seconds waited for | bytes sent a device, GB |\n|---|---|---|")
    for p in plans.values():
        if p["fits"]:
            waits = ", ".join(f"{name} {seconds:.3f}" for name, seconds in p["bound_seconds"].items())
            sent = ", ".join(f"{'+'.join(n['axes'])} {n['collective']} {n['bytes'] / 1e9:.1f}" for n in p["network"][:4])
            print(f"| {p['topology']} {mesh(p)} | {waits} | {sent} |")
    if arguments.scaling:
        draw([plans[name] for name in SCALING if name in plans], arguments.scaling)


def make(name, path):
    """Compiles one point; exit code 1 is a plan, too: one that does not fit."""
    topology, axes, settings = POINTS[name]
    if not path.exists():
        command = [sys.executable, "-m", "qwen3next_jax.plan", "--config=configs/qwen3_next_80b_a3b.py", f"--topology={topology}",
                   f"--mesh={axes}", f"--json={path}", *settings]
        print(" ".join(command[1:]), file=sys.stderr)
        if subprocess.run(command, stdout=sys.stderr).returncode not in (0, 1):
            sys.exit(1)


def mesh(p):
    return " ".join(f"{axis}={n}" for axis, n in p["mesh"].items() if n > 1)


def row(p):
    first = [p["topology"], str(p["chips"]) + (f" ({p['devices']} devices)" if p["devices"] != p["chips"] else ""), mesh(p),
             f"{p['batch_size']} × {p['sequence_length']:,}", f"{p['remat']} × {p['gradient_accumulation']}"]
    level = "" if p["optimization_level"] == "default" else f", {p['optimization_level']}"
    last = f"{p['compile_seconds']:.0f} ({p['compile_cpu_seconds']:.0f}){level}"
    if not p["fits"]:
        return [*first, "does not fit: " + p["reason"], "", "", "", "", last]
    return [*first, f"{p['peak_hbm_bytes'] / 2**30:.1f} of {p['usable_hbm_bytes'] / 2**30:.1f}", f"{p['step_seconds']:.3f}",
            f"{p['tokens_per_second']:,.0f}", f"{p['mfu']:.1%}", p["binding"], last]


def draw(plans, path):
    """Seconds waited for, stacked, against chips: what limits the step, and how it grows."""
    from matplotlib.figure import Figure

    plans = sorted((p for p in plans if p["fits"]), key=lambda p: p["chips"])
    names = sorted({name for p in plans for name in p["bound_seconds"]}, key=lambda n: -plans[-1]["bound_seconds"].get(n, 0))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    labels = [f"{p['chips']}\n{mesh(p)}" for p in plans]
    bottom = [0.0] * len(plans)
    for name in names:
        seconds = [p["bound_seconds"].get(name, 0.0) for p in plans]
        axes.bar(labels, seconds, bottom=bottom, label=name)
        bottom = [a + b for a, b in zip(bottom, seconds)]
    for label, p, top in zip(labels, plans, bottom):
        axes.annotate(f"MFU {p['mfu']:.1%}", (label, top), ha="center", va="bottom")
    tokens = plans[0]["tokens_per_step"] // plans[0]["chips"]
    axes.set(xlabel="chips and mesh", ylabel="seconds a step", title=f"{plans[0]['config']} on {plans[0]['topology'].split(':')[0]}, {tokens:,} tokens a chip")
    axes.legend(title="waiting for", fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
