"""VMEM and cores of the chip that is compiled for."""

from qwen3next_jax.ops.compile_target import compile_target

# of v4, the least that a supported chip has; assumed where the chip is not known
SMALLEST_VMEM = 16 * 2**20


def vmem_bytes() -> int:
    tpu = compile_target().tpu
    return tpu.vmem_capacity_bytes if tpu else SMALLEST_VMEM


def vmem_budget() -> float:
    """What a kernel may use; the rest is the compiler's."""
    return 0.95 * vmem_bytes()


def cores() -> int:
    tpu = compile_target().tpu
    return tpu.num_cores if tpu else 1
