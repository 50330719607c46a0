"""Compiles the real train step for a described TPU slice, or GPUs, and says what each chip would
hold, send and take.

A compiler for GPUs leaves no schedule: there, nothing says how long a step lasts.

Nothing here touches a device: the model is shapes, the slice a description, the compiler the
real one.
"""

import dataclasses
import functools
import re
import resource
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.version import code_version
from qwen3next_jax.config import Config
from qwen3next_jax.model.expert_parallelism import GATHERED_SHARDS
from qwen3next_jax.model.flops import flops_per_token
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.compiled import (
    Collective,
    Memory,
    program_collectives,
    gpu_flops,
    memory_use,
    unknown_kernels,
)
from qwen3next_jax.planner.ideal import IdealTime, ideal_time
from qwen3next_jax.planner.roofline import COST_MODELS, Estimate, estimate_time
from qwen3next_jax.planner.topology import Topology
from qwen3next_jax.sharding.chips import Chip
from qwen3next_jax.sharding.compiler_options import compiler_options
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import EXPERT
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run
from qwen3next_jax.training.stages import ResolvedStage

# Of a GPU's program memory and network are read, which are settled before its code is made.
ROUGH_CODE = {
    "xla_gpu_disable_gpuasm_optimizations": True,
    "xla_llvm_disable_expensive_passes": True,
    "xla_backend_optimization_level": 0,
}
UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One configuration on one slice. Bytes, FLOPs and seconds are of one device and one step.

    Where the program does not fit, there are no figures but `needs` and `usable_hbm` (bytes).
    Where the compiler gave another error or ended its process (`failed`), there are none.
    `reason` says which, in one line. Times are by the rules called `rules` (`roofline.RULES`),
    of which `estimates` has one each.
    """

    config: Config
    topology: Topology
    mesh: dict[str, int]
    optimization_level: str
    lower_seconds: float
    compile_seconds: float
    compile_cpu_seconds: float  # of all threads: what other load on the machine does not change
    fits: bool
    failed: bool = False
    reason: str = ""
    compile_bytes: float = 0.0  # peak of the memory of the process that compiled it
    needs: float = 0.0
    usable_hbm: float = 0.0
    memory: Memory | None = None
    estimates: Mapping[str, Estimate] = dataclasses.field(default_factory=dict)
    gpu_flops: float = 0.0  # of a GPU's program, which has no estimates
    cost_model: str = COST_MODELS[0]
    ideal: IdealTime | None = None
    collectives: tuple[Collective, ...] = ()
    unstated_loops: tuple[str, ...] = ()
    unknown_kernels: tuple[str, ...] = ()
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def estimate(self) -> Estimate:
        return self.estimates[self.cost_model]

    @property
    def tokens(self) -> int:
        """Of one step, over all devices."""
        return self.config.train.batch_size * self.config.train.sequence_length

    @property
    def model_flops(self) -> float:
        """Of one step on one device, recomputation excluded."""
        return (
            flops_per_token(self.config.model, self.config.train.sequence_length)
            * self.tokens
            / len(self.topology.devices)
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.estimate.seconds

    @property
    def mfu(self) -> float | None:
        return self.mfu_in(self.estimate.seconds)

    def mfu_in(self, seconds: float) -> float | None:
        """Of a step of so many seconds; None where nothing says what a kernel costs."""
        return (
            None
            if self.unknown_kernels
            else self.model_flops / seconds / self.topology.chip.device_flops
        )

    @property
    def binding(self) -> str:
        """What the step waits for most: "compute", "hbm", or "network" and its mesh axes."""
        return next(iter(self.estimate.bound))

    @property
    def verdict(self) -> str:
        return "fits" if self.fits else "failed" if self.failed else "does not fit"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready. Of what does not fit, the predictions are null."""
        train, fitting = self.config.train, self.fits and bool(self.estimates)
        return {
            "topology": self.topology.name,
            "chips": self.topology.chips,
            "devices": len(self.topology.devices),
            "mesh": self.mesh,
            "config": self.config.name,
            "batch_size": train.batch_size,
            "sequence_length": train.sequence_length,
            "remat": train.remat,
            "gradient_accumulation": train.gradient_accumulation,
            "tokens_per_step": self.tokens,
            "fits": self.fits,
            "failed": self.failed,
            "reason": self.reason,
            "peak_hbm_bytes": self.needs or None,
            "usable_hbm_bytes": self.usable_hbm or None,
            "memory_bytes": self.memory._asdict() if self.fits else None,
            "step_seconds": self.estimate.seconds if fitting else None,
            "tokens_per_second": self.tokens_per_second if fitting else None,
            "mfu": self.mfu if fitting else None,
            "mfu_roofline": self.mfu_in(self.estimates["roofline"].seconds) if fitting else None,
            "cost_model": self.cost_model,
            # the names that these two had before, for whoever reads them
            "mfu_today": self.mfu_in(self.estimates["roofline"].seconds) if fitting else None,
            "rules": {"schedule": "new", "roofline": "today"}[self.cost_model],
            "ideal": self.ideal._asdict() if fitting else None,
            "parts": {name: part._asdict() for name, part in self.estimate.by_source.items()}
            if fitting
            else None,
            "bound_seconds": self.estimate.bound if fitting else None,
            "binding": self.binding if fitting else None,
            "model_flops": self.model_flops,
            "executed_flops": self.estimate.flops if fitting else self.gpu_flops or None,
            "hbm_bytes": self.estimate.hbm_bytes if fitting else None,
            "network": [
                {"axes": list(axes), "collective": kind, "bytes": size, "count": count}
                for (axes, kind), (size, count) in traffic(self.collectives).items()
            ],
            "loops_of_unknown_length": list(self.unstated_loops),
            "kernels_of_unknown_cost": list(self.unknown_kernels),
            "optimization_level": self.optimization_level,
            "compiler_options": dict(self.compiler_options),
            "lower_seconds": round(self.lower_seconds, 1),
            "compile_seconds": round(self.compile_seconds, 1),
            "compile_cpu_seconds": round(self.compile_cpu_seconds, 1),
            "compile_memory_bytes": self.compile_bytes or None,
            "versions": {
                "jax": jax.__version__,
                **_compiler_version(self.topology.chip),
                "code": code_version(),
            },
        }


def traffic(
    found: tuple[Collective, ...],
) -> dict[tuple[tuple[str, ...], str], tuple[float, float]]:
    """(axes, kind) → (bytes that leave a device in a step, collectives run), largest first."""
    sums: dict = {}
    for c in found:
        size, count = sums.get((c.axes, c.kind), (0.0, 0.0))
        sums[c.axes, c.kind] = size + c.total, count + c.times
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))


def check_expert_exchange(sizes: dict[str, int], topology: Topology) -> None:
    """Raises UserError where the experts' exchange needs what the slice's compiler does not
    have.
    """
    if topology.chip.name == "v5e" and topology.chips > 16 and sizes[EXPERT] > GATHERED_SHARDS:
        raise UserError(
            f"parallel.mesh.expert = {sizes[EXPERT]}: beyond {GATHERED_SHARDS} needs "
            "ragged_all_to_all, which libtpu 0.0.50 "
            f"lacks on v5e beyond 4x4: expected at most {GATHERED_SHARDS}"
        )


def abstract_batch(run: ResolvedRun, stage: ResolvedStage) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and sharding of the arrays of one batch."""
    shape = (stage.batch_size, stage.sequence_length)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=run.batch_sharding)
        for name in ("tokens", "segment_ids")
    }


def make_plan(
    config: Config, topology: Topology, optimization_level: str = "", dumped: str | None = None
) -> Plan:
    """Compiles the train step of `config`, a run of one stage, for `topology`.

    Args:
      optimization_level: "O1" partitions and plans memory as always, but keeps no arrays in VMEM
      between fusions and spends
        less on the code of each: memory and network hold, times are others. "": the compiler's
        default, which training uses.

      dumped: folder to which the compiler leaves its schedules (`schedule.dump_to`); None: none
      are read.

    Raises:
      UserError: the mesh does not fit the devices or the model.
    """
    mesh = make_mesh(config.parallel, topology.devices)
    check_expert_exchange(dict(mesh.shape), topology)
    run = resolve_run(config, mesh)
    (stage,) = run.stages
    state = run.abstract_state
    batch = abstract_batch(run, stage)
    start = time.perf_counter()
    # kernels ask the described chip for its memory
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        platforms = None if topology.chip.torus else ("cuda",)
        traced = make_train_step(run, stage).trace(state, batch)
        lowered = traced.lower(lowering_platforms=platforms)
    lowered_at, cpu_then = time.perf_counter(), used_cpu_seconds()
    options = {"optimization_level": optimization_level} if optimization_level else {}
    try:
        compiled, failure = (
            lowered.compile(options | ({} if topology.chip.torus else ROUGH_CODE) or None),
            "",
        )
    except jax.errors.JaxRuntimeError as error:
        compiled, failure = None, str(error)
    plan = functools.partial(
        Plan,
        config,
        topology,
        mesh=dict(mesh.shape),
        compiler_options=compiler_options(config.parallel, mesh),
        optimization_level=optimization_level or "default",
        lower_seconds=lowered_at - start,
        compile_seconds=time.perf_counter() - lowered_at,
        compile_cpu_seconds=used_cpu_seconds() - cpu_then,
        compile_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10,
    )
    if compiled is None and "RESOURCE_EXHAUSTED" not in failure:
        return plan(
            fits=False, failed=True, reason=f"the compiler's error: {failure.splitlines()[0][:300]}"
        )
    if compiled is None:
        needs, usable = out_of_memory(failure)
        return plan(fits=False, reason=_too_much(needs, usable), needs=needs, usable_hbm=usable)
    program = hlo.parse(compiled.as_text())
    schedules = schedule.read_schedules(dumped, program) if dumped else {}
    parts = memory_use(compiled, program, state["params"], state["opt_state"])
    usable = topology.chip.usable_hbm
    fits = parts.peak <= usable  # at O1 the compiler does not refuse what exceeds it
    plan = functools.partial(
        plan,
        fits=fits,
        reason="" if fits else _too_much(parts.peak, usable),
        needs=parts.peak,
        usable_hbm=usable,
        memory=parts,
        collectives=tuple(program_collectives(program, mesh)),
        unstated_loops=tuple(program.unstated_loops()),
    )
    if not topology.chip.torus:
        return plan(gpu_flops=gpu_flops(program))
    return plan(
        estimates={
            cost_model: estimate_time(
                program, mesh, topology.chip, topology.shape, schedules, cost_model
            )
            for cost_model in COST_MODELS
        },
        ideal=ideal_time(config.model, config.train, topology, mesh),
        unknown_kernels=tuple(unknown_kernels(program, schedules)),
    )


def _too_much(needs: float, usable: float) -> str:
    return f"needs {needs / 2**30:.2f} GiB of {usable / 2**30:.2f} GiB"


def used_cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    """Of all threads, in user and kernel mode; RUSAGE_CHILDREN: of the processes that this one
    has waited for.
    """
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def out_of_memory(message: str) -> tuple[float, float]:
    """(bytes needed, bytes there) of the compiler's complaint; 0 where it does not say."""
    for pattern in (
        r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
        r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    ):
        m = re.search(pattern, message)
        if m:
            return float(m.group(1)) * UNITS[m.group(2)], float(m.group(3)) * UNITS[m.group(4)]
    return 0.0, 0.0


def _compiler_version(chip: Chip) -> dict[str, str]:
    import importlib.metadata

    name = "libtpu" if chip.torus else "jax-cuda13-plugin"
    return {name: importlib.metadata.version(name)}
