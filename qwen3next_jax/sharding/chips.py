"""Published peak figures of accelerators: FLOP/s, memory and network. MFU and the planner use them.

Sources. TPU: Google Cloud's documentation of each version
(docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}) gives the peak compute, the HBM bandwidth,
and the bidirectional interconnect bandwidth per chip. The interconnect bandwidth divided by twice
the number of links is the bandwidth of one direction of one link. NVIDIA: data sheets of A100 SXM
(80 GB), H100 SXM, H200 SXM and DGX B200, dense bf16. A clock rate is the peak FLOP/s divided by the
FLOPs that the matrix units do in a cycle. Programs reach less than these peaks.

The bandwidth between slices is the bandwidth of the data center network. The page of v5p gives 50
Gbit/s between slices for a chip; the pages of v5e and v6e give 6.4 and 25.6 Tbit/s for a pod of 256
chips. The pages of v4 and TPU7x give no bandwidth between slices. The bandwidth to the host is from
the book "How to Scale Your Model" (jax-ml.github.io/scaling-book): about 15 GB/s a chip, 32 GB/s on
v6e, no figure for TPU7x.
"""

import dataclasses

GB, GIB, TERA = 1e9, 2**30, 1e12


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator chip. A figure of 0 means that the figure is not known or not needed;
    but a 0 in `torus_dimensions` means that the chips form no torus.

    Attributes:
      name: the short name, such as "v5p", which `--topology` takes.
      device_kinds: the values of `jax.Device.device_kind` for this chip.
      bf16_flops: peak FLOP/s of the whole chip in bfloat16.
      hbm_bandwidth: bandwidth of the whole chip's memory, in bytes/s.
      torus_dimensions: number of dimensions of the torus that links TPU chips; 0 if a switch links
        the chips.
      link_bandwidth: bandwidth of one direction of one link, in bytes/s. A chip has two links per
        dimension of a torus, and one link to a switch.
      devices_per_chip: number of JAX devices per chip: two for TPU7x, one for all others. (JAX
        shows the two cores of a v4 or v5p chip as one device.)
      cores_per_device: number of cores of a TPU's JAX device that can share the work of a kernel.
      clock_hz: clock rate of the matrix unit in Hz. The planner divides cycles by the clock rate to
        get seconds.
      die_to_die_bandwidth: bandwidth between the two JAX devices of a chip, in bytes/s.
      usable_hbm_per_device: number of bytes of HBM that a program may use on one JAX device, as the
        TPU compiler (libtpu 0.0.50) or the GPU's driver reports it.
      largest_slice_chips: number of chips of the largest slice that Google Cloud offers.
      inter_slice_bandwidth: bandwidth of one direction of the network between slices, in bytes/s
        for each chip.
      host_bandwidth: bandwidth of one direction between a chip and the memory of its host, in
        bytes/s.
    """

    name: str
    device_kinds: tuple[str, ...]
    bf16_flops: float
    hbm_bandwidth: float
    torus_dimensions: int
    link_bandwidth: float
    devices_per_chip: int = 1
    cores_per_device: int = 1
    clock_hz: float = 0.0
    die_to_die_bandwidth: float = 0.0
    usable_hbm_per_device: float = 0.0
    largest_slice_chips: int = 0
    inter_slice_bandwidth: float = 0.0
    host_bandwidth: float = 0.0

    @property
    def device_flops(self) -> float:
        """The peak FLOP/s of one JAX device in bfloat16."""
        return self.bf16_flops / self.devices_per_chip


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "v4",
            ("TPU v4",),
            275 * TERA,
            1228 * GB,
            torus_dimensions=3,
            link_bandwidth=50 * GB,
            cores_per_device=2,
            clock_hz=1.05e9,
            usable_hbm_per_device=30.75 * GIB,
            largest_slice_chips=4096,
            host_bandwidth=15 * GB,
        ),
        Chip(
            "v5e",
            ("TPU v5 lite", "TPU v5e"),
            197 * TERA,
            819 * GB,
            torus_dimensions=2,
            link_bandwidth=50 * GB,
            clock_hz=1.5e9,
            usable_hbm_per_device=15.75 * GIB,
            largest_slice_chips=256,
            inter_slice_bandwidth=3.125 * GB,
            host_bandwidth=15 * GB,
        ),
        Chip(
            "v5p",
            ("TPU v5", "TPU v5p"),
            459 * TERA,
            2765 * GB,
            torus_dimensions=3,
            link_bandwidth=100 * GB,
            cores_per_device=2,
            clock_hz=1.75e9,
            usable_hbm_per_device=95.73 * GIB,
            largest_slice_chips=6144,
            inter_slice_bandwidth=6.25 * GB,
            host_bandwidth=15 * GB,
        ),
        Chip(
            "v6e",
            ("TPU v6 lite", "TPU v6e"),
            918 * TERA,
            1640 * GB,
            torus_dimensions=2,
            link_bandwidth=100 * GB,
            clock_hz=1.75e9,
            usable_hbm_per_device=31.24 * GIB,
            largest_slice_chips=256,
            inter_slice_bandwidth=12.5 * GB,
            host_bandwidth=32 * GB,
        ),
        # The link between the two chiplets of TPU7x has six times the bandwidth of a link between
        # chips.
        Chip(
            "tpu7x",
            ("TPU7x",),
            2307 * TERA,
            7380 * GB,
            torus_dimensions=3,
            link_bandwidth=100 * GB,
            devices_per_chip=2,
            clock_hz=2.2e9,
            die_to_die_bandwidth=600 * GB,
            usable_hbm_per_device=94.74 * GIB,
            largest_slice_chips=9216,
        ),
        Chip(
            "A100",
            ("NVIDIA A100-SXM4-80GB",),
            312 * TERA,
            2039 * GB,
            torus_dimensions=0,
            link_bandwidth=300 * GB,
        ),
        Chip(
            "H100",
            ("NVIDIA H100 80GB HBM3",),
            989.4 * TERA,
            3350 * GB,
            torus_dimensions=0,
            link_bandwidth=450 * GB,
            usable_hbm_per_device=84_929_347_584,
        ),
        Chip(
            "H200",
            ("NVIDIA H200",),
            989.4 * TERA,
            4800 * GB,
            torus_dimensions=0,
            link_bandwidth=450 * GB,
            usable_hbm_per_device=139 * GIB,
        ),
        Chip(
            "B200",
            ("NVIDIA B200",),
            2250 * TERA,
            8000 * GB,
            torus_dimensions=0,
            link_bandwidth=900 * GB,
        ),
    )
}


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip with this `jax.Device.device_kind`; None if `CHIPS` does not list it (a CPU,
    or another GPU).
    """
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)
