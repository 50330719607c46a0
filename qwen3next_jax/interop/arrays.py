"""Parameters on devices, written and read a bounded piece at a time: the host never holds more of
a parameter than `MAX_PIECE_BYTES`.

A process writes to its own devices only, to each its own shard. Large shards are allocated on
their devices and filled there, by programs of one device, so no process waits for another.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from qwen3next_jax.interop import shard_slices, tensor_rows
from qwen3next_jax.interop.entries import TensorSlice
from qwen3next_jax.interop.layout import Parameter
from qwen3next_jax.interop.shard_slices import ShardSlice

MAX_PIECE_BYTES = 64 * 2**20
Read = Callable[[ShardSlice], np.ndarray]


def make_array(
    parameter: Parameter, dtype: np.dtype, sharding: Sharding | None, read: Read
) -> jax.Array:
    """The array of `parameter`.

    Args:
      parameter: the array's path, shape and tensors.
      dtype: of the array.
      sharding: over which devices it is split; None: it lies on the default device, uncommitted.
      read: see `make_shards`.
    """
    if sharding is None:
        everything = (slice(None),) * len(parameter.shape)
        return make_shards(parameter, dtype, {None: everything}, read)[0]
    indices = sharding.addressable_devices_indices_map(parameter.shape)
    shards = make_shards(parameter, dtype, indices, read)
    return jax.make_array_from_single_device_arrays(parameter.shape, sharding, shards)


def make_shards(
    parameter: Parameter,
    dtype: np.dtype,
    indices: Mapping[jax.Device | None, tuple[slice, ...]],
    read: Read,
) -> list[jax.Array]:
    """The part `indices[device]` of `parameter` on every such device.

    Args:
      parameter: the array's path, shape and tensors.
      dtype: of the array.
      indices: device → its part of the array.
      read: slice → its values, of `dtype`. It is called once for every element that a device
        holds, and for no other element. Parts that lie side by side are read together, because
        rows of a file are read the faster the longer they are.
    """
    part_of = {
        device: shard_slices.bounded(index, parameter.shape) for device, index in indices.items()
    }
    first_device = {part: device for device, part in reversed(part_of.items())}
    bounding = shard_slices.bounding(list(first_device))
    side_by_side = shard_slices.size_of(bounding) == sum(map(shard_slices.size_of, first_device))
    if side_by_side:
        groups = [first_device]
    else:
        groups = [{part: device} for part, device in first_device.items()]
    made: dict[ShardSlice, jax.Array] = {}
    for group in groups:
        made |= _read_group(parameter, np.dtype(dtype), group, read)
    return [
        made[part] if device == first_device[part] else jax.device_put(made[part], device)
        for device, part in part_of.items()
    ]


def _read_group(
    parameter: Parameter,
    dtype: np.dtype,
    devices: Mapping[ShardSlice, jax.Device | None],
    read: Read,
) -> dict[ShardSlice, jax.Array]:
    """Reads parts that lie side by side, each onto its device."""
    bounding = shard_slices.bounding(list(devices))
    most = MAX_PIECE_BYTES // dtype.itemsize
    if shard_slices.size_of(bounding) <= most:
        values = read(bounding)
        return {
            part: jax.device_put(values[shard_slices.relative_to(bounding, part)], device)
            for part, device in devices.items()
        }
    shards = {
        part: jnp.zeros(shard_slices.shape_of(part), dtype, device=device)
        for part, device in devices.items()
    }
    for piece in tensor_rows.pieces(parameter, bounding, most):
        values = read(piece)
        # or pieces pile up on the host, where they are read faster than the devices take them
        jax.block_until_ready(list(shards.values()))
        for part, device in devices.items():
            common = shard_slices.intersection(piece, part)
            if common is None:
                continue
            start = [side.start for side in shard_slices.relative_to(part, common)]
            update = jax.device_put(values[shard_slices.relative_to(piece, common)], device)
            shards[part] = _update_shard(shards[part], update, start)
    return shards


@functools.partial(jax.jit, donate_argnums=0)
def _update_shard(shard: jax.Array, update: jax.Array, start: list) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, update, start)


class TensorReader:
    """Reads tensors out of parameters, in the rows of the tensors.

    It holds the piece that it copied from the devices last, because tensors that follow each other
    lie side by side.
    """

    def __init__(self):
        self._held: tuple[Parameter, ShardSlice, np.ndarray] | None = None

    def blocks(
        self,
        array: jax.Array | np.ndarray,
        parameter: Parameter,
        tensor: TensorSlice,
        layer: int,
    ) -> Iterator[np.ndarray]:
        """The rows [n, columns] of a tensor, in blocks of at most `MAX_PIECE_BYTES`.

        Where the array spans several processes, all of them call this for the same tensors, in the
        same order.

        Args:
          array: the values of `parameter`.
          parameter: the tensor's.
          tensor: one of its entry's.
          layer: the tensor's, of those stacked in the parameter.
        """
        rows = math.prod(tensor.shape[:-1])
        step = max(1, MAX_PIECE_BYTES // (tensor.shape[-1] * array.dtype.itemsize))
        for row in range(0, rows, step):
            yield self._rows(array, parameter, tensor, layer, slice(row, min(row + step, rows)))

    def _rows(
        self,
        array: jax.Array | np.ndarray,
        parameter: Parameter,
        tensor: TensorSlice,
        layer: int,
        rows: slice,
    ) -> np.ndarray:
        wanted = tensor_rows.slice_around_rows(parameter, tensor, layer, rows)
        held, values = self._hold(array, parameter, wanted)
        index = shard_slices.relative_to(held, wanted)
        ((_, part, view),) = tensor_rows.layers(parameter, wanted, values[index])
        found = np.empty((rows.stop - rows.start, tensor.shape[-1]), values.dtype)
        for run in tensor_rows.runs(parameter, tensor, part, rows):
            source = view[run.index]
            target = found[run.rows.start - rows.start : run.rows.stop - rows.start]
            tensor_rows.copy(target.reshape(source.shape), source)
        return found

    def _hold(
        self, array: jax.Array | np.ndarray, parameter: Parameter, wanted: ShardSlice
    ) -> tuple[ShardSlice, np.ndarray]:
        """A slice around `wanted`, and its values on the host."""
        if self._held is not None:
            of, held, values = self._held
            if of is parameter and shard_slices.intersection(wanted, held) == wanted:
                return held, values
        self._held = None  # frees the last piece before the next one is made
        held = _as_much_as_fits(wanted, parameter, array)
        values = read_slice(array, held)
        self._held = parameter, held, values
        return held, values


def _as_much_as_fits(
    wanted: ShardSlice, parameter: Parameter, array: jax.Array | np.ndarray
) -> ShardSlice:
    """All of a small array; of others `wanted`, and what follows it along the first dimension that
    the tensors split.
    """
    if array.nbytes <= MAX_PIECE_BYTES:
        return shard_slices.full(array.shape)
    dim = len(parameter.declared.stack) + parameter.entry.axes[0]
    side = wanted[dim]
    length = side.stop - side.start
    bytes_per_index = shard_slices.size_of(wanted) * array.dtype.itemsize // length
    most = side.start + MAX_PIECE_BYTES // bytes_per_index
    stop = max(side.stop, min(array.shape[dim], most))
    return (*wanted[:dim], slice(side.start, stop), *wanted[dim + 1 :])


def read_slice(array: jax.Array | np.ndarray, part: ShardSlice) -> np.ndarray:
    """The values in a slice of an array, on every process that holds a part of the array. All of
    these processes call this together.
    """
    if isinstance(array, np.ndarray):
        return array[part]
    start = [side.start for side in part]
    if not array.is_fully_addressable:
        gather = _gather_slice(array.sharding, shard_slices.shape_of(part))
        return np.asarray(gather(array, np.array(start, np.int32)).addressable_data(0))
    if part == shard_slices.full(array.shape):
        return np.asarray(array)
    values = np.empty(shard_slices.shape_of(part), array.dtype)
    for shard in array.addressable_shards:
        held = shard_slices.bounded(shard.index, array.shape)
        common = shard_slices.intersection(part, held)
        if shard.replica_id or common is None:
            continue
        start_in_shard = [side.start for side in shard_slices.relative_to(held, common)]
        values[shard_slices.relative_to(part, common)] = jax.lax.dynamic_slice(
            shard.data, start_in_shard, shard_slices.shape_of(common)
        )
    return values


@functools.lru_cache(maxsize=256)
def _gather_slice(
    sharding: NamedSharding, sizes: tuple[int, ...]
) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """A jitted `f(array, start)`: the slice of `sizes` that begins at `start`, on every device.

    Each device contributes what it holds of the slice, and zeros elsewhere; the devices' parts are
    summed as integers, because -0.0 + 0.0 is 0.0. Nothing larger than the slice is gathered.
    """
    spec = (*sharding.spec, *(None,) * (len(sizes) - len(sharding.spec)))
    split = {
        dim: (axes,) if isinstance(axes, str) else axes for dim, axes in enumerate(spec) if axes
    }
    mesh_axes = tuple(axis for axes in split.values() for axis in axes)

    def local(x, start):
        dtype = x.dtype
        unsigned = f"uint{8 * dtype.itemsize}"
        x = jax.lax.bitcast_convert_type(x, unsigned)
        for dim in set(range(len(sizes))) - set(split):
            x = jax.lax.dynamic_slice_in_dim(x, start[dim], sizes[dim], dim)
        for dim, axes in split.items():
            first_here = jax.lax.axis_index(axes) * x.shape[dim]
            index = start[dim] + jnp.arange(sizes[dim]) - first_here
            is_here = (index >= 0) & (index < x.shape[dim])
            other_dims = [other for other in range(x.ndim) if other != dim]
            taken = jnp.take(x, index, axis=dim, mode="clip")
            x = jnp.where(jnp.expand_dims(is_here, other_dims), taken, 0)
        if mesh_axes:  # every network can add 32 bits, not every one 16
            x = jax.lax.psum(x.astype(jnp.uint32), mesh_axes).astype(unsigned)
        return jax.lax.bitcast_convert_type(x, dtype)

    mapped = jax.shard_map(
        local, mesh=sharding.mesh, in_specs=(P(*spec), P()), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped)
