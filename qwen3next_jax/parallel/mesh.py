"""The mesh of devices, and whether a run's dimensions divide over it.

Axes: `data` and `expert` split the rows of a batch, `context` the tokens of a row, `tensor` heads and widths; `expert`
splits the experts as well. Parameters and optimizer state are split over whatever is there (`rules`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from qwen3next_jax.config import MESH_AXES, Config, ParallelConfig
from qwen3next_jax.errors import UserError


def make_mesh(config: ParallelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `config.mesh` over `devices` (None: all of this run; virtual and described ones serve too).

    An axis takes whole dimensions of the chips' network, or contiguous parts of them, where it can. Where the devices are several
    TPU slices, `data` alone spans the slower network between them.

    Raises:
      UserError: the axes do not multiply to the number of devices, or `data` does not span the slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = config.mesh.sizes(len(devices))
    shape = tuple(sizes[axis] for axis in MESH_AXES)
    slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    if slices > 1:
        if sizes["data"] % slices:
            raise UserError(f"parallel.mesh.data = {sizes['data']} over {slices} TPU slices: expected a multiple of {slices}, "
                            "as only data may cross the network between slices")
        within, across = (sizes["data"] // slices, *shape[1:]), (slices, 1, 1, 1)
        grid = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    elif devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.array(devices).reshape(shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def one_device() -> Mesh:
    """The mesh of this process's first device alone."""
    return make_mesh(ParallelConfig(), jax.local_devices()[:1])


def check_divides(config: Config, mesh: Mesh) -> None:
    """Raises UserError where an axis of `mesh` does not divide what it splits; names both and the nearest sizes that do."""
    size, model, train = dict(mesh.shape), config.model, config.train
    rows = train.batch_size // train.gradient_accumulation
    if rows % (size["data"] * size["expert"]):
        raise UserError(f"parallel.mesh: data × expert = {size['data']} × {size['expert']} does not divide the {rows} rows of "
                        f"train.batch_size / train.gradient_accumulation; {_nearest(size['data'] * size['expert'], rows, 'their product')}")
    sparse = model.num_experts > 0 and (model.mtp_depth > 0 or any(sparse for _, sparse in model.layer_kinds))
    dense = not all(sparse for _, sparse in model.layer_kinds) or (model.mtp_depth > 0 and not model.num_experts)
    if size["context"] > 1 and train.sequence_length % (2 * size["context"]):  # attention shares out half blocks
        raise UserError(f"parallel.mesh.context = {size['context']}: twice that does not divide train.sequence_length = "
                        f"{train.sequence_length}; {_nearest(size['context'], train.sequence_length // 2, 'context')}")
    halo = model.linear_conv_kernel_dim - 1
    if size["context"] > 1 and model.short_convolution and train.sequence_length // size["context"] < halo:
        raise UserError(f"parallel.mesh.context = {size['context']} leaves {train.sequence_length // size['context']} tokens a device: "
                        f"expected at least the {halo} that the convolution reads of its neighbour; use fewer")
    split = [("tensor", "model.linear_num_key_heads", model.linear_num_key_heads),
             ("tensor", "model.num_attention_heads", model.num_attention_heads)]
    if sparse:
        split += [("expert", "model.num_experts", model.num_experts),
                  ("tensor", "model.moe_intermediate_size", model.moe_intermediate_size)]
        if model.shared_expert_intermediate_size:
            split.append(("tensor", "model.shared_expert_intermediate_size", model.shared_expert_intermediate_size))
    elif size["expert"] > 1:
        raise UserError(f"parallel.mesh.expert = {size['expert']}, but the model has no experts (model.num_experts = 0): expected 1")
    if dense:
        split.append(("tensor", "model.intermediate_size", model.intermediate_size))
    for axis, name, dimension in split:
        if dimension % size[axis]:
            raise UserError(f"parallel.mesh.{axis} = {size[axis]} does not divide {name} = {dimension}; "
                            f"{_nearest(size[axis], dimension, axis)}")
    heads = model.num_key_value_heads
    if size["tensor"] % heads and heads % size["tensor"]:
        raise UserError(f"parallel.mesh.tensor = {size['tensor']} neither divides model.num_key_value_heads = {heads} nor is a "
                        f"multiple of it (each shard needs whole key/value heads)")


def _nearest(size: int, dimension: int, what: str) -> str:
    """'the nearest sizes that do: 4, 8' for the divisors of `dimension` around `size`."""
    divisors = [d for d in range(1, dimension + 1) if dimension % d == 0]
    around = [*[d for d in divisors if d < size][-1:], *[d for d in divisors if d > size][:1]]
    return f"nearest valid sizes of {what}: {', '.join(map(str, around))}"
