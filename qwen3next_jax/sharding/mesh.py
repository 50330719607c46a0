"""The mesh of devices, and whether a run's dimensions divide over it.

Axes: `data` and `expert` split the rows of a batch, `context` the tokens of a row, `tensor`
heads and widths; `expert` splits the experts as well. Parameters and optimizer state are split
over whatever is there (`rules`).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import MESH_AXES, ModelConfig, ParallelConfig
from qwen3next_jax.sharding.torus import blocks_of_experts

DATA, EXPERT, CONTEXT, TENSOR = MESH_AXES


def make_mesh(config: ParallelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `config.mesh` over `devices` (None: all of this run; virtual and described
    ones serve too).

    An axis takes whole dimensions of the chips' network, or contiguous parts of them, where it
    can; `expert` a block rather than a line. Where the devices are several TPU slices, `data`
    alone spans the slower network between them.

    Raises:
      UserError: the axes do not multiply to the number of devices, or `data` does not span the
      slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = config.mesh.sizes(len(devices))
    shape = tuple(sizes[axis] for axis in MESH_AXES)
    slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    if slices > 1:
        if sizes["data"] % slices:
            raise UserError(
                f"parallel.mesh.data = {sizes['data']} over {slices} TPU slices: expected a "
                f"multiple of {slices}, as only data may cross the network between slices"
            )
        within, across = (sizes["data"] // slices, *shape[1:]), (slices, 1, 1, 1)
        grid = mesh_utils.create_hybrid_device_mesh(
            within, across, devices, allow_split_physical_axes=True
        )
    elif devices[0].platform == "tpu":
        grid = blocks_of_experts(
            mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        )
    else:
        grid = np.array(devices).reshape(shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def one_device() -> Mesh:
    """The mesh of this process's first device alone."""
    return make_mesh(ParallelConfig(), jax.local_devices()[:1])


def mesh_text(sizes: dict[str, int]) -> str:
    """ "data=64 expert=8": the axes that split anything."""
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one device"


def compute_mesh(mesh: Mesh) -> Mesh | None:
    """What the model's functions take as `mesh`: None for one device, whose program then says
    nothing about sharding.
    """
    return mesh if mesh.size > 1 else None


def check_divides(
    model: ModelConfig,
    rows: int,
    length: int,
    mesh: Mesh,
    split_by_mixers: Mapping[str, int],
    halo: int,
    whole_rows: Sequence[str] = (),
) -> None:
    """Checks that every axis of `mesh` divides what it splits.

    Args:
      rows: of a micro-batch.
      length: tokens of a row.
      split_by_mixers: what the model's mixers split over `tensor` (`Mixer.splits`), by name.
      halo: tokens of the neighbour before it that a device reads, where `context` splits rows.
      whole_rows: parts of the model that work on whole rows.

    Raises:
      UserError: names the axis, what it does not divide, and the nearest sizes that divide it.
    """
    size = dict(mesh.shape)
    if rows % (size["data"] * size["expert"]):
        nearest = _nearest(
            size["data"] * size["expert"], range(1, rows + 1), lambda n: rows % n == 0
        )
        raise UserError(
            f"parallel.mesh: data × expert = {size['data']} × {size['expert']} does not divide "
            f"the {rows} rows of "
            "train.batch_size / train.gradient_accumulation; nearest valid sizes of their "
            f"product: {nearest}"
        )
    if size["expert"] > 1 and not model.has_experts:
        raise UserError(
            f"parallel.mesh.expert = {size['expert']}, but the model has no experts "
            "(model.num_experts = 0): expected 1"
        )
    key_value_heads = model.num_key_value_heads
    mlps = {
        "moe_intermediate_size": model.has_experts,
        "intermediate_size": model.has_dense_mlps,
        "shared_expert_intermediate_size": model.has_experts
        and model.shared_expert_intermediate_size > 0,
    }
    split = {
        **split_by_mixers,
        **{name: getattr(model, name) for name, used in mlps.items() if used},
    }

    def divides(name: str, dimension: int) -> tuple[str, Callable[[int], bool]]:
        return f" does not divide model.{name} = {dimension}", lambda n: dimension % n == 0

    # axis → [(complaint, whether a size is one of those that it is not about)]
    rules = {
        # attention shares out half blocks
        "context": [
            (
                f" splits rows, and {' and '.join(whole_rows)} needs whole ones",
                lambda n: n == 1 or not whole_rows,
            ),
            (
                f": twice that does not divide train.sequence_length = {length}",
                lambda n: n == 1 or length % (2 * n) == 0,
            ),
            (
                f" leaves {length // size['context']} tokens a device: expected at least the "
                f"{halo} that the convolution reads of its neighbour",
                lambda n: n == 1 or length // n >= halo,
            ),
        ],
        "expert": [divides("num_experts", model.num_experts)] * model.has_experts,
        "tensor": [
            *itertools.starmap(divides, split.items()),
            (
                f" neither divides model.num_key_value_heads = {key_value_heads} nor is a "
                "multiple of it (each shard needs whole key/value heads)",
                lambda n: n % key_value_heads == 0 or key_value_heads % n == 0,
            ),
        ],
    }
    largest = {
        "context": length // 2,
        "expert": model.num_experts,
        "tensor": model.num_attention_heads,
    }
    for axis, of_axis in rules.items():
        for complaint, holds in of_axis:
            if not holds(size[axis]):
                nearest = _nearest(
                    size[axis],
                    range(1, largest[axis] + 1),
                    lambda n: all(holds(n) for _, holds in of_axis),
                )
                raise UserError(
                    f"parallel.mesh.{axis} = {size[axis]}{complaint}; nearest valid sizes of "
                    f"{axis}: {nearest}"
                )


def _nearest(size: int, sizes: Iterable[int], valid: Callable[[int], bool]) -> str:
    """ "4, 8": the valid ones of the ascending `sizes` around `size`."""
    found = [n for n in sizes if valid(n)]
    return ", ".join(
        str(n) for n in [*[n for n in found if n < size][-1:], *[n for n in found if n > size][:1]]
    )
