"""Will it fit, and how fast should it run? Compiles the real train step for a TPU slice, on a
machine without one.

    qwen3next plan --config=configs/qwen3_next_80b_a3b.py --topology=v5p:8x8x8
    --mesh=data=64,expert=8
        [--search [--rows=512,1024]] [--quick] [--rules=new|today] [--json=plan.json]
    uv run --extra gpu qwen3next plan --config=configs/small.py --topology=h100:1x8
    --mesh=data=8

`--search` ranks meshes, rows a step, remat policies and micro-batches by arithmetic and compiles
the best five; axes that `--mesh` names stay as they are. `--json` also draws the memory by part
beside the file. How to read the figures, and what they leave out: docs/planner.md. Of GPUs
(hosts x GPUs of a host) there are memory, products and what is sent, and no times.
"""

import dataclasses
import importlib.util
import json
import pathlib

from absl import flags
from rich.console import Console
from rich.table import Table

from qwen3next_jax.commands import cli
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import Config, MeshConfig
from qwen3next_jax.runs import unread
from qwen3next_jax.training.stages import resolve_stages

COMPILED = 5  # of a search
DOES_NOT_FIT = 1  # exit code


def main() -> int:
    named = cli.read_mesh(_mesh.value)
    config = whole = _config()
    given = cli.given_settings()
    unread.check(config, given)
    stage = max(resolve_stages(config), key=lambda stage: (stage.sequence_length, stage.batch_size))
    if stage.name:
        print(f"planning for stage {stage.name}, the one of the longest rows")
    config = stage.alone(config)
    if _mesh.value is not None:
        config = with_mesh(config, named)
    if _rows.value and not _search.value:
        raise UserError(
            f"--rows={','.join(_rows.value)}: is for --search; without it: "
            "--config.train.batch_size=ROWS"
        )
    if not _topology.value:
        raise UserError("--topology is missing: expected a slice such as --topology=v5p:8x8x8")
    out = pathlib.Path(_json.value) if _json.value else None
    for path in (out, out.with_suffix(".png")) if out else ():
        if path.exists():
            raise UserError(f"--json={out}: {path} exists: choose another name, or remove it")
    if out and importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"--json={out}: the plot of memory beside it needs matplotlib, which is not "
            "installed: use `uv run --extra plan …`, or run `pip install libtpu matplotlib`"
        )
    import jax

    # nothing runs; an accelerator of this machine is left alone
    jax.config.update("jax_platforms", "cpu")
    unread.check(whole, given, find=unread.by_layers)
    from qwen3next_jax.planner.process import make_plan_apart
    from qwen3next_jax.planner.topology import describe

    level = "O1" if _quick.value else ""
    topology, console = describe(_topology.value), Console(highlight=False)
    if out:
        _check_writable(out)
    if _search.value and not topology.chip.torus:
        raise UserError(
            f"--search: nothing says how long a step lasts on {topology.name}: expected a TPU "
            "slice, or one --mesh"
        )
    if _search.value:
        plans = search(
            config,
            topology,
            level,
            console,
            {axis: size for axis, size in named.items() if size != -1},
            _read_rows(),
        )
    else:
        plans = [by_rules(make_plan_apart(config, topology, level))]
        show(plans[0], console)
    if out:
        found = [plan.as_dict() for plan in plans]
        out.write_text(json.dumps(found if _search.value else found[0], indent=1) + "\n")
        draw(plans, out.with_suffix(".png"))
    return 0 if any(plan.fits for plan in plans) else DOES_NOT_FIT


def by_rules(plan):
    """`plan` with the times that `--rules` asks for."""
    return dataclasses.replace(plan, rules=_rules.value) if flags.FLAGS.is_parsed() else plan


def _check_writable(out: pathlib.Path) -> None:
    """Before minutes of compiling, not after."""
    if out.suffix == ".png":
        raise UserError(
            f"--json={out}: the plot of memory would take its place: give another ending, such as "
            ".json"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch(exist_ok=False)
        out.unlink()
    except OSError as error:
        raise UserError(f"--json={out}: cannot be written ({error.strerror})") from error


def with_mesh(config: Config, sizes: dict[str, int]) -> Config:
    """`config` with a mesh of these axes, the others 1; `data` takes what is left unless it is
    named.
    """
    return dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, mesh=MeshConfig(**sizes))
    )


def _read_rows() -> tuple[int, ...]:
    try:
        rows = tuple(int(n) for n in _rows.value)
    except ValueError:
        rows = (0,)
    if any(n < 1 for n in rows):
        raise UserError(
            f"--rows={','.join(_rows.value)}: expected numbers of rows a step, such as "
            "--rows=512,1024"
        )
    return rows


def search(
    config: Config,
    topology,
    level: str,
    console: Console,
    fixed: dict[str, int],
    rows: tuple[int, ...] = (),
) -> list:
    """Compiles what the arithmetic ranks highest, fastest first in the result, and shows why the
    others are out.
    """
    from qwen3next_jax.planner.process import make_plan_apart
    from qwen3next_jax.planner.search import candidates
    from qwen3next_jax.sharding.mesh import mesh_text

    ranked = candidates(config, topology, fixed, rows)
    chosen = [c for c in ranked if not c.reason][:COMPILED] or [
        c for c in ranked if c.bytes < float("inf")
    ][:1]
    if not chosen:
        wanted = " with " + ", ".join(f"{axis}={n}" for axis, n in fixed.items()) if fixed else ""
        reason = f"; the first: {ranked[0].reason}" if ranked else ""
        raise UserError(
            f"no mesh of {len(topology.devices)} devices{wanted} divides this model and "
            f"batch{reason}"
        )
    plans = []
    for number, candidate in enumerate(chosen, 1):
        console.print(
            f"compiling {number} of {len(chosen)}: {candidate.label} (by arithmetic "
            f"{candidate.seconds:.3g} s)",
            markup=False,
        )
        plans.append(by_rules(make_plan_apart(candidate.config, topology, level)))
    plans.sort(key=lambda p: (not p.fits, p.failed, -p.tokens_per_second if p.fits else p.needs))
    table = Table(
        "mesh",
        "rows",
        "remat",
        "micro-batches",
        "peak GiB",
        "step s",
        "tokens/s",
        "MFU",
        "bound by",
        title=_title(plans[0]),
    )
    for p in plans:
        row = [
            mesh_text(p.mesh),
            f"{p.config.train.batch_size:,}",
            p.config.train.remat,
            str(p.config.train.gradient_accumulation),
        ]
        figures = (
            [
                f"{p.needs / 2**30:.1f}",
                f"{p.estimate.seconds:.4g}",
                f"{p.tokens_per_second:,.0f}",
                percent(p.mfu),
                p.binding,
            ]
            if p.fits
            else [p.reason, "", "", "", p.verdict]
        )
        table.add_row(*row, *figures)
    console.print(table)
    out = [c for c in ranked if c.reason]
    if out:
        table = Table(
            "not compiled",
            "why (by arithmetic)",
            title=f"{len(out)} of {len(ranked)} candidates do not fit, the nearest first",
        )
        for c in out[:10]:
            table.add_row(c.label, c.reason)
        console.print(table)
    return plans


def percent(mfu: float | None) -> str:
    return "unknown" if mfu is None else f"{mfu:.1%}"


def show(plan, console: Console) -> None:
    """The tables of one plan."""
    from qwen3next_jax.planner.planning import traffic
    from qwen3next_jax.sharding.compiler_options import options_text
    from qwen3next_jax.sharding.mesh import mesh_text

    per = "device" if plan.topology.chip.devices_per_chip > 1 else "chip"
    if not plan.fits:
        console.print(
            f"{_title(plan)}\n{mesh_text(plan.mesh)} {plan.verdict}: {plan.reason} (compile "
            f"{plan.compile_seconds:.0f} s)",
            markup=False,
        )
        return
    usable = plan.usable_hbm
    console.print(_title(plan), markup=False)
    table = Table(f"HBM per {per}", "GiB")
    for name, size in plan.memory._asdict().items():
        table.add_row(
            name,
            f"{size / 2**30:.4g}"
            + (f" of {usable / 2**30:.4g} ({size / usable:.0%})" if name == "peak" else ""),
        )
    console.print(table)
    if plan.collectives:
        table = Table("mesh axes", "collective", "times", f"GB sent per {per}")
        for (axes, kind), (size, count) in traffic(plan.collectives).items():
            table.add_row("+".join(axes), kind, f"{count:,.0f}", f"{size / 1e9:.4g}")
        console.print(table)
    if not plan.estimates:
        console.print(
            f"{mesh_text(plan.mesh)}: fits, {plan.memory.peak / 2**30:.1f} of "
            f"{usable / 2**30:.1f} GiB. Products: "
            f"{plan.model_flops / 1e12:.4g} TFLOP of the model per {per}, "
            f"{plan.gpu_flops / 1e12:.4g} executed. All in XLA's "
            "forms: kernels are tried on the GPU itself. Nothing says how long a step lasts. "
            f"Lowered in {plan.lower_seconds:.0f} s, compiled in {plan.compile_seconds:.0f} s",
            markup=False,
        )
        return
    e = plan.estimate
    table = Table("waiting for", "s", "share")
    for name, seconds in e.bound.items():
        table.add_row(name, f"{seconds:.4g}", f"{seconds / e.seconds:.0%}")
    console.print(table)
    table = Table("part", "ms", "GB through HBM", "TFLOP")
    for name, part in plan.estimate.parts.items():
        if part.seconds >= 0.01 * e.seconds:
            table.add_row(
                name,
                f"{1e3 * part.seconds:,.1f}",
                f"{part.hbm_bytes / 1e9:,.1f}",
                f"{part.flops / 1e12:,.2f}",
            )
    console.print(table)
    console.print(options_text(plan.compiler_options), markup=False)
    if plan.optimization_level != "default":
        console.print(
            f"compiled at optimization level {plan.optimization_level}: at the default level, "
            "which training uses, times differ",
            markup=False,
        )
    console.print(
        f"{mesh_text(plan.mesh)}: fits, {plan.memory.peak / 2**30:.1f} of {usable / 2**30:.1f} "
        f"GiB. Step {e.seconds:.4g} s, "
        f"bound by {plan.binding}; {plan.tokens_per_second:,.0f} tokens/s, MFU "
        f"{percent(plan.mfu)} by the rules of --rules={plan.rules}"
        + "".join(
            f", {percent(plan.mfu_in(other.seconds))} ({other.seconds:.4g} s) by {name}"
            for name, other in plan.estimates.items()
            if name != plan.rules
        ),
        markup=False,
    )
    ideal = plan.ideal
    needs = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in ideal.bound.items())
    console.print(
        f"ideal: max({needs}) = {ideal.seconds:.3g} s, MFU {percent(plan.mfu_in(ideal.seconds))}; "
        "with 75 % of the peak in dense "
        f"products and 60 % in grouped ones {ideal.realistic:.3g} s, "
        f"{percent(plan.mfu_in(ideal.realistic))}. This step takes "
        f"{e.seconds / ideal.seconds:.2f} times the first",
        markup=False,
    )
    console.print(
        f"{plan.model_flops / 1e12:.4g} TFLOP of the model per {per}, {e.flops / 1e12:.4g} "
        "executed, "
        f"{e.hbm_bytes / 1e9:.4g} GB through HBM; lowered in {plan.lower_seconds:.0f} s, compiled "
        f"in {plan.compile_seconds:.0f} s ({plan.compile_cpu_seconds:.0f} s of CPU), "
        f"{plan.compile_bytes / 2**30:.1f} GiB of memory taken",
        markup=False,
    )
    if plan.unstated_loops:
        console.print(
            "counted once, as the program does not say how often they run: "
            f"{len(plan.unstated_loops)} loops, such as "
            f"{plan.unstated_loops[0]}. The experts' rounds are one under even load.",
            markup=False,
        )
    if plan.unknown_kernels:
        console.print(
            f"no MFU, as nothing says what {len(plan.unknown_kernels)} kernels cost, such as "
            f"{plan.unknown_kernels[0]}: the step is longer than this",
            markup=False,
        )


def draw(plans: list, path: pathlib.Path) -> None:
    """A bar of memory by part for every plan that fits, against what the chip has."""
    plans = [plan for plan in plans if plan.fits]
    if not plans:
        return
    from matplotlib.figure import Figure

    from qwen3next_jax.sharding.mesh import mesh_text

    figure = Figure(figsize=(9, 1.5 + 0.5 * len(plans)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(plans)
    labels = [
        f"{mesh_text(p.mesh)}\nremat {p.config.train.remat} × "
        f"{p.config.train.gradient_accumulation}"
        for p in plans
    ]
    for part in plans[0].memory._fields[:-1]:
        sizes = [getattr(p.memory, part) / 2**30 for p in plans]
        axes.barh(labels, sizes, left=left, label=part)
        left = [a + b for a, b in zip(left, sizes)]
    axes.axvline(plans[0].usable_hbm / 2**30, color="black", linestyle="--", label="usable HBM")
    axes.set(xlabel="GiB per device", title=_title(plans[0]))
    figure.legend(ncols=7, fontsize="small", loc="outside lower center")
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def _title(plan) -> str:
    t, train = plan.topology, plan.config.train
    devices = f"{t.chips} chips" + (
        f", {len(t.devices)} devices" if len(t.devices) != t.chips else ""
    )
    return (
        f"{plan.config.name} on {t.name} ({devices}), {train.batch_size} × "
        f"{train.sequence_length} tokens"
    )


_config = cli.define_config_flag()
_topology = flags.DEFINE_string(
    "topology", None, "TPU slice, such as v5p:8x8x8, or hosts x GPUs: h100:16x8"
)
_mesh = cli.define_mesh_flag()
_search = flags.DEFINE_bool(
    "search", False, "rank meshes, remat policies and micro-batches, compile the best five"
)
_rows = flags.DEFINE_list(
    "rows",
    [],
    "rows a step among which --search chooses the fastest for each token; none: the "
    "configuration's",
)
_quick = flags.DEFINE_bool(
    "quick",
    False,
    "compile at optimization level O1, in less time: for memory and network; times differ from "
    "those of training's level",
)
_rules = flags.DEFINE_enum(
    "rules",
    "new",
    ("new", "today"),
    "where the compiler's schedule counts: in every instruction, or in kernels only",
)
_json = flags.DEFINE_string(
    "json", None, "file to write; the plot of memory goes beside it as .png"
)
