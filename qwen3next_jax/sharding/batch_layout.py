"""Which rows of a batch this process reads, and the global arrays made of them."""

import jax
import numpy as np


class BatchLayout:
    """How a batch [B, …] lies on the devices of all processes.

    The sharding alone decides which rows a process reads: processes that hold different columns
    of the same rows (`context`), or the same values twice (`tensor`), read the same rows.

    Attributes:
      rows: the indices in the batch of the rows that this process reads, ascending.
    """

    def __init__(self, sharding: jax.sharding.NamedSharding, batch_size: int):
        """`sharding`: of an array [batch_size, …]."""
        self._sharding = sharding
        self._batch_size = batch_size
        any_columns = (1 << 20,) * (len(sharding.spec) - 1)
        shards = sharding.addressable_devices_indices_map((batch_size, *any_columns))
        self.rows = sorted(
            {row for index in shards.values() for row in range(*index[0].indices(batch_size))}
        )

    def to_global(self, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """`local` [len(rows), …] of every process → the batch [B, …], split over the devices."""
        position = {row: i for i, row in enumerate(self.rows)}

        def global_array(x: np.ndarray) -> jax.Array:
            def shard(index: tuple[slice, ...]) -> np.ndarray:
                start, stop, _ = index[0].indices(self._batch_size)
                # Rows of a shard are neighbours in `local`, too.
                return x[(slice(position[start], position[stop - 1] + 1), *index[1:])]

            shape = (self._batch_size, *x.shape[1:])
            return jax.make_array_from_callback(shape, self._sharding, shard)

        return {name: global_array(x) for name, x in local.items()}
