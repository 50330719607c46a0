"""Makes the mesh of devices, and checks that its axes divide the arrays of a run.

The mesh axes `slice`, `data` and `expert` split the rows of a batch, `context` splits the tokens of
a row, and `tensor` splits heads and widths. `expert` also splits the experts. Parameters are split
over all axes but `slice`. The optimizer state is split like the parameters; if the slices share the
optimizer state, `slice` splits it too (`sharding.rules`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import MESH_AXES, MeshConfig, ModelConfig, ParallelConfig


def make_mesh(config: ParallelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes the mesh with the axis sizes of `config.mesh`.

    On TPU a mesh axis is laid along whole dimensions of the chips' network, or along contiguous
    parts of dimensions, if possible. The devices along `expert`, which together hold all experts,
    form a block of the network if a block is faster than a line (`sharding.torus`). If the devices
    belong to several TPU slices, only `slice` and `data` cross the slower network between slices,
    and `data` crosses this network only if the axis `slice` is smaller than the number of slices.
    Devices that belong to no TPU slice are put into the mesh in their order.

    Args:
      devices: the devices to use; None means all devices of the run. Virtual devices and the
        devices of a topology description work too.

    Raises:
      UserError: the product of the sizes is not the number of devices, an axis other than `slice`
        and `data` would cross slices, or the TPU slices have different shapes.
    """
    devices = list(jax.devices() if devices is None else devices)
    by_slice: dict[int, list] = {}
    for device in devices:
        by_slice.setdefault(slice_number(device), []).append(device)
    if len(by_slice) > 1:
        _check_slices(config.mesh, by_slice)
    is_tpu = devices[0].platform == "tpu"
    sizes = config.mesh.axis_sizes(len(devices), len(by_slice) if is_tpu else 1)
    if is_tpu or len(by_slice) > 1:
        grid = _grid_of_slices(sizes, [by_slice[index] for index in sorted(by_slice)])
    else:
        grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def slice_number(device: Any) -> int:
    """Returns the number of the TPU slice that a device belongs to; 0 if JAX reports no slice."""
    return getattr(device, "slice_index", 0) or 0


def _check_slices(mesh: MeshConfig, by_slice: Mapping[int, Sequence[Any]]) -> None:
    """Raises UserError if the slices have different shapes, or if the mesh axes `expert`, `context`
    and `tensor` do not fit into one slice. `by_slice`: {number of a slice: its devices}.
    """
    shapes = {index: _slice_shape_text(by_slice[index]) for index in sorted(by_slice)}
    first = next(iter(shapes))
    for index, shape in shapes.items():
        if shape != shapes[first]:
            raise UserError(
                f"the devices belong to {len(shapes)} slices of unequal shape: slice {first} has "
                f"{shapes[first]}, slice {index} has {shape}: expected slices of one shape; start "
                "the run on such slices"
            )
    axis_sizes = {axis: max(getattr(mesh, axis), 1) for axis in ("expert", "context", "tensor")}
    if len(by_slice[first]) % math.prod(axis_sizes.values()):
        largest = max(axis_sizes, key=axis_sizes.get)
        text = " × ".join(f"{axis} {size}" for axis, size in axis_sizes.items())
        raise UserError(
            f"parallel.mesh.{largest} = {axis_sizes[largest]}: {text} would cross slices of "
            f"{len(by_slice[first])} devices, and only slice and data may cross the network "
            f"between slices: expected a product that divides {len(by_slice[first])}"
        )


def _slice_shape_text(devices: Sequence[Any]) -> str:
    """Returns the shape of a TPU slice as text, "4x4x8 chips, 128 devices". For devices without
    coordinates, the text has only the number of devices.
    """
    count = f"{len(devices)} devices"
    if not hasattr(devices[0], "coords"):
        return count
    chips = np.ptp([device.coords for device in devices], axis=0) + 1
    return f"{'x'.join(map(str, chips))} chips, {count}"


def _grid_of_slices(sizes: dict[str, int], slices: Sequence[Sequence[Any]]) -> np.ndarray:
    """Returns the devices of slices, which all have the same shape, as an array with the dimensions
    `sizes`, a dict from mesh axis to size. As many slices as possible lie along the axis `slice`,
    all other slices along `data`.
    """
    along_slice = math.gcd(sizes["slice"], len(slices))
    along_data = len(slices) // along_slice
    if sizes["data"] % along_data:
        raise UserError(
            f"parallel.mesh: slice {sizes['slice']} × data {sizes['data']} over {len(slices)} TPU "
            f"slices: expected a product that {len(slices)} divides, as only slice and data may "
            f"cross the network between slices; set parallel.mesh.slice = {len(slices)}"
        )
    sizes_within_slice = dict(sizes)
    sizes_within_slice["slice"] //= along_slice
    sizes_within_slice["data"] //= along_data
    grids = []
    for devices in slices:
        grid = mesh_utils.create_device_mesh(
            tuple(sizes_within_slice.values()), devices, allow_split_physical_axes=True
        )
        if devices[0].platform == "tpu":
            from qwen3next_jax.sharding.torus import place_experts_in_blocks

            grid = np.stack([place_experts_in_blocks(part) for part in grid])
        grids.append(grid)
    rows = [np.concatenate(grids[i : i + along_data], 1) for i in range(0, len(grids), along_data)]
    return np.concatenate(rows)


def single_device_mesh() -> Mesh:
    """Returns a mesh of this process's first device."""
    return make_mesh(ParallelConfig(), jax.local_devices()[:1])


def mesh_text(sizes: dict[str, int]) -> str:
    """Returns the axes whose size is more than 1, as text: "data=64 expert=8"."""
    return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "one device"


def mesh_unless_single_device(mesh: Mesh) -> Mesh | None:
    """Returns `mesh`, or None if the mesh has one device. The model's functions take None for one
    device, so that a program for one device contains no sharding.
    """
    return mesh if mesh.size > 1 else None


class _Constraint(NamedTuple):
    """A condition on the size of a mesh axis.

    Attributes:
      complaint: the text that follows "parallel.mesh.AXIS = SIZE" in the error message.
      holds: function (size) → whether the size fulfils the condition.
    """

    complaint: str
    holds: Callable[[int], bool]


def check_mesh_divides(
    model: ModelConfig,
    rows: int,
    length: int,
    mesh: Mesh,
    split_by_mixers: Mapping[str, int],
    halo: int,
    whole_rows: Sequence[str] = (),
) -> None:
    """Checks that every axis of `mesh` divides the dimensions that it splits.

    Args:
      model: the settings of the model.
      rows: number of rows of a micro-batch, over all devices.
      length: number of tokens of a row.
      mesh: the devices.
      split_by_mixers: dict from a setting to the size of a dimension that the model's mixers split
        over `tensor` (`Mixer.sizes_split_by_tensor`).
      halo: number of tokens that a device reads from the end of its neighbour's part of a row, if
        `context` splits rows.
      whole_rows: names of the parts of the model that need whole rows on one device.

    Raises:
      UserError: an axis of the mesh has a wrong size; the message names the axis and valid sizes.
        An axis must divide the dimensions that it splits; `tensor` may also be a multiple of the
        number of key/value heads. The product of `slice`, `data` and `expert` must divide the rows.
        Twice `context` must divide the length of a row, and each device needs at least `halo`
        tokens of a row. `context` must be 1 if a part of the model needs whole rows. `expert` must
        be 1 if the model has no experts.
    """
    size = dict(mesh.shape)
    axes = [axis for axis in ("slice", "data", "expert") if size[axis] > 1 or axis != "slice"]
    shards = math.prod(size[axis] for axis in axes)
    if rows % shards:
        nearest = _nearest_sizes(shards, range(1, rows + 1), lambda n: rows % n == 0)
        raise UserError(
            f"parallel.mesh: {' × '.join(axes)} = {' × '.join(str(size[axis]) for axis in axes)} "
            f"does not divide the {rows} rows of train.batch_size / train.gradient_accumulation; "
            f"nearest valid sizes of their product: {nearest}"
        )
    if size["expert"] > 1 and not model.has_experts:
        raise UserError(
            f"parallel.mesh.expert = {size['expert']}, but the model has no experts "
            "(model.num_experts = 0): expected 1"
        )
    context = _context_constraints(size, length, halo, whole_rows)
    _check_axis_size("context", size["context"], length // 2, context)
    experts = [_divides_constraint("num_experts", model.num_experts)] if model.has_experts else []
    _check_axis_size("expert", size["expert"], model.num_experts, experts)
    tensor = _tensor_constraints(model, split_by_mixers)
    _check_axis_size("tensor", size["tensor"], model.num_attention_heads, tensor)


def _context_constraints(
    size: Mapping[str, int], length: int, halo: int, whole_rows: Sequence[str]
) -> list[_Constraint]:
    """Returns the constraints on the size of the axis `context`. `size`: {name of an axis: number
    of devices along the axis}. `check_mesh_divides` explains the other arguments.
    """
    return [
        _Constraint(
            f" splits rows over devices, but {' and '.join(whole_rows)} can only process whole "
            "rows (docs/qwen3_8_flash_next.md says what it would take)",
            lambda n: n == 1 or not whole_rows,
        ),
        # Ring attention gives each device two blocks of a row (`ops.attention.ring`).
        _Constraint(
            f": expected train.sequence_length = {length} to be a multiple of twice that",
            lambda n: n == 1 or length % (2 * n) == 0,
        ),
        _Constraint(
            f" leaves {length // size['context']} tokens a device: expected at least the {halo} "
            "that the convolution reads of its neighbour",
            lambda n: n == 1 or length // n >= halo,
        ),
    ]


def _tensor_constraints(
    model: ModelConfig, split_by_mixers: Mapping[str, int]
) -> list[_Constraint]:
    """Returns the constraints on the size of the axis `tensor`. `check_mesh_divides` explains the
    arguments.
    """
    split = dict(split_by_mixers)
    if model.has_experts:
        split["moe_intermediate_size"] = model.moe_intermediate_size
    if model.has_dense_mlps:
        split["intermediate_size"] = model.intermediate_size
    if model.has_experts and model.shared_expert_intermediate_size > 0:
        split["shared_expert_intermediate_size"] = model.shared_expert_intermediate_size
    heads = model.num_key_value_heads
    return [
        *(_divides_constraint(name, dimension) for name, dimension in split.items()),
        _Constraint(
            f" neither divides model.num_key_value_heads = {heads} nor is a multiple of it (each "
            "shard needs whole key/value heads)",
            lambda n: n % heads == 0 or heads % n == 0,
        ),
    ]


def _divides_constraint(name: str, dimension: int) -> _Constraint:
    return _Constraint(f" does not divide model.{name} = {dimension}", lambda n: dimension % n == 0)


def _check_axis_size(
    axis: str, size: int, largest: int, constraints: Sequence[_Constraint]
) -> None:
    """Raises UserError for the first constraint that the size of a mesh axis breaks. The message
    suggests sizes up to `largest` that fulfil all constraints.
    """
    for complaint, holds in constraints:
        if not holds(size):
            nearest = _nearest_sizes(
                size,
                range(1, largest + 1),
                lambda n: all(constraint.holds(n) for constraint in constraints),
            )
            raise UserError(
                f"parallel.mesh.{axis} = {size}{complaint}; nearest valid sizes of {axis}: "
                f"{nearest}"
            )


def _nearest_sizes(size: int, sizes: Iterable[int], valid: Callable[[int], bool]) -> str:
    """Returns the nearest valid size below `size` and the nearest one above, as text: "4, 8".
    `sizes`: the candidates, ascending.
    """
    found = [n for n in sizes if valid(n)]
    below = [n for n in found if n < size][-1:]
    above = [n for n in found if n > size][:1]
    return ", ".join(map(str, below + above))
