"""Described TPU slices: the real TPU compiler (libtpu) on a machine that has no TPU."""

import importlib.util
import math
import os
import re
from typing import NamedTuple

import jax
from jax.experimental import topologies

from qwen3next_jax.errors import UserError
from qwen3next_jax.parallel.chips import CHIPS, Chip

_CUBES = "2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 4x8x8, 8x8x8, 8x8x16, 8x16x16, 16x16x16"
_PLANES = "1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
# Slice shapes that Google Cloud documents; the compiler takes others too (4x4x12).
KNOWN = {"v4": _CUBES, "v5e": _PLANES, "v5p": _CUBES, "v6e": _PLANES, "tpu7x": _CUBES}
_ACCELERATOR_TYPES = {"v4": "v4-8", "v5e": "v5litepod-16", "v5p": "v5p-8", "v6e": "v6e-16", "tpu7x": "tpu7x-8"}


class Topology(NamedTuple):
    """name: as given. shape: chips along each dimension of the torus. devices: described, not present."""

    name: str
    chip: Chip
    shape: tuple[int, ...]
    devices: tuple[jax.Device, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)


def describe(name: str) -> Topology:
    """The slice called CHIP:GRID, such as "v5p:8x8x8". Call it before anything else loads libtpu in this process.

    Raises:
      UserError: no such chip or grid (the known ones are listed), or libtpu is not installed.
    """
    chip, _, grid = name.partition(":")
    known = "; ".join(f"{c}: {grids}" for c, grids in KNOWN.items())
    if chip not in KNOWN or not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*)*", grid) or grid.count("x") + 1 != CHIPS[chip].torus:
        raise UserError(f"--topology={name}: unknown; expected CHIP:GRID, of {known}")
    shape = tuple(int(n) for n in grid.split("x"))
    if math.prod(shape) > CHIPS[chip].largest_slice:
        raise UserError(f"--topology={name}: {math.prod(shape):,} chips, but the largest slice of {chip} has {CHIPS[chip].largest_slice:,}")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu, the TPU compiler, is not installed: use `uv run --extra plan …`, or run `pip install libtpu matplotlib`")
    # Read once, when libtpu is loaded. Without them it asks the cloud's metadata server which TPU it is on.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                   "TPU_ACCELERATOR_TYPE": _ACCELERATOR_TYPES[chip]}
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # v4's two cores are one device, as on real hosts; for the later chips the compiler's default is already right.
    options = {"chip_config_name": "megacore"} if chip == "v4" else {}
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].partition(": ")[2]
        raise UserError(f"--topology={name}: {reason}; known: {known}") from None
    return Topology(name, CHIPS[chip], shape, tuple(devices))
