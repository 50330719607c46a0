"""Decides which rows of a batch this process reads, and makes global arrays from the rows of all
processes.
"""

import jax
import numpy as np


class BatchLayout:
    """The layout of a batch [B, …] over the devices of all processes.

    The sharding decides which rows a process reads. Several processes read the same rows if the
    mesh axis `context` gives them different tokens of these rows, or if `tensor` gives them copies
    of the rows.

    Attributes:
      rows: indices, within the batch, of the rows that this process reads, in ascending order.
    """

    def __init__(self, sharding: jax.sharding.NamedSharding, batch_size: int):
        """Makes the layout of arrays [batch_size, …] that are split by `sharding`."""
        self._sharding = sharding
        self._batch_size = batch_size
        # Only the indices of the first dimension are used. The other sizes may be any that the mesh
        # divides.
        other_sizes = (1 << 20,) * (len(sharding.spec) - 1)
        shards = sharding.addressable_devices_indices_map((batch_size, *other_sizes))
        self.rows = sorted(
            {row for index in shards.values() for row in range(*index[0].indices(batch_size))}
        )

    def to_global(self, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Makes the global arrays [B, …] of a batch from the rows of all processes. Every process
        must call this method with its own rows.

        Args:
          local: {name: array [len(rows), …]}, the rows that this process has read.
        """
        position = {row: i for i, row in enumerate(self.rows)}

        def global_array(x: np.ndarray) -> jax.Array:
            def shard(index: tuple[slice, ...]) -> np.ndarray:
                start, stop, _ = index[0].indices(self._batch_size)
                # The rows of a shard are contiguous in the batch, and so in `local`.
                return x[(slice(position[start], position[stop - 1] + 1), *index[1:])]

            shape = (self._batch_size, *x.shape[1:])
            return jax.make_array_from_callback(shape, self._sharding, shard)

        return {name: global_array(x) for name, x in local.items()}
