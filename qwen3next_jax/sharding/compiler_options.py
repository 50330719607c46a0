"""XLA compiler options that make a train step on several chips overlap collectives with compute.

With the compiler's defaults, a program for TPU waits for every all-gather of weights, every
exchange of tokens between experts, and every reduce-scatter of gradients. Some TPUs have sparse
cores, which can run collectives while the tensor cores compute. The options below let the compiler
use the sparse cores. docs/notes/planner.md reports the effect of each option.
"""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import ParallelConfig
from qwen3next_jax.sharding.chips import find_chip

_SPARSE_CORES = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    # the same for a mesh axis that spans two dimensions of the torus
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    # Otherwise the compiler fuses all-gathers into other work, which runs on the tensor cores.
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
}
# By default the compiler for TPU7x stores bfloat16 arrays in tiles of 16 rows. The kernels of this
# package read tiles of 8 rows, so the program would copy every input of a kernel.
_SMALL_TILES = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}
# The compilers for v4 and v5e accept none of these options; v5e has no sparse cores.
CHIP_OPTIONS = {"v5p": _SPARSE_CORES, "v6e": _SPARSE_CORES, "tpu7x": _SPARSE_CORES | _SMALL_TILES}


def compiler_options(config: ParallelConfig, mesh: Mesh) -> dict[str, str]:
    """Returns {name: value} of the compiler options for a step on `mesh`. On several devices the
    options are those of the chip in `CHIP_OPTIONS`, on one device there are none. The user's
    options in `config.compiler_options` are added, and replace options of the same name.

    Raises:
      UserError: an option of the configuration is not of the form NAME=VALUE, or the compiler does
        not accept it.
    """
    chip = find_chip(mesh.devices.flat[0].device_kind)
    options = dict(CHIP_OPTIONS.get(chip.name, {})) if chip and mesh.size > 1 else {}
    if not config.compiler_options:
        return options
    for part in config.compiler_options.split(","):
        name, sign, value = part.strip().partition("=")
        if not name or not sign:
            raise UserError(
                f"parallel.compiler_options: {part!r}: expected NAME=VALUE; NAME= removes one of "
                "the chip's own"
            )
        options[name] = value
    options = {name: value for name, value in options.items() if value}
    scalar = jax.ShapeDtypeStruct((), "float32", sharding=NamedSharding(mesh, P()))
    try:  # an empty program compiles in milliseconds, a train step in minutes
        jax.jit(lambda x: x, compiler_options=options).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"parallel.compiler_options = {config.compiler_options!r}: the compiler says: "
            f"{str(error).splitlines()[0]}"
        ) from None
    return options


def options_text(options: dict[str, str]) -> str:
    """Returns the options as one line of text: "compiler options: NAME=VALUE, …"."""
    return "compiler options: " + (
        ", ".join(f"{name}={value}" for name, value in options.items()) or "none"
    )
