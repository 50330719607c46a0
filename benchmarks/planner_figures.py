"""Prints the tables of docs/notes/2026-11-23-planner.md and of remat in
docs/notes/2026-11-26-many-devices.md, and plots step time against chips, from the plans of
docs/planner.

    python benchmarks/planner_figures.py [--compile=v6e_16x16_default,v5e_16x16 | --compile=all]
    [--scaling=docs/planner/scaling.png]

A plan is what `qwen3next plan … --json=docs/planner/NAME.json` wrote; `--compile`
makes those of POINTS that are not there yet, one after another: on 2 idle cores a few minutes
each, a quarter of an hour at the compiler's default level.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from qwen3next_jax.sharding.mesh import mesh_text

BATCH, LENGTH, QUICK = "--config.train.batch_size=", "--config.train.sequence_length=", "--quick"
DOTS = "--config.train.remat=dots"
# Gated DeltaNet layers only: one kind to compile.
EIGHT_LAYERS = (
    "--config.model.num_hidden_layers=8",
    "--config.model.full_attention_interval=16",
    "--config.model.mtp_depth=0",
    BATCH + "8",
)
REMAT = ("none", "dots", "block", "offload")
# name: (slice, mesh, flags beside --config=configs/qwen3_next_80b_a3b.py)
POINTS = {
    "v5p_8x8x8": ("v5p:8x8x8", "data=64,expert=8", (QUICK, DOTS)),
    "v5p_8x8x8_default": ("v5p:8x8x8", "data=64,expert=8", (DOTS,)),
    "v5p_8x8x8_16k": ("v5p:8x8x8", "data=64,expert=8", (QUICK, DOTS, BATCH + "2048")),
    "v5p_8x8x8_16k_default": ("v5p:8x8x8", "data=64,expert=8", (DOTS, BATCH + "2048")),
    "v6e_16x16_default": ("v6e:16x16", "data=32,expert=8", ()),
    "v6e_16x16_16k_default": ("v6e:16x16", "data=32,expert=8", (BATCH + "1024",)),
    "small_v6e_2x2": ("v6e:2x2", "data=4", (QUICK, "--config=configs/small.py")),
    "small_v6e_2x2_default": ("v6e:2x2", "data=4", ("--config=configs/small.py",)),
    "tpu7x_4x4x4_default": ("tpu7x:4x4x4", "data=16,expert=8", (DOTS, BATCH + "128")),
    "tpu7x_4x4x4_16k_default": ("tpu7x:4x4x4", "data=16,expert=8", (DOTS, BATCH + "512")),
    "v5e_16x16": (
        "v5e:16x16",
        "data=32,expert=8",
        (QUICK, BATCH + "256", "--config.train.remat=offload"),
    ),
    "v5p_8x8x8_long_default": (
        "v5p:8x8x8",
        "data=2,expert=8,context=32",
        (DOTS, BATCH + "16", LENGTH + "262144"),
    ),
    "v5p_4x4x4": ("v5p:4x4x4", "data=8,expert=8", (QUICK, BATCH + "64")),
    "v5p_4x4x8": ("v5p:4x4x8", "data=16,expert=8", (QUICK, BATCH + "128")),
    "v5p_4x8x8": ("v5p:4x8x8", "data=32,expert=8", (QUICK, BATCH + "256")),
    **{
        f"remat_{policy}": (
            "v5p:2x2x2",
            "data=1,expert=8",
            (QUICK, *EIGHT_LAYERS, f"--config.train.remat={policy}"),
        )
        for policy in REMAT
    },
}
SCALING = ("v5p_4x4x4", "v5p_4x4x8", "v5p_4x8x8", "v5p_8x8x8")  # one row of 4096 tokens a chip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=pathlib.Path, default=pathlib.Path("docs/planner"))
    parser.add_argument(
        "--scaling", type=pathlib.Path, help="PNG to draw from the plans of SCALING"
    )
    parser.add_argument("--compile", default="", help="names of POINTS, or all")
    arguments = parser.parse_args()
    names = (
        list(POINTS)
        if arguments.compile == "all"
        else [name for name in arguments.compile.split(",") if name]
    )
    unknown = [name for name in names if name not in POINTS]
    if unknown:
        parser.error(
            f"--compile={arguments.compile}: no point {', '.join(unknown)}; known: all, "
            f"{', '.join(POINTS)}"
        )
    for name in names:
        make(name, arguments.plans / f"{name}.json")
    plans = {
        path.stem: json.loads(path.read_text()) for path in sorted(arguments.plans.glob("*.json"))
    }
    remat = [plans.pop(f"remat_{policy}") for policy in REMAT if f"remat_{policy}" in plans]
    print(
        "| slice | chips | mesh | tokens a step | remat × micro-batches | peak GiB | step s | "
        "tokens/s | MFU `schedule`, `roofline`; of the ideal | waits for | "
        "compile s (CPU s), GiB, level |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for p in plans.values():
        print("| " + " | ".join(row(p)) + " |")
    print_parts(plans.values(), point)
    print("\n| slice | seconds waited for | bytes sent a device, GB |\n|---|---|---|")
    for p in filter(fits, plans.values()):
        waits = ", ".join(
            f"{name} {seconds:.3f}"
            for name, seconds in p["bound_seconds"].items()
            if seconds >= 5e-4
        )
        sent = ", ".join(
            f"{'+'.join(n['axes'])} {n['collective']} {n['bytes'] / 1e9:.1f}"
            for n in p["network"][:5]
        )
        print(f"| {point(p)} | {waits} | {sent} |")
    print_parts(remat, lambda p: p["remat"])
    print(
        "\n| remat | TFLOP executed, of the model | GB through HBM | step s | MFU "
        "|\n|---|---|---|---|---|"
    )
    for p in remat:
        figures = (
            f"{p['executed_flops'] / 1e12:.1f}, {p['model_flops'] / 1e12:.1f} | "
            f"{p['hbm_bytes'] / 1e9:.0f} | {p['step_seconds']:.3f} | {p['mfu']:.1%}"
            if p["fits"]
            else f"{verdict(p)}: {p['reason']} | | |"
        )
        print(f"| {p['remat']} | {figures} |")
    if arguments.scaling:
        draw([plans[name] for name in SCALING if name in plans], arguments.scaling)


def fits(p):
    return p["fits"]


def verdict(p):
    return "failed" if p["failed"] else "does not fit"


def label(p):
    """Its slice; the model, too, if it is not the released one."""
    return p["topology"] + f" ({p['config']})" * (p["config"] != "qwen3_next_80b_a3b")


def point(p):
    return f"{label(p)} {mesh_text(p['mesh'])}, {p['batch_size']:,} rows, {p['optimization_level']}"


def print_parts(plans, label):
    """Memory by part."""
    plans = list(filter(fits, plans))
    if plans:
        print(
            "\n| GiB a device | "
            + " | ".join(plans[0]["memory_bytes"])
            + " | usable |\n|---|---|---|---|---|---|---|---|---|"
        )
    for p in plans:
        parts = " | ".join(f"{size / 2**30:.2f}" for size in p["memory_bytes"].values())
        print(f"| {label(p)} | {parts} | {p['usable_hbm_bytes'] / 2**30:.2f} |")


def make(name, path):
    """Compiles one point; exit code 1 is a plan, too: one that does not fit."""
    topology, axes, given = POINTS[name]
    if not path.exists():
        command = [
            sys.executable,
            "-m",
            "qwen3next_jax",
            "plan",
            "--config=configs/qwen3_next_80b_a3b.py",
            f"--topology={topology}",
            f"--mesh={axes}",
            f"--json={path}",
            *given,
        ]
        print(" ".join(command[1:]), file=sys.stderr)
        if subprocess.run(command, stdout=sys.stderr).returncode not in (0, 1):
            sys.exit(1)


def row(p):
    first = [
        label(p),
        str(p["chips"]) + (f" ({p['devices']} devices)" if p["devices"] != p["chips"] else ""),
        mesh_text(p["mesh"]),
        f"{p['batch_size']:,} × {p['sequence_length']:,}",
        f"{p['remat']} × {p['gradient_accumulation']}",
    ]
    memory = f", {p['compile_memory_bytes'] / 2**30:.1f} GiB" if p["compile_memory_bytes"] else ""
    last = (
        f"{p['compile_seconds']:.0f} ({p['compile_cpu_seconds']:.0f}){memory}, "
        f"{p['optimization_level']}"
    )
    if not p["fits"]:
        return [*first, f"{verdict(p)}: {p['reason']}", "", "", "", "", last]
    return [
        *first,
        f"{p['peak_hbm_bytes'] / 2**30:.1f} of {p['usable_hbm_bytes'] / 2**30:.1f}",
        f"{p['step_seconds']:.3f}",
        f"{p['tokens_per_second']:,.0f}",
        mfu(p),
        p["binding"],
        last,
    ]


def mfu(p):
    """MFU by both cost models, and the share of the step that the ideal takes. A plan that was
    written before there were two has its kernels' products alone.
    """
    if "ideal" not in p:
        return f"({p['mfu']:.1%})"
    roofline = p["mfu_roofline"] if "mfu_roofline" in p else p["mfu_today"]
    return f"{p['mfu']:.1%}, {roofline:.1%}; {p['ideal']['seconds'] / p['step_seconds']:.0%}"


def limit(p):
    """The collective that the step waits for longest: of the axes with the longest wait the one
    that sends most.
    """
    waits = {
        name.removeprefix("network "): seconds
        for name, seconds in p["bound_seconds"].items()
        if name.startswith("network")
    }
    axes = max(waits, key=waits.get)
    kind = max((n for n in p["network"] if "+".join(n["axes"]) == axes), key=lambda n: n["bytes"])[
        "collective"
    ]
    return f"{axes} {kind}"


def draw(plans, path):
    """Seconds waited for, stacked, against chips: what limits the step, and how it grows."""
    from matplotlib.figure import Figure

    plans = sorted(filter(fits, plans), key=lambda p: p["chips"])
    names = [
        name for name in plans[-1]["bound_seconds"] if plans[-1]["bound_seconds"][name] >= 1e-3
    ]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    labels = [f"{p['chips']} chips\n{mesh_text(p['mesh'])}" for p in plans]
    bottom = [0.0] * len(plans)
    for name in names:
        seconds = [p["bound_seconds"].get(name, 0.0) for p in plans]
        axes.bar(labels, seconds, bottom=bottom, label=name, width=0.6)
        bottom = [a + b for a, b in zip(bottom, seconds)]
    for label, p, top in zip(labels, plans, bottom):
        axes.annotate(
            f"MFU {p['mfu']:.1%}\n{limit(p)}",
            (label, top),
            ha="center",
            va="bottom",
            fontsize="small",
        )
    tokens = plans[0]["tokens_per_step"] // plans[0]["chips"]
    axes.set(ylabel="seconds a step, by what is waited for", ylim=(0, 1.15 * max(bottom)))
    axes.set_title(
        f"{plans[0]['config']} on {plans[0]['topology'].split(':')[0]}, {tokens:,} tokens a chip\n"
        "above the bars: MFU, and the collective waited for longest",
        fontsize="medium",
    )
    figure.legend(ncols=len(names), fontsize="small", loc="outside lower center")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
