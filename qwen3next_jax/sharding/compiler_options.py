"""Options of the XLA compiler that a train step over many chips is compiled with: collectives
beside compute.

By default the TPU compiler waits for every gather of weights, exchange of rows and scatter of
gradients. A chip with sparse cores can have these do them, and the compiler then starts them
early; docs/pod_step.md has what each option was measured to give.
"""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import ParallelConfig
from qwen3next_jax.sharding.chips import find_chip

_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    # over an axis that spans two dimensions of the torus
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    # else the tensor cores do the gathers, with what fuses into them
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
}
# TPU7x's compiler lays bfloat16 out in tiles of 16 rows; kernels read tiles of 8, so that all that
# goes into one would be copied.
_TILES = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
# v4's compiler, and that of v5e, which has no sparse cores, take none of these.
CHIP_OPTIONS = {"v5p": _SPARSE_CORES, "v6e": _SPARSE_CORES, "tpu7x": _SPARSE_CORES | _TILES}


def compiler_options(config: ParallelConfig, mesh: Mesh) -> dict[str, str]:
    """Those of the chip that `mesh` is of, where it has several, with those of
    `config.compiler_options` in their place.

    Raises:
      UserError: an option of the configuration is not written as NAME=VALUE, or the compiler
      does not know it.
    """
    chip = find_chip(mesh.devices.flat[0].device_kind)
    options = dict(CHIP_OPTIONS.get(chip.name, {})) if chip and mesh.size > 1 else {}
    if not config.compiler_options:
        return options
    for part in config.compiler_options.split(","):
        name, sign, value = part.strip().partition("=")
        if not name or not sign:
            raise UserError(
                f"parallel.compiler_options: {part!r}: expected NAME=VALUE; NAME= leaves out one "
                "of the chip's own"
            )
        options[name] = value
    options = {name: value for name, value in options.items() if value}
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, P()))
    try:  # a compile of nothing takes milliseconds, that of a step minutes
        jax.jit(lambda x: x, compiler_options=options).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"parallel.compiler_options = {config.compiler_options!r}: the compiler: "
            f"{str(error).splitlines()[0]}"
        ) from None
    return options


def options_text(options: dict[str, str]) -> str:
    return "compiler options: " + (
        ", ".join(f"{name}={value}" for name, value in options.items()) or "none"
    )
