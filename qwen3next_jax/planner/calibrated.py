"""The cost model "calibrated": the simulation of `roofline.py` at rates that chips were measured to
reach. It also counts costs that the cost models "schedule" and "roofline" leave out, listed here.

- An instruction takes the longest of three times: the measured seconds for its bytes through HBM,
  the measured seconds for the FLOPs of its products, and the cycles of its schedule. Measured
  seconds include the start of a kernel (`SecondsCurve`).
- A collective takes a fixed start time, and then sends its bytes at the rate that a link was
  measured to reach.
- The links along one dimension of the torus are one resource. Collectives over different mesh axes
  that lie along the same dimension wait for each other. There is one exception: a collective that
  is shorter than what remains of the earlier collectives shares the links with them. Such a short
  collective takes twice its own time, and delays each earlier collective by its own time.
- An asynchronous copy to or from the memory of the host moves its bytes at the published rate of
  the link between device and host, one copy after another in each direction.
- A kernel for grouped products computes whole tiles, and a tile again for each group that has rows
  in it (`grouped_products.py`). The time of a step of the kernel's grid is the sum of a start time,
  the time of its products at the published peak, the time of the vector unit that the products do
  not hide, and the wait for the next block of a matrix. The time of a step of the experts' kernels
  is the sum of a start time and the time of its products at the peak.
- The experts' kernels skip the tiles of their buffers that hold no row, and the loops for rows that
  do not fit run as often as the load of the experts asks for (`expert_load.py`).
- A copy that the compiler started early takes only the HBM time that the instructions beside it
  leave. So does the HBM traffic of a collective, which reads every byte that the chip sends and
  writes every byte that the chip receives. Several transfers at once share the HBM time evenly, so
  that a short copy does not wait for a long one. If a copy is unfinished at its end instruction,
  the device waits until it has finished.

`RATES` has the rates of each chip; `ChipRates.rate_sources` says where each rate was measured. A
rate that was not measured on a chip is taken from the nearest chip on which it was measured, and
scaled by the ratio of the published peaks.

Like the other cost models, the prediction leaves out stalls inside a schedule, input data, and
checkpoints.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.planner.compiled import (
    collective_kind,
    fused_collective,
    hbm_bytes,
    host_transfer_bytes,
    instruction_flops,
    permuted_pairs,
    read_collective,
)
from qwen3next_jax.planner.expert_load import (
    ExpertLayout,
    assumed_expert_load,
    find_expert_kernel,
    mean_expert_load,
    parse_expert_layout,
)
from qwen3next_jax.planner.grouped_products import GroupedProductCall, parse_grouped_product
from qwen3next_jax.planner.hlo import Computation, Instruction, Program
from qwen3next_jax.planner.roofline import (
    COMPUTE,
    HBM,
    ComputationCosts,
    Network,
    Simulation,
    Timeline,
)
from qwen3next_jax.planner.schedule import Schedule
from qwen3next_jax.sharding.chips import CHIPS, Chip

# The loops of the experts whose length depends on the router: {the function that makes the loop:
# the field of `ExpertLoad` with its mean number of iterations}.
TRIPS_BY_FUNCTION = {
    "_loop_over_overflowing_experts": "experts_beyond",
    "_loop_over_overflow_choices": "steps_beyond",
    "_AllToAllExperts._run_all_rounds": "rounds",
}


@dataclasses.dataclass(frozen=True)
class SecondsCurve:
    """Measured seconds by size, where a size is a number of FLOPs or of bytes. Seconds between two
    points are interpolated. Beyond the last point, the seconds grow at the last point's mean rate.

    Attributes:
      empty_kernel_seconds: seconds of a kernel of size 0, in which no work is done.
      size_and_seconds_points: (size, seconds), by size.
    """

    empty_kernel_seconds: float
    size_and_seconds_points: tuple[tuple[float, float], ...]

    def seconds(self, size: float) -> float:
        """Returns the seconds of one instruction of this size; 0 for size 0."""
        if not size:
            return 0.0
        last_size, last_seconds = self.size_and_seconds_points[-1]
        if size >= last_size:
            return last_seconds * size / last_size
        sizes, seconds = zip((0.0, self.empty_kernel_seconds), *self.size_and_seconds_points)
        return float(np.interp(size, sizes, seconds))

    def scaled_to_peak(self, factor: float) -> "SecondsCurve":
        """Returns the curve of a chip whose peak rate is `factor` times as high: `factor` times the
        size takes the same seconds.
        """
        return SecondsCurve(
            self.empty_kernel_seconds,
            tuple((factor * size, seconds) for size, seconds in self.size_and_seconds_points),
        )


@dataclasses.dataclass(frozen=True)
class ChipRates:
    """Measured rates of one JAX device of a chip, or of its links.

    Attributes:
      product_curve: seconds by FLOPs of a matrix product in bfloat16.
      hbm_curve: seconds by bytes read and written.
      reached_link_share: the share of a link's published bandwidth that a long transfer reaches.
      collective_start_seconds: seconds before a collective's first byte.
      grid_step_start_seconds: seconds that a step of a kernel's grid takes beyond its products at
        the published peak.
      host_bandwidth: bytes/s of one direction between the device and the memory of its host.
      rate_sources: {name of a rate: where it was measured, or from which chip it was taken: "… the
        nearest, CHIP"}.
    """

    product_curve: SecondsCurve
    hbm_curve: SecondsCurve
    reached_link_share: float
    collective_start_seconds: float
    grid_step_start_seconds: float
    host_bandwidth: float
    rate_sources: Mapping[str, str]

    @property
    def rates_taken_from_nearest_chip(self) -> list[str]:
        """For each rate that was not measured on this chip, a sentence that names the chip from
        which it was taken.
        """
        return [source for source in self.rate_sources.values() if "the nearest" in source]


# seconds of a kernel that does nothing: the time that copies below 16 MB on TPU7x take beyond their
# bytes at 3,210 GB/s
_START = 1.7e-6
_TPU7X_PRODUCTS = SecondsCurve(
    _START,
    tuple(
        (2.0 * n**3, 2.0 * n**3 / rate)
        for n, rate in ((1024, 350e12), (2048, 679e12), (4096, 893e12), (8192, 956e12))
    ),
)
# A copy of an array of `size` bytes reads and writes `size` bytes.
_TPU7X_HBM = SecondsCurve(
    _START,
    tuple(
        (2.0 * size, 2.0 * size / rate)
        for size, rate in (
            (2**21, 1379e9),
            (2**22, 2250e9),
            (2**23, 2246e9),
            (2**24, 2757e9),
            (2**25, 3010e9),
            (2**26, 3097e9),
            (2**27, 3177e9),
            (2**33, 3210e9),
        )
    ),
)
_VECTOR_WIDTH = 1024  # elements that the vector unit of a core computes with in a cycle
_BYTES = 2  # of an element of rows and matrices in a grouped product
# Seconds of a step of a kernel's grid beyond its products, which fit best to the times of tokamax's
# grouped products (benchmarks/planner/kernel_validation.py)
_STEP_STARTS = {"v5p": 0.27e-6, "tpu7x": 0.7e-6}
_STEPS = "openxla/tokamax data/autotuning, pallas_mosaic_tpu_ragged_dot"
_V6E_PRODUCTS = SecondsCurve(_START, ((2.0 * 8192**3, 1.3288e-3),))
_MICROBENCHMARKS = "AI-Hypercomputer/tpu-recipes microbenchmarks"
_PERMUTES = "marin-community/marin#6736, ppermute"


def _relative_peak_rate(measured: str, name: str, rate: str) -> float:
    """Returns the published peak rate of a device of the chip `name`, relative to `measured`."""
    peak = {
        "products": lambda chip: chip.device_flops,
        "hbm": lambda chip: chip.hbm_bandwidth / chip.devices_per_chip,
    }[rate]
    return peak(CHIPS[name]) / peak(CHIPS[measured])


def _source_of_unmeasured_rate(rate: str, measured: str) -> str:
    return f"no {rate} measured: the nearest, {measured}, scaled by the published peaks"


def _rates_from_scaled_curves(
    name: str,
    link_share: float,
    collective_start: float,
    network_source: str,
    products_source: str,
    steps_chip: str,
) -> ChipRates:
    """Returns the rates of a chip without a measured HBM curve of its own.

    Args:
      network_source: where the link's rate and the start of a collective were measured.
      products_source: where the seconds of products were measured; "": nowhere.
      steps_chip: the chip on which the start of a step of a kernel's grid was measured: this chip,
        or the nearest chip with such a measurement.
    """
    return ChipRates(
        product_curve=_V6E_PRODUCTS.scaled_to_peak(_relative_peak_rate("v6e", name, "products")),
        hbm_curve=_TPU7X_HBM.scaled_to_peak(_relative_peak_rate("tpu7x", name, "hbm")),
        reached_link_share=link_share,
        collective_start_seconds=collective_start,
        grid_step_start_seconds=_STEP_STARTS[steps_chip],
        host_bandwidth=CHIPS[name].host_bandwidth,
        rate_sources={
            "products": products_source or _source_of_unmeasured_rate("product", "v6e"),
            "hbm": _source_of_unmeasured_rate("HBM curve", "tpu7x"),
            "network": network_source,
            "steps": _STEPS
            if steps_chip == name
            else f"no steps measured: those of the nearest, {steps_chip}",
            "host": "the published peak (sharding/chips.py); no copy measured",
        },
    )


RATES: dict[str, ChipRates] = {
    "tpu7x": ChipRates(
        product_curve=_TPU7X_PRODUCTS,
        hbm_curve=_TPU7X_HBM,
        # 178.8 of 200 GB/s over two links; 1.6 MB at 71.8 GB/s take 13.5 µs longer than at 178.8
        reached_link_share=0.894,
        collective_start_seconds=13.5e-6,
        grid_step_start_seconds=_STEP_STARTS["tpu7x"],
        host_bandwidth=CHIPS["v6e"].host_bandwidth / CHIPS["tpu7x"].devices_per_chip,
        rate_sources={
            "products": "AI-Hypercomputer/accelerator-microbenchmarks, gemm",
            "hbm": f"{_MICROBENCHMARKS}/ironwood/hbm",
            "network": f"{_MICROBENCHMARKS}/ironwood/collectives, all-gather on 2x2x1",
            "steps": _STEPS,
            "host": "no rate published: that of the nearest, v6e, shared by the chip's two devices",
        },
    ),
    # Its one measured copy, 32 MiB at 1,360 GB/s, takes 2 % longer than the scaled curve says.
    "v6e": _rates_from_scaled_curves(
        "v6e",
        0.868,
        2.29e-6,
        _PERMUTES,
        f"{_MICROBENCHMARKS}, 8192³ at 827 TFLOP/s",
        "tpu7x",
    ),
    "v5p": _rates_from_scaled_curves("v5p", 0.863, 4.55e-6, _PERMUTES, "", "v5p"),
    "v5e": _rates_from_scaled_curves(
        "v5e", 0.868, 2.29e-6, _source_of_unmeasured_rate("link", "v6e"), "", "v5p"
    ),
    "v4": _rates_from_scaled_curves(
        "v4", 0.863, 4.55e-6, _source_of_unmeasured_rate("link", "v5p"), "", "v5p"
    ),
}


def rates_of_chip(chip: Chip) -> ChipRates:
    """Returns the measured rates of a kind of chip.

    Raises:
      UserError: `RATES` has no rates of this chip.
    """
    if chip.name not in RATES:
        raise UserError(
            f"--cost_model=calibrated: no measured rates of {chip.name}: expected one of "
            f"{', '.join(RATES)}; take another cost model"
        )
    return RATES[chip.name]


class CalibratedTimeline(Timeline):
    """The simulation of one run of a computation, in which transfers compete.

    Attributes:
      backlog: {name of the starting instruction: seconds of HBM time that its transfer still
        needs}.
    """

    def __init__(self):
        super().__init__()
        self.backlog: dict[str, float] = {}
        # {name of the starting instruction: dimensions of the torus over whose links it sends}
        self._over: dict[str, tuple[int, ...]] = {}

    def add_called_computation(
        self, seconds: float, costs: ComputationCosts, times: float = 1
    ) -> None:
        super().add_called_computation(seconds, costs, times)
        self.spend_hbm_time_on_transfers(times * (seconds - costs.seconds_by_resource[HBM]))

    def spend_hbm_time_on_transfers(self, seconds: float) -> None:
        """Lets the transfers use HBM for `seconds`. The transfers share the time evenly, until each
        has had the time that it needs.
        """
        while self.backlog:
            share = seconds / len(self.backlog)
            seconds_each = min(share, *self.backlog.values())
            seconds -= seconds_each * len(self.backlog)
            remaining = {name: needed - seconds_each for name, needed in self.backlog.items()}
            self.backlog = {name: needed for name, needed in remaining.items() if needed > 0}
            if seconds_each == share:
                return

    def start_link_transfer(
        self, name: str, seconds: float, resource: str, source: str, dimensions: Sequence[int]
    ) -> None:
        """Starts a transfer over the links along `dimensions` of the torus."""
        finish = self.occupy_links(dimensions, seconds)
        self._pending[name] = finish, resource, source
        self._over[name] = tuple(dimensions)

    def occupy_links(self, dimensions: Sequence[int], seconds: float) -> float:
        """Reserves the links along these dimensions for a transfer of `seconds`, and returns the
        time at which the transfer finishes. If the transfer is shorter than what remains of the
        earlier transfers, it shares the links with them; otherwise it waits for them.
        """
        free = max([self.now, *(self._free[d] for d in dimensions)])
        if seconds >= free - self.now:
            for d in dimensions:
                self._free[d] = free + seconds
            return free + seconds
        for name, over in self._over.items():
            finish, *what = self._pending.get(name, (0.0,))
            if finish > self.now and set(over) & set(dimensions):
                self._pending[name] = finish + seconds, *what
                for d in over:
                    self._free[d] = max(self._free[d], finish + seconds)
        for d in dimensions:
            self._free[d] = max(self._free[d], self.now + 2 * seconds)
        return self.now + 2 * seconds

    def start_hbm_copy(self, name: str, seconds: float, source: str) -> None:
        """Starts a copy that needs `seconds` of HBM time."""
        self.backlog[name] = seconds
        self._pending[name] = self.now, HBM, source

    def rename_transfer(self, name: str, new_name: str) -> bool:
        if name in self._over:
            self._over[new_name] = self._over.pop(name)
        self.backlog = {
            new_name if key == name else key: left for key, left in self.backlog.items()
        }
        return super().rename_transfer(name, new_name)

    def finish_transfer(self, name: str) -> bool:
        if name not in self._pending:
            return False
        _, _, source = self._pending[name]
        wait_start = self.now
        super().finish_transfer(name)
        self.spend_hbm_time_on_transfers(
            self.now - wait_start
        )  # while it waited for the network, HBM was free
        if name in self.backlog:
            copy_seconds = self.backlog.pop(name)
            # while this one ends, each of the others gets as much, or all that it needs
            left = copy_seconds + sum(min(copy_seconds, other) for other in self.backlog.values())
            self.spend_hbm_time_on_transfers(left - copy_seconds)
            self.spend_on_resource(left, HBM, source)
        return True


class CalibratedSimulation(Simulation):
    """Goes through the instructions of a program at measured rates."""

    def __init__(
        self,
        program: Program,
        network: Network,
        chip: Chip,
        schedules: Mapping[str, Schedule],
        cost_model: str,
        source_of: Callable[[Instruction], str],
        skew: float = 0.0,
    ):
        self.rates, self.skew = rates_of_chip(chip), skew
        self.load = assumed_expert_load(program, network.mesh, skew)
        measured = dataclasses.replace(
            chip,
            link_bandwidth=chip.link_bandwidth * self.rates.reached_link_share,
            die_to_die_bandwidth=chip.die_to_die_bandwidth * self.rates.reached_link_share,
        )
        network = copy.copy(network)
        network.chip = measured
        super().__init__(program, network, measured, schedules, cost_model, source_of)

    def _new_timeline(self) -> CalibratedTimeline:
        return CalibratedTimeline()

    def _product_seconds(self, flops: float) -> float:
        return self.rates.product_curve.seconds(flops)

    def _hbm_seconds(self, moved_bytes: float) -> float:
        return self.rates.hbm_curve.seconds(moved_bytes)

    def _collective_resource_and_seconds(
        self, computation: Computation, instruction: Instruction
    ) -> tuple[str, float]:
        resource, seconds = super()._collective_resource_and_seconds(computation, instruction)
        return resource, seconds and self.rates.collective_start_seconds + seconds

    def _run_collective(
        self,
        timeline: CalibratedTimeline,
        computation: Computation,
        instruction: Instruction,
        source: str,
    ) -> None:
        resource, seconds = self._collective_resource_and_seconds(computation, instruction)
        dimensions = self._torus_dimensions_used(computation, instruction)
        name = instruction.name
        timeline.start_link_transfer(name, seconds, resource, source, dimensions)
        sent = read_collective(computation, instruction, self.network.mesh).sent_bytes
        if sent:
            timeline.backlog[name] = self._long_transfer_seconds(2 * sent)
        if not instruction.opcode.endswith("-start"):
            timeline.finish_transfer(name)

    def _long_transfer_seconds(self, moved_bytes: float) -> float:
        """Returns the seconds of a long transfer through HBM, without the start of a kernel."""
        size, seconds = self.rates.hbm_curve.size_and_seconds_points[-1]
        return moved_bytes * seconds / size

    def _start_async_call(
        self,
        timeline: CalibratedTimeline,
        instruction: Instruction,
        seconds: float,
        resource: str,
        source: str,
    ) -> None:
        dimensions = {
            d
            for step in self.program.walk(instruction.called_computations[0])
            if collective_kind(step.instruction)
            for d in self._torus_dimensions_used(step.computation, step.instruction)
        }
        if dimensions:
            timeline.start_link_transfer(
                instruction.name, seconds, resource, source, sorted(dimensions)
            )
        elif resource == HBM:
            timeline.start_hbm_copy(instruction.name, seconds, source)
        else:
            timeline.start_transfer(instruction.name, seconds, resource, source)

    def _start_async_copy(
        self,
        timeline: CalibratedTimeline,
        computation: Computation,
        instruction: Instruction,
        moved_bytes: float,
        source: str,
    ) -> None:
        if of_host := host_transfer_bytes(computation, instruction):
            copied_to_host = (
                instruction.opcode == "copy-start" and instruction.shapes[0].in_host_memory
            )
            updates_host = instruction.opcode == "dynamic-update-slice-start"
            direction = "to" if copied_to_host or updates_host else "from"
            seconds = of_host / self.rates.host_bandwidth
            timeline.start_transfer(
                instruction.name, seconds, f"copies {direction} the host", source
            )
            timeline.backlog[instruction.name] = self._long_transfer_seconds(moved_bytes)
        else:
            timeline.start_hbm_copy(
                instruction.name, self._long_transfer_seconds(moved_bytes), source
            )

    def _loop_trips(self, computation: Computation, loop: Instruction) -> float:
        load = self.load
        if load is None or self.program.loop_trips(computation, loop) is not None:
            return super()._loop_trips(computation, loop)
        trips = TRIPS_BY_FUNCTION.get(self.program.source_function(loop).split(" ")[-1])
        return getattr(load, trips) if trips else 1

    def _seconds_by_resource(
        self, computation: Computation, instruction: Instruction
    ) -> dict[str, float]:
        seconds_of = super()._seconds_by_resource(computation, instruction)
        if found := find_expert_kernel(self.program, computation, instruction):
            layout = parse_expert_layout(*found, self.network.mesh)
            in_steps = self._own_expert_kernel_seconds(
                layout, computation, instruction, found[1].name
            )
            seconds_of[COMPUTE] = max(seconds_of[COMPUTE], in_steps)
            seconds_of[COMPUTE] *= mean_expert_load(layout, self.skew).used
        if product := parse_grouped_product(self.program, computation, instruction):
            seconds_of[COMPUTE] = self._grouped_product_seconds(product, instruction)
        return seconds_of

    def _own_expert_kernel_seconds(
        self,
        layout: ExpertLayout,
        computation: Computation,
        instruction: Instruction,
        kernel_name: str,
    ) -> float:
        """Returns the seconds of the products of one of the experts' kernels, whose grid has a step
        for each tile of rows. The cores share the tiles. For the gradients of the matrices, each
        core goes through all tiles, and computes its part of each matrix.
        """
        cores = self._cores_sharing_work(instruction)
        steps = (
            layout.tile_count
            if kernel_name.startswith("expert_backward_weights")
            else layout.tile_count / cores
        )
        flops = instruction_flops(self.program, computation, instruction)
        return steps * self._grid_step_seconds(flops / (steps * cores))

    def _grouped_product_seconds(
        self, product: GroupedProductCall, instruction: Instruction
    ) -> float:
        """Returns the seconds of a kernel for grouped products. The cores share the tiles of
        columns: megablox marks this axis of its grid as parallel, and XLA's kernel is assumed to do
        the same. If two cores share an odd number of tiles, one core waits while the other computes
        the last tile.
        """
        cores = self._cores_sharing_work(instruction)
        rows, width, columns = product.step_tile
        along_width, along_columns = (
            product.tile_counts_width_columns[0],
            -(-product.tile_counts_width_columns[1] // cores),
        )
        steps = product.tile_visits * along_width * along_columns
        step = self._grid_step_seconds(2.0 * rows * width * columns)
        seconds = steps * step
        if product.computes_matrix_gradients:
            # It sets the sums of each group to zero and writes them at the end.
            blocks = product.group_count * along_width * along_columns
            seconds += blocks * self._vector_seconds(width * columns)
        else:
            # It adds the result of each step to sums, half of it while the matrix unit works.
            seconds += steps * self._vector_seconds(rows * columns) / 2
            # While one step runs, the rows and the block of a matrix of the next one are fetched.
            blocks = product.group_count * along_columns if along_width == 1 else steps
            fetched = _BYTES * width * (rows + columns) * cores
            seconds += blocks * max(0.0, self._long_transfer_seconds(fetched) - step)
        schedule = self.schedules.get(instruction.name)
        if schedule and product.schedule_is_one_step:
            seconds = max(seconds, steps * schedule.cycles / self.chip.clock_hz)
        return seconds

    def _cores_sharing_work(self, instruction: Instruction) -> int:
        """Returns the number of cores that share the work of an instruction."""
        schedule = self.schedules.get(instruction.name)
        return schedule.cores if schedule else self.chip.cores_per_device

    def _grid_step_seconds(self, flops: float) -> float:
        """Returns the seconds of a step of a kernel's grid whose matrix products have `flops`
        FLOPs.
        """
        return (
            flops * self.chip.cores_per_device / self.chip.device_flops
            + self.rates.grid_step_start_seconds
        )

    def _vector_seconds(self, elements: int) -> float:
        """Returns the seconds that one operation of the vector unit on `elements` numbers takes."""
        return elements / (_VECTOR_WIDTH * self.chip.clock_hz)

    def _run_synchronously(
        self,
        timeline: CalibratedTimeline,
        computation: Computation,
        instruction: Instruction,
        source: str,
    ) -> None:
        seconds_of = self._seconds_by_resource(computation, instruction)
        if fused := fused_collective(self.program, instruction):
            resource, seconds = self._collective_resource_and_seconds(*fused)
            dimensions = self._torus_dimensions_used(*fused)
            seconds_of[resource] = timeline.occupy_links(dimensions, seconds) - timeline.now
        longest = max(seconds_of, key=seconds_of.get)
        seconds = seconds_of[longest]
        timeline.spend_on_resource(
            seconds,
            longest,
            source,
            hbm_bytes=hbm_bytes(self.program, computation, instruction),
            flops=instruction_flops(self.program, computation, instruction),
        )
        timeline.spend_hbm_time_on_transfers(seconds - seconds_of[HBM])

    def _torus_dimensions_used(
        self, computation: Computation, instruction: Instruction
    ) -> tuple[int, ...]:
        """Returns the dimensions of the torus over whose links a collective sends."""
        coordinates = self.network.coordinates
        if collective_kind(instruction) == "collective-permute":
            at, to = (
                coordinates.reshape(-1, coordinates.shape[-1])[pairs]
                for pairs in permuted_pairs(instruction).T
            )
            return tuple(int(d) for d in np.flatnonzero(np.any(at != to, axis=0)))
        return torus_dimensions_of_axes(
            self.network, read_collective(computation, instruction, self.network.mesh).axes
        )


def torus_dimensions_of_axes(network: Network, axes: Sequence[str]) -> tuple[int, ...]:
    """Returns the dimensions of the torus along which a group of devices over mesh axes lies."""
    group = tuple(slice(None) if name in axes else 0 for name in network.mesh.axis_names)
    places = network.coordinates[group].reshape(-1, network.coordinates.shape[-1])
    return tuple(int(d) for d in np.flatnonzero(np.ptp(places, axis=0)))


def busiest_link_seconds(
    network: Network, seconds_by_axes: Mapping[tuple[str, ...], float]
) -> float:
    """Returns the seconds for which the busiest links are needed.

    Args:
      seconds_by_axes: {mesh axes: seconds of all collectives over them}.
    """
    busy = [0.0] * len(network.shape)
    for axes, needed in seconds_by_axes.items():
        for d in torus_dimensions_of_axes(network, axes):
            busy[d] += needed
    return max(*busy, *seconds_by_axes.values(), 0.0)
