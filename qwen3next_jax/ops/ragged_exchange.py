"""Exchange of rows between the shards of a mesh axis. Each pair of shards may exchange a different
number of rows.

Q rows of a shard's input, P rows of its output, S shards.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.compile_target import compile_target


def exchange_rows(rows, output, from_row_SS, count_SS, to_row_SS, axis: str):
    """Sends rows between the shards of `axis` and returns `output` with the received rows written
    into it.

    Shard s sends count_SS[s, d] consecutive rows to shard d. The first row that shard s sends to
    shard d is row from_row_SS[s, d] of `rows` on shard s, and becomes row to_row_SS[s, d] of
    `output` on shard d.

    Args:
      rows: [Q, …], the array from which this shard sends rows.
      output: [P, …], the array into which the received rows are written.
      from_row_SS: [S, S] integers, the index in `rows` of the first row to send; the same array on
        all shards.
      count_SS: [S, S] integers, the number of rows to send; the same array on all shards.
      to_row_SS: [S, S] integers, the index in `output` of the first row to write; the same array on
        all shards.
      axis: name of the mesh axis.
    """
    from_row_SS, count_SS, to_row_SS = (
        a.astype(jnp.int32) for a in (from_row_SS, count_SS, to_row_SS)
    )
    shard = jax.lax.axis_index(axis)
    if compile_target().platform == "cpu":  # XLA's CPU backend has no ragged_all_to_all
        return _exchange_by_gather(rows, output, from_row_SS, count_SS, to_row_SS, axis)
    return jax.lax.ragged_all_to_all(
        rows,
        output,
        from_row_SS[shard],
        count_SS[shard],
        to_row_SS[shard],
        count_SS[:, shard],
        axis_name=axis,
    )


def _exchange_by_gather(rows, output, from_row_SS, count_SS, to_row_SS, axis):
    """Computes `exchange_rows` with an all-gather of the rows of all shards."""
    shard = jax.lax.axis_index(axis)
    row_P1 = jnp.arange(output.shape[0])[:, None]
    into_PS = row_P1 - to_row_SS[:, shard]
    from_PS = (into_PS >= 0) & (into_PS < count_SS[:, shard])
    index_PS = jnp.arange(count_SS.shape[0]) * rows.shape[0] + from_row_SS[:, shard] + into_PS
    received = jax.lax.all_gather(rows, axis, tiled=True)[
        jnp.sum(jnp.where(from_PS, index_PS, 0), axis=1)
    ]
    arrived_P = jnp.any(from_PS, axis=1)
    return jnp.where(arrived_P.reshape(-1, *(1,) * (rows.ndim - 1)), received, output)
