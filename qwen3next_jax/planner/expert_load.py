"""The load of the routed experts that the cost model "calibrated" assumes. A choice is a pair of a
token and an expert to which the router sends it. The buffers of the experts have room for somewhat
more choices than a balanced router makes, and loops compute the choices that do not fit
(`ops/routed_experts/layout.py`, `model/expert_parallelism.py`). The router decides how much of the
buffers is in use and how often the loops run, and the compiled program does not state the router's
choices. So this module draws random routers: the popularity of expert e is proportional to exp(σ
z_e), with standard normal z_e, and each expert gets a Poisson number of choices. With σ = 0 all
experts are equally popular. All devices wait for the device with the most choices, so the module
computes the load of the fullest shard.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from qwen3next_jax.model.expert_parallelism import (
    CAPACITY_FACTOR,
    GATHERED_SHARDS,
    OVERFLOW_PART,
)
from qwen3next_jax.ops.routed_experts.layout import LOOP_ROWS
from qwen3next_jax.planner.compiled import is_tpu_kernel
from qwen3next_jax.planner.hlo import Computation, Instruction, Program
from qwen3next_jax.sharding.rules import EXPERT

_DRAWS = 64  # number of routers over which the load is averaged


class ExpertLayout(NamedTuple):
    """The buffers of one call of the experts' kernels.

    Attributes:
      expert_shards: number of shards that the experts are split over.
      experts_per_shard: number of experts of one shard.
      tile_count: number of tiles of the layout.
      tile_rows: number of rows of a tile.
    """

    expert_shards: int
    experts_per_shard: int
    tile_count: int
    tile_rows: int

    @property
    def uses_gathered_exchange(self) -> bool:
        """Whether the shards exchange choices by the gathered exchange."""
        return 1 < self.expert_shards <= GATHERED_SHARDS

    @property
    def choice_capacity(self) -> int:
        """The number of choices that the layout has room for, however they are distributed over the
        experts.
        """
        # The layouts of one shard and of the ragged exchange have room for choices of any experts.
        padding = (
            self.experts_per_shard // 2 if self.uses_gathered_exchange else self.experts_per_shard
        )
        return max(self.tile_count - padding, 0) * self.tile_rows

    @property
    def balanced_choices(self) -> float:
        """The number of choices that a shard gets from a balanced router."""
        return self.choice_capacity / (1 if self.expert_shards == 1 else CAPACITY_FACTOR)


@dataclasses.dataclass(frozen=True)
class ExpertLoad:
    """The load of the fullest shard, as a mean over random routers.

    Attributes:
      fullest: the number of choices of the fullest shard, relative to the mean of all shards.
      used: the share of the layout's tiles that hold choices.
      beyond: the share of the fullest shard's choices that the layout has no room for.
      experts_beyond: number of experts with choices that the layout has no room for, which the
        gathered exchange computes one after another.
      steps_beyond: number of steps, of `LOOP_ROWS` choices, that the loop takes for one of the
        `experts_beyond`.
      rounds: number of rounds of the ragged exchange after the first round, which compute the
        choices that the layout has no room for.
    """

    fullest: float
    used: float
    beyond: float
    experts_beyond: float
    steps_beyond: float
    rounds: float


def assumed_expert_load(
    program: Program, mesh: jax.sharding.Mesh, skew: float
) -> ExpertLoad | None:
    """Returns the load of the largest layout of experts in a program; None if it has no kernels of
    experts.
    """
    layouts = [
        parse_expert_layout(step.computation, step.instruction, mesh)
        for step in program.walk()
        if is_expert_kernel(step.instruction) and "forward" in step.instruction.name
    ]
    if not layouts:
        return None
    return mean_expert_load(max(layouts, key=lambda layout: layout.choice_capacity), skew)


def is_expert_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction calls one of the experts' kernels."""
    return is_tpu_kernel(instruction) and instruction.name.startswith("expert_")


def find_expert_kernel(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[Computation, Instruction] | None:
    """Returns the call of one of the experts' kernels, with its computation, if `instruction` is
    such a call or a fusion that contains one; otherwise None. The compiler fuses a kernel with the
    update in place of an array in which a scan saves its result.
    """
    candidates = [(computation, instruction)]
    if instruction.opcode == "fusion":
        inner = [program.computations[name] for name in instruction.called_computations]
        candidates = [(within, i) for within in inner for i in within.values()]
    return next((found for found in candidates if is_expert_kernel(found[1])), None)


def parse_expert_layout(
    computation: Computation, kernel: Instruction, mesh: jax.sharding.Mesh
) -> ExpertLayout:
    """Returns the layout of a call of one of the experts' kernels
    (`kernels/tpu/routed_experts.py`). The kernel's operands begin with the expert of each tile, the
    number of tiles in use, and an array of rows. The first array of three dimensions among the
    kernel's operands and results holds matrices of the experts.
    """
    arrays = [shape for name in kernel.operands for shape in computation[name].shapes]
    tiles, rows = arrays[0].elements, arrays[2].dims[0]
    experts = next(s.dims[0] for s in (*arrays, *kernel.shapes) if len(s.dims) == 3)
    return ExpertLayout(mesh.shape[EXPERT], experts, tiles, rows // tiles)


@functools.cache
def mean_expert_load(layout: ExpertLayout, skew: float) -> ExpertLoad:
    """Returns the load of the experts.

    Args:
      layout: the buffers.
      skew: σ of the logarithm of the experts' popularity.
    """
    random = np.random.default_rng(0)
    popularity = np.exp(
        skew * random.standard_normal((_DRAWS, layout.expert_shards, layout.experts_per_shard))
    )
    popularity /= popularity.sum(axis=(1, 2), keepdims=True)
    choices = random.poisson(popularity * layout.balanced_choices * layout.expert_shards)
    loads = choices.sum(axis=2)
    fullest = loads.argmax(axis=1)
    choices = choices[np.arange(_DRAWS), fullest]
    tiles = np.maximum(-(-choices // layout.tile_rows), 1)
    ends = np.cumsum(tiles, axis=1)
    total = choices.sum()
    load = ExpertLoad(
        fullest=float(total / loads.mean(axis=1).sum()),
        used=float(np.minimum(ends[:, -1] / layout.tile_count, 1).mean()),
        beyond=0.0,
        experts_beyond=0.0,
        steps_beyond=0.0,
        rounds=0.0,
    )
    if layout.uses_gathered_exchange:
        room = np.clip(layout.tile_count - (ends - tiles), 0, tiles) * layout.tile_rows
        beyond = np.maximum(choices - room, 0)
        steps, experts = -(-beyond // LOOP_ROWS), np.sum(ends > layout.tile_count, axis=1)
        return dataclasses.replace(
            load,
            beyond=float(beyond.sum() / total),
            experts_beyond=float(experts.mean()),
            steps_beyond=float(steps.sum() / max(experts.sum(), 1)),
        )
    if layout.expert_shards > GATHERED_SHARDS:
        beyond = np.maximum(choices.sum(axis=1) - layout.choice_capacity, 0)
        more = -(-layout.choice_capacity // OVERFLOW_PART)
        return dataclasses.replace(
            load, beyond=float(beyond.sum() / total), rounds=float(np.ceil(beyond / more).mean())
        )
    return load  # one shard has room for all choices
