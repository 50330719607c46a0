"""Copies parameters between the devices of a run and the tensors of files, in pieces: the host
holds at most `MAX_PIECE_BYTES` of a parameter at a time.

When a model is read, every process fills the shards of its own devices. A large shard is allocated
on its device, and filled there piece by piece, by programs that run on this device alone. So no
process waits for another. When a model is written, each piece is gathered from all devices that
hold parts of it.
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
from qwen3next_jax.interop.layout import StoredParameter
from qwen3next_jax.interop.shard_slices import ShardSlice

MAX_PIECE_BYTES = 64 * 2**20
# A function from a slice of a parameter to the values of the slice.
ReadSlice = Callable[[ShardSlice], np.ndarray]


def make_array(
    parameter: StoredParameter, dtype: np.dtype, sharding: Sharding | None, read_values: ReadSlice
) -> jax.Array:
    """Makes the array of `parameter` on the devices of `sharding`.

    Args:
      parameter: the parameter (`layout.StoredParameter`), with its path in the parameter tree and
        the tensors of the files that hold it.
      dtype: the array's dtype.
      sharding: the array's sharding; None: the array is on the default device, and JAX may move it
        (it is uncommitted).
      read_values: see `make_device_shards`.
    """
    if sharding is None:
        whole = (slice(None),) * len(parameter.shape)
        return make_device_shards(parameter, dtype, {None: whole}, read_values)[0]
    indices = sharding.addressable_devices_indices_map(parameter.shape)
    shards = make_device_shards(parameter, dtype, indices, read_values)
    return jax.make_array_from_single_device_arrays(parameter.shape, sharding, shards)


def make_device_shards(
    parameter: StoredParameter,
    dtype: np.dtype,
    indices: Mapping[jax.Device | None, tuple[slice, ...]],
    read_values: ReadSlice,
) -> list[jax.Array]:
    """Makes a single-device array on every device of `indices`: the device's shard of `parameter`.

    Args:
      parameter: the parameter's path, shape and tensors.
      dtype: the dtype of the shards.
      indices: device → the index of its shard in the parameter; the device None is the default
        device.
      read_values: function from a slice of the parameter to its values in `dtype`. All calls
        together ask exactly once for each element that a device holds, and for no other element. If
        the shards together form one slice, one call may read several shards, because long rows of a
        file are read faster than short ones.

    Returns:
      The shards, in the order of `indices`.
    """
    part_of = {
        device: shard_slices.with_start_and_stop(index, parameter.shape)
        for device, index in indices.items()
    }
    # If several devices hold the same slice, the first device reads it and the others copy it.
    reader_of = {part: device for device, part in reversed(part_of.items())}
    bounding = shard_slices.bounding_slice(list(reader_of))
    total = sum(shard_slices.num_elements(part) for part in reader_of)
    if shard_slices.num_elements(bounding) == total:  # the slices fill their bounding slice
        groups = [reader_of]
    else:
        groups = [{part: device} for part, device in reader_of.items()]
    shards: dict[ShardSlice, jax.Array] = {}
    for group in groups:
        shards |= _read_adjacent_shards(parameter, np.dtype(dtype), group, read_values)
    return [
        shards[part] if device == reader_of[part] else jax.device_put(shards[part], device)
        for device, part in part_of.items()
    ]


def _read_adjacent_shards(
    parameter: StoredParameter,
    dtype: np.dtype,
    device_of: Mapping[ShardSlice, jax.Device | None],
    read_values: ReadSlice,
) -> dict[ShardSlice, jax.Array]:
    """Reads slices of a parameter that together fill their bounding slice, and puts each slice on
    its device.

    Args:
      parameter: the parameter's path, shape and tensors.
      dtype: the dtype of the values.
      device_of: slice → the device that gets it.
      read_values: see `make_device_shards`.

    Returns:
      Slice → its values on the device.
    """
    bounding = shard_slices.bounding_slice(list(device_of))
    max_elements = MAX_PIECE_BYTES // dtype.itemsize
    if shard_slices.num_elements(bounding) <= max_elements:
        values = read_values(bounding)
        return {
            part: jax.device_put(values[shard_slices.relative_to(bounding, part)], device)
            for part, device in device_of.items()
        }
    shards = {
        part: jnp.zeros(shard_slices.shape_of(part), dtype, device=device)
        for part, device in device_of.items()
    }
    for piece in tensor_rows.split_along_rows(parameter, bounding, max_elements):
        values = read_values(piece)
        # The host may read faster than the devices copy. If it did not wait here, pieces would fill
        # up its memory.
        jax.block_until_ready(list(shards.values()))
        for part, device in device_of.items():
            common = shard_slices.intersection(piece, part)
            if common is None:
                continue
            start = [dim.start for dim in shard_slices.relative_to(part, common)]
            update = jax.device_put(values[shard_slices.relative_to(piece, common)], device)
            shards[part] = _update_shard(shards[part], update, start)
    return shards


@functools.partial(jax.jit, donate_argnums=0)
def _update_shard(shard: jax.Array, update: jax.Array, start: list) -> jax.Array:
    """Returns `shard` with `update` written at the position `start`. The memory of `shard` is
    reused.
    """
    return jax.lax.dynamic_update_slice(shard, update, start)


class TensorReader:
    """Reads tensors, in the layout of files, from the parameters on the devices.

    A reader caches the last piece that it copied from the devices, because tensors that are written
    one after the other are usually adjacent in the parameter.
    """

    def __init__(self):
        # The parameter, the slice of it that is cached, and the values of that slice.
        self._cached: tuple[StoredParameter, ShardSlice, np.ndarray] | None = None

    def row_blocks(
        self,
        array: jax.Array | np.ndarray,
        parameter: StoredParameter,
        tensor: TensorSlice,
        layer: int,
    ) -> Iterator[np.ndarray]:
        """Yields the rows of a tensor in order, as blocks [rows, columns] of at most
        `MAX_PIECE_BYTES` (but at least one row).

        If the array spans several processes, all these processes must call this method for the same
        tensors in the same order.

        Args:
          array: the values of `parameter`.
          parameter: the parameter that the tensor belongs to.
          tensor: the tensor, one of the slices of the parameter's entry.
          layer: the index of the tensor's layer among the layers that are stacked in the parameter.
        """
        num_rows = math.prod(tensor.shape[:-1])
        step = max(1, MAX_PIECE_BYTES // (tensor.shape[-1] * array.dtype.itemsize))
        for first in range(0, num_rows, step):
            rows = slice(first, min(first + step, num_rows))
            yield self._read_rows(array, parameter, tensor, layer, rows)

    def _read_rows(
        self,
        array: jax.Array | np.ndarray,
        parameter: StoredParameter,
        tensor: TensorSlice,
        layer: int,
        rows: slice,
    ) -> np.ndarray:
        """Returns the range `rows` of a tensor's rows, [rows, columns]. `row_blocks` explains the
        other arguments.
        """
        needed = tensor_rows.slice_around_rows(parameter, tensor, layer, rows)
        cached, values = self._cached_slice_around(array, parameter, needed)
        index = shard_slices.relative_to(cached, needed)
        ((_, layer_part, layer_values),) = tensor_rows.transposed_layers(
            parameter, needed, values[index]
        )
        block = np.empty((rows.stop - rows.start, tensor.shape[-1]), values.dtype)
        for run in tensor_rows.row_runs(parameter, tensor, layer_part, rows):
            source = layer_values[run.index_in_slice]
            target = block[run.tensor_rows.start - rows.start : run.tensor_rows.stop - rows.start]
            tensor_rows.copy_rows(target.reshape(source.shape), source)
        return block

    def _cached_slice_around(
        self, array: jax.Array | np.ndarray, parameter: StoredParameter, needed: ShardSlice
    ) -> tuple[ShardSlice, np.ndarray]:
        """Returns a slice that contains the slice `needed`, and its values on the host."""
        if self._cached is not None:
            cached_parameter, cached, values = self._cached
            if cached_parameter is parameter:
                if shard_slices.intersection(needed, cached) == needed:
                    return cached, values
        self._cached = None  # frees the last piece before the next one is read
        larger = _extend_to_piece(needed, parameter, array)
        values = read_slice_to_host(array, larger)
        self._cached = parameter, larger, values
        return larger, values


def _extend_to_piece(
    needed: ShardSlice, parameter: StoredParameter, array: jax.Array | np.ndarray
) -> ShardSlice:
    """Extends the slice `needed` to as much as fits into `MAX_PIECE_BYTES`. If the whole array
    fits, the result is the whole array. If the array does not fit, `needed` is extended along the
    first dimension of the transposed layer, which numbers the parameter's tensors or the rows of
    its tensor.
    """
    if array.nbytes <= MAX_PIECE_BYTES:
        return shard_slices.full_slice(array.shape)
    dim = len(parameter.declaration.stack_shape) + parameter.entry.transpose_axes[0]
    start, stop = needed[dim].start, needed[dim].stop
    bytes_per_index = shard_slices.num_elements(needed) * array.dtype.itemsize // (stop - start)
    last_stop = start + MAX_PIECE_BYTES // bytes_per_index
    stop = max(stop, min(array.shape[dim], last_stop))
    return (*needed[:dim], slice(start, stop), *needed[dim + 1 :])


def read_slice_to_host(array: jax.Array | np.ndarray, part: ShardSlice) -> np.ndarray:
    """Returns the values of a slice of an array, on the host. All processes that hold a shard of
    the array must call this function together; each process gets the values.
    """
    if isinstance(array, np.ndarray):
        return array[part]
    start = [dim.start for dim in part]
    if not array.is_fully_addressable:
        gather = _make_slice_gather(array.sharding, shard_slices.shape_of(part))
        return np.asarray(gather(array, np.array(start, np.int32)).addressable_data(0))
    if part == shard_slices.full_slice(array.shape):
        return np.asarray(array)
    values = np.empty(shard_slices.shape_of(part), array.dtype)
    for shard in array.addressable_shards:
        shard_part = shard_slices.with_start_and_stop(shard.index, array.shape)
        common = shard_slices.intersection(part, shard_part)
        if shard.replica_id or common is None:
            continue
        start_in_shard = [dim.start for dim in shard_slices.relative_to(shard_part, common)]
        values[shard_slices.relative_to(part, common)] = jax.lax.dynamic_slice(
            shard.data, start_in_shard, shard_slices.shape_of(common)
        )
    return values


@functools.lru_cache(maxsize=256)
def _make_slice_gather(
    sharding: NamedSharding, sizes: tuple[int, ...]
) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """Makes a jitted function `gather(array, start)`. It returns the slice of shape `sizes` from
    the index `start` on, replicated on every device.

    Each device makes an array of the slice's shape with the values that its own shard has, and
    zeros elsewhere. The sum of the arrays of all devices is the slice. The values are added as
    integers with the same bits, because -0.0 + 0.0 is 0.0 in floating point. No device gets more
    than the slice.
    """
    spec = (*sharding.spec, *(None,) * (len(sizes) - len(sharding.spec)))
    tuples = [(axes,) if isinstance(axes, str) else axes for axes in spec]
    split_dims = {dim: axes for dim, axes in enumerate(tuples) if axes}
    mesh_axes = tuple(axis for axes in split_dims.values() for axis in axes)

    def replicated_slice(x, start):
        dtype = x.dtype
        unsigned = f"uint{8 * dtype.itemsize}"
        x = jax.lax.bitcast_convert_type(x, unsigned)
        for dim in set(range(len(sizes))) - set(split_dims):
            x = jax.lax.dynamic_slice_in_dim(x, start[dim], sizes[dim], dim)
        for dim, axes in split_dims.items():
            first_in_shard = jax.lax.axis_index(axes) * x.shape[dim]
            index = start[dim] + jnp.arange(sizes[dim]) - first_in_shard
            in_shard = (index >= 0) & (index < x.shape[dim])
            other_dims = [other for other in range(x.ndim) if other != dim]
            values = jnp.take(x, index, axis=dim, mode="clip")
            x = jnp.where(jnp.expand_dims(in_shard, other_dims), values, 0)
        if mesh_axes:  # some backends can add 32-bit integers but not 16-bit integers
            x = jax.lax.psum(x.astype(jnp.uint32), mesh_axes).astype(unsigned)
        return jax.lax.bitcast_convert_type(x, dtype)

    mapped = jax.shard_map(
        replicated_slice,
        mesh=sharding.mesh,
        in_specs=(P(*spec), P()),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(mapped)
