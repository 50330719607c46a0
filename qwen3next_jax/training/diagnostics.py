"""Measures properties of each layer. The hook of `telemetry.diagnostics_every` runs an extra
forward pass for these measurements.

Each module of the model decides what it measures, and its class documents the names of the
quantities. The functions in this file turn the measurements of all layers into one list per
quantity, with one entry per layer. A layer that does not measure a quantity has the entry None.
docs/reference/metrics.md explains the quantities and lists published values.

Letters: L layers (the layer of the MTP module, if there is one, is last), N heads, E experts, S
layers with experts.
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
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.layers import SINK_HEAD, ForwardOptions


def l2_norms_by_layer(model: ModelConfig, tree: dict) -> dict[str, jax.Array]:
    """Computes L2 norms of a tree that has the structure of the parameters, such as the gradients:
    one norm for each key of the tree's top level, and for "layers" one norm per layer.

    Returns:
      Key of the tree's top level → L2 norm. The value for "layers" is an array with one norm per
      layer, without the layer of the MTP module; every other value is a scalar.
    """

    def sum_of_squares(leaf, num_kept_axes):
        axes = tuple(range(num_kept_axes, leaf.ndim))
        return jnp.sum(jnp.square(leaf.astype(jnp.float32)), axis=axes)

    norms = {}
    for name, group in tree.items():
        if name == "layers":  # the parameters for each entry of `model.layer_stacks`
            squares = [
                sum(sum_of_squares(leaf, 1) for leaf in jax.tree.leaves(group[j]))
                for j in sorted(group)
            ]
            norms[name] = jnp.sqrt(_in_layer_order(model, squares))
        else:
            norms[name] = jnp.sqrt(sum(sum_of_squares(leaf, 0) for leaf in jax.tree.leaves(group)))
    return norms


def largest_norm_weight_by_layer(model: ModelConfig, params: dict) -> jax.Array:
    """Returns the largest |w| among the weights w of the norms (RMSNorm) of each layer, [L]. Most
    norms scale by 1 + w, where w starts at 0.
    """

    def largest(group, prefix, num_kept_axes):
        leaves = {
            f"{prefix}/{path_string(path)}": leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(group)
        }
        return jnp.stack(
            [
                jnp.max(jnp.abs(leaf), axis=tuple(range(num_kept_axes, leaf.ndim)))
                for name, leaf in leaves.items()
                if parameter_declarations(model)[name].kind == "norm"
            ]
        ).max(axis=0)

    blocks = params["layers"]
    layers = _in_layer_order(model, [largest(blocks[j], f"layers/{j}", 1) for j in sorted(blocks)])
    if "mtp" not in params:
        return layers
    return jnp.concatenate([layers, largest(params["mtp"], "mtp", 0)[None]])


def _in_layer_order(model: ModelConfig, values_of_blocks: list[jax.Array]) -> jax.Array:
    """Concatenates values of layers in the order of the layers, without the layer of the MTP
    module. `values_of_blocks` holds one array for each entry of `ModelConfig.layer_stacks`: the
    values of the layers whose parameters are stacked in this entry.
    """
    order = np.argsort([layer for layers in model.layer_stacks for layer in layers])
    return jnp.concatenate(values_of_blocks)[order]


def make_diagnostics_step(
    model: ModelConfig, graphdef: nnx.GraphDef, micro_batches: int = 1, mesh: Mesh | None = None
) -> Callable[[dict, dict[str, jax.Array]], dict[str, Any]]:
    """Makes the jitted function `step(params, batch)` that measures all layers.

    Args:
      model: the model's settings.
      graphdef: the model without its parameters.
      micro_batches: the number of micro-batches of a training step. The function measures every
        `micro_batches`-th row of the batch: as many rows as a micro-batch has.
      mesh: the devices that share the batch; None: one device.

    Returns:
      The function `step`. The result of `step` is the argument `measured` of
      `diagnostics_event_fields`.
    """

    def step(params, batch):
        tokens, segment_ids = (batch[name][::micro_batches] for name in ("tokens", "segment_ids"))
        features = nnx.merge(graphdef, params).features(
            tokens, segment_ids, mesh=mesh, options=ForwardOptions(collect_stats=True)
        )
        return {
            "layers": features.diagnostics,
            "param_norms": l2_norms_by_layer(model, params),
            "norm_weights": largest_norm_weight_by_layer(model, params),
        }

    # The results are replicated, because every process of the run reads all of them.
    return jax.jit(
        step, out_shardings=NamedSharding(mesh, PartitionSpec()) if mesh is not None else None
    )


def diagnostics_event_fields(
    measured: dict[str, Any], grad_norms: dict[str, Any], expert_load: Any
) -> dict[str, Any]:
    """Returns the fields of a "diagnostics" event in metrics.jsonl.

    Args:
      measured: the result of the function that `make_diagnostics_step` makes, on the host.
      grad_norms: `l2_norms_by_layer` of the gradients, before clipping.
      expert_load: [S, E], `loss.expert_load` of the whole batch of the train step; None if no layer
        has experts.

    Returns:
      Name of a quantity → a list with one number or None per layer. The entry "groups" holds the
      norms of the parameters that belong to no layer, and "expert_load" [S][E] repeats the argument
      `expert_load`, if it is not None.
    """
    rows = [_summarise_layer(layer) for layer in measured["layers"]]
    for name, norms in (("grad_norm", grad_norms), ("param_norm", measured["param_norms"])):
        per_layer = [*norms["layers"], *([norms["mtp"]] if "mtp" in norms else [])]
        for row, norm in zip(rows, per_layer, strict=True):
            row[name] = norm
    for row, weight in zip(rows, measured["norm_weights"], strict=True):
        row["norm_weight_max"] = weight
    record = {
        "groups": {
            name: {
                "grad_norm": _round_to_4_digits(norm),
                "param_norm": _round_to_4_digits(measured["param_norms"][name]),
            }
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
        name: [_round_to_4_digits(row[name]) if name in row else None for row in rows]
        for name in names
    } | record


def _summarise_layer(layer: dict[str, np.ndarray]) -> dict[str, Any]:
    """Reduces each measurement of a layer to one number. A measurement whose name ends in "_max"
    becomes the maximum over the layer's heads. The half-lives of a layer become their geometric
    mean, and also give `half_life_min` and `half_life_max`. Every other measurement becomes its
    mean.
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


def _round_to_4_digits(value: Any) -> float:
    """Rounds to four significant digits, because a "diagnostics" event holds many numbers."""
    return float(f"{float(value):.4g}")
