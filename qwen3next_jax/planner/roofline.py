"""Predicts the time of a compiled TPU program from its own schedule: a roofline per instruction,
a torus per collective.

The instructions of a computation stand in the order in which the compiler starts them. They are
taken one after another:

- an instruction lasts max(FLOPs / peak, HBM bytes / bandwidth); a kernel also at least the
  cycles of the compiler's own schedule of
  it (`schedule.py`; where nothing was dumped those of the delta rule's kernels, `_CYCLES`) and,
  at HBM's bandwidth, the bytes that it states or else those of its windows times its trips;
- by the rules called "new" every instruction lasts at least the cycles of its schedule, which
  counts the vector unit, products that do
  not fill the matrix unit, sorts and scatters; by those called "today" only kernels do;
- a collective lasts as long as its bytes need on the links of its mesh axes, at their peak, all
  links in use (`Network`); a
  permutation as long as the busiest link needs for the transfers that meet on it;
- one that the compiler split into a start and an end runs beside what stands between them; what
  is left when its end is
  reached is waited for, and so is all of one that it did not split. Collectives of the same axes
  wait for each other;
- a collective inside a fusion lasts as long as the longer of the two;
- copies that the compiler started early (HBM to VMEM and back) run beside the rest in the same way;
- a loop lasts its trips times its body.

Not in the model: latency of collectives, of launches and of small transfers; stalls inside a
schedule; links shared by collectives of different axes; hosts, input and checkpoints. A real
step is slower.
"""

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
    """Of one run of the program on one device.

    seconds: of the whole. bound: seconds by what each instruction waited for: "compute", "hbm",
    or "network" with its mesh axes, such as "network data+expert". flops: executed,
    recomputation included. hbm_bytes: read and written. parts: of the functions of this package
    that asked for the work, the innermost of each, longest first; what was started early has its
    bytes there, and its seconds where it is waited for.
    """

    seconds: float
    bound: dict[str, float]
    flops: float
    hbm_bytes: float
    by_source: dict[str, "SourceCost"]


class SourceCost(NamedTuple):
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
    """Time of a program compiled for `mesh` on a slice of `shape` chips; `schedules` by name of
    instruction.
    """
    simulation = _Simulation(
        program,
        Network(mesh, chip, shape),
        chip,
        schedules or {},
        cost_model,
        source or program.source_function,
    )
    seconds, counts = simulation.run(program.entry)
    bound = {k: v for k, v in counts.items() if isinstance(k, str) and v}
    names = dict.fromkeys(k[1] for k in counts if isinstance(k, tuple))
    by_source = {
        name: SourceCost(*(counts[what, name] for what in SourceCost._fields)) for name in names
    }
    by_source = dict(
        sorted(by_source.items(), key=lambda item: (-item[1].seconds, -item[1].hbm_bytes))
    )
    return Estimate(
        seconds,
        dict(sorted(bound.items(), key=lambda item: -item[1])),
        sum(p.flops for p in by_source.values()),
        sum(p.hbm_bytes for p in by_source.values()),
        by_source,
    )


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
        self.done: dict[str, tuple[float, Counter]] = {}

    def run(self, name: str) -> tuple[float, Counter]:
        """(seconds, seconds by bound, beside them ("seconds" | "hbm_bytes" | "flops", part)) of
        one run of a computation.
        """
        if name not in self.done:
            self.done[name] = self._run(self.program.computations[name])
        return self.done[name]

    def _run(self, computation: Computation) -> tuple[float, Counter]:
        now, counts = 0.0, Counter()
        free: Counter = Counter()  # when each resource has finished what was given to it
        pending: dict[str, tuple[float, str, str]] = {}

        def add(seconds: float, inner: Mapping, times: float = 1) -> None:
            nonlocal now
            now += times * seconds
            for key, value in inner.items():
                counts[key] += times * value

        def wait(seconds: float, resource: str, source: str, **work: float) -> None:
            add(
                seconds,
                {resource: seconds, ("seconds", source): seconds}
                | {(what, source): size for what, size in work.items()},
            )

        def start(name: str, seconds: float, resource: str, source: str) -> None:
            free[resource] = max(now, free[resource]) + seconds
            pending[name] = free[resource], resource, source

        for instruction in computation.values():
            op, source = instruction.opcode, self.source(instruction)
            if op.endswith("-done") and instruction.operands[0] in pending:
                finish, resource, source = pending.pop(instruction.operands[0])
                wait(max(finish - now, 0.0), resource, source)
            elif op.endswith("-update") and instruction.operands[0] in pending:
                pending[instruction.name] = pending.pop(instruction.operands[0])
            elif collective_kind(instruction):
                resource, seconds = self._network(computation, instruction)
                if op.endswith("-start"):
                    start(instruction.name, seconds, resource, source)
                else:
                    wait(seconds, resource, source)
            elif op == "while":
                seconds, inner = self.run(instruction.attribute("body").lstrip("%"))
                add(seconds, inner, self.program.trips(computation, instruction) or 1)
            elif op == "conditional":
                add(
                    *max(
                        (self.run(name) for name in instruction.called),
                        key=lambda branch: branch[0],
                    )
                )
            elif op == "call":
                add(*self.run(instruction.called[0]))
            elif op in ("async-start", "call-start"):
                seconds, inner = self.run(instruction.called[0])
                waits = {k: v for k, v in inner.items() if isinstance(k, str)}
                start(instruction.name, seconds, max(waits, key=waits.get, default=HBM), source)
                add(
                    0.0,
                    {k: v for k, v in inner.items() if isinstance(k, tuple) and k[0] != "seconds"},
                )
            elif op.endswith("-start"):
                moved = hbm_bytes(self.program, computation, instruction)
                add(0.0, {("hbm_bytes", source): moved})
                start(instruction.name, moved / self.bandwidth, HBM, source)
            else:
                wait(
                    *self._work(computation, instruction),
                    source,
                    hbm_bytes=hbm_bytes(self.program, computation, instruction),
                    flops=instruction_flops(self.program, computation, instruction),
                )
        return now, counts

    def _work(self, computation: Computation, instruction: Instruction) -> tuple[float, str]:
        """(seconds, what they are waited for)."""
        cycles, moved = 0.0, hbm_bytes(self.program, computation, instruction)
        schedule, kernel = self.schedules.get(instruction.name), is_kernel(instruction)
        if schedule and (kernel or self.cost_model == "schedule"):
            cycles = (
                schedule.cycles * visited_grid_share(computation, instruction) / self.chip.clock
            )
            moved = max(moved, stated_bytes(instruction) or schedule.copied)
        elif kernel:
            cycles = _kernel_seconds(computation, instruction, self.chip)
        lasts = {
            COMPUTE: max(
                instruction_flops(self.program, computation, instruction) / self.peak, cycles
            ),
            HBM: moved / self.bandwidth,
        }
        fused = fused_collective(self.program, instruction)
        if fused:
            resource, seconds = self._network(*fused)
            lasts[resource] = seconds
        longest = max(lasts, key=lasts.get)
        return lasts[longest], longest

    def _network(self, computation: Computation, instruction: Instruction) -> tuple[str, float]:
        """("network" and the axes, seconds) of a collective."""
        collective = read_collective(computation, instruction, self.network.mesh)
        return "network " + "+".join(collective.axes), self.network.seconds(collective, instruction)


# Cycles per token and value head of our kernels with K = V = 128: the static schedules that
# benchmarks/delta_rule_tpu_schedule.py --chip=… [--context=4, for the two that a split row needs]
# prints for 4096 tokens of 32 heads (v4's for one of its two cores, halved).
_KERNELS = ("forward", "backward", "map", "forward with known inverses")
_CYCLES = {
    "v4": (3.82, 6.19, 4.69, 2.69),
    "v5e": (4.94, 8.96, 6.56, 3.04),
    "v5p": (2.61, 4.84, 3.49, 1.72),
    "v6e": (2.95, 4.99, 3.73, 1.98),
    "tpu7x": (2.95, 5.17, 3.93, 2.13),
}


def _kernel_seconds(computation: Computation, instruction: Instruction, chip: Chip) -> float:
    call = delta_rule_call(computation, instruction)
    if call is None or chip.name not in _CYCLES:
        return 0.0
    cycles = _CYCLES[chip.name][_KERNELS.index(call.kernel)]
    return call.tokens * call.heads * (call.key * call.value / 128**2) * cycles / chip.clock


class Network:
    """Peak times of collectives on the links of a TPU slice.

    A ring along one dimension of the torus sends both ways, at twice a link's rate; a line (a
    dimension that does not close, or of which the group takes a part) at once the rate. A group
    that spans several dimensions uses all of their links. Where groups interleave (their devices
    lie s apart) they share links, and each has 1/s. The two devices of a TPU7x chip share the
    chip's links, and talk to each other over a faster one.
    """

    def __init__(self, mesh: jax.sharding.Mesh, chip: Chip, shape: tuple[int, ...]):
        self.mesh, self.chip, self.shape = mesh, chip, shape
        # A torus closes along a dimension of v5e and v6e when it is a pod's whole side, of the
        # others where the slice is made of whole cubes of 4 × 4 × 4.
        cubes = all(n % 4 == 0 for n in shape)
        self.closes = tuple(n == 16 if chip.torus == 2 else cubes for n in shape)
        devices = mesh.devices.flatten()
        self.coordinates = np.array([d.coords[: len(shape)] for d in devices]).reshape(
            *mesh.devices.shape, len(shape)
        )
        self.cores = np.array([d.core_on_chip for d in devices]).reshape(mesh.devices.shape)

    def seconds(self, collective: Collective, instruction: Instruction) -> float:
        """Of one run."""
        if not collective.sent:
            return 0.0
        if collective.kind == "collective-permute":
            transfers = self._busiest_link(permuted_pairs(instruction))
            return collective.sent * (
                transfers / self.chip.link_bandwidth if transfers else 1 / self.chip.die_bandwidth
            )
        spans, shares = self._spans(collective.axes)
        if not spans:
            return collective.sent / self.chip.die_bandwidth
        if collective.kind in ("all-to-all", "ragged-all-to-all"):
            # Over a ring of m a byte travels m/4 links on average, over a line m/3.
            return max(
                collective.sent
                * shares
                * stride
                * (m / 8 if ring else m / 4)
                / self.chip.link_bandwidth
                for m, stride, ring in spans
            )
        links = sum((2 if ring else 1) / stride for _, stride, ring in spans)
        return collective.sent * shares / (links * self.chip.link_bandwidth)

    def _spans(self, axes: tuple[str, ...]) -> tuple[list[tuple[int, int, bool]], float]:
        """([(chips, their distance, whether a ring) for each torus dimension that a group
        spans], devices that share links).
        """
        index = tuple(slice(None) if name in axes else 0 for name in self.mesh.axis_names)
        coordinates = self.coordinates[index].reshape(-1, len(self.shape))
        spans = []
        for d, side in enumerate(self.shape):
            places = np.unique(coordinates[:, d])
            if len(places) > 1:
                stride = int(np.min(np.diff(places)))
                spans.append((len(places), stride, self.closes[d] and len(places) * stride == side))
        both_cores = len(np.unique(self.cores[index])) > 1
        # A chip takes in what its two devices both need once.
        return spans, self.chip.devices_per_chip / (2 if both_cores else 1)

    def _busiest_link(self, pairs: np.ndarray) -> float:
        """Transfers of a permutation [n, 2] that the busiest link carries in one direction; 0
        where none leaves its chip.

        A transfer goes along one dimension of the torus after the other, the shorter way round,
        half each way where both are as long.
        """
        at, to = (self.coordinates.reshape(-1, len(self.shape))[pairs[:, i]] for i in (0, 1))
        busiest = 0.0
        for d, side in enumerate(self.shape):
            for direction in (1, -1):
                apart = direction * (to[:, d] - at[:, d])
                apart = apart % side if self.closes[d] else np.maximum(apart, 0)
                share = (
                    np.where(2 * apart == side, 0.5, 2 * apart < side)
                    if self.closes[d]
                    else np.ones(len(pairs))
                )
                carried = np.zeros(self.shape)
                for hop in range(max(apart, default=0)):
                    place = at.copy()
                    place[:, d] = (at[:, d] + direction * hop) % side
                    np.add.at(carried, tuple(place.T), share * (hop < apart))
                busiest = max(busiest, float(carried.max()))
            at[:, d] = to[:, d]
        return busiest
