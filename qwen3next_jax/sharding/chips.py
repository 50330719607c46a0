"""Published figures of accelerators: peak FLOP/s, memory and network, for MFU and for the planner.

Sources. TPU: Google Cloud's documentation of each version
(docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}): peak compute, HBM bandwidth, and the
bidirectional interconnect bandwidth per chip. That bandwidth divided by the number of links, and by
two, is one direction of one link. NVIDIA: data sheets of A100 SXM (80 GB), H100 SXM, H200 SXM and
DGX B200, dense bf16. Clocks are the peak divided by the multiply-adds of the matrix units. All
figures are peaks; programs reach less.
"""

import dataclasses

GB, GIB, TERA = 1e9, 2**30, 1e12


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator chip. 0 means that a figure is not known or not needed.

    Attributes:
      name: the short name, such as "v5p", which `--topology` takes.
      kinds: values of `jax.Device.device_kind` on this chip.
      bf16_flops: peak FLOP/s of the whole chip in bfloat16.
      hbm_bandwidth: bytes/s of the whole chip.
      torus: dimensions of the torus that links TPU chips; 0: a switch links the chips.
      link_bandwidth: bytes/s in one direction over one link. In a torus a chip has two links for
        each dimension, at a switch one.
      devices_per_chip: JAX devices that one chip appears as: two on TPU7x. The two cores of v4 and
        of v5p are one device.
      clock: Hz of the matrix unit; turns cycles of a static schedule into seconds.
      die_bandwidth: bytes/s between the two devices of a chip.
      usable_hbm: bytes that one device's program may use: by the TPU compiler (libtpu 0.0.50), or
        by the GPU's driver.
      largest_slice: chips of the largest slice that Google Cloud offers.
    """

    name: str
    kinds: tuple[str, ...]
    bf16_flops: float
    hbm_bandwidth: float
    torus: int
    link_bandwidth: float
    devices_per_chip: int = 1
    clock: float = 0.0
    die_bandwidth: float = 0.0
    usable_hbm: float = 0.0
    largest_slice: int = 0

    @property
    def device_flops(self) -> float:
        """Peak FLOP/s of one JAX device in bfloat16."""
        return self.bf16_flops / self.devices_per_chip


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v4",
            ("TPU v4",),
            275 * TERA,
            1228 * GB,
            torus=3,
            link_bandwidth=50 * GB,
            clock=1.05e9,
            usable_hbm=30.75 * GIB,
            largest_slice=4096,
        ),
        Chip(
            "v5e",
            ("TPU v5 lite", "TPU v5e"),
            197 * TERA,
            819 * GB,
            torus=2,
            link_bandwidth=50 * GB,
            clock=1.5e9,
            usable_hbm=15.75 * GIB,
            largest_slice=256,
        ),
        Chip(
            "v5p",
            ("TPU v5", "TPU v5p"),
            459 * TERA,
            2765 * GB,
            torus=3,
            link_bandwidth=100 * GB,
            clock=1.75e9,
            usable_hbm=95.73 * GIB,
            largest_slice=6144,
        ),
        Chip(
            "v6e",
            ("TPU v6 lite", "TPU v6e"),
            918 * TERA,
            1640 * GB,
            torus=2,
            link_bandwidth=100 * GB,
            clock=1.75e9,
            usable_hbm=31.24 * GIB,
            largest_slice=256,
        ),
        # The link between its two chiplets has six times the bandwidth of a link between chips.
        Chip(
            "tpu7x",
            ("TPU7x",),
            2307 * TERA,
            7380 * GB,
            torus=3,
            link_bandwidth=100 * GB,
            devices_per_chip=2,
            clock=2.2e9,
            die_bandwidth=600 * GB,
            usable_hbm=94.74 * GIB,
            largest_slice=9216,
        ),
        Chip(
            "A100",
            ("NVIDIA A100-SXM4-80GB",),
            312 * TERA,
            2039 * GB,
            torus=0,
            link_bandwidth=300 * GB,
        ),
        Chip(
            "H100",
            ("NVIDIA H100 80GB HBM3",),
            989.4 * TERA,
            3350 * GB,
            torus=0,
            link_bandwidth=450 * GB,
            usable_hbm=84_929_347_584,
        ),
        Chip(
            "H200",
            ("NVIDIA H200",),
            989.4 * TERA,
            4800 * GB,
            torus=0,
            link_bandwidth=450 * GB,
            usable_hbm=139 * GIB,
        ),
        Chip("B200", ("NVIDIA B200",), 2250 * TERA, 8000 * GB, torus=0, link_bandwidth=900 * GB),
    )
}


def find_chip(device_kind: str) -> Chip | None:
    """The chip with this `jax.Device.device_kind`; None if `CHIPS` does not list it (a CPU, another
    GPU).
    """
    return next((chip for chip in CHIPS.values() if device_kind in chip.kinds), None)
