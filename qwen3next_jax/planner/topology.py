"""Describes TPU slices and GPU hosts to their real compilers (libtpu, XLA's CUDA plugin), on a
machine that has no TPU and no GPU.
"""

import importlib.util
import math
import os
import re
import shutil
from typing import NamedTuple

import jax
from jax.experimental import topologies

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.common.installation import how_to_install
from qwen3next_jax.sharding.chips import CHIPS, Chip

_CUBES = "2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 4x8x8, 8x8x8, 8x8x16, 8x16x16, 16x16x16"
_PLANES = "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
# {chip: the slice shapes that Google Cloud documents}. The compiler also accepts other shapes, such
# as 4x4x12.
KNOWN = {"v4": _CUBES, "v5e": _PLANES, "v5p": _CUBES, "v6e": _PLANES, "tpu7x": _CUBES}
_ACCELERATOR_TYPES = {
    "v4": "v4-8",
    "v5e": "v5litepod-16",
    "v5p": "v5p-8",
    "v6e": "v6e-16",
    "tpu7x": "tpu7x-8",
}
# The description of an H100 or H200 that XLA's compiler for GPUs reads.
_HOPPER = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {memory:.0f}
  shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{kind}"
"""  # noqa: E501
GPUS = {"h100": "H100", "h200": "H200"}


class Topology(NamedTuple):
    """TPU slices of one shape, or hosts with GPUs, for which programs can be compiled.

    Attributes:
      name: the name that the user gave, such as "v5p:8x8x8".
      chip: the kind of chip.
      shape: number of chips along each dimension of a TPU slice's torus, or (number of hosts, GPUs
        per host).
      devices: descriptions of the devices of all slices; nothing can run on them.
      slices: number of TPU slices.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    devices: tuple[jax.Device, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        """The number of chips of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def title(self) -> str:
        """The name, with the number of slices if there are several: "2 × v5p:8x8x8"."""
        return f"{self.slices} × {self.name}" if self.slices > 1 else self.name


def describe_topology(name: str, slices: int = 1) -> Topology:
    """Returns the topology with the given name. For a TPU, call this function before anything else
    loads libtpu in this process, because libtpu reads environment variables that this function
    sets.

    Args:
      name: CHIP:GRID for a TPU slice, such as "v5p:8x8x8", or CHIP:HOSTSxGPUS for GPUs, such as
        "h100:16x8" for 16 hosts with 8 GPUs each.
      slices: number of TPU slices of this shape, between which there is a slower network.

    Raises:
      UserError: there is no such chip or grid (the message lists the chips or grids that exist), or
        the compiler is not installed.
    """
    chip, _, grid = name.partition(":")
    # "v6e-8" and "V6E:2x2" are not names of topologies, but say which chip the user means.
    known = _known_grids_text(re.split("[:-]", name.lower())[0])
    if chip in GPUS and re.fullmatch("[1-9][0-9]*x[1-8]", grid):
        if slices != 1:
            raise UserError(
                f"--slices={slices}: {name} has GPUs, which belong to no TPU slices: expected 1, "
                "or --mesh=slice=… for groups of hosts"
            )
        return _gpu_topology(name, CHIPS[GPUS[chip]], tuple(int(n) for n in grid.split("x")))
    if (
        chip not in KNOWN
        or not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*)*", grid)
        or grid.count("x") + 1 != CHIPS[chip].torus_dimensions
    ):
        raise UserError(f"--topology={name}: unknown; expected CHIP:GRID, of {known}")
    shape = tuple(int(n) for n in grid.split("x"))
    if math.prod(shape) > CHIPS[chip].largest_slice_chips:
        raise UserError(
            f"--topology={name}: {math.prod(shape):,} chips, but the largest slice of {chip} has "
            f"{CHIPS[chip].largest_slice_chips:,}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"libtpu, the TPU compiler, is not installed: {how_to_install('plan')}")
    # libtpu reads these variables once, when it is loaded. Without them it asks the metadata server
    # of Google Cloud which TPU this machine has.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": _ACCELERATOR_TYPES[chip],
    }
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # This option makes the two cores of a v4 chip one device, as on real hosts. Other chips need no
    # option.
    options = {"chip_config_name": "megacore"} if chip == "v4" else {}
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=name, num_slices=slices, **options
        ).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].partition(": ")[2]
        raise UserError(f"--topology={name}: {reason}; known: {known}") from None
    return Topology(name, CHIPS[chip], shape, tuple(devices), slices)


def _known_grids_text(chip: str) -> str:
    """Returns the grids of a chip as text for messages; the grids of all chips if there is no such
    chip.
    """
    if chip in KNOWN:
        return f"{chip}: {KNOWN[chip]}"
    gpu_grids = "HOSTSxGPUS, such as 1x8, 16x8"
    if chip in GPUS:
        return f"{chip}: {gpu_grids}"
    return (
        "; ".join(f"{c}: {grids}" for c, grids in KNOWN.items())
        + f"; {', '.join(GPUS)}: {gpu_grids}"
    )


def _gpu_topology(name: str, chip: Chip, shape: tuple[int, int]) -> Topology:
    """Returns the topology of `shape` (number of hosts, GPUs per host) GPUs. `name` is the name
    that the user gave.

    Raises:
      UserError: the compiler for GPUs is not installed.
    """
    # `ptxas` comes with an installed CUDA, which has it on the PATH, or with the package
    # nvidia-cuda-nvcc. The compiler needs none of CUDA's libraries.
    assembler = shutil.which("ptxas") or importlib.util.find_spec("nvidia")
    if importlib.util.find_spec("jax_cuda13_plugin") is None or assembler is None:
        raise UserError(
            f"--topology={name}: its compiler is not installed, jax's CUDA plugin and `ptxas` of "
            f"CUDA 13: {how_to_install('plan-gpu')}; no GPU is needed"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # uses no GPU of this machine
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    described = _HOPPER.format(
        bandwidth=chip.hbm_bandwidth, memory=chip.usable_hbm_per_device, kind=chip.device_kinds[0]
    )
    devices = topologies.get_topology_desc(
        platform="cuda", target_config=described, topology=f"1x{shape[0]}x{shape[1]}"
    ).devices
    return Topology(name, chip, shape, tuple(devices))
