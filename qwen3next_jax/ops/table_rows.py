"""Reads and updates single rows of a large table whose rows are split over the shards of a mesh. An
id is the index of a row in the whole table. The shards exchange the ids and the contents of the
rows that they need, so that no shard has to hold the whole table.

A shard first removes duplicates from its ids, so that it sends each id once, and for each id a
single sum of gradients. Every pair of shards exchanges at most C rows in a round
(`_pair_capacity`). If any pair of shards has more than C rows to exchange, the exchange takes
several rounds. Each round covers the same range of rows of every shard's part of the table, so all
contributions to a row arrive in one round. If the ids are hashes, they are spread evenly, and one
round is almost always enough.

Letters: N ids of this shard, S shards, R rows of a shard's part of the table, C capacity, W width
of a row, P = S · C rows that reach this shard in a round.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def look_up_rows(
    table_RW: jax.Array, ids_N: jax.Array, axes: Sequence[str], dtype: Any
) -> jax.Array:
    """Returns the rows of the ids, [N, W] in `dtype`. The shards also exchange the rows in `dtype`.

    Args:
      table_RW: this shard's rows of the table.
      ids_N: int32, the ids.
      axes: inside `shard_map`, the mesh axes that split the rows, outermost first. () means that
        the rows are not split.
      dtype: dtype of the result.
    """
    if not axes:
        return table_RW[ids_N].astype(dtype)
    axes, rows = tuple(axes), table_RW.shape[0]
    unique_N, slot_N = _unique_ids_and_slots(ids_N, _num_table_rows(rows, axes))
    plan = _plan_exchange_rounds(unique_N, rows, axes)

    def read(round, found_NW):
        index_SC, ids_SC = plan.ids_to_send(unique_N, round)
        wanted_SC = jax.lax.all_to_all(ids_SC, axes, 0, 0, tiled=True)
        rows_SCW = table_RW[jnp.maximum(wanted_SC, 0)].astype(dtype)
        rows_SCW = jax.lax.all_to_all(rows_SCW, axes, 0, 0, tiled=True)
        return found_NW.at[index_SC].set(rows_SCW, mode="drop")

    empty_NW = jnp.zeros((len(ids_N), table_RW.shape[1]), dtype)
    return jax.lax.fori_loop(0, plan.round_count, read, empty_NW)[slot_N]


def update_rows(
    state: Any,
    ids_N: jax.Array,
    gradient_NW: jax.Array,
    rows: int,
    axes: Sequence[str],
    write: Callable[[Any, jax.Array, jax.Array], Any],
) -> Any:
    """Sums the gradients of each row over all shards, and lets `write` update this shard's rows
    with the sums. Returns the updated state.

    Args:
      state: a tree of arrays, such as this shard's part of the table and of its optimizer's state.
      ids_N: int32, the ids.
      gradient_NW: the gradient of each id's row, in the dtype in which gradients are summed.
      rows: R.
      axes: as in `look_up_rows`.
      write: function (state, row, gradient) → state, which is called once in each round. `row` is
        int32 [P], indices in this shard's part of the table; each row occurs once, and an entry of
        R or more stands for no row. `gradient` [P, W] has the sum of all shards' gradients of each
        row. If `axes` is (), `row` and `gradient` have N entries instead of P.
    """
    axes = tuple(axes)
    unique_N, slot_N = _unique_ids_and_slots(ids_N, _num_table_rows(rows, axes))
    sum_NW = jnp.zeros_like(gradient_NW).at[slot_N].add(gradient_NW)
    if not axes:
        return write(state, unique_N, sum_NW)
    plan = _plan_exchange_rounds(unique_N, rows, axes)

    def exchange(round, state):
        index_SC, ids_SC = plan.ids_to_send(unique_N, round)
        sent_SCW = sum_NW.at[index_SC].get(mode="fill", fill_value=0)
        ids_SC, sum_SCW = (
            jax.lax.all_to_all(x, axes, 0, 0, tiled=True) for x in (ids_SC, sent_SCW)
        )
        ids_P = jnp.where(ids_SC < 0, rows, ids_SC).reshape(-1)
        row_P, slot_P = _unique_ids_and_slots(ids_P, rows)
        sum_PW = sum_SCW.reshape(len(ids_P), -1)
        return write(state, row_P, jnp.zeros_like(sum_PW).at[slot_P].add(sum_PW))

    return jax.lax.fori_loop(0, plan.round_count, exchange, state)


class _ExchangeRounds(NamedTuple):
    """How an exchange is divided into rounds.

    Attributes:
      rows_per_shard: R.
      mesh_axes: the mesh axes that split the rows.
      pair_capacity: C, the largest number of rows that a pair of shards exchanges in a round.
      rows_per_round: number of rows of each shard's part of the table that a round covers.
      round_count: number of rounds.
    """

    rows_per_shard: int
    mesh_axes: tuple[str, ...]
    pair_capacity: int
    rows_per_round: jax.Array
    round_count: jax.Array

    def ids_to_send(self, unique_N: jax.Array, round: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the ids that this shard sends to each shard in the round with the index `round`,
        as two arrays [S, C]. The first array has the index of each id in `unique_N`, and N for an
        entry without an id. The second array has the index of the id's row in the receiving shard's
        part of the table, and -1 for an entry without an id.
        """
        first_S = jnp.arange(_num_shards(self.mesh_axes), dtype=jnp.int32) * self.rows_per_shard
        begin = jnp.minimum(round * self.rows_per_round, self.rows_per_shard)
        end = jnp.minimum(begin + self.rows_per_round, self.rows_per_shard)
        begin_S, end_S = (jnp.searchsorted(unique_N, first_S + x) for x in (begin, end))
        index_SC = begin_S[:, None] + jnp.arange(self.pair_capacity)
        index_SC = jnp.where(index_SC < end_S[:, None], index_SC, len(unique_N))
        ids_SC = unique_N.at[index_SC].get(mode="fill", fill_value=-1)
        return index_SC, jnp.where(ids_SC < 0, -1, ids_SC - first_S[:, None])


def _plan_exchange_rounds(unique_N: jax.Array, rows: int, axes: tuple[str, ...]) -> _ExchangeRounds:
    """Divides the exchange of the sorted ids `unique_N` (the first result of
    `_unique_ids_and_slots`) into rounds. The function halves the number of rows of a round until no
    pair of shards exchanges more rows than the capacity.
    """
    shards, ids = _num_shards(axes), len(unique_N)
    capacity = _pair_capacity(ids, shards)
    owner_N, within_N = unique_N // rows, unique_N % rows
    number_N = jnp.arange(ids)

    def exceeds(width):
        """Returns whether any pair of shards exchanges more rows than the capacity in a round of
        `width` rows.
        """
        # the ids of one pair and round are neighbours, because the ids are sorted
        part_N = within_N // width
        begins_N = jnp.concatenate(
            (jnp.ones(1, bool), (owner_N[1:] != owner_N[:-1]) | (part_N[1:] != part_N[:-1]))
        )
        first_N = jax.lax.cummax(jnp.where(begins_N, number_N, 0))
        count_N = jnp.where(owner_N < shards, number_N - first_N + 1, 0)
        return jax.lax.pmax(jnp.max(count_N), axes) > capacity

    width, _ = jax.lax.while_loop(
        lambda carry: carry[1],
        lambda carry: ((carry[0] + 1) // 2, exceeds((carry[0] + 1) // 2)),
        (jnp.int32(rows), exceeds(jnp.int32(rows))),
    )
    return _ExchangeRounds(rows, axes, capacity, width, -(-rows // width))


def _pair_capacity(ids: int, shards: int) -> int:
    """Returns C, the largest number of rows that a pair of shards exchanges in a round. C is the
    mean number of rows of a pair of shards, plus six standard deviations of a Poisson distribution
    with this mean, plus 1; but C is at most `ids`, the number of ids of a shard.
    """
    mean = ids / shards
    return min(ids, math.ceil(mean + 6 * math.sqrt(mean)) + 1)


def _unique_ids_and_slots(ids_N: jax.Array, limit: int) -> tuple[jax.Array, jax.Array]:
    """Returns two arrays [N]. The first array has the ids in ascending order without duplicates,
    then `limit` in all remaining entries. The second array has, for each id of `ids_N`, the index
    of the id in the first array.
    """
    order_N = jnp.argsort(ids_N)
    sorted_N = ids_N[order_N]
    is_new_N = jnp.concatenate((jnp.zeros(1, bool), sorted_N[1:] != sorted_N[:-1]))
    slot_N = jnp.cumsum(is_new_N)
    unique_N = jnp.full_like(ids_N, limit).at[slot_N].set(sorted_N)
    return unique_N, jnp.zeros_like(order_N).at[order_N].set(slot_N)


def _num_shards(axes: tuple[str, ...]) -> int:
    """Returns S, the number of shards along the mesh axes together."""
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def _num_table_rows(rows: int, axes: tuple[str, ...]) -> int:
    """Returns the number of rows of the whole table."""
    return rows * _num_shards(axes)
