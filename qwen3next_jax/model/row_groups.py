"""Row groups: a device's rows go through a layer in groups that meet only in the routed experts, so
that communication overlaps with computation. While the tokens of one group travel over the mesh
axis `expert`, the mixer, the norms and the shared expert of another group are computed
(docs/notes/2026-11-23-pod-step.md).

Every group has rows of every device.

Letters: B rows, T time, D model.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model import expert_parallelism
from qwen3next_jax.sharding.rules import CONTEXT, EXPERT, ROWS, constrain, num_shards


def row_groups(x_BTD: jax.Array, config: ModelConfig, mesh: Mesh | None) -> int:
    """The number of groups: the number of overlapping chunks into which the gathered exchange
    divides the tokens, if that divides the number of a device's rows; else 1.
    """
    split = num_shards(mesh, EXPERT)
    rows, time = (
        x_BTD.shape[0] // num_shards(mesh, *ROWS),
        x_BTD.shape[1] // num_shards(mesh, CONTEXT),
    )
    groups = expert_parallelism.overlap_chunks_of_all(
        rows * time,
        x_BTD.shape[2],
        config.num_experts_per_tok,
        config.num_experts // split,
        x_BTD.dtype,
    )
    return groups if 1 < split <= expert_parallelism.GATHERED_SHARDS and rows % groups == 0 else 1


def split_rows(x_BTD: jax.Array, context: Any, groups: int) -> list[tuple[jax.Array, Any]]:
    """[(rows of x, context of these rows)], one pair for each group. `context`: the
    `model.layers.Context` of all rows.
    """
    if groups == 1:
        return [(x_BTD, context)]

    def split(x):
        parts = jnp.split(
            x.reshape(num_shards(context.mesh, *ROWS), groups, -1, *x.shape[1:]), groups, axis=1
        )
        return [
            constrain(part.reshape(-1, *x.shape[1:]), context.mesh, "batch", context.time)
            for part in parts
        ]

    fields = {name: getattr(context, name) for name in ("positions", "segment_ids", "stats_mask")}
    tokens = {name: split(x) for name, x in fields.items() if x is not None}
    return [
        (x, context._replace(**{name: parts[i] for name, parts in tokens.items()}))
        for i, x in enumerate(split(x_BTD))
    ]


def merge_rows(xs: Sequence[jax.Array], context: Any) -> jax.Array:
    """The inverse of `split_rows`: arrays [B / groups, T, …] of all groups → [B, T, …]."""
    if len(xs) == 1:
        return xs[0]
    parts = [x.reshape(num_shards(context.mesh, *ROWS), 1, -1, *x.shape[1:]) for x in xs]
    return constrain(
        jnp.concatenate(parts, axis=1).reshape(-1, *xs[0].shape[1:]),
        context.mesh,
        "batch",
        context.time,
    )
