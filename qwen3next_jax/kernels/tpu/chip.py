"""The VMEM and the number of cores of the TPU that the program is compiled for."""

from qwen3next_jax.ops.compile_target import compile_target

SMALLEST_VMEM = 16 * 2**20  # bytes of VMEM of a TPU v4, assumed if the chip is not known


def vmem_bytes() -> int:
    """Returns the bytes of VMEM of one core; SMALLEST_VMEM if the chip is not known."""
    tpu = compile_target().tpu_info
    return tpu.vmem_capacity_bytes if tpu else SMALLEST_VMEM


def vmem_budget_bytes() -> float:
    """Returns the bytes of VMEM that a kernel may use: 95 % of `vmem_bytes`. The compiler needs the
    rest.
    """
    return 0.95 * vmem_bytes()


def core_count() -> int:
    """Returns the number of cores of one JAX device of this chip; 1 if the chip is not known."""
    tpu = compile_target().tpu_info
    return tpu.num_cores if tpu else 1
