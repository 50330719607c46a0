"""Predicts whether a configuration fits on a TPU slice and how fast it trains there. The command
compiles the real train step for the slice, on a machine that needs no TPU.

    qwen3next plan --config=configs/qwen3_next_80b_a3b.py --topology=v5p:8x8x8
    --mesh=data=64,expert=8
        [--search [--rows=512,1024]] [--quick] [--cost_model=schedule|roofline|calibrated]
        [--json=plan.json]
    uv run --extra plan-gpu qwen3next plan --config=configs/small.py --topology=h100:1x8
    --mesh=data=8

`--search` ranks candidates by their estimated time per token. A candidate is a combination of a
mesh, a batch size (from `--rows`), a remat policy and a number of micro-batches, and has the axis
sizes that `--mesh` names; -1 leaves an axis free. The search compiles up to five of the candidates
that should fit into memory: the best one for each of expert=1, 2, 4 and 8 (with tensor=1), and then
the best remaining candidate. If all candidates are estimated not to fit, the search compiles the
candidate that needs the least memory. `--json` also draws the memory of each plan into a .png of
the same name. docs/planner.md explains the figures. For GPUs (hosts x GPUs per host) the command
predicts memory, FLOPs and network traffic, but no times.
"""

import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Iterator, Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from qwen3next_jax.commands import config_flags, interrupts, run_flags
from qwen3next_jax.commands.console import make_console, show_while_waiting
from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.installation import how_to_install
from qwen3next_jax.config import Config, MeshConfig, ParallelConfig
from qwen3next_jax.training import unused_settings
from qwen3next_jax.training.stages import ResolvedStage, resolve_stages

COMPILED = 5  # number of candidates that a search compiles
LARGEST_SKEW = 1.5
DOES_NOT_FIT = 1  # the exit code if no plan fits


def main() -> int:
    mesh = run_flags.parse_mesh_flag(_mesh.value)
    whole, given = _config(), config_flags.settings_given_by_user()
    unused_settings.check_effect_and_targets(whole, given)
    config = _stage_with_longest_rows(resolve_stages(whole)).as_single_stage(whole)
    if _mesh.value is not None:
        config = dataclasses.replace(config, parallel=with_mesh(config.parallel, mesh))
    _check_flags(config)
    interrupts.interrupt_at_sigterm()  # the compiler runs in another process
    out = pathlib.Path(_json.value) if _json.value else None
    if out:
        _check_plan_files_absent(out)
    import jax

    jax.config.update("jax_platforms", "cpu")  # plans use no accelerator of this machine
    unused_settings.check_effect_and_targets(
        whole, given, find=unused_settings.find_unused_by_mixers_and_evals
    )
    from qwen3next_jax.planner.subprocess_plan import make_plan_in_subprocess
    from qwen3next_jax.planner.topology import describe_topology

    level = "O1" if _quick.value else ""
    # Only "calibrated" counts an uneven load.
    cost_model = _cost_model.value or ("calibrated" if _skew.value else "schedule")
    topology, console = describe_topology(_topology.value, _slices.value), make_console()
    if out:
        _check_json_writable(out)
    if not topology.chip.torus_dimensions:
        _check_gpu_flags(topology.name)
    if _search.value:
        fixed = {axis: size for axis, size in mesh.items() if size != -1}
        plans = search_and_compile(
            config, topology, level, console, fixed, _batch_sizes_of_flag(), cost_model, _skew.value
        )
    else:
        if topology.chip.torus_dimensions and _mesh.value is None:
            console.print(_no_mesh_sentence(config, topology), markup=False)
        with show_while_waiting(_compiling_text(config, topology)):
            plan = make_plan_in_subprocess(config, topology, level, _skew.value)
        plans = [dataclasses.replace(plan, cost_model=cost_model)]
        print_plan(plans[0], console)
    if out:
        records = [plan.as_dict() for plan in plans]
        out.write_text(json.dumps(records if _search.value else records[0], indent=1) + "\n")
        draw_memory_bars(plans, out.with_suffix(".png"))
    return 0 if any(plan.fits for plan in plans) else DOES_NOT_FIT


def _no_mesh_sentence(config: Config, topology) -> str:
    """Returns the sentence that a command without `--mesh` prints. The sentence names the mesh that
    is planned, which is the mesh of the configuration, and the candidate that a search would rank
    first.
    """
    from qwen3next_jax.planner.search import rank_candidates
    from qwen3next_jax.sharding.mesh import mesh_text

    mesh = mesh_text(config.parallel.mesh.axis_sizes(len(topology.devices), topology.slices))
    ranked = rank_candidates(
        config.model,
        config.train,
        topology,
        parallel=config.parallel,
        optimizer=config.optimizer,
    )
    fitting = [candidate for candidate in ranked if not candidate.unusable_reason]
    found = "finds none that fits"
    if fitting:
        found = (
            f"would take {fitting[0].description} (by arithmetic {fitting[0].step_seconds:.3g} s)"
        )
    return f"no --mesh: planning {mesh}, the configuration's; --search {found}"


def _compiling_text(config: Config, topology) -> str:
    """Returns the text that the command shows while it compiles."""
    from qwen3next_jax.sharding.mesh import mesh_text

    mesh = mesh_text(config.parallel.mesh.axis_sizes(len(topology.devices), topology.slices))
    return (
        f"compiling a step of {config.name} for {topology.title}, {mesh}: minutes for a large model"
    )


def _stage_with_longest_rows(stages: Sequence[ResolvedStage]) -> ResolvedStage:
    """Returns the stage with the longest rows; of several such stages, the one with the largest
    batch. Prints the name of the stage.
    """
    stage = max(stages, key=lambda stage: (stage.sequence_length, stage.batch_size))
    if stage.name:
        print(f"planning for stage {stage.name}, the one with the longest rows")
    return stage


def _check_flags(config: Config) -> None:
    if not 0 <= _skew.value <= LARGEST_SKEW:
        raise UserError(
            f"--skew={_skew.value:g}: expected a number from 0 (a balanced router) to "
            f"{LARGEST_SKEW:g}: beyond, more and more routers would send an expert more choices "
            "than there are tokens"
        )
    if _skew.value and not config.model.has_experts:
        raise UserError(f"--skew={_skew.value:g}: the model of {config.name} has no experts")
    if _rows.value and not _search.value:
        raise UserError(
            f"--rows={','.join(_rows.value)}: is for --search; without it: "
            "--config.train.batch_size=ROWS"
        )
    if not _topology.value:
        raise UserError("--topology is missing: expected a slice such as --topology=v5p:8x8x8")


def _check_gpu_flags(topology: str) -> None:
    """Raises UserError if a flag is given that a plan for GPUs cannot use."""
    if _skew.value:
        raise UserError(
            f"--skew={_skew.value:g}: there is no prediction of time for {topology}: expected a "
            "TPU slice"
        )
    if _search.value:
        raise UserError(
            f"--search: there is no prediction of time for {topology}: expected a TPU slice, or "
            "one --mesh"
        )
    if _quick.value:
        raise UserError(
            f"--quick: the compiler for {topology} does more at level O1, not less, and it can "
            "abort there: leave --quick out (plans for GPUs skip the slow passes anyway)"
        )


def _check_plan_files_absent(out: pathlib.Path) -> None:
    """Raises UserError if a file that `--json` would write exists, or matplotlib is missing."""
    for path in (out, out.with_suffix(".png")):
        if path.exists():
            raise UserError(f"--json={out}: {path} exists: choose another name, or remove it")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"--json={out}: the plot of memory beside it needs matplotlib, which is not "
            f"installed: {how_to_install('plan')}"
        )


def _check_json_writable(out: pathlib.Path) -> None:
    """Raises UserError if the file of `--json` cannot be written. The command calls this function
    before it compiles the step, which takes minutes.
    """
    if out.suffix == ".png":
        raise UserError(
            f"--json={out}: the plot of memory would replace it: give another ending, such as .json"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch(exist_ok=False)
        out.unlink()
    except OSError as error:
        raise UserError(f"--json={out}: cannot be written ({error.strerror})") from error


def with_mesh(parallel: ParallelConfig, sizes: dict[str, int]) -> ParallelConfig:
    """Returns `parallel` with a mesh whose axes have the given `sizes`. Axes that are not named
    have their default sizes: `data` takes the remaining devices, `slice` has one group for each TPU
    slice, and every other axis has size 1.
    """
    return dataclasses.replace(parallel, mesh=MeshConfig(**sizes))


def _batch_sizes_of_flag() -> tuple[int, ...]:
    """Returns the batch sizes in `--rows`. Raises UserError if a batch size is not a positive
    number.
    """
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


def search_and_compile(
    config: Config,
    topology,
    optimization_level: str,
    console: Console,
    fixed: dict[str, int],
    batch_sizes: tuple[int, ...] = (),
    cost_model: str = "schedule",
    skew: float = 0.0,
) -> list:
    """Ranks candidates for the mesh, batch size, remat policy and micro-batches by estimated time,
    and compiles the best. Prints a table of the compiled plans, and a table of candidates that do
    not fit.

    Args:
      config: the configuration to plan for.
      topology: the slice, as `planner.topology.describe_topology` returns it.
      optimization_level: the compiler's optimization level; "" for its default.
      console: the console that shows the tables.
      fixed: axis of the mesh → its size in all candidates.
      batch_sizes: the batch sizes of the candidates; () means the batch size of `config`.
      cost_model: the value of --cost_model, the cost model whose times the tables show.
      skew: the value of --skew.

    Returns:
      The compiled plans. Plans that fit into memory come first, in the order of their seconds per
      token by the cost model "calibrated".

    Raises:
      UserError: no mesh divides the dimensions of the model and the batch.
    """
    from qwen3next_jax.planner.search import candidates_to_compile, rank_candidates
    from qwen3next_jax.planner.subprocess_plan import make_plan_in_subprocess

    ranked = rank_candidates(
        config.model, config.train, topology, fixed, batch_sizes, config.parallel, config.optimizer
    )
    chosen = candidates_to_compile([c for c in ranked if not c.unusable_reason], COMPILED)
    if not chosen:  # the estimate is rough, so the smallest candidate may fit anyway
        chosen = [c for c in ranked if c.hbm_bytes < float("inf")][:1]
    if not chosen:
        fixed_text = (
            " with " + ", ".join(f"{axis}={n}" for axis, n in fixed.items()) if fixed else ""
        )
        reason = f"; the first: {ranked[0].unusable_reason}" if ranked else ""
        raise UserError(
            f"no mesh of {len(topology.devices)} devices{fixed_text} divides this model and "
            f"batch{reason}"
        )
    plans = []
    for number, candidate in enumerate(chosen, 1):
        text = (
            f"compiling {number} of {len(chosen)}: {candidate.description} (by arithmetic "
            f"{candidate.step_seconds:.3g} s)"
        )
        parallel = dataclasses.replace(config.parallel, mesh=candidate.mesh)
        candidate_config = dataclasses.replace(config, train=candidate.train, parallel=parallel)
        with show_while_waiting(text):
            plan = make_plan_in_subprocess(candidate_config, topology, optimization_level, skew)
        plans.append(dataclasses.replace(plan, cost_model=cost_model))
    plans.sort(
        key=lambda p: (
            not p.fits,
            p.failed,
            p.estimate_by_cost_model["calibrated"].seconds / p.tokens_per_step
            if p.fits
            else p.needed_hbm_bytes,
        )
    )
    _print_search_tables(plans, ranked, console)
    return plans


def _print_search_tables(plans: list, ranked: list, console: Console) -> None:
    """Prints the tables of a search: the compiled plans, and the candidates that do not fit."""
    from qwen3next_jax.sharding.mesh import mesh_text

    head = ("mesh", "rows", "remat", "micro-batches", "peak GiB", "step s by calibrated")
    head += (f"by {plans[0].cost_model}", "tokens/s", "MFU", "bound by")
    table = Table(*head, title=_plan_title(plans[0]))
    for p in plans:
        train = p.train
        figures = [p.failure_reason, "", "", "", "", p.verdict]
        if p.estimate_by_cost_model:
            figures = [
                f"{p.needed_hbm_bytes / 2**30:.1f}" if p.fits else p.failure_reason,
                f"{p.estimate_by_cost_model['calibrated'].seconds:.4g}",
                f"{p.estimate.seconds:.4g}",
                f"{p.tokens_per_second:,.0f}",
                percent_text(p.mfu),
                p.slowest_resource,
            ]
        table.add_row(
            mesh_text(p.mesh),
            f"{train.batch_size:,}",
            train.remat,
            str(train.gradient_accumulation),
            *figures,
        )
    console.print(table)
    excluded = [c for c in ranked if c.unusable_reason]
    if excluded:
        title = f"{len(excluded)} of {len(ranked)} candidates do not fit, the nearest first"
        table = Table("not compiled", "why (by arithmetic)", title=title)
        for c in excluded[:10]:
            table.add_row(c.description, c.unusable_reason)
        console.print(table)


def percent_text(share: float | None) -> str:
    """Formats a share as a percentage; "unknown" for None."""
    return "unknown" if share is None else f"{share:.1%}"


def print_plan(plan, console: Console) -> None:
    """Prints the tables and sentences of one plan."""
    from qwen3next_jax.sharding.mesh import mesh_text

    if not plan.memory:
        console.print(
            f"{mesh_text(plan.mesh)} {plan.verdict}: {plan.failure_reason} (compile "
            f"{plan.compile_seconds:.0f} s)",
            markup=False,
        )
        console.print(_plan_title(plan), markup=False)
        return
    if plan.estimate_by_cost_model:
        console.print(_fit_time_and_mfu_text(plan), markup=False)
    console.print(_plan_title(plan), markup=False)
    device = "device" if plan.topology.chip.devices_per_chip > 1 else "chip"
    console.print(_memory_table(plan, device))
    if plan.collectives:
        console.print(_network_traffic_table(plan, device))
    if not plan.estimate_by_cost_model:
        console.print(_gpu_summary(plan, device), markup=False)
        return
    console.print(_waiting_times_table(plan))
    console.print(_model_parts_table(plan))
    for line in _time_estimate_sentences(plan, device):
        console.print(line, markup=False)


def _memory_table(plan, device: str) -> Table:
    """Returns a table of the memory that one device needs for parameters, activations and so on.
    `device`: the word for a device, "chip" or "device".
    """
    usable = plan.usable_hbm
    table = Table(f"HBM per {device}", "GiB")
    for name, size in plan.memory._asdict().items():
        text = f"{size / 2**30:.4g}"
        if name == "peak":
            text += f" of {usable / 2**30:.4g} ({size / usable:.0%})"
        table.add_row(name, text)
    return table


def _network_traffic_table(plan, device: str) -> Table:
    from qwen3next_jax.planner.planning import traffic_by_axes

    table = Table("mesh axes", "collective", "times", f"GB sent per {device}")
    for (axes, kind), (size, count) in traffic_by_axes(plan.collectives).items():
        table.add_row("+".join(axes), kind, f"{count:,.0f}", f"{size / 1e9:.4g}")
    return table


def _waiting_times_table(plan) -> Table:
    """Returns a table of the resources for which the step waits, such as HBM, with the seconds that
    the step waits for each resource, and the share of these seconds in the time of the step.
    """
    estimate = plan.estimate
    table = Table("waiting for", "s", "share")
    for name, seconds in estimate.seconds_by_resource.items():
        table.add_row(name, f"{seconds:.4g}", f"{seconds / estimate.seconds:.0%}")
    return table


def _model_parts_table(plan) -> Table:
    """Returns a table of the parts of the model that take at least 1 % of the step."""
    from qwen3next_jax.planner.parts import cost_by_part

    estimate = plan.estimate
    table = Table("part", "ms", "GB through HBM", "TFLOP")
    for name, cost in cost_by_part(estimate.cost_by_function).items():
        if cost.seconds >= 0.01 * estimate.seconds:
            table.add_row(
                name,
                f"{1e3 * cost.seconds:,.1f}",
                f"{cost.hbm_bytes / 1e9:,.1f}",
                f"{cost.flops / 1e12:,.2f}",
            )
    return table


def _memory_fit_text(plan) -> str:
    from qwen3next_jax.sharding.mesh import mesh_text

    if not plan.fits:
        return f"{mesh_text(plan.mesh)}: does not fit, {plan.failure_reason}. As if it did:"
    return (
        f"{mesh_text(plan.mesh)}: fits, {plan.memory.peak / 2**30:.1f} of "
        f"{plan.usable_hbm / 2**30:.1f} GiB."
    )


def _gpu_summary(plan, device: str) -> str:
    return (
        f"{_memory_fit_text(plan)} Products: {plan.model_flops / 1e12:.4g} TFLOP of the model per "
        f"{device}, {plan.executed_gpu_flops / 1e12:.4g} executed. The program contains XLA's "
        "implementations alone, because kernels are tested on the GPU itself. There is no "
        "prediction of time. Lowered in "
        f"{plan.lower_seconds:.0f} s, compiled in {plan.compile_seconds:.0f} s"
    )


def _fit_time_and_mfu_text(plan) -> str:
    """Returns a text that says whether a plan fits, and gives the time of the step and the MFU:
    first their ranges over all cost models, then their values by each cost model.
    """
    estimates = plan.estimate_by_cost_model.items()
    times = sorted(estimate.seconds for _, estimate in estimates)
    slowest, fastest = plan.mfu_of_step_time(times[-1]), plan.mfu_of_step_time(times[0])
    each = "; ".join(
        f"{name} {estimate.seconds:.4g} s, {percent_text(plan.mfu_of_step_time(estimate.seconds))}"
        for name, estimate in estimates
    )
    mfu = (
        percent_text(slowest)
        if slowest == fastest
        else f"{percent_text(slowest)}–{percent_text(fastest)}"
    )
    return (
        f"{_memory_fit_text(plan)} Step {times[0]:.3g}–{times[-1]:.3g} s, MFU {mfu} ({each}). By "
        f"--cost_model={plan.cost_model}: bound by {plan.slowest_resource}, "
        f"{plan.tokens_per_second:,.0f} tokens/s"
    )


def _time_estimate_sentences(plan, device: str) -> Iterator[str]:
    """Yields sentences about `plan`, which must have estimates of time."""
    from qwen3next_jax.planner.calibrated import rates_of_chip
    from qwen3next_jax.sharding.compiler_options import options_text

    estimate, ideal, chip = plan.estimate, plan.ideal_time, plan.topology.chip
    yield options_text(plan.compiler_options)
    if plan.optimization_level != "default":
        yield (
            f"compiled at optimization level {plan.optimization_level}: at the default level, "
            "which training uses, times differ"
        )
    needs = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in ideal.bound.items())
    yield (
        f"ideal: max({needs}) = {ideal.seconds:.3g} s, "
        f"MFU {percent_text(plan.mfu_of_step_time(ideal.seconds))}; "
        f"at rates that chips were measured to reach {ideal.realistic:.3g} s, "
        f"{percent_text(plan.mfu_of_step_time(ideal.realistic))}. This step takes "
        f"{estimate.seconds / ideal.realistic:.2f} times the second"
    )
    if taken := rates_of_chip(chip).rates_taken_from_nearest_chip:
        yield f"rates of {chip.name} by calibrated: {'; '.join(taken)}"
    yield (
        f"{plan.model_flops / 1e12:.4g} TFLOP of the model per {device}, "
        f"{estimate.flops / 1e12:.4g} executed, {estimate.hbm_bytes / 1e9:.4g} GB through HBM; "
        f"lowered in {plan.lower_seconds:.0f} s, compiled in {plan.compile_seconds:.0f} s "
        f"({plan.compile_cpu_seconds:.0f} s of CPU), {plan.compile_memory_bytes / 2**30:.1f} GiB "
        "of memory used"
    )
    if crossing := plan.slice_traffic:
        train = plan.train
        yield (
            f"between slices: {crossing.bytes / 1e9:.4g} GB leave each {device} in a step, "
            f"{crossing.seconds:.3g} s at the network's peak; the backward pass takes as long from "
            f"{crossing.hidden_from_rows:,} rows of {train.sequence_length:,} tokens on, with "
            f"{train.gradient_accumulation} micro-batches"
        )
    if load := plan.expert_load:
        yield (
            f"experts by calibrated: --skew={plan.expert_skew:g}; the fullest device gets "
            f"{load.fullest:.2f} times the mean, its choices fill {load.used:.0%} of the tiles of "
            f"its buffers, and {load.beyond:.1%} of them do not fit{_expert_overflow_text(load)}"
        )
    if plan.loops_of_unknown_length:
        yield (
            "counted once, as the program does not say how often they run (by calibrated, loops of "
            f"the experts as --skew asks for): {len(plan.loops_of_unknown_length)} loops, such as "
            f"{plan.loops_of_unknown_length[0]}"
        )
    if plan.kernels_of_unknown_cost:
        yield (
            f"no MFU, as the cost of {len(plan.kernels_of_unknown_cost)} kernels is unknown, "
            "such as "
            f"{plan.kernels_of_unknown_cost[0]}: the step takes longer than this"
        )


def _expert_overflow_text(load) -> str:
    """Returns a text about the loops for tokens that do not fit into the buffers of their experts;
    "" if no loop runs.
    """
    if load.rounds:
        return f": {load.rounds:.1f} further rounds exchange and compute them"
    if load.experts_beyond:
        steps = load.experts_beyond * load.steps_beyond
        return f": a loop of {steps:.1f} steps computes them, one expert after another"
    return ""


def draw_memory_bars(plans: list, path: pathlib.Path) -> None:
    """Draws the memory of every compiled plan as a bar, divided into the parts of the memory, and a
    line at the usable memory. Writes the picture to `path`.
    """
    plans = [plan for plan in plans if plan.memory]
    if not plans:
        return
    from matplotlib.figure import Figure

    from qwen3next_jax.sharding.mesh import mesh_text

    figure = Figure(figsize=(9, 1.5 + 0.5 * len(plans)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(plans)
    labels = [
        f"{mesh_text(p.mesh)}\nremat {p.train.remat} × {p.train.gradient_accumulation}"
        for p in plans
    ]
    for part in plans[0].memory._fields[:-1]:
        sizes = [getattr(p.memory, part) / 2**30 for p in plans]
        axes.barh(labels, sizes, left=left, label=part)
        left = [a + b for a, b in zip(left, sizes)]
    axes.axvline(plans[0].usable_hbm / 2**30, color="black", linestyle="--", label="usable HBM")
    axes.set(xlabel="GiB per device", title=_plan_title(plans[0]))
    figure.legend(ncols=7, fontsize="small", loc="outside lower center")
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def _plan_title(plan) -> str:
    topology, train = plan.topology, plan.train
    devices = f"{topology.chips} chips"
    if len(topology.devices) != topology.chips:
        devices += f", {len(topology.devices)} devices"
    return (
        f"{plan.config_name} on {topology.title} ({devices}), {train.batch_size} × "
        f"{train.sequence_length} tokens"
    )


_config = config_flags.define_config_flag()
_topology = flags.DEFINE_string(
    "topology", None, "TPU slice, such as v5p:8x8x8, or hosts x GPUs: h100:16x8"
)
_slices = flags.DEFINE_integer(
    "slices", 1, "number of TPU slices of this shape, joined by the data center network", 1
)
_mesh = run_flags.define_mesh_flag()
_search = flags.DEFINE_bool(
    "search", False, "rank meshes, remat policies and micro-batches, compile the best five"
)
_rows = flags.DEFINE_list(
    "rows",
    [],
    "batch sizes from which --search chooses the fastest per token (default: the config's)",
)
_quick = flags.DEFINE_bool(
    "quick",
    False,
    "for TPU slices: compile at optimization level O1, in less time: memory and network hold, "
    "times differ from those of the level that training uses",
)
_cost_model = flags.DEFINE_enum(
    "cost_model",
    None,
    ("schedule", "roofline", "calibrated"),
    "schedule (default without --skew): every instruction lasts at least the cycles that the "
    "compiler scheduled; roofline: kernels alone do; calibrated: as schedule, at rates that chips "
    "were measured to reach, with starts of collectives and kernels and shared links (default with "
    "--skew)",
)
_skew = flags.DEFINE_float(
    "skew",
    0.0,
    "uneven load of the experts, for calibrated: the standard deviation of the logarithm of the "
    "experts' popularity; 0: a balanced router",
)
_json = flags.DEFINE_string(
    "json", None, "file to write; a plot of memory is written beside it as .png"
)
