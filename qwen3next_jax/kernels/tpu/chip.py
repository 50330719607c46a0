"""VMEM and cores of the TPU that the program is compiled for."""

from qwen3next_jax.ops.compile_target import compile_target

SMALLEST_VMEM = 16 * 2**20  # bytes; a v4's, assumed where the chip is not known


def vmem_bytes() -> int:
    """Of one core."""
    tpu = compile_target().tpu
    return tpu.vmem_capacity_bytes if tpu else SMALLEST_VMEM


def vmem_budget() -> float:
    """Bytes of VMEM that a kernel may use; the compiler needs the rest."""
    return 0.95 * vmem_bytes()


def cores() -> int:
    """Cores of the chip that JAX shows as one device; 1 where the chip is not known."""
    tpu = compile_target().tpu
    return tpu.num_cores if tpu else 1
