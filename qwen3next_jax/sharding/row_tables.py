"""Look-up and update of large embedding tables, of which a batch uses only some rows, on a mesh.
The mesh axes that split the tokens of a batch, except `slice`, split the rows of an embedding
table, and `tensor` splits its width (the logical axes `table_rows` and `table_width` of
`sharding.rules`). `ops.table_rows` exchanges the rows between devices.

If the size of a mesh axis does not divide the number of rows, the devices along this axis hold
copies of the rows.

Letters: B batch, T time, H rows of a token, V rows of the table, W their width.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qwen3next_jax.ops import table_rows
from qwen3next_jax.sharding.rules import (
    TOKENS,
    ShardedParam,
    activation_spec,
    mesh_axes_of_entry,
    non_manual_axes,
    num_shards,
    per_shard,
    storage_spec,
)


def look_up_rows(
    table_VW: jax.Array,
    ids_BTH: jax.Array,
    declared: ShardedParam,
    mesh: Mesh | None,
    time: str | None = "time",
    dtype: Any = None,
) -> jax.Array:
    """Returns the rows `ids_BTH` of a table, as an array [B, T, H · W]. The gradient of the table
    is an array of the table's shape; `update_rows` avoids such an array.

    Args:
      ids_BTH: int32, numbers of rows, split over `mesh` as tokens are.
      declared: the declaration of the table.
      time: the logical axis of T (see `Context`).
      dtype: the dtype of the result and of the rows that devices exchange; None: the table's.
    """
    return _look_up(table_VW, ids_BTH, declared, mesh, time, dtype or table_VW.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _look_up(table_VW, ids_BTH, declared, mesh, time, dtype):
    spec, row_axes, width_axes = _table_spec_and_mesh_axes(declared, table_VW.shape, mesh)

    def run(table_RW, ids_BTH):
        rows = table_rows.look_up_rows(table_RW, ids_BTH.reshape(-1), row_axes, dtype)
        if width_axes:
            rows = jax.lax.all_gather(rows, width_axes, axis=1, tiled=True)
        return rows.reshape(*ids_BTH.shape[:2], -1)

    tokens = activation_spec("batch", time, None)
    return per_shard(run, mesh, (spec, tokens), tokens)(table_VW, ids_BTH)


def _look_up_backward(declared, mesh, time, dtype, saved, d_rows_BTP):
    table_VW, ids_BTH = saved

    def write(total_RW, row_P, gradient_PW):
        return total_RW.at[row_P].add(gradient_PW, mode="drop")

    total_VW = jnp.zeros(table_VW.shape, jnp.float32)
    total_VW = update_rows(total_VW, ids_BTH, d_rows_BTP.astype(jnp.float32), declared, mesh, write)
    return total_VW.astype(table_VW.dtype), None


_look_up.defvjp(
    lambda table, ids, *static: (_look_up(table, ids, *static), (table, ids)), _look_up_backward
)


def update_rows(
    state: Any,
    ids_BTH: jax.Array,
    d_rows_BTP: jax.Array,
    declared: ShardedParam,
    mesh: Mesh | None,
    write: Callable[..., Any],
    scalars: tuple[jax.Array, ...] = (),
) -> Any:
    """Returns `state` with the rows `ids_BTH` changed by the function `write` (see
    `ops.table_rows.update_rows`). Each device calls `write(state, row, gradient, *scalars)` for its
    own rows and columns.

    Args:
      state: a tree of arrays [V, …], such as the table and its optimizer's state.
      d_rows_BTP: the gradient of the result of `look_up_rows`, float32.
      declared: the declaration of the table. All arrays of `state` are split like the table.
    """
    specs = jax.tree.map(lambda x: _table_spec_and_mesh_axes(declared, x.shape, mesh)[0], state)
    rows = jax.tree.leaves(state)[0].shape[0]
    width = d_rows_BTP.shape[2] // ids_BTH.shape[2]
    _, row_axes, width_axes = _table_spec_and_mesh_axes(declared, (rows, width), mesh)
    own_rows, own_width = (
        rows // num_shards(mesh, *row_axes),
        width // num_shards(mesh, *width_axes),
    )
    in_program = () if mesh is None else non_manual_axes(mesh, TOKENS)
    copies = tuple(axis for axis in in_program if axis not in row_axes)

    def run(state, ids_BTH, d_rows_BTP, *scalars):
        ids_N, gradient_NW = ids_BTH.reshape(-1), d_rows_BTP.reshape(-1, width)
        if width_axes:
            column = jax.lax.axis_index(width_axes) * own_width
            gradient_NW = jax.lax.dynamic_slice_in_dim(gradient_NW, column, own_width, axis=1)
        if copies:
            ids_N, gradient_NW = (
                jax.lax.all_gather(x, copies, tiled=True) for x in (ids_N, gradient_NW)
            )
        own_write = lambda *args: write(*args, *scalars)
        return table_rows.update_rows(state, ids_N, gradient_NW, own_rows, row_axes, own_write)

    tokens = activation_spec("batch", "time", None)
    in_specs = (specs, tokens, tokens, *(P() for _ in scalars))
    return per_shard(run, mesh, in_specs, specs)(state, ids_BTH, d_rows_BTP, *scalars)


def _table_spec_and_mesh_axes(
    declared: ShardedParam, shape: tuple[int, ...], mesh: Mesh | None
) -> tuple[P | None, tuple[str, ...], tuple[str, ...]]:
    """Returns how the mesh splits a table of this shape: the table's PartitionSpec, the mesh axes
    that split its rows, and the mesh axes that split its width.
    """
    if mesh is None:
        return None, (), ()
    spec = storage_spec(declared, shape, mesh)
    return spec, *(mesh_axes_of_entry(entry) for entry in spec)
