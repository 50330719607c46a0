"""Groups of a device's rows that go through a layer one beside the other and meet in its routed
experts alone: what the experts of one group send over `expert` travels beside the mixer, the
norms and the shared expert of another (docs/pod_step.md).

Each group has a part of every device's rows. B rows, T time.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model import expert_parallelism
from qwen3next_jax.sharding.rules import CONTEXT, EXPERTS, ROWS, constrain, shards


def row_groups(x_BTD: jax.Array, config: ModelConfig, mesh: Mesh | None) -> int:
    """In how many groups rows should go: in as many parts as the gathered exchange takes their
    tokens, where that divides them.
    """
    split = shards(mesh, EXPERTS)
    rows, time = x_BTD.shape[0] // shards(mesh, *ROWS), x_BTD.shape[1] // shards(mesh, CONTEXT)
    groups = expert_parallelism.halves_of_all(
        rows * time,
        x_BTD.shape[2],
        config.num_experts_per_tok,
        config.num_experts // split,
        x_BTD.dtype,
    )
    return groups if 1 < split <= expert_parallelism.GATHERED_SHARDS and rows % groups == 0 else 1


def apart(x_BTD: jax.Array, context: Any, groups: int) -> list[tuple[jax.Array, Any]]:
    """Of each group its rows of x, and `context` (a `model.layers.Context`) with its tokens."""
    if groups == 1:
        return [(x_BTD, context)]

    def cut(x):
        parts = jnp.split(
            x.reshape(shards(context.mesh, *ROWS), groups, -1, *x.shape[1:]), groups, axis=1
        )
        return [
            constrain(part.reshape(-1, *x.shape[1:]), context.mesh, "batch", context.time)
            for part in parts
        ]

    fields = {name: getattr(context, name) for name in ("positions", "segment_ids", "stats_mask")}
    tokens = {name: cut(x) for name, x in fields.items() if x is not None}
    return [
        (x, context._replace(**{name: parts[i] for name, parts in tokens.items()}))
        for i, x in enumerate(cut(x_BTD))
    ]


def joined(xs: Sequence[jax.Array], context: Any) -> jax.Array:
    """The inverse of `apart`, of arrays [B / groups, T, …]."""
    if len(xs) == 1:
        return xs[0]
    parts = [x.reshape(shards(context.mesh, *ROWS), 1, -1, *x.shape[1:]) for x in xs]
    return constrain(
        jnp.concatenate(parts, axis=1).reshape(-1, *xs[0].shape[1:]),
        context.mesh,
        "batch",
        context.time,
    )
