"""Predicts the time of a compiled program by one of the cost models."""

from collections.abc import Callable, Mapping

import jax

from qwen3next_jax.planner.calibrated import CalibratedSimulation
from qwen3next_jax.planner.hlo import Instruction, Program
from qwen3next_jax.planner.roofline import Estimate, FunctionCost, Network, Simulation
from qwen3next_jax.planner.schedule import Schedule
from qwen3next_jax.sharding.chips import Chip

COST_MODELS = ("schedule", "roofline", "calibrated")


def estimate_time(
    program: Program,
    mesh: jax.sharding.Mesh,
    chip: Chip,
    shape: tuple[int, ...],
    schedules: Mapping[str, Schedule] | None = None,
    cost_model: str = "schedule",
    source_of: Callable[[Instruction], str] | None = None,
    skew: float = 0.0,
) -> Estimate:
    """Predicts the time of a program.

    Args:
      program: the program, compiled for `mesh`.
      mesh: the mesh of the described devices.
      chip: the kind of chip.
      shape: number of chips along each dimension of the slice.
      schedules: name of an instruction → its schedule; None means that there are no schedules.
      cost_model: one of COST_MODELS; see `roofline` and `calibrated`.
      source_of: function that returns the key of `Estimate.cost_by_function` to which an
        instruction belongs; None means `program.source_function`.
      skew: σ of the experts' popularity (`expert_load`), which "calibrated" takes into account.
    """
    arguments = (
        program,
        Network(mesh, chip, shape),
        chip,
        schedules or {},
        cost_model,
        source_of or program.source_function,
    )
    if cost_model == "calibrated":
        simulation = CalibratedSimulation(*arguments, skew)
    else:
        simulation = Simulation(*arguments)
    seconds, costs = simulation.run_computation(program.entry_computation)
    by_source = {
        name: FunctionCost(
            *(costs.amount_by_field_and_function[field, name] for field in FunctionCost._fields)
        )
        for name in dict.fromkeys(name for _, name in costs.amount_by_field_and_function)
    }
    by_source = dict(
        sorted(by_source.items(), key=lambda item: (-item[1].seconds, -item[1].hbm_bytes))
    )
    bound = {resource: waited for resource, waited in costs.seconds_by_resource.items() if waited}
    return Estimate(
        seconds,
        dict(sorted(bound.items(), key=lambda item: -item[1])),
        sum(cost.flops for cost in by_source.values()),
        sum(cost.hbm_bytes for cost in by_source.values()),
        by_source,
    )
