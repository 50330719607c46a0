"""What is measured per layer every `telemetry.diagnostics_every` steps: a forward pass of its
own, beside the train step.

Each layer says what to measure (its class documents the names); here the numbers of all layers
become lists, one entry per layer, None where a layer has no such thing. docs/report.md explains
them and the values published for them.

Letters: L layers, the MTP module's (if there is one) last; N heads; E experts; S sparse layers.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model import declared
from qwen3next_jax.model.layers import SINK_HEAD


def norms_by_layer(model: ModelConfig, tree: dict) -> dict[str, jax.Array]:
    """L2 norms of a tree shaped like the parameters: `layers` [number of layers], and one [] for
    each other group.
    """

    def squares(leaf, axes_kept):
        return jnp.sum(
            jnp.square(leaf.astype(jnp.float32)), axis=tuple(range(axes_kept, leaf.ndim))
        )

    norms = {}
    for name, group in tree.items():
        if name == "layers":  # traced block → parameters stacked over its layers
            norms[name] = jnp.sqrt(
                _in_order(
                    model,
                    [
                        sum(squares(leaf, 1) for leaf in jax.tree.leaves(group[j]))
                        for j in sorted(group)
                    ],
                )
            )
        else:
            norms[name] = jnp.sqrt(sum(squares(leaf, 0) for leaf in jax.tree.leaves(group)))
    return norms


def norm_weights_by_layer(model: ModelConfig, params: dict) -> jax.Array:
    """[L]: the largest |w| among the layer's norm weights; those of most norms start at 0, and
    act as 1 + w.
    """

    def largest(group, prefix, axes_kept):
        leaves = {
            f"{prefix}/{path_string(path)}": leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(group)
        }
        return jnp.stack(
            [
                jnp.max(jnp.abs(leaf), axis=tuple(range(axes_kept, leaf.ndim)))
                for name, leaf in leaves.items()
                if declared(model)[name].kind == "norm"
            ]
        ).max(axis=0)

    layers = _in_order(
        model, [largest(params["layers"][j], f"layers/{j}", 1) for j in sorted(params["layers"])]
    )
    return (
        jnp.concatenate([layers, largest(params["mtp"], "mtp", 0)[None]])
        if "mtp" in params
        else layers
    )


def _in_order(model: ModelConfig, of_blocks: list[jax.Array]) -> jax.Array:
    """[layers of the trunk], from one array per traced block over its layers."""
    order = np.argsort([layer for layers in model.stacks for layer in layers])
    return jnp.concatenate(of_blocks)[order]


def make_diagnostics_step(
    model: ModelConfig, graphdef: nnx.GraphDef, micro_batches: int = 1, mesh: Mesh | None = None
) -> Callable[[dict, dict[str, jax.Array]], dict[str, Any]]:
    """→ jitted `step(params, batch)` → what `summarise` takes, from every `micro_batches`-th row
    of `batch`.
    """

    def step(params, batch):
        tokens, segment_ids = (batch[name][::micro_batches] for name in ("tokens", "segment_ids"))
        features = nnx.merge(graphdef, params).features(
            tokens, segment_ids, diagnose=True, mesh=mesh
        )
        return {
            "layers": features.diagnostics,
            "param_norms": norms_by_layer(model, params),
            "norm_weights": norm_weights_by_layer(model, params),
        }

    # Every process of the run reads all of it.
    return jax.jit(
        step, out_shardings=NamedSharding(mesh, PartitionSpec()) if mesh is not None else None
    )


def summarise(
    measured: dict[str, Any], grad_norms: dict[str, Any], expert_load: Any
) -> dict[str, Any]:
    """What a "diagnostics" event records.

    Args:
      measured: of the step that `make_diagnostics_step` makes, on the host.
      grad_norms: `norms_by_layer` of the gradients, before clipping.
      expert_load: [S, E] share of each expert times E, of the train step's whole batch; None
      where nothing is sparse.
    """
    rows = [_layer(layer) for layer in measured["layers"]]
    for name, norms in (("grad_norm", grad_norms), ("param_norm", measured["param_norms"])):
        per_layer = [*norms["layers"], *([norms["mtp"]] if "mtp" in norms else [])]
        for row, norm in zip(rows, per_layer, strict=True):
            row[name] = norm
    for row, weight in zip(rows, measured["norm_weights"], strict=True):
        row["norm_weight_max"] = weight
    record = {
        "groups": {
            name: {"grad_norm": _short(norm), "param_norm": _short(measured["param_norms"][name])}
            for name, norm in grad_norms.items()
            if name not in ("layers", "mtp")
        }
    }
    if expert_load is not None:
        sparse = [row for row in rows if "router_entropy" in row]
        for row, load_E in zip(sparse, np.asarray(expert_load), strict=True):
            mean = max(float(np.mean(load_E)), 1e-12)
            row |= {
                "load_cv": np.std(load_E) / mean,
                "load_max_violation": np.max(load_E) / mean - 1,
                "dead_experts": np.sum(load_E == 0),
            }
        record["expert_load"] = [
            [round(float(x), 2) for x in load_E] for load_E in np.asarray(expert_load)
        ]
    names = sorted({name for row in rows for name in row})
    return {
        name: [_short(row[name]) if name in row else None for row in rows] for name in names
    } | record


def _layer(layer: dict[str, np.ndarray]) -> dict[str, Any]:
    """One layer's numbers with its heads summed up: the mean, of what is called "_max" the
    largest.
    """
    row = {
        name: np.max(value) if name.endswith("_max") else np.mean(value)
        for name, value in layer.items()
    }
    row["activation_ratio"] = row["activation_max"] / max(
        float(row.pop("activation_median")), 1e-12
    )
    if "first_token_share" in layer:
        row["first_token_heads"] = np.mean(layer["first_token_share"] > SINK_HEAD)
    if "half_life" in layer:
        half_life_H = layer["half_life"]
        row |= {
            "half_life": math.exp(np.mean(np.log(half_life_H))),
            "half_life_min": np.min(half_life_H),
            "half_life_max": np.max(half_life_H),
        }
    return row


def _short(value: Any) -> float:
    """Four significant digits: 48 layers of these are written again and again."""
    return float(f"{float(value):.4g}")
