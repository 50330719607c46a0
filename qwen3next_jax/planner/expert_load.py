"""The load of the routed experts that the cost model "calibrated" assumes.

The buffers of the experts have room for somewhat more rows than a balanced router sends, and loops
compute what does not fit (`ops/routed_experts/layout.py`, `model/expert_parallelism.py`). How much
of the buffers is in use, and how often the loops run, depends on the router, which no program
states. This module draws it: the popularity of expert e is proportional to exp(σ z_e), with
standard normal z_e, and each expert gets a Poisson number of choices. With σ = 0 all experts are
equally popular. All devices wait for the one with the most choices, so the load is that of the
fullest shard.
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
from qwen3next_jax.planner.compiled import is_kernel
from qwen3next_jax.planner.hlo import Computation, Instruction, Program
from qwen3next_jax.sharding.rules import EXPERT

_DRAWS = 64  # number of routers over which the load is averaged


class Layout(NamedTuple):
    """The buffers of one call of the experts' kernels.

    Attributes:
      shards: number of shards that the experts are split over.
      experts: number of experts of one shard.
      tiles: number of tiles of the layout.
      tile: number of rows of a tile.
    """

    shards: int
    experts: int
    tiles: int
    tile: int

    @property
    def gathered(self) -> bool:
        """Whether the shards exchange choices by the gathered exchange."""
        return 1 < self.shards <= GATHERED_SHARDS

    @property
    def capacity(self) -> int:
        """The number of choices that the layout has room for, whatever their experts."""
        # The layouts of one shard and of the ragged exchange have room for choices of any experts.
        padding = self.experts // 2 if self.gathered else self.experts
        return max(self.tiles - padding, 0) * self.tile

    @property
    def balanced(self) -> float:
        """The number of choices that a shard gets from a balanced router."""
        return self.capacity / (1 if self.shards == 1 else CAPACITY_FACTOR)


@dataclasses.dataclass(frozen=True)
class ExpertLoad:
    """The load of the fullest shard, the mean over random routers.

    Attributes:
      fullest: its number of choices, relative to the mean of all shards.
      used: the share of the layout's tiles that hold choices.
      beyond: the share of its choices that the layout has no room for.
      experts_beyond: number of experts with such choices, which the gathered exchange computes one
        after another.
      steps_beyond: number of steps, of `LOOP_ROWS` choices, that the loop of such an expert takes.
      rounds: number of rounds of the ragged exchange after the first, which compute such choices.
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
        expert_layout(step.computation, step.instruction, mesh)
        for step in program.walk()
        if is_expert_kernel(step.instruction) and "forward" in step.instruction.name
    ]
    if not layouts:
        return None
    return expert_load(max(layouts, key=lambda layout: layout.capacity), skew)


def is_expert_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction calls one of the experts' kernels."""
    return is_kernel(instruction) and instruction.name.startswith("expert_")


def find_expert_kernel(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[Computation, Instruction] | None:
    """Returns the call of one of the experts' kernels that an instruction is, or that it contains
    if it is a fusion, with its computation; None if there is none. The compiler fuses a kernel with
    the update in place of an array in which a scan saves its result.
    """
    candidates = [(computation, instruction)]
    if instruction.opcode == "fusion":
        inner = [program.computations[name] for name in instruction.called]
        candidates = [(within, i) for within in inner for i in within.values()]
    return next((found for found in candidates if is_expert_kernel(found[1])), None)


def expert_layout(computation: Computation, kernel: Instruction, mesh: jax.sharding.Mesh) -> Layout:
    """Returns the layout of a call of one of the experts' kernels
    (`kernels/tpu/routed_experts.py`). Its operands begin with the expert of each tile, the number
    of tiles in use, and an array of rows. The first array of three dimensions among its operands
    and results is of the experts' matrices.
    """
    arrays = [shape for name in kernel.operands for shape in computation[name].shapes]
    tiles, rows = arrays[0].elements, arrays[2].dims[0]
    experts = next(s.dims[0] for s in (*arrays, *kernel.shapes) if len(s.dims) == 3)
    return Layout(mesh.shape[EXPERT], experts, tiles, rows // tiles)


@functools.cache
def expert_load(layout: Layout, skew: float) -> ExpertLoad:
    """Returns the load of the experts.

    Args:
      layout: the buffers.
      skew: σ of the logarithm of the experts' popularity.
    """
    random = np.random.default_rng(0)
    popularity = np.exp(skew * random.standard_normal((_DRAWS, layout.shards, layout.experts)))
    popularity /= popularity.sum(axis=(1, 2), keepdims=True)
    choices = random.poisson(popularity * layout.balanced * layout.shards)
    loads = choices.sum(axis=2)
    fullest = loads.argmax(axis=1)
    choices = choices[np.arange(_DRAWS), fullest]
    tiles = np.maximum(-(-choices // layout.tile), 1)
    ends = np.cumsum(tiles, axis=1)
    total = choices.sum()
    load = ExpertLoad(
        fullest=float(total / loads.mean(axis=1).sum()),
        used=float(np.minimum(ends[:, -1] / layout.tiles, 1).mean()),
        beyond=0.0,
        experts_beyond=0.0,
        steps_beyond=0.0,
        rounds=0.0,
    )
    if layout.gathered:
        room = np.clip(layout.tiles - (ends - tiles), 0, tiles) * layout.tile
        beyond = np.maximum(choices - room, 0)
        steps, experts = -(-beyond // LOOP_ROWS), np.sum(ends > layout.tiles, axis=1)
        return dataclasses.replace(
            load,
            beyond=float(beyond.sum() / total),
            experts_beyond=float(experts.mean()),
            steps_beyond=float(steps.sum() / max(experts.sum(), 1)),
        )
    if layout.shards > GATHERED_SHARDS:
        beyond = np.maximum(choices.sum(axis=1) - layout.capacity, 0)
        more = -(-layout.capacity // OVERFLOW_PART)
        return dataclasses.replace(
            load, beyond=float(beyond.sum() / total), rounds=float(np.ceil(beyond / more).mean())
        )
    return load  # one shard has room for all choices
