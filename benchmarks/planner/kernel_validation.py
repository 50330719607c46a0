"""Holds the planner's price of a kernel for grouped products against kernels that others measured.

    python benchmarks/planner/kernel_validation.py           prints a line for each chip and product
    python benchmarks/planner/kernel_validation.py --all     prints every kernel

`grouped_products.csv` has the medians of five runs of tokamax's kernels, from its repository
(openxla/tokamax at 783ea95, tokamax/data/autotuning, pallas_mosaic_tpu_ragged_dot.json): a product
of rows [rows, width] and matrices [groups, width, columns] ("forward"), its gradient of the rows,
which is a product, too ("rows"), and its gradient of the matrices ("matrices"). The sizes of the
groups were drawn evenly. Such a kernel runs on one core of v5p, and here one core is priced, too.

The price is that of the cost model "calibrated" (`planner/calibrated.py`). Two of its constants,
the start of a step on v5p and on TPU7x, were fitted to these times. What the vector unit does
beside the products was assumed, in the form that agreed best with them.
"""

import csv
import pathlib
import statistics
from typing import NamedTuple

import jax

from benchmarks import harness
from qwen3next_jax.config import MeshConfig, ParallelConfig
from qwen3next_jax.planner import hlo
from qwen3next_jax.planner.estimate import estimate_time
from qwen3next_jax.planner.schedule import Schedule
from qwen3next_jax.planner.topology import describe_topology
from qwen3next_jax.sharding.mesh import make_mesh

TIMES = pathlib.Path(__file__).with_name("grouped_products.csv")
# a slice of four devices of each chip; one of them runs the kernel
SLICES = {"v5p": "v5p:2x2x1", "tpu7x": "tpu7x:2x1x1"}
# tokamax's loop over tiles does not split over the cores of a device
ONE_CORE = {"kernel": Schedule(cycles=0.0, copied_bytes=0.0, states_all_trips=False, cores=1)}
PROGRAM = """ENTRY %main () -> f32[] {{
  %rows = bf16[{rows},{width}]{{1,0}} parameter(0)
  %matrices = bf16[{groups},{width},{columns}]{{2,1,0}} parameter(1)
  %out = bf16[{rows},{columns}]{{1,0}} parameter(2)
  ROOT %kernel = bf16[{result}] custom-call({operands}), custom_call_target="tpu_custom_call", metadata={{op_name="f/ragged_dot_tiling_{tile}/pallas_call"}}, backend_config={{"cost_estimate":{{"flops":"{flops}","bytes_accessed":"{bytes}"}}}}
}}
"""  # noqa: E501


class Kernel(NamedTuple):
    """A measured kernel: a line of the file, see above. `milliseconds` is its measured time."""

    chip: str
    product: str
    rows: int
    width: int
    columns: int
    groups: int
    tile_rows: int
    tile_width: int
    tile_columns: int
    milliseconds: float


def read_kernels() -> list[Kernel]:
    """Returns the measured kernels."""
    with TIMES.open() as file:
        return [
            Kernel(line["chip"], line["product"], *map(int, numbers), float(line["milliseconds"]))
            for line in csv.DictReader(file)
            for numbers in [[line[name] for name in Kernel._fields[2:-1]]]
        ]


def predict(kernel: Kernel) -> float:
    """Returns the milliseconds that the cost model "calibrated" predicts."""
    of_matrices = kernel.product == "matrices"
    matrices = kernel.groups * kernel.width * kernel.columns
    text = PROGRAM.format(
        **kernel._asdict(),
        result=f"{kernel.groups},{kernel.width},{kernel.columns}"
        if of_matrices
        else f"{kernel.rows},{kernel.columns}",
        operands="%rows, %out" if of_matrices else "%rows, %matrices",
        tile="_".join(map(str, kernel[6:9])),
        flops=2 * kernel.rows * kernel.width * kernel.columns,
        bytes=2 * (kernel.rows * (kernel.width + kernel.columns) + matrices),
    )
    topology = describe_topology(SLICES[kernel.chip])
    devices = MeshConfig(data=len(topology.devices))
    mesh = make_mesh(ParallelConfig(mesh=devices), topology.devices)
    found = estimate_time(
        hlo.parse_program(text), mesh, topology.chip, topology.shape, ONE_CORE, "calibrated"
    )
    return 1e3 * found.seconds


def main():
    parser = harness.arguments(__doc__)
    parser.add_argument("--all", action="store_true", help="print every kernel")
    flags = parser.parse_args()
    ratios = {}
    for kernel in read_kernels():
        ratio = predict(kernel) / kernel.milliseconds
        ratios.setdefault((kernel.chip, kernel.product), []).append(ratio)
        if flags.all:
            print(f"{' '.join(map(str, kernel))} ms, predicted {ratio - 1:+.1%}")
    harness.print_header("chip", "product", "kernels", "median error", "smallest", "largest")
    for (chip, product), found in ratios.items():
        errors = (statistics.median(found), min(found), max(found))
        harness.print_row(chip, product, len(found), *(f"{error - 1:+.1%}" for error in errors))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
