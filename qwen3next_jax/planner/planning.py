"""Compiles the real train step for a TPU slice or for GPUs, which this machine need not have, and
predicts the memory, the network traffic and the time of each device.

It uses no device. The parameters are shapes without values, and the devices are descriptions
(`topology.py`); the train step and the compiler are the real ones. The compiler for
GPUs gives no schedule, so there is no prediction of time for GPUs.
"""

import dataclasses
import functools
import pathlib
import re
import resource
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.version import code_version
from qwen3next_jax.config import Config, ModelConfig, TrainConfig
from qwen3next_jax.model.expert_parallelism import GATHERED_SHARDS
from qwen3next_jax.model.flops import flops_per_token
from qwen3next_jax.planner import hlo, schedule
from qwen3next_jax.planner.between_slices import SliceTraffic, predict_slice_traffic
from qwen3next_jax.planner.compiled import (
    Collective,
    Memory,
    gpu_program_flops,
    kernels_of_unknown_cost,
    memory_use,
    program_collectives,
)
from qwen3next_jax.planner.estimate import COST_MODELS, estimate_time
from qwen3next_jax.planner.expert_load import ExpertLoad, assumed_expert_load
from qwen3next_jax.planner.ideal import IdealTime, ideal_time
from qwen3next_jax.planner.roofline import Estimate
from qwen3next_jax.planner.topology import Topology
from qwen3next_jax.sharding.chips import Chip
from qwen3next_jax.sharding.compiler_options import compiler_options
from qwen3next_jax.sharding.mesh import make_mesh
from qwen3next_jax.sharding.rules import EXPERT, SLICE
from qwen3next_jax.training.loop import make_train_step
from qwen3next_jax.training.resolve import ResolvedRun, resolve_run
from qwen3next_jax.training.stages import ResolvedStage

# Options that make the GPU compiler skip the optimization of machine code. The compiler decides on
# memory and collectives, which the planner reads, before that optimization.
FAST_GPU_COMPILE = {
    "xla_gpu_disable_gpuasm_optimizations": True,
    "xla_llvm_disable_expensive_passes": True,
    "xla_backend_optimization_level": 0,
}
# A program that needs at most this share more than the usable memory is compiled nevertheless, so
# that the user sees how fast the step would be if a little memory were saved.
NEAR = 0.1
COMPILE_ANYWAY = {"xla_tpu_no_crash_on_oom": "true"}
PROGRAM = "program.hlo"  # the file of the compiled program in the folder of its schedules
UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The prediction for one configuration on one slice. Bytes, FLOPs and seconds are for one
    device and one step.

    If the compiler refuses a program that needs too much memory, the plan has all predictions only
    on a TPU, and only if the program needs at most (1 + NEAR) times the usable memory. For any
    other refused program, the only predictions are `needed_hbm_bytes`, `usable_hbm` and
    `failure_reason`. If the compilation fails for another reason than memory, or ends its process,
    `failed` is true and the plan has only `failure_reason`.

    Attributes:
      config_name: name of the configuration.
      model: the model.
      train: the training settings of the configuration's only stage.
      topology: the described devices.
      mesh: mesh axis → size.
      optimization_level: the compiler's optimization level, "O1" or "default".
      lower_seconds, compile_seconds: wall time that the planner took to lower and to compile the
        program.
      compile_cpu_seconds: CPU time of the compilation, summed over all threads.
      fits: whether the program fits in the memory of a device.
      failure_reason: why the program does not fit or the compilation failed, in one line.
      compile_memory_bytes: peak memory of the process that compiled the program.
      needed_hbm_bytes: bytes of HBM that the program needs on one device.
      usable_hbm: bytes of HBM of one device that a program can use.
      memory: `needed_hbm_bytes`, divided by purpose.
      estimate_by_cost_model: name of a cost model (`estimate.COST_MODELS`) → its estimate; {} for
        GPUs.
      executed_gpu_flops: FLOPs that the program executes, including recomputation; 0 for TPUs.
      cost_model: the key of `estimate_by_cost_model` for the properties `estimate`,
        `tokens_per_second`, `mfu` and `slowest_resource`.
      ideal_time: lower bounds of the step's time; None for GPUs.
      collectives: the collectives of the program that send data.
      slice_traffic: the traffic between slices; None if there is one slice.
      expert_skew: σ of the experts' popularity that the cost model "calibrated" assumes.
      expert_load: the load of the experts that follows from `expert_skew`; None if the program has
        no kernels of experts.
      loops_of_unknown_length: names of loops that count as if they ran once, because the program
        does not state how often they run. The cost model "calibrated" counts the loops of the
        experts as often as `expert_load` says.
      kernels_of_unknown_cost: names of kernels whose FLOPs or cycles are unknown. If there are such
        kernels, `mfu` is None.
      compiler_options: the options that training gives the compiler, name → value.
    """

    config_name: str
    model: ModelConfig
    train: TrainConfig
    topology: Topology
    mesh: dict[str, int]
    optimization_level: str
    lower_seconds: float
    compile_seconds: float
    compile_cpu_seconds: float
    fits: bool
    failed: bool = False
    failure_reason: str = ""
    compile_memory_bytes: float = 0.0
    needed_hbm_bytes: float = 0.0
    usable_hbm: float = 0.0
    memory: Memory | None = None
    estimate_by_cost_model: Mapping[str, Estimate] = dataclasses.field(default_factory=dict)
    executed_gpu_flops: float = 0.0
    cost_model: str = COST_MODELS[0]
    ideal_time: IdealTime | None = None
    slice_traffic: SliceTraffic | None = None
    collectives: tuple[Collective, ...] = ()
    expert_skew: float = 0.0
    expert_load: ExpertLoad | None = None
    loops_of_unknown_length: tuple[str, ...] = ()
    kernels_of_unknown_cost: tuple[str, ...] = ()
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def estimate(self) -> Estimate:
        """The estimate of the chosen cost model."""
        return self.estimate_by_cost_model[self.cost_model]

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens of one step on all devices."""
        return self.train.batch_size * self.train.sequence_length

    @property
    def model_flops(self) -> float:
        """The FLOPs of the model's forward and backward pass (without recomputation) in one step on
        one device.
        """
        per_token = flops_per_token(self.model, self.train.sequence_length)
        return per_token * self.tokens_per_step / len(self.topology.devices)

    @property
    def tokens_per_second(self) -> float:
        """The predicted number of tokens per second on all devices."""
        return self.tokens_per_step / self.estimate.seconds

    @property
    def mfu(self) -> float | None:
        """The predicted model FLOPs utilization (MFU); None if the cost of a kernel is unknown."""
        return self.mfu_of_step_time(self.estimate.seconds)

    def mfu_of_step_time(self, seconds: float) -> float | None:
        """Returns the model FLOPs utilization (MFU) of a step that takes `seconds`; None if the
        cost of a kernel is unknown.
        """
        if self.kernels_of_unknown_cost:
            return None
        return self.model_flops / seconds / self.topology.chip.device_flops

    @property
    def slowest_resource(self) -> str:
        """The resource that takes most of the predicted time: "compute", "hbm", or "network" and
        its mesh axes, such as "network data+expert".
        """
        return next(iter(self.estimate.seconds_by_resource))

    @property
    def verdict(self) -> str:
        """ "fits", "failed" or "does not fit"."""
        if self.fits:
            return "fits"
        return "failed" if self.failed else "does not fit"

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as a dictionary that JSON can represent. Missing predictions are
        None.
        """
        train = self.train
        return {
            "topology": self.topology.name,
            "slices": self.topology.slices,
            "chips": self.topology.chips,
            "devices": len(self.topology.devices),
            "mesh": self.mesh,
            "config": self.config_name,
            "batch_size": train.batch_size,
            "sequence_length": train.sequence_length,
            "remat": train.remat,
            "gradient_accumulation": train.gradient_accumulation,
            "tokens_per_step": self.tokens_per_step,
            "fits": self.fits,
            "failed": self.failed,
            "reason": self.failure_reason,
            "peak_hbm_bytes": self.needed_hbm_bytes or None,
            "usable_hbm_bytes": self.usable_hbm or None,
            "memory_bytes": self.memory and self.memory._asdict(),
            **self._times_as_dict(),
            "model_flops": self.model_flops,
            "network": [
                {"axes": list(axes), "collective": kind, "bytes": size, "count": count}
                for (axes, kind), (size, count) in traffic_by_axes(self.collectives).items()
            ],
            "skew": self.expert_skew,
            "expert_load": self.expert_load and dataclasses.asdict(self.expert_load),
            "between_slices": self.slice_traffic and self.slice_traffic._asdict(),
            "loops_of_unknown_length": list(self.loops_of_unknown_length),
            "kernels_of_unknown_cost": list(self.kernels_of_unknown_cost),
            "optimization_level": self.optimization_level,
            "compiler_options": dict(self.compiler_options),
            "lower_seconds": round(self.lower_seconds, 1),
            "compile_seconds": round(self.compile_seconds, 1),
            "compile_cpu_seconds": round(self.compile_cpu_seconds, 1),
            "compile_memory_bytes": self.compile_memory_bytes or None,
            "versions": {
                "jax": jax.__version__,
                **_compiler_version(self.topology.chip),
                "code": code_version(),
            },
        }

    def _times_as_dict(self) -> dict[str, Any]:
        """Returns the part of `as_dict` that contains the estimates of time."""
        times: dict[str, Any] = dict.fromkeys(
            (
                *("step_seconds", "tokens_per_second", "mfu", "mfu_roofline", "estimates"),
                *("ideal", "parts", "bound_seconds", "binding", "hbm_bytes"),
            )
        )
        times |= {
            "executed_flops": self.executed_gpu_flops or None,
            "cost_model": self.cost_model,
        }
        if not self.estimate_by_cost_model:
            return times
        estimate = self.estimate
        mfu_roofline = self.mfu_of_step_time(self.estimate_by_cost_model["roofline"].seconds)
        return times | {
            "step_seconds": estimate.seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "mfu_roofline": mfu_roofline,
            "estimates": {
                name: {
                    "step_seconds": e.seconds,
                    "mfu": self.mfu_of_step_time(e.seconds),
                    "bound_seconds": e.seconds_by_resource,
                }
                for name, e in self.estimate_by_cost_model.items()
            },
            "ideal": self.ideal_time._asdict(),
            "parts": {name: cost._asdict() for name, cost in estimate.cost_by_function.items()},
            "bound_seconds": estimate.seconds_by_resource,
            "binding": self.slowest_resource,
            "executed_flops": estimate.flops,
            "hbm_bytes": estimate.hbm_bytes,
        }


def traffic_by_axes(
    collectives: tuple[Collective, ...],
) -> dict[tuple[tuple[str, ...], str], tuple[float, float]]:
    """Sums collectives by mesh axes and kind.

    Returns:
      (axes, kind) → (bytes that leave a device in a step, number of collectives), sorted by bytes,
      largest first.
    """
    sums: dict = {}
    for c in collectives:
        size, count = sums.get((c.axes, c.kind), (0.0, 0.0))
        sums[c.axes, c.kind] = size + c.total_sent_bytes, count + c.run_count
    return dict(sorted(sums.items(), key=lambda item: -item[1][0]))


def check_expert_exchange_supported(sizes: dict[str, int], topology: Topology) -> None:
    """Checks that the compiler for this slice supports the collective that sends tokens to the
    devices of their experts.

    Args:
      sizes: mesh axis → size.

    Raises:
      UserError: the mesh needs `ragged_all_to_all`, which the compiler does not support on this
        slice.
    """
    if topology.chip.name == "v5e" and topology.chips > 16 and sizes[EXPERT] > GATHERED_SHARDS:
        raise UserError(
            f"parallel.mesh.expert = {sizes[EXPERT]}: beyond {GATHERED_SHARDS} needs "
            "ragged_all_to_all, which libtpu 0.0.50 "
            f"lacks on v5e beyond 4x4: expected at most {GATHERED_SHARDS}"
        )


def abstract_batch(run: ResolvedRun, stage: ResolvedStage) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of one batch by name, as shapes [B, T] with shardings."""
    shape = (stage.batch_size, stage.sequence_length)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=run.batch_sharding)
        for name in ("tokens", "segment_ids")
    }


def make_plan(
    config: Config,
    topology: Topology,
    optimization_level: str = "",
    dump_folder: str | None = None,
    skew: float = 0.0,
) -> Plan:
    """Compiles the train step of `config`, a run of one stage, for `topology`.

    Args:
      config: the configuration of the run.
      topology: the devices.
      optimization_level: the compiler's optimization level; "" means the default level, which
        training uses. "O1" compiles faster. The default and "O1" partition the program and plan its
        memory in the same way, so their predictions of memory and network are the same. The
        predicted times differ, because "O1" keeps no arrays in VMEM between fusions and optimizes
        the code of each fusion less.
      dump_folder: the folder into which the compiler writes its schedules
        (`schedule.enable_schedule_dump`), and this function the compiled program. None means that
        no schedules are read.
      skew: σ of the experts' popularity, for the cost model "calibrated" (`expert_load`).

    Raises:
      UserError: the mesh does not fit the devices or the model.
    """
    mesh = make_mesh(config.parallel, topology.devices)
    check_expert_exchange_supported(dict(mesh.shape), topology)
    run = resolve_run(config, mesh)
    started = time.perf_counter()
    lowered = lower_step(run, topology)
    lowered_at, cpu_before = time.perf_counter(), used_cpu_seconds()
    compiled, failure = compile_step(lowered, topology, optimization_level)
    refusal = failure
    if compiled is None and topology.chip.torus_dimensions and _nearly_fits(failure):
        compiled, failure = compile_step(lowered, topology, optimization_level, COMPILE_ANYWAY)
    plan = functools.partial(
        Plan,
        config.name,
        config.model,
        config.train,
        topology,
        mesh=dict(mesh.shape),
        compiler_options=compiler_options(config.parallel, mesh),
        optimization_level=optimization_level or "default",
        expert_skew=skew,
        lower_seconds=lowered_at - started,
        compile_seconds=time.perf_counter() - lowered_at,
        compile_cpu_seconds=used_cpu_seconds() - cpu_before,
        compile_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10,
    )
    if compiled is None and "RESOURCE_EXHAUSTED" not in failure:
        reason = f"the compiler's error: {failure.splitlines()[0][:300]}"
        return plan(fits=False, failed=True, failure_reason=reason)
    if compiled is None:
        needs, usable = needed_and_usable_bytes(failure)
        return plan(
            fits=False,
            failure_reason=_out_of_memory_reason(needs, usable),
            needed_hbm_bytes=needs,
            usable_hbm=usable,
        )
    text = compiled.as_text()
    program = hlo.parse_program(text)
    schedules = {}
    if dump_folder:
        (pathlib.Path(dump_folder) / PROGRAM).write_text(text)
        schedules = schedule.read_schedules(dump_folder, program)
    state = run.abstract_state
    beside_params = {name: state[name] for name in state.keys() - {"params", "step", "guards"}}
    memory = memory_use(compiled, program, state["params"], beside_params)
    needs, usable = memory.peak, topology.chip.usable_hbm_per_device
    fits = needs <= usable  # at O1 the compiler accepts programs that do not fit
    if fits and refusal:  # by the compiler, which knows of less memory than the table of chips
        fits, (needs, usable) = False, needed_and_usable_bytes(refusal)
    plan = functools.partial(
        plan,
        fits=fits,
        failure_reason="" if fits else _out_of_memory_reason(needs, usable),
        needed_hbm_bytes=needs,
        usable_hbm=usable,
        memory=memory,
        collectives=tuple(program_collectives(program, mesh)),
        loops_of_unknown_length=tuple(program.loops_of_unknown_length()),
    )
    if not topology.chip.torus_dimensions:
        return plan(executed_gpu_flops=gpu_program_flops(program))
    return _plan_with_estimates(
        plan(slice_traffic=_slice_traffic(config, topology, mesh, memory)),
        config,
        mesh,
        program,
        schedules,
    )


def reestimate_plan(
    plan: Plan, config: Config, topology: Topology, dump_folder: str | pathlib.Path
) -> Plan:
    """Returns `plan`, which `make_plan` made for `config`, with new estimates: the cost models make
    them from the program and the schedules in `dump_folder`. Nothing is compiled. If the step of
    the plan was not compiled (`plan.memory` is None), there is nothing to estimate.
    """
    plan = dataclasses.replace(plan, topology=topology)
    if not plan.memory:
        return plan
    program = hlo.parse_program((pathlib.Path(dump_folder) / PROGRAM).read_text())
    schedules = schedule.read_schedules(dump_folder, program)
    mesh = make_mesh(config.parallel, topology.devices)
    return _plan_with_estimates(plan, config, mesh, program, schedules)


def _plan_with_estimates(
    plan: Plan,
    config: Config,
    mesh: jax.sharding.Mesh,
    program: hlo.Program,
    schedules: Mapping[str, schedule.Schedule],
) -> Plan:
    """Returns `plan` with the estimates that the cost models make of its program."""
    topology = plan.topology
    estimates = {
        name: estimate_time(
            program, mesh, topology.chip, topology.shape, schedules, name, skew=plan.expert_skew
        )
        for name in COST_MODELS
    }
    return dataclasses.replace(
        plan,
        estimate_by_cost_model=estimates,
        ideal_time=ideal_time(config.model, config.train, topology, mesh, config.parallel),
        expert_load=assumed_expert_load(program, mesh, plan.expert_skew),
        kernels_of_unknown_cost=tuple(kernels_of_unknown_cost(program, schedules)),
    )


def _slice_traffic(
    config: Config, topology: Topology, mesh: jax.sharding.Mesh, memory: Memory
) -> SliceTraffic | None:
    """Returns the traffic between the slices of the mesh; None if the mesh has one slice."""
    if mesh.shape[SLICE] == 1:
        return None
    stored = memory.parameters / 4  # parameters are float32
    return predict_slice_traffic(
        config.model, config.train, config.parallel, topology, mesh, stored
    )


def lower_step(run: ResolvedRun, topology: Topology) -> jax.stages.Lowered:
    """Returns the train step of the run's only stage, lowered for `topology`."""
    (stage,) = run.stages
    # When kernels are traced, they read from the abstract mesh for which chip they are compiled.
    with jax.sharding.use_abstract_mesh(run.mesh.abstract_mesh):
        step = make_train_step(run, stage)
        traced = step.trace(run.abstract_state, abstract_batch(run, stage))
        return traced.lower(
            lowering_platforms=None if topology.chip.torus_dimensions else ("cuda",)
        )


def compile_step(
    lowered: jax.stages.Lowered,
    topology: Topology,
    optimization_level: str,
    more_options: Mapping[str, str] = MappingProxyType({}),
) -> tuple[jax.stages.Compiled | None, str]:
    """Returns the compiled program and "", or None and the compiler's error message."""
    options = dict(more_options)
    if optimization_level:
        options["optimization_level"] = optimization_level
    if not topology.chip.torus_dimensions:
        options |= FAST_GPU_COMPILE
    try:
        return lowered.compile(options or None), ""
    except jax.errors.JaxRuntimeError as error:
        return None, str(error)


def _nearly_fits(failure: str) -> bool:
    """Whether the compiler refused a program that needs little more memory than there is."""
    if "RESOURCE_EXHAUSTED" not in failure:
        return False
    needs, usable = needed_and_usable_bytes(failure)
    return 0 < needs <= (1 + NEAR) * usable


def _out_of_memory_reason(needs: float, usable: float) -> str:
    """Returns the reason of a plan that does not fit. Both arguments are bytes of HBM."""
    over = needs - usable
    return (
        f"needs {needs / 2**30:.2f} GiB of {usable / 2**30:.2f} GiB: {over / 2**30:.2f} GiB "
        f"({over / usable:.1%}) too many"
    )


def used_cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    """Returns the CPU seconds, in user and kernel mode, of all threads of this process, or, with
    RUSAGE_CHILDREN, of the child processes that this process has waited for.
    """
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def needed_and_usable_bytes(message: str) -> tuple[float, float]:
    """Reads (bytes needed, bytes usable) from the compiler's error message. Returns zeros if the
    message does not contain the two numbers.
    """
    for pattern in (
        r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm",
        r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    ):
        if found := re.search(pattern, message):
            needs, needs_unit, usable, usable_unit = found.groups()
            return float(needs) * UNITS[needs_unit], float(usable) * UNITS[usable_unit]
    return 0.0, 0.0


def _compiler_version(chip: Chip) -> dict[str, str]:
    """Returns {package with which JAX compiles for the chip: its installed version}."""
    import importlib.metadata

    name = "libtpu" if chip.torus_dimensions else "jax-cuda13-plugin"
    return {name: importlib.metadata.version(name)}
