"""Splits the rows of a batch into groups, so that communication overlaps with computation. The
mixer, the norms and the shared expert process one group at a time. The routed experts process all
groups together. While the tokens of one group travel along the mesh axis `expert`, the devices
compute the mixer, the norms and the shared expert of another group (docs/notes/planner.md).

Each device contributes equally many rows to every group.

Letters: B rows, T time, D model.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.sharding.rules import CONTEXT, EXPERT, ROWS, constrain, num_shards


def row_group_count(x_BTD: jax.Array, config: ModelConfig, mesh: Mesh | None) -> int:
    """Returns the number of groups of rows. With the gathered exchange of `expert_parallelism`,
    there is one group for each chunk into which the exchange splits a device's tokens, if the
    number of chunks divides the device's rows. In all other cases, all rows are one group.

    Args:
      x_BTD: all rows.
      config: the settings of the model.
      mesh: the devices; None: one device.
    """
    split = num_shards(mesh, EXPERT)
    if split == 1:
        return 1
    from qwen3next_jax.model import expert_parallelism

    rows, time = (
        x_BTD.shape[0] // num_shards(mesh, *ROWS),
        x_BTD.shape[1] // num_shards(mesh, CONTEXT),
    )
    groups = expert_parallelism.overlap_chunk_count_in_memory(
        rows * time,
        config.hidden_size,  # not the width of x_BTD, which holds all residual streams
        config.num_experts_per_tok,
        config.num_experts // split,
        x_BTD.dtype,
    )
    return groups if split <= expert_parallelism.GATHERED_SHARDS and rows % groups == 0 else 1


def split_rows(x_BTD: jax.Array, context: Any, groups: int) -> list[tuple[jax.Array, Any]]:
    """Splits rows into groups.

    Args:
      x_BTD: all rows.
      context: the `model.layers.Context` of all rows.
      groups: the number of groups.

    Returns:
      (x [B / groups, T, D], context) of each group.
    """
    if groups == 1:
        return [(x_BTD, context)]

    def split(x):
        parts = jnp.split(
            x.reshape(num_shards(context.mesh, *ROWS), groups, -1, *x.shape[1:]), groups, axis=1
        )
        return [
            constrain(
                part.reshape(-1, *x.shape[1:]), context.mesh, "batch", context.logical_time_axis
            )
            for part in parts
        ]

    names = ("positions", "segment_ids", "stats_mask", "replayed_expert_ids")
    fields = {name: getattr(context, name) for name in names}
    tokens = {name: split(x) for name, x in fields.items() if x is not None}
    return [
        (x, context._replace(**{name: parts[i] for name, parts in tokens.items()}))
        for i, x in enumerate(split(x_BTD))
    ]


def merge_rows(xs: Sequence[jax.Array], context: Any) -> jax.Array:
    """Undoes `split_rows`: joins the arrays [B / groups, T, …] of all groups to [B, T, …]."""
    if len(xs) == 1:
        return xs[0]
    parts = [x.reshape(num_shards(context.mesh, *ROWS), 1, -1, *x.shape[1:]) for x in xs]
    return constrain(
        jnp.concatenate(parts, axis=1).reshape(-1, *xs[0].shape[1:]),
        context.mesh,
        "batch",
        context.logical_time_axis,
    )
