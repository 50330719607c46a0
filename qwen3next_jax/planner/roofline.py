"""Predicts the time of a compiled TPU program. The time of an instruction comes from a roofline,
and the time of a collective from the links of the torus.

A computation lists its instructions in the order in which the compiler starts them. The prediction
goes through the instructions of a computation one after another:

- An instruction takes max(FLOPs / peak, HBM bytes / bandwidth).
- A kernel also takes at least the cycles of the schedule that the compiler made of it
  (`schedule.py`). If there is no schedule of a gated delta rule kernel, its cycles come from a
  table (`_CYCLES`). A kernel's HBM bytes are the number that the kernel states, or else the bytes
  of its blocks times the number of grid steps.
- In the cost model "schedule", every instruction takes at least the cycles of its schedule. The
  cycles of a schedule include work that FLOPs do not show: the vector unit, products that do not
  fill the matrix unit, sorts and scatters. In the cost model "roofline", only kernels take at least
  the cycles of their schedules. The cost model "calibrated" replaces the peak rates by measured
  ones, and counts many costs that "schedule" and "roofline" leave out (`calibrated.py`).
- A collective takes the time in which the links along its mesh axes carry its bytes, at their peak
  rate and with all links in use (`Network`). A permutation takes the time of its busiest link.
- The compiler may split a collective into a start and an end. A split collective overlaps with the
  instructions between its start and its end; at its end the device waits until the collective has
  finished. During a collective that is not split, the device does nothing else. Collectives over
  the same axes run one after another.
- A fusion that contains a collective takes as long as the collective or as the rest of the fusion,
  whichever is longer.
- Copies between HBM and VMEM that the compiler starts early overlap with the instructions between
  their start and their end, too.
- For a collective between slices, the program sends data to the host and later receives the result
  from the host. The collective overlaps with the instructions between the `send` and the end of the
  `recv`, and takes the time that its bytes need on the network between slices, at the network's
  peak rate.
- A loop takes the time of its body times the number of its trips.

The cost models "schedule" and "roofline" leave out the latency of collectives, launches and small
transfers; stalls inside a schedule; contention on links that collectives over different axes share;
and the time for hosts, input data and checkpoints. So a real step is slower.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from qwen3next_jax.planner.between_slices import seconds_between_slices
from qwen3next_jax.planner.compiled import (
    Collective,
    collective_kind,
    fused_collective,
    hbm_bytes,
    instruction_flops,
    is_tpu_kernel,
    kernel_hbm_bytes,
    parse_delta_rule_call,
    parse_slice_transfer,
    permuted_pairs,
    read_collective,
    read_slice_transfer,
    visited_grid_step_share,
)
from qwen3next_jax.planner.hlo import Computation, Instruction, Program
from qwen3next_jax.planner.schedule import Schedule
from qwen3next_jax.sharding.chips import Chip
from qwen3next_jax.sharding.mesh import slice_number

COMPUTE, HBM = "compute", "hbm"


class Estimate(NamedTuple):
    """The predicted cost of one run of a program on one device.

    Attributes:
      seconds: the whole time.
      seconds_by_resource: {resource: seconds that the device spent on it or waited for it}, longest
        first. A resource is "compute", "hbm", or "network" with mesh axes, such as "network
        data+expert".
      flops: executed FLOPs, including recomputation.
      hbm_bytes: bytes read from and written to HBM.
      cost_by_function: {function of this package: cost of the instructions compiled from its code},
        longest first. Each instruction belongs to the innermost function of its stack. For a copy
        or collective that overlaps with other instructions, the seconds are the time that the
        device waits at its end.
    """

    seconds: float
    seconds_by_resource: dict[str, float]
    flops: float
    hbm_bytes: float
    cost_by_function: dict[str, "FunctionCost"]


class FunctionCost(NamedTuple):
    """The cost of the instructions compiled from the code of one function, in one run of the
    program on one device. (In the planner's JSON, the fields have the same names.)
    """

    seconds: float
    hbm_bytes: float
    flops: float


@dataclasses.dataclass
class ComputationCosts:
    """The cost of a computation: one of the program's functions, such as the body of a loop.

    Attributes:
      seconds_by_resource: {resource: seconds that the device spent on it or waited for it}.
      amount_by_field_and_function: {(field of `FunctionCost`, source): the value of this field for
        this source}.
    """

    seconds_by_resource: Counter = dataclasses.field(default_factory=Counter)
    amount_by_field_and_function: Counter = dataclasses.field(default_factory=Counter)

    def add(self, other: "ComputationCosts", times: float = 1) -> None:
        """Adds `times` times the costs `other`."""
        for resource, seconds in other.seconds_by_resource.items():
            self.seconds_by_resource[resource] += times * seconds
        for key, amount in other.amount_by_field_and_function.items():
            self.amount_by_field_and_function[key] += times * amount


class Timeline:
    """The simulation of one run of a computation: its time and costs so far, and the transfers that
    have started and whose end has not been reached.

    Attributes:
      now: seconds since the computation began.
      costs: the costs so far.
    """

    def __init__(self):
        self.now, self.costs = 0.0, ComputationCosts()
        self._free: Counter = Counter()  # {resource: end of its last transfer}
        # {name of the starting instruction: (time at which its transfer finishes, resource,
        # source)}
        self._pending: dict[str, tuple[float, str, str]] = {}

    def add_called_computation(
        self, seconds: float, costs: ComputationCosts, times: float = 1
    ) -> None:
        """Adds `times` runs of a called computation that takes `seconds` and costs `costs`."""
        self.now += times * seconds
        self.costs.add(costs, times)

    def record_work(self, source: str, **work: float) -> None:
        """Adds work to the costs without advancing the time."""
        self.costs.add(
            ComputationCosts(
                amount_by_field_and_function=Counter(
                    {(field, source): n for field, n in work.items()}
                )
            )
        )

    def spend_on_resource(self, seconds: float, resource: str, source: str, **work: float) -> None:
        """Advances the time by `seconds`, which the device spends on `resource`, and adds the
        work.
        """
        self.now += seconds
        self.costs.add(ComputationCosts(seconds_by_resource=Counter({resource: seconds})))
        self.record_work(source, seconds=seconds, **work)

    def start_transfer(self, name: str, seconds: float, resource: str, source: str) -> None:
        """Starts a transfer that takes `seconds`, as soon as its resource is free."""
        self._free[resource] = max(self.now, self._free[resource]) + seconds
        self._pending[name] = self._free[resource], resource, source

    def rename_transfer(self, name: str, new_name: str) -> bool:
        """Renames the transfer that `name` started to `new_name`. Returns whether there is one."""
        if name not in self._pending:
            return False
        self._pending[new_name] = self._pending.pop(name)
        return True

    def finish_transfer(self, name: str) -> bool:
        """Waits for the transfer that `name` started. Returns whether there is one."""
        if name not in self._pending:
            return False
        finish, resource, source = self._pending.pop(name)
        self.spend_on_resource(max(finish - self.now, 0.0), resource, source)
        return True


class Simulation:
    """Goes through the instructions of a program and adds up their times and costs."""

    def __init__(
        self,
        program: Program,
        network: "Network",
        chip: Chip,
        schedules: Mapping[str, Schedule],
        cost_model: str,
        source_of: Callable[[Instruction], str],
    ):
        self.program, self.network, self.chip = program, network, chip
        self.schedules, self.cost_model, self.source_of = schedules, cost_model, source_of
        self.peak, self.bandwidth = chip.device_flops, chip.hbm_bandwidth / chip.devices_per_chip
        self._done: dict[str, tuple[float, ComputationCosts]] = {}

    def run_computation(self, name: str) -> tuple[float, ComputationCosts]:
        """Returns the seconds and the costs of one run of the computation `name`."""
        if name not in self._done:
            timeline, computation = self._new_timeline(), self.program.computations[name]
            for instruction in computation.values():
                self._run_instruction(timeline, computation, instruction)
            self._done[name] = timeline.now, timeline.costs
        return self._done[name]

    def _new_timeline(self) -> Timeline:
        return Timeline()

    def _run_instruction(
        self, timeline: Timeline, computation: Computation, instruction: Instruction
    ) -> None:
        """Adds one run of an instruction to the timeline."""
        op, name, source = instruction.opcode, instruction.name, self.source_of(instruction)
        if op == "recv-done":
            received = parse_slice_transfer(computation[instruction.operands[0]])
            if received and timeline.finish_transfer(received.rendezvous_name):
                return
        if transfer := parse_slice_transfer(instruction):
            if op == "send":
                collective = read_slice_transfer(computation, instruction, self.network.mesh)
                seconds = seconds_between_slices(collective.sent_bytes, self.chip)
                timeline.start_transfer(
                    transfer.rendezvous_name, seconds, f"network {collective.axes[0]}", source
                )
            return
        if op.endswith("-done") and timeline.finish_transfer(instruction.operands[0]):
            return
        if op.endswith("-update") and timeline.rename_transfer(instruction.operands[0], name):
            return
        if collective_kind(instruction):
            self._run_collective(timeline, computation, instruction, source)
        elif op == "while":
            body = self.run_computation(instruction.attribute("body").lstrip("%"))
            timeline.add_called_computation(*body, self._loop_trips(computation, instruction))
        elif op == "conditional":
            branches = [self.run_computation(branch) for branch in instruction.called_computations]
            timeline.add_called_computation(*max(branches, key=lambda branch: branch[0]))
        elif op == "call":
            timeline.add_called_computation(
                *self.run_computation(instruction.called_computations[0])
            )
        elif op in ("async-start", "call-start"):
            seconds, costs = self.run_computation(instruction.called_computations[0])
            longest = max(costs.seconds_by_resource, key=costs.seconds_by_resource.get, default=HBM)
            self._start_async_call(timeline, instruction, seconds, longest, source)
            work = {
                key: n
                for key, n in costs.amount_by_field_and_function.items()
                if key[0] != "seconds"
            }
            timeline.add_called_computation(
                0.0, ComputationCosts(amount_by_field_and_function=Counter(work))
            )
        elif op.endswith("-start"):
            moved = hbm_bytes(self.program, computation, instruction)
            timeline.record_work(source, hbm_bytes=moved)
            self._start_async_copy(timeline, computation, instruction, moved, source)
        else:
            self._run_synchronously(timeline, computation, instruction, source)

    def _loop_trips(self, computation: Computation, loop: Instruction) -> float:
        """Returns how often the body of a loop runs."""
        return self.program.loop_trips(computation, loop) or 1

    def _run_collective(
        self, timeline: Timeline, computation: Computation, instruction: Instruction, source: str
    ) -> None:
        """Runs a collective, or starts it if the instruction is the start of an asynchronous
        collective.
        """
        resource, seconds = self._collective_resource_and_seconds(computation, instruction)
        if instruction.opcode.endswith("-start"):
            timeline.start_transfer(instruction.name, seconds, resource, source)
        else:
            timeline.spend_on_resource(seconds, resource, source)

    def _start_async_call(
        self,
        timeline: Timeline,
        instruction: Instruction,
        seconds: float,
        resource: str,
        source: str,
    ) -> None:
        """Starts an asynchronous computation, which overlaps with the instructions until its end
        instruction.
        """
        timeline.start_transfer(instruction.name, seconds, resource, source)

    def _start_async_copy(
        self,
        timeline: Timeline,
        computation: Computation,
        instruction: Instruction,
        moved_bytes: float,
        source: str,
    ) -> None:
        """Starts a copy that moves `moved_bytes` through HBM."""
        timeline.start_transfer(instruction.name, moved_bytes / self.bandwidth, HBM, source)

    def _run_synchronously(
        self, timeline: Timeline, computation: Computation, instruction: Instruction, source: str
    ) -> None:
        """Runs an instruction that is neither a collective nor the start of a transfer."""
        timeline.spend_on_resource(
            *self._seconds_and_slowest_resource(computation, instruction),
            source,
            hbm_bytes=hbm_bytes(self.program, computation, instruction),
            flops=instruction_flops(self.program, computation, instruction),
        )

    def _seconds_and_slowest_resource(
        self, computation: Computation, instruction: Instruction
    ) -> tuple[float, str]:
        """Returns the seconds that an instruction takes, and the resource that it waits for."""
        seconds_of = self._seconds_by_resource(computation, instruction)
        longest = max(seconds_of, key=seconds_of.get)
        return seconds_of[longest], longest

    def _seconds_by_resource(
        self, computation: Computation, instruction: Instruction
    ) -> dict[str, float]:
        """Returns {resource: seconds for which an instruction needs it}."""
        cycles, moved = 0.0, hbm_bytes(self.program, computation, instruction)
        schedule, kernel = self.schedules.get(instruction.name), is_tpu_kernel(instruction)
        if schedule and (kernel or self.cost_model != "roofline"):
            cycles = (
                schedule.cycles
                * visited_grid_step_share(computation, instruction)
                / self.chip.clock_hz
            )
            moved = max(moved, kernel_hbm_bytes(computation, instruction) or schedule.copied_bytes)
        elif kernel:
            cycles = _delta_rule_seconds(computation, instruction, self.chip)
        flops = instruction_flops(self.program, computation, instruction)
        seconds_of = {
            COMPUTE: max(self._product_seconds(flops), cycles),
            HBM: self._hbm_seconds(moved),
        }
        fused = fused_collective(self.program, instruction)
        if fused:
            resource, seconds = self._collective_resource_and_seconds(*fused)
            seconds_of[resource] = seconds
        return seconds_of

    def _product_seconds(self, flops: float) -> float:
        """Returns the seconds of the matrix products of one instruction."""
        return flops / self.peak

    def _hbm_seconds(self, moved_bytes: float) -> float:
        """Returns the seconds in which one instruction moves `moved_bytes` through HBM."""
        return moved_bytes / self.bandwidth

    def _collective_resource_and_seconds(
        self, computation: Computation, instruction: Instruction
    ) -> tuple[str, float]:
        """Returns the resource of a collective ("network" and its mesh axes), and the seconds that
        the collective takes.
        """
        collective = read_collective(computation, instruction, self.network.mesh)
        return "network " + "+".join(collective.axes), self.network.collective_seconds(
            collective, instruction
        )


# The cycles that the kernels of the gated delta rule, in the order of _KERNELS, take per token and
# value head if keys and values are 128 wide. They come from the static schedules that
# benchmarks/kernels/delta_rule_tpu_schedule.py --chip=… prints for 4096 tokens of 32 heads (with
# --context=4 for the last two kernels, which only context parallelism needs). The numbers for v4
# are half of the cycles of one core, because its two cores share the work.
_KERNELS = ("forward", "backward", "map", "forward with known inverses")
_CYCLES = {
    "v4": (3.82, 6.19, 4.69, 2.69),
    "v5e": (4.94, 8.96, 6.56, 3.04),
    "v5p": (2.61, 4.84, 3.49, 1.72),
    "v6e": (2.95, 4.99, 3.73, 1.98),
    "tpu7x": (2.95, 5.17, 3.93, 2.13),
}


def _delta_rule_seconds(computation: Computation, instruction: Instruction, chip: Chip) -> float:
    """Returns the seconds of a gated delta rule kernel by `_CYCLES`; 0 for any other kernel and for
    a chip that is not in the table.
    """
    call = parse_delta_rule_call(computation, instruction)
    if call is None or chip.name not in _CYCLES:
        return 0.0
    cycles = _CYCLES[chip.name][_KERNELS.index(call.pass_name)]
    return (
        call.tokens
        * call.heads
        * (call.key_width * call.value_width / 128**2)
        * cycles
        / chip.clock_hz
    )


class Network:
    """Computes the time of collectives on the links of a TPU slice, at the links' peak rates.

    A "group" is a set of devices that take part in one collective. If the chips of a group form a
    ring along one dimension of the torus, the group sends in both directions, at twice a link's
    rate. If the dimension does not close to a ring, or the group has only a part of the dimension,
    the chips of the group form a line, which sends at a link's rate. A group that spans several
    dimensions uses the links of all of them. If the neighbours in a group are s chips apart, s
    groups share the links, and each gets 1/s of the rate. The two devices of a TPU7x chip share the
    chip's links, and exchange data with each other over a faster link.
    """

    def __init__(self, mesh: jax.sharding.Mesh, chip: Chip, shape: tuple[int, ...]):
        """Computes the places of the mesh's devices in a slice with `shape` chips along each
        dimension.
        """
        self.mesh, self.chip, self.shape = mesh, chip, shape
        # On v5e and v6e, a dimension closes to a ring if it has 16 chips, the whole side of a pod.
        # On the other chips, all dimensions close to rings if the slice consists of whole cubes of
        # 4 × 4 × 4 chips.
        cubes = all(n % 4 == 0 for n in shape)
        self.closes = tuple(n == 16 if chip.torus_dimensions == 2 else cubes for n in shape)
        devices = mesh.devices.flatten()
        self.coordinates = np.array([d.coords[: len(shape)] for d in devices]).reshape(
            *mesh.devices.shape, len(shape)
        )
        self.cores = np.array([d.core_on_chip for d in devices]).reshape(mesh.devices.shape)
        self.slices = np.array([slice_number(d) for d in devices]).reshape(mesh.devices.shape)

    def collective_seconds(self, collective: Collective, instruction: Instruction) -> float:
        """Returns the seconds of one run of a collective.

        Args:
          collective: the collective.
          instruction: the instruction of the collective, which is read only for a permutation; it
            may be None for any other collective.
        """
        if not collective.sent_bytes:
            return 0.0
        if collective.kind == "collective-permute":
            pairs = permuted_pairs(instruction)
            source, target = self.slices.reshape(-1)[pairs].T
            if np.any(source != target):
                return seconds_between_slices(collective.sent_bytes, self.chip)
            # All slices do the same, so the links of one slice are enough.
            transfers = self._busiest_link_transfers(pairs[source == self.slices.min()])
            if not transfers:
                return collective.sent_bytes / self.chip.die_to_die_bandwidth
            return collective.sent_bytes * (transfers / self.chip.link_bandwidth)
        spans, sharing = self._torus_spans_and_sharing(collective.axes)
        if (slices := self._slices_spanned(collective.axes)) > 1:
            # The devices of a slice share the work first, so only this part of what each device
            # sends has to cross.
            crosses = collective.sent_bytes * (slices - 1) / (collective.group_size - 1)
            within = collective._replace(sent_bytes=collective.sent_bytes - crosses)
            return seconds_between_slices(crosses, self.chip) + self._seconds_within_slice(
                within, spans, sharing
            )
        return self._seconds_within_slice(collective, spans, sharing)

    def _slices_spanned(self, axes: tuple[str, ...]) -> int:
        """Returns the number of slices over which a group along the mesh axes `axes` extends."""
        index = tuple(slice(None) if name in axes else 0 for name in self.mesh.axis_names)
        return len(np.unique(self.slices[index]))

    def _seconds_within_slice(
        self, collective: Collective, spans: Sequence["_TorusSpan"], sharing: float
    ) -> float:
        """Returns the seconds of a collective on the links of a slice. `spans` and `sharing` are
        the results of `_torus_spans_and_sharing`.
        """
        if not collective.sent_bytes:
            return 0.0
        if not spans:
            return collective.sent_bytes / self.chip.die_to_die_bandwidth
        sent = collective.sent_bytes * sharing
        if collective.kind in ("all-to-all", "ragged-all-to-all"):
            # The busiest link sets the time. In a ring of m chips, a byte travels over m/4 links on
            # average, and a chip sends in two directions, so each link carries m/8 times the bytes
            # of a chip. In a line, half of the bytes of m/2 chips cross the middle link in each
            # direction: m/4 times the bytes of a chip.
            return max(
                sent
                * s.stride
                * (s.chips / 8 if s.is_ring else s.chips / 4)
                / self.chip.link_bandwidth
                for s in spans
            )
        links = sum((2 if s.is_ring else 1) / s.stride for s in spans)
        return sent / (links * self.chip.link_bandwidth)

    def _torus_spans_and_sharing(self, axes: tuple[str, ...]) -> tuple[list["_TorusSpan"], float]:
        """Returns the dimensions of the torus that a group along the mesh axes `axes` spans, and a
        factor for the bytes of a device: 2 if the two devices of a chip belong to different groups,
        which share the chip's links; otherwise 1.
        """
        index = tuple(slice(None) if name in axes else 0 for name in self.mesh.axis_names)
        coordinates = self.coordinates[index].reshape(-1, len(self.shape))
        spans = []
        for d, side in enumerate(self.shape):
            places = np.unique(coordinates[:, d])
            if len(places) > 1:
                stride = int(np.min(np.diff(places)))
                is_ring = self.closes[d] and len(places) * stride == side
                spans.append(_TorusSpan(len(places), stride, is_ring))
        both_cores = len(np.unique(self.cores[index])) > 1
        # If both devices of a chip are in the group, the chip receives the data for both only once.
        return spans, self.chip.devices_per_chip / (2 if both_cores else 1)

    def _busiest_link_transfers(self, pairs: np.ndarray) -> float:
        """Returns the number of transfers of a permutation that the busiest link carries in one
        direction (half a transfer counts 0.5); 0 if no transfer leaves its chip.

        A transfer goes along one dimension of the torus after another, in a ring always the shorter
        way round. If both ways round a ring are equally long, half of the data goes each way.

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
                    np.add.at(carried, tuple(place.T), np.where(hop < hops, share, 0.0))
                busiest = max(busiest, float(carried.max()))
            at[:, d] = to[:, d]
        return busiest


class _TorusSpan(NamedTuple):
    """A dimension of the torus that a group spans.

    Attributes:
      chips: number of the group's chips along the dimension.
      stride: distance between neighbours in the group, in chips.
      is_ring: whether the group's chips close to a ring.
    """

    chips: int
    stride: int
    is_ring: bool
