"""Arrays on devices, made and read a bounded piece at a time: the host never holds more of a
parameter than `PIECE` bytes.

What is kept lies on the devices of this process, each its own shard. Large shards are allocated
on their devices and filled there; only programs of one device run for that, so that no process
waits for another.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from qwen3next_jax.interop import boxes
from qwen3next_jax.interop.boxes import Box
from qwen3next_jax.interop.layout import Parameter
from qwen3next_jax.model.hf_entries import Slice

PIECE = 64 * 2**20  # bytes
Read = Callable[[Box], np.ndarray]


def build(
    parameter: Parameter, dtype: np.dtype, sharding: Sharding | None, read: Read
) -> jax.Array:
    """The array of `parameter`, placed by `sharding` (None: on the default device, uncommitted).
    `read`: see `shards`.
    """
    if sharding is None:
        return shards(parameter, dtype, {None: (slice(None),) * len(parameter.shape)}, read)[0]
    places = sharding.addressable_devices_indices_map(parameter.shape)
    return jax.make_array_from_single_device_arrays(
        parameter.shape, sharding, shards(parameter, dtype, places, read)
    )


def shards(
    parameter: Parameter,
    dtype: np.dtype,
    places: Mapping[jax.Device | None, tuple[slice, ...]],
    read: Read,
) -> list[jax.Array]:
    """The part `places[device]` of `parameter` on every such device.

    Args:
      read: box → its values, of `dtype`. Asked for each place that one of the devices holds
      once, and for no other; what lies side by
        side on several devices is asked for together, as rows of a file are read the faster the
        longer they are.
    """
    of_device = {device: boxes.bounded(index, parameter.shape) for device, index in places.items()}
    first_on = {box: device for device, box in reversed(of_device.items())}
    around = boxes.around(list(first_on))
    side_by_side = boxes.size(around) == sum(map(boxes.size, first_on))
    made: dict[Box, jax.Array] = {}
    for group in (
        [first_on] if side_by_side else [{box: device} for box, device in first_on.items()]
    ):
        made |= _fill(parameter, np.dtype(dtype), group, read)
    return [
        made[box] if device == first_on[box] else jax.device_put(made[box], device)
        for device, box in of_device.items()
    ]


def _fill(
    parameter: Parameter, dtype: np.dtype, devices: Mapping[Box, jax.Device | None], read: Read
) -> dict[Box, jax.Array]:
    around, most = boxes.around(list(devices)), PIECE // dtype.itemsize
    if boxes.size(around) <= most:
        values = read(around)
        return {
            box: jax.device_put(values[boxes.within(box, around)], device)
            for box, device in devices.items()
        }
    filled = {
        box: jnp.zeros(boxes.shape_of(box), dtype, device=device) for box, device in devices.items()
    }
    for piece in boxes.pieces(parameter, around, most):
        values = read(piece)
        # or pieces pile up that are read faster than the devices take them
        jax.block_until_ready(list(filled.values()))
        for box, device in devices.items():
            if (part := boxes.overlap(piece, box)) is not None:
                start = [side.start for side in boxes.within(part, box)]
                filled[box] = _put(
                    filled[box], jax.device_put(values[boxes.within(part, piece)], device), start
                )
    return filled


@functools.partial(jax.jit, donate_argnums=0)
def _put(shard: jax.Array, piece: jax.Array, start: list) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, piece, start)


class Reader:
    """Reads tensors out of arrays. What was read last is still at hand, as tensors that follow
    each other lie side by side.
    """

    def __init__(self):
        self._held: tuple[Parameter, Box, np.ndarray] | None = None

    def blocks(
        self, array: jax.Array | np.ndarray, parameter: Parameter, part: Slice, layer: int
    ) -> Iterator[np.ndarray]:
        """The rows [n, columns] of the tensor `part` of one layer of `parameter`, whose values
        are in `array`, in blocks of at most `PIECE` bytes. Of an array that spans several
        processes all of them ask for the same, in the same order.
        """
        height, step = (
            math.prod(part.shape[:-1]),
            max(1, PIECE // (part.shape[-1] * array.dtype.itemsize)),
        )
        for row in range(0, height, step):
            yield self._rows(array, parameter, part, layer, slice(row, min(row + step, height)))

    def _rows(
        self,
        array: jax.Array | np.ndarray,
        parameter: Parameter,
        part: Slice,
        layer: int,
        only: slice,
    ) -> np.ndarray:
        wanted = boxes.around_rows(parameter, part, layer, only)
        if (
            self._held is None
            or self._held[0] is not parameter
            or boxes.overlap(wanted, self._held[1]) != wanted
        ):
            self._held = None  # let go of it first
            box = self._wider(wanted, parameter, array)
            self._held = parameter, box, take(array, box)
        _, box, values = self._held
        ((_, own, view),) = boxes.layers(parameter, wanted, values[boxes.within(wanted, box)])
        rows = np.empty((only.stop - only.start, part.shape[-1]), values.dtype)
        for run in boxes.runs(parameter, part, own, only):
            source = view[run.place]
            boxes.copy(
                rows[run.rows.start - only.start : run.rows.stop - only.start].reshape(
                    source.shape
                ),
                source,
            )
        return rows

    def _wider(self, box: Box, parameter: Parameter, array: jax.Array | np.ndarray) -> Box:
        """`box`, or more: all of a small array, else what follows along the dimension of which
        `box` is a range.
        """
        if array.nbytes <= PIECE:
            return boxes.whole(array.shape)
        dim = len(parameter.declared.stack) + parameter.entry.axes[0]
        side, one = (
            box[dim],
            boxes.size(box) * array.dtype.itemsize // (box[dim].stop - box[dim].start),
        )
        stop = max(side.stop, min(array.shape[dim], side.start + PIECE // one))
        return (*box[:dim], slice(side.start, stop), *box[dim + 1 :])


def take(array: jax.Array | np.ndarray, box: Box) -> np.ndarray:
    """The values in a box of an array, on every process that holds a part of it; all of them
    call this together.
    """
    if isinstance(array, np.ndarray):
        return array[box]
    start = [side.start for side in box]
    if not array.is_fully_addressable:
        return np.asarray(
            _taker(array.sharding, boxes.shape_of(box))(
                array, np.array(start, np.int32)
            ).addressable_data(0)
        )
    if box == boxes.whole(array.shape):
        return np.asarray(array)
    values = np.empty(boxes.shape_of(box), array.dtype)
    for shard in array.addressable_shards:
        held = boxes.bounded(shard.index, array.shape)
        if shard.replica_id == 0 and (part := boxes.overlap(box, held)) is not None:
            place = boxes.within(part, held)
            values[boxes.within(part, box)] = jax.lax.dynamic_slice(
                shard.data, [side.start for side in place], boxes.shape_of(part)
            )
    return values


@functools.lru_cache(maxsize=256)
def _taker(
    sharding: NamedSharding, sizes: tuple[int, ...]
) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    """→ jitted `f(array, start)` → the box of `sizes` from `start` on, on every device. Each
    device adds what it holds of it, as integers, as -0.0 + 0.0 is 0.0; nothing larger than the
    box is gathered.
    """
    spec = (*sharding.spec, *(None,) * (len(sizes) - len(sharding.spec)))
    split = {
        dim: (axes,) if isinstance(axes, str) else axes for dim, axes in enumerate(spec) if axes
    }

    def local(x, start):
        dtype, bits = x.dtype, f"uint{8 * x.dtype.itemsize}"
        x = jax.lax.bitcast_convert_type(x, bits)
        for dim in set(range(len(sizes))) - set(split):
            x = jax.lax.dynamic_slice_in_dim(x, start[dim], sizes[dim], dim)
        for dim, axes in split.items():
            here = start[dim] + jnp.arange(sizes[dim]) - jax.lax.axis_index(axes) * x.shape[dim]
            inside = jnp.expand_dims(
                (here >= 0) & (here < x.shape[dim]), [i for i in range(x.ndim) if i != dim]
            )
            x = jnp.where(inside, jnp.take(x, here, axis=dim, mode="clip"), 0)
        axes = tuple(axis for axes in split.values() for axis in axes)
        if axes:  # networks add 32 bits everywhere, 16 not
            x = jax.lax.psum(x.astype(jnp.uint32), axes).astype(bits)
        return jax.lax.bitcast_convert_type(x, dtype)

    return jax.jit(
        jax.shard_map(
            local, mesh=sharding.mesh, in_specs=(P(*spec), P()), out_specs=P(), check_vma=False
        )
    )
