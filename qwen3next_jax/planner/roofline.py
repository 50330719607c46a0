"""Predicts the time of a compiled TPU program: a roofline for each instruction, the links of the
torus for each collective, in the order in which the compiler scheduled them.

The instructions of a computation are listed in the order in which the compiler starts them. The
prediction walks them one after another:

- An instruction takes max(FLOPs / peak, HBM bytes / bandwidth).
- A kernel also takes at least the cycles of the compiler's own schedule of it (`schedule.py`). If
  none was dumped, the cycles of our delta rule kernels come from a table (`_CYCLES`). Its HBM bytes
  are those that it states, else those of its windows times its trips.
- By the cost model "schedule" every instruction takes at least the cycles of its schedule, which
  also counts the vector unit, products that do not fill the matrix unit, sorts and scatters. By
  the cost model "roofline" only kernels do.
- A collective takes the time that its bytes need on the links of its mesh axes, at their peak, with
  all links in use (`Network`). A permutation takes the time of the busiest link.
- A collective that the compiler split into a start and an end overlaps with the instructions
  between them; the end waits for the rest of it. A collective that is not split stops the device.
  Collectives of the same axes run one after another.
- A fusion that contains a collective takes the longer time of the two.
- Copies that the compiler starts early (between HBM and VMEM) overlap in the same way.
- A loop takes its trips times its body.

Not in the model: latency of collectives, launches and small transfers; stalls inside a schedule;
links that collectives of different axes share; hosts, input and checkpoints. A real step is slower.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from qwen3next_jax.planner.compiled import (
    Collective,
    collective_kind,
    delta_rule_call,
    instruction_flops,
    fused_collective,
    hbm_bytes,
    is_kernel,
    permuted_pairs,
    read_collective,
    stated_bytes,
    visited_grid_share,
)
from qwen3next_jax.planner.hlo import Computation, Instruction, Program
from qwen3next_jax.planner.schedule import Schedule
from qwen3next_jax.sharding.chips import Chip

COMPUTE, HBM = "compute", "hbm"
COST_MODELS = ("schedule", "roofline")


class Estimate(NamedTuple):
    """The predicted cost of one run of a program on one device.

    Attributes:
      seconds: the whole time.
      bound: resource → seconds that instructions waited for it: "compute", "hbm", or "network" and
        its mesh axes, such as "network data+expert". Longest first.
      flops: executed FLOPs, with recomputation.
      hbm_bytes: bytes read and written.
      by_source: function of this package → cost of the instructions that it asked for (the
        innermost function of each instruction's stack). Longest first. A copy or collective that
        was started early has its bytes at its start, its seconds where its end is waited for.
    """

    seconds: float
    bound: dict[str, float]
    flops: float
    hbm_bytes: float
    by_source: dict[str, "SourceCost"]


class SourceCost(NamedTuple):
    """The cost of the instructions that one function asked for. (The fields are part of the
    planner's JSON.)
    """

    seconds: float
    hbm_bytes: float
    flops: float


def estimate_time(
    program: Program,
    mesh: jax.sharding.Mesh,
    chip: Chip,
    shape: tuple[int, ...],
    schedules: Mapping[str, Schedule] | None = None,
    cost_model: str = "schedule",
    source: Callable[[Instruction], str] | None = None,
) -> Estimate:
    """Predicts the time of a program.

    Args:
      program: compiled for `mesh`.
      shape: chips along each dimension of the slice.
      schedules: name of an instruction → its schedule.
      cost_model: one of COST_MODELS; see the top of this file.
      source: names the group of `Estimate.by_source` that an instruction belongs to; default:
        `program.source_function`.
    """
    simulation = _Simulation(
        program,
        Network(mesh, chip, shape),
        chip,
        schedules or {},
        cost_model,
        source or program.source_function,
    )
    seconds, costs = simulation.run(program.entry)
    by_source = {
        name: SourceCost(*(costs.work[field, name] for field in SourceCost._fields))
        for name in dict.fromkeys(name for _, name in costs.work)
    }
    by_source = dict(
        sorted(by_source.items(), key=lambda item: (-item[1].seconds, -item[1].hbm_bytes))
    )
    bound = {resource: waited for resource, waited in costs.waits.items() if waited}
    return Estimate(
        seconds,
        dict(sorted(bound.items(), key=lambda item: -item[1])),
        sum(cost.flops for cost in by_source.values()),
        sum(cost.hbm_bytes for cost in by_source.values()),
        by_source,
    )


@dataclasses.dataclass
class _Costs:
    """What a computation costs.

    Attributes:
      waits: resource → seconds that instructions waited for it.
      work: (field of `SourceCost`, source) → amount.
    """

    waits: Counter = dataclasses.field(default_factory=Counter)
    work: Counter = dataclasses.field(default_factory=Counter)

    def add(self, other: "_Costs", times: float = 1) -> None:
        for resource, seconds in other.waits.items():
            self.waits[resource] += times * seconds
        for key, amount in other.work.items():
            self.work[key] += times * amount


class _Timeline:
    """One run of a computation: the time so far, its costs, and what was started early.

    Attributes:
      now: seconds since the computation began.
    """

    def __init__(self):
        self.now, self.costs = 0.0, _Costs()
        self._free: Counter = Counter()  # resource → when it has finished what it was given
        # name of a start → (when it finishes, resource, source)
        self._pending: dict[str, tuple[float, str, str]] = {}

    def add(self, seconds: float, costs: _Costs, times: float = 1) -> None:
        """A computation that this one calls runs `times` times."""
        self.now += times * seconds
        self.costs.add(costs, times)

    def add_work(self, source: str, **work: float) -> None:
        """Counts work that takes no time now."""
        self.costs.add(_Costs(work=Counter({(field, source): n for field, n in work.items()})))

    def wait(self, seconds: float, resource: str, source: str, **work: float) -> None:
        """The device waits for a resource."""
        self.now += seconds
        self.costs.add(_Costs(waits=Counter({resource: seconds})))
        self.add_work(source, seconds=seconds, **work)

    def start(self, name: str, seconds: float, resource: str, source: str) -> None:
        """Starts something that takes `seconds` once its resource is free."""
        self._free[resource] = max(self.now, self._free[resource]) + seconds
        self._pending[name] = self._free[resource], resource, source

    def rename(self, name: str, new: str) -> bool:
        """From now on `new` names what `name` started. Returns whether it started anything."""
        if name not in self._pending:
            return False
        self._pending[new] = self._pending.pop(name)
        return True

    def finish(self, name: str) -> bool:
        """Waits for what `name` started. Returns whether it started anything."""
        if name not in self._pending:
            return False
        finish, resource, source = self._pending.pop(name)
        self.wait(max(finish - self.now, 0.0), resource, source)
        return True


class _Simulation:
    def __init__(
        self,
        program: Program,
        network: "Network",
        chip: Chip,
        schedules: Mapping[str, Schedule],
        cost_model: str,
        source: Callable[[Instruction], str],
    ):
        self.program, self.network, self.chip = program, network, chip
        self.schedules, self.cost_model, self.source = schedules, cost_model, source
        self.peak, self.bandwidth = chip.device_flops, chip.hbm_bandwidth / chip.devices_per_chip
        self._done: dict[str, tuple[float, _Costs]] = {}

    def run(self, name: str) -> tuple[float, _Costs]:
        """Seconds and costs of one run of the computation `name`."""
        if name not in self._done:
            timeline, computation = _Timeline(), self.program.computations[name]
            for instruction in computation.values():
                self._run(timeline, computation, instruction)
            self._done[name] = timeline.now, timeline.costs
        return self._done[name]

    def _run(self, timeline: _Timeline, computation: Computation, instruction: Instruction) -> None:
        """Runs one instruction."""
        op, name, source = instruction.opcode, instruction.name, self.source(instruction)
        if op.endswith("-done") and timeline.finish(instruction.operands[0]):
            return
        if op.endswith("-update") and timeline.rename(instruction.operands[0], name):
            return
        if collective_kind(instruction):
            resource, seconds = self._network(computation, instruction)
            if op.endswith("-start"):
                timeline.start(name, seconds, resource, source)
            else:
                timeline.wait(seconds, resource, source)
        elif op == "while":
            body = self.run(instruction.attribute("body").lstrip("%"))
            timeline.add(*body, self.program.trips(computation, instruction) or 1)
        elif op == "conditional":
            branches = [self.run(branch) for branch in instruction.called]
            timeline.add(*max(branches, key=lambda branch: branch[0]))
        elif op == "call":
            timeline.add(*self.run(instruction.called[0]))
        elif op in ("async-start", "call-start"):
            seconds, costs = self.run(instruction.called[0])
            longest = max(costs.waits, key=costs.waits.get, default=HBM)
            timeline.start(name, seconds, longest, source)
            work = {key: n for key, n in costs.work.items() if key[0] != "seconds"}
            timeline.add(0.0, _Costs(work=Counter(work)))
        elif op.endswith("-start"):
            moved = hbm_bytes(self.program, computation, instruction)
            timeline.add_work(source, hbm_bytes=moved)
            timeline.start(name, moved / self.bandwidth, HBM, source)
        else:
            timeline.wait(
                *self._time(computation, instruction),
                source,
                hbm_bytes=hbm_bytes(self.program, computation, instruction),
                flops=instruction_flops(self.program, computation, instruction),
            )

    def _time(self, computation: Computation, instruction: Instruction) -> tuple[float, str]:
        """Seconds of an instruction, and the resource that it waits for."""
        cycles, moved = 0.0, hbm_bytes(self.program, computation, instruction)
        schedule, kernel = self.schedules.get(instruction.name), is_kernel(instruction)
        if schedule and (kernel or self.cost_model == "schedule"):
            cycles = (
                schedule.cycles * visited_grid_share(computation, instruction) / self.chip.clock
            )
            moved = max(moved, stated_bytes(instruction) or schedule.copied)
        elif kernel:
            cycles = _delta_rule_seconds(computation, instruction, self.chip)
        products = instruction_flops(self.program, computation, instruction) / self.peak
        seconds_of = {COMPUTE: max(products, cycles), HBM: moved / self.bandwidth}
        fused = fused_collective(self.program, instruction)
        if fused:
            resource, seconds = self._network(*fused)
            seconds_of[resource] = seconds
        longest = max(seconds_of, key=seconds_of.get)
        return seconds_of[longest], longest

    def _network(self, computation: Computation, instruction: Instruction) -> tuple[str, float]:
        """The resource of a collective ("network" and its mesh axes), and its seconds."""
        collective = read_collective(computation, instruction, self.network.mesh)
        return "network " + "+".join(collective.axes), self.network.seconds(collective, instruction)


# Cycles per token and value head of our kernels with K = V = 128, by the static schedules that
# benchmarks/delta_rule_tpu_schedule.py --chip=… prints for 4096 tokens of 32 heads (--context=4
# for the last two kernels, which only split rows need). v4's are half of one core's.
_KERNELS = ("forward", "backward", "map", "forward with known inverses")
_CYCLES = {
    "v4": (3.82, 6.19, 4.69, 2.69),
    "v5e": (4.94, 8.96, 6.56, 3.04),
    "v5p": (2.61, 4.84, 3.49, 1.72),
    "v6e": (2.95, 4.99, 3.73, 1.98),
    "tpu7x": (2.95, 5.17, 3.93, 2.13),
}


def _delta_rule_seconds(computation: Computation, instruction: Instruction, chip: Chip) -> float:
    """Seconds of a delta rule kernel by `_CYCLES`; 0 for any other kernel or chip."""
    call = delta_rule_call(computation, instruction)
    if call is None or chip.name not in _CYCLES:
        return 0.0
    cycles = _CYCLES[chip.name][_KERNELS.index(call.kernel)]
    return call.tokens * call.heads * (call.key * call.value / 128**2) * cycles / chip.clock


class Network:
    """Computes the time of collectives on the links of a TPU slice, at their peak rates.

    A ring along one dimension of the torus sends in both directions, at twice a link's rate. A line
    sends at a link's rate; a group is a line if the dimension does not close to a ring, or if the
    group has only a part of it. A group that spans several dimensions uses the links of all of
    them. Groups that interleave (neighbours of a group are s chips apart) share links, and each
    gets 1/s of the rate. The two devices of a TPU7x chip share the chip's links, and exchange data
    with each other over a faster link.
    """

    def __init__(self, mesh: jax.sharding.Mesh, chip: Chip, shape: tuple[int, ...]):
        """`shape`: chips along each dimension of the slice."""
        self.mesh, self.chip, self.shape = mesh, chip, shape
        # A dimension closes to a ring if, on v5e and v6e, it is a pod's whole side of 16 chips; on
        # the other chips, if the slice consists of whole cubes of 4 × 4 × 4.
        cubes = all(n % 4 == 0 for n in shape)
        self.closes = tuple(n == 16 if chip.torus == 2 else cubes for n in shape)
        devices = mesh.devices.flatten()
        self.coordinates = np.array([d.coords[: len(shape)] for d in devices]).reshape(
            *mesh.devices.shape, len(shape)
        )
        self.cores = np.array([d.core_on_chip for d in devices]).reshape(mesh.devices.shape)

    def seconds(self, collective: Collective, instruction: Instruction) -> float:
        """Seconds of one run of a collective. `instruction` is read only for a permutation."""
        if not collective.sent:
            return 0.0
        if collective.kind == "collective-permute":
            transfers = self._busiest_link(permuted_pairs(instruction))
            if not transfers:
                return collective.sent / self.chip.die_bandwidth
            return collective.sent * (transfers / self.chip.link_bandwidth)
        spans, sharing = self._spans(collective.axes)
        if not spans:
            return collective.sent / self.chip.die_bandwidth
        sent = collective.sent * sharing
        if collective.kind in ("all-to-all", "ragged-all-to-all"):
            # In a ring of m chips a byte travels over m/4 links on average, in a line over m/3.
            return max(
                sent
                * s.stride
                * (s.chips / 8 if s.is_ring else s.chips / 4)
                / self.chip.link_bandwidth
                for s in spans
            )
        links = sum((2 if s.is_ring else 1) / s.stride for s in spans)
        return sent / (links * self.chip.link_bandwidth)

    def _spans(self, axes: tuple[str, ...]) -> tuple[list["_Span"], float]:
        """The dimensions of the torus that a group along these mesh axes spans, and how many
        devices share each link.
        """
        index = tuple(slice(None) if name in axes else 0 for name in self.mesh.axis_names)
        coordinates = self.coordinates[index].reshape(-1, len(self.shape))
        spans = []
        for d, side in enumerate(self.shape):
            places = np.unique(coordinates[:, d])
            if len(places) > 1:
                stride = int(np.min(np.diff(places)))
                is_ring = self.closes[d] and len(places) * stride == side
                spans.append(_Span(len(places), stride, is_ring))
        both_cores = len(np.unique(self.cores[index])) > 1
        # If both devices of a chip are in the group, the chip receives once what both need.
        return spans, self.chip.devices_per_chip / (2 if both_cores else 1)

    def _busiest_link(self, pairs: np.ndarray) -> float:
        """How many transfers of a permutation the busiest link carries in one direction; 0 if no
        transfer leaves its chip.

        A transfer goes along one dimension of the torus after the other, the shorter way round. If
        both ways are equally long, half goes each way.

        Args:
          pairs: [n, 2] positions of sources and targets in the mesh.
        """
        at, to = (self.coordinates.reshape(-1, len(self.shape))[pairs[:, i]] for i in (0, 1))
        busiest = 0.0
        for d, side in enumerate(self.shape):
            for direction in (1, -1):
                hops = direction * (to[:, d] - at[:, d])
                if self.closes[d]:
                    hops = hops % side
                    share = np.where(2 * hops == side, 0.5, 2 * hops < side)
                else:
                    hops, share = np.maximum(hops, 0), np.ones(len(pairs))
                carried = np.zeros(self.shape)
                for hop in range(max(hops, default=0)):
                    place = at.copy()
                    place[:, d] = (at[:, d] + direction * hop) % side
                    np.add.at(carried, tuple(place.T), share * (hop < hops))
                busiest = max(busiest, float(carried.max()))
            at[:, d] = to[:, d]
        return busiest


class _Span(NamedTuple):
    """A dimension of the torus that a group spans: how many chips, how far apart, and whether they
    close to a ring.
    """

    chips: int
    stride: int
    is_ring: bool
