"""Arrays on devices, made and read a bounded piece at a time: the host never holds more of a parameter than `PIECE` bytes.

What is kept lies on the devices of this process, each its own shard. Large shards are allocated on their devices and filled there;
only programs of one device run for that, so that no process waits for another.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from qwen3next_jax.interop import boxes
from qwen3next_jax.interop.boxes import Box
from qwen3next_jax.interop.layout import Parameter

PIECE = 64 * 2**20  # bytes
Read = Callable[[Box], np.ndarray]


def build(parameter: Parameter, dtype: np.dtype, sharding: Sharding | None, read: Read) -> jax.Array:
    """The array of `parameter`, placed by `sharding` (None: on the default device, uncommitted). `read`: see `shards`."""
    if sharding is None:
        return shards(parameter, dtype, {None: (slice(None),) * len(parameter.shape)}, read)[0]
    places = sharding.addressable_devices_indices_map(parameter.shape)
    return jax.make_array_from_single_device_arrays(parameter.shape, sharding, shards(parameter, dtype, places, read))


def shards(parameter: Parameter, dtype: np.dtype, places: Mapping[jax.Device | None, tuple[slice, ...]], read: Read) -> list[jax.Array]:
    """The part `places[device]` of `parameter` on every such device.

    Args:
      read: box → its values, of `dtype`. Asked for each place that one of the devices holds once, and for no other; what lies side by
        side on several devices is asked for together, as rows of a file are read the faster the longer they are.
    """
    of_device = {device: boxes.bounded(index, parameter.shape) for device, index in places.items()}
    first_on = {box: device for device, box in reversed(of_device.items())}
    around = boxes.around(list(first_on))
    side_by_side = boxes.size(around) == sum(map(boxes.size, first_on))
    made: dict[Box, jax.Array] = {}
    for group in [first_on] if side_by_side else [{box: device} for box, device in first_on.items()]:
        made |= _fill(parameter, np.dtype(dtype), group, read)
    return [made[box] if device == first_on[box] else jax.device_put(made[box], device) for device, box in of_device.items()]


def _fill(parameter: Parameter, dtype: np.dtype, devices: Mapping[Box, jax.Device | None], read: Read) -> dict[Box, jax.Array]:
    around, most = boxes.around(list(devices)), PIECE // dtype.itemsize
    if boxes.size(around) <= most:
        values = read(around)
        return {box: jax.device_put(values[boxes.within(box, around)], device) for box, device in devices.items()}
    filled = {box: jnp.zeros(boxes.shape_of(box), dtype, device=device) for box, device in devices.items()}
    for piece in boxes.pieces(parameter, around, most):
        values = read(piece)
        jax.block_until_ready(list(filled.values()))  # or pieces pile up that are read faster than the devices take them
        for box, device in devices.items():
            if (part := boxes.overlap(piece, box)) is not None:
                start = [side.start for side in boxes.within(part, box)]
                filled[box] = _put(filled[box], jax.device_put(values[boxes.within(part, piece)], device), start)
    return filled


@functools.partial(jax.jit, donate_argnums=0)
def _put(shard: jax.Array, piece: jax.Array, start: list) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, piece, start)
