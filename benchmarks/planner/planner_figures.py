"""Prints the predicted steps of docs/planner: memory, what a step waits for and sends, MFU by each
cost model, and of which code a plan is.

    python benchmarks/planner/planner_figures.py [--compile=v5p_8x8x8,v6e_16x16_16k | --compile=all]

A plan is what `qwen3next plan … --json=docs/planner/NAME.json` writes. `--compile` makes those of
POINTS again, one after another: 10 to 35 minutes of a CPU each. `--programs=FOLDER` keeps the
compiled programs and their schedules there; a program that is there is priced again, not compiled.
"""

import argparse
import dataclasses
import json
import pathlib
import pickle
import subprocess
import sys
import tempfile

import jax

from benchmarks import harness
from qwen3next_jax.commands import run_flags
from qwen3next_jax.commands.python import load_config
from qwen3next_jax.common.version import code_version, git_output
from qwen3next_jax.config import MeshConfig
from qwen3next_jax.planner import schedule
from qwen3next_jax.planner.planning import make_plan, reestimate_plan
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.sharding.mesh import mesh_text

BATCH, LENGTH = "train.batch_size", "train.sequence_length"
DOTS = {"train.remat": "dots"}
RELEASED = "configs/qwen3_next_80b_a3b.py"
# name: (slice, mesh, config, settings)
POINTS = {
    "v5p_8x8x8_default": (
        "v5p:8x8x8",
        "data=64,expert=8",
        RELEASED,
        {"train.remat": "none"},
    ),
    "v5p_8x8x8_16k_default": (
        "v5p:8x8x8",
        "data=64,expert=8",
        RELEASED,
        {"train.remat": "dots keep=experts,convolution", BATCH: 2048},
    ),
    "v5p_8x8x8_long_default": (
        "v5p:8x8x8",
        "data=2,expert=8,context=32",
        RELEASED,
        DOTS | {BATCH: 16, LENGTH: 262_144},
    ),
    "v6e_16x16_default": ("v6e:16x16", "data=32,expert=8", RELEASED, {}),
    "v6e_16x16_16k_default": (
        "v6e:16x16",
        "data=32,expert=8",
        RELEASED,
        {"train.remat": "block keep=mixer", BATCH: 1024},
    ),
    "tpu7x_4x4x4_default": ("tpu7x:4x4x4", "data=16,expert=8", RELEASED, DOTS | {BATCH: 128}),
    "tpu7x_4x4x4_16k_default": ("tpu7x:4x4x4", "data=16,expert=8", RELEASED, DOTS | {BATCH: 512}),
    "tpu7x_4x4x4_64k_default": (
        "tpu7x:4x4x4",
        "data=128",
        RELEASED,
        {"train.remat": "keep=router", BATCH: 2048},
    ),
    "small_v6e_2x2_default": ("v6e:2x2", "data=4", "configs/small.py", {}),
}
# the folders whose code becomes the compiled program
PROGRAM = ("config", "kernels", "model", "ops", "sharding", "training")


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("--plans", type=pathlib.Path, default=pathlib.Path("docs/planner"))
    parser.add_argument("--compile", default="", help="names of POINTS, or all")
    parser.add_argument("--programs", type=pathlib.Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
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
    if arguments.one:
        return make(names[0], arguments.plans / f"{names[0]}.json", arguments.programs)
    for name in names:  # each in a process of its own, because the compiler can end its process
        command = [sys.executable, __file__, "--one", f"--compile={name}"]
        command += [f"--plans={arguments.plans}"]
        command += [f"--programs={arguments.programs}"] if arguments.programs else []
        if subprocess.run(command, stdout=sys.stderr).returncode:
            sys.exit(1)
    plans = [json.loads(path.read_text()) for path in sorted(arguments.plans.glob("*.json"))]
    harness.print_header(
        "slice",
        "mesh",
        "tokens a step",
        "remat × micro-batches",
        "peak GiB",
        "step s, MFU by `calibrated`",
        "`schedule`",
        "`roofline`",
        "waits for",
        "compile s (CPU s), GiB, level",
        "code",
    )
    for p in plans:
        harness.print_row(*row(p))
    fitting = [p for p in plans if p["fits"]]
    print()
    harness.print_header("GiB a device", *fitting[0]["memory_bytes"], "usable")
    for p in fitting:
        parts = [f"{size / 2**30:.2f}" for size in p["memory_bytes"].values()]
        harness.print_row(point(p), *parts, f"{p['usable_hbm_bytes'] / 2**30:.2f}")
    print()
    harness.print_header("slice", "seconds waited for", "bytes sent a device, GB")
    for p in fitting:
        waits = ", ".join(
            f"{name} {seconds:.3f}"
            for name, seconds in p["bound_seconds"].items()
            if seconds >= 5e-4
        )
        sent = ", ".join(
            f"{'+'.join(n['axes'])} {n['collective']} {n['bytes'] / 1e9:.1f}"
            for n in p["network"][:5]
        )
        harness.print_row(point(p), waits, sent)


def label(p):
    """Its slice; the model, too, if it is not the released one."""
    return p["topology"] + f" ({p['config']})" * (p["config"] != "qwen3_next_80b_a3b")


def point(p):
    return f"{label(p)} {mesh_text(p['mesh'])}, {p['batch_size']:,} × {p['sequence_length']:,}"


def make(name: str, path: pathlib.Path, programs: pathlib.Path | None):
    """Writes the plan of one point to `path`. If its program is in `programs`, made of the same
    configuration, prices it again and compiles nothing.
    """
    topology_name, axes, config_file, settings = POINTS[name]
    config = load_config(config_file, settings)
    mesh = MeshConfig(**run_flags.parse_mesh_flag(axes))
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, mesh=mesh))
    jax.config.update("jax_platforms", "cpu")
    # JAX can write programs for described devices to its compilation cache, but cannot read them.
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryDirectory(prefix="schedules-") as temporary:
        folder = (programs or pathlib.Path(temporary)) / name
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "plan.pickle"
        schedule.enable_schedule_dump(folder)  # before the next line, which loads libtpu
        topology = describe_topology(topology_name)
        plan, compiled_for, code = (
            pickle.loads(kept.read_bytes()) if kept.exists() else (None, None, "")
        )
        if compiled_for == config:
            plan = reestimate_plan(plan, config, topology, folder)
        else:
            plan, code = make_plan(config, topology, "", folder), code_version()
            without = dataclasses.replace(plan, topology=None)
            kept.write_bytes(pickle.dumps((without, config, code)))
    record = plan.as_dict()
    record["versions"]["code"] = code
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(
        name,
        plan.verdict,
        plan.failure_reason,
        {n: e.seconds for n, e in plan.estimate_by_cost_model.items()},
    )


def row(p):
    first = [
        label(p),
        mesh_text(p["mesh"]),
        f"{p['batch_size']:,} × {p['sequence_length']:,}",
        f"{p['remat']} × {p['gradient_accumulation']}",
    ]
    last = (
        f"{p['compile_seconds']:.0f} ({p['compile_cpu_seconds']:.0f}), "
        f"{p['compile_memory_bytes'] / 2**30:.1f} GiB, {p['optimization_level']}"
    )
    if not p["fits"]:
        reason = f"{'failed' if p['failed'] else 'does not fit'}: {p['reason']}"
        return [*first, reason, *[""] * 4, last, code(p)]
    return [
        *first,
        f"{p['peak_hbm_bytes'] / 2**30:.1f} of {p['usable_hbm_bytes'] / 2**30:.1f}",
        *(by_cost_model(p, name) for name in ("calibrated", "schedule", "roofline")),
        p["binding"],
        last,
        code(p),
    ]


def by_cost_model(p, name):
    """Seconds of a step and MFU."""
    estimate = p["estimates"][name]
    return f"{estimate['step_seconds']:.3f}, {estimate['mfu']:.1%}"


def code(p):
    """The commit of the code that made a plan, and how many commits have changed the code of the
    program since.
    """
    commit = p["versions"].get("code", "unknown")
    folders = [f"qwen3next_jax/{name}" for name in PROGRAM]
    since = git_output("rev-list", "--count", f"{commit.rstrip('+')}..HEAD", "--", *folders)
    if since is None:
        return f"{commit}, not in this history"
    return commit + (f", {since} commits of the program since" if since != "0" else "")


if __name__ == "__main__":
    main()
