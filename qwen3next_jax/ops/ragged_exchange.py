"""Rows that the shards of a mesh axis send each other, each as many as it likes.

Q rows that a shard may send, P rows of the output, S shards.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.compile_target import compile_target


def exchange(rows, output, read_SS, rows_SS, land_SS, axis: str):
    """`output` with the rows written into it that the shards of `axis` send each other.

    Args:
      rows: [Q, …], what this shard may send.
      output: [P, …].
      read_SS, rows_SS, land_SS: [S, S] integers, known to all: sender s sends receiver d its rows
        from read[s, d] on, rows[s, d] of them, to d's output from land[s, d] on.
    """
    read_SS, rows_SS, land_SS = (a.astype(jnp.int32) for a in (read_SS, rows_SS, land_SS))
    shard = jax.lax.axis_index(axis)
    if compile_target().platform == "cpu":  # XLA's CPU backend has no ragged_all_to_all
        return _by_gather(rows, output, read_SS, rows_SS, land_SS, axis)
    return jax.lax.ragged_all_to_all(
        rows,
        output,
        read_SS[shard],
        rows_SS[shard],
        land_SS[shard],
        rows_SS[:, shard],
        axis_name=axis,
    )


def _by_gather(rows, output, read_SS, rows_SS, land_SS, axis):
    shard = jax.lax.axis_index(axis)
    place_P1 = jnp.arange(output.shape[0])[:, None]
    into_PS = place_P1 - land_SS[:, shard]
    from_PS = (into_PS >= 0) & (into_PS < rows_SS[:, shard])
    index_PS = jnp.arange(rows_SS.shape[0]) * rows.shape[0] + read_SS[:, shard] + into_PS
    taken = jax.lax.all_gather(rows, axis, tiled=True)[
        jnp.sum(jnp.where(from_PS, index_PS, 0), axis=1)
    ]
    arrived_P = jnp.any(from_PS, axis=1)
    return jnp.where(arrived_P.reshape(-1, *(1,) * (rows.ndim - 1)), taken, output)
