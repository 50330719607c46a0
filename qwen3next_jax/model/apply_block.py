"""What a forward pass may add around a decoder layer (`model.block.Block`): an embedding of the
layer's own before it, measurements of its two halves, and rows in groups, of which one is computed
while another is exchanged between devices.

Letters: B batch, T time, D model.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.model.layers import Context, token_mean
from qwen3next_jax.model.moe import SparseMoE
from qwen3next_jax.model.row_groups import merge_rows, row_groups, split_rows

Cache = dict[str, Any] | None
Applied = tuple[jax.Array, dict[str, Any], Cache]  # (x, auxiliary outputs, cache)


def apply_block(
    block: nnx.Module, x_BTD: jax.Array, context: Context, cache: Cache = None
) -> Applied:
    """Applies a layer as `block(x, context, cache)` does, with what the forward pass adds.

    Args:
      block: a `model.block.Block`.
      x_BTD: the residual stream.
      context: the inputs that all layers of the forward pass share.
      cache: the cache of the layer, and under "embedding" that of its embedding.

    Returns:
      The residual stream after the layer; the auxiliary outputs, with "diagnostics" if the caller
      collects them (`measured`); the cache after these tokens.
    """
    if context.options.collect_stats:
        # Measurements are means over all tokens, so that all rows are one group.
        run = measured
    elif cache is None and isinstance(block.mlp, SparseMoE):
        run = in_groups
    else:
        run = type(block).__call__
    if block.embedding is None:
        return run(block, x_BTD, context, cache)
    return with_embedding(run, block, x_BTD, context, cache)


def with_embedding(
    run: Callable, block: nnx.Module, x_BTD: jax.Array, context: Context, cache: Cache
) -> Applied:
    """Adds the layer's embedding of the tokens to x, then runs the layer."""
    of_embedding = None
    if cache is not None:
        of_embedding = cache["embedding"]
        cache = {name: leaf for name, leaf in cache.items() if name != "embedding"}
    added_BTD, of_embedding = block.embedding(x_BTD, context, of_embedding)
    x_BTD, aux, cache = run(block, x_BTD + added_BTD, context, cache)
    if cache is not None:
        cache = cache | {"embedding": of_embedding}
    return x_BTD, aux, cache


def in_groups(block: nnx.Module, x_BTD: jax.Array, context: Context, cache: None = None) -> Applied:
    """Runs the layer on groups of rows: each passes through the mixer, the norms and the shared
    expert by itself, and only the routed experts process all together (`row_groups`). The mixer's
    auxiliary outputs, which are sums over tokens, are added up.
    """
    groups = row_groups(x_BTD, block.config, context.mesh)
    if groups == 1:
        return block(x_BTD, context)
    xs_BTD, contexts, of_mixer = [], [], {}
    for rows_BTD, own in split_rows(x_BTD, context, groups):
        mixed_BTD, aux, _ = block.mix(rows_BTD, own)
        xs_BTD.append(mixed_BTD)
        contexts.append(own)
        of_mixer = {name: of_mixer.get(name, 0) + value for name, value in aux.items()}
    inputs_BTD, adds = zip(
        *(block.unsplit_around(x, "mlp", own) for x, own in zip(xs_BTD, contexts))
    )
    ys_BTD, of_mlp = block.mlp.in_groups(inputs_BTD, contexts)
    x_BTD = merge_rows([add(y_BTD) for add, y_BTD in zip(adds, ys_BTD)], context)
    return x_BTD, of_mixer | of_mlp, None


def measured(block: nnx.Module, x_BTD: jax.Array, context: Context, cache: Cache = None) -> Applied:
    """Runs the two halves of the layer and adds "diagnostics": the measurements of the mixer and of
    the MLP, and over the tokens that count activation_max [], the largest |x|, and
    activation_median [], the mean of each token's median |x|.
    """
    x_BTD, of_mixer, cache = block.mix(x_BTD, context, cache)
    x_BTD, aux = block.feed_forward(x_BTD, context)
    if "mixer_loss" in of_mixer:
        aux["mixer_loss"] = of_mixer.pop("mixer_loss")
    aux["diagnostics"] = (
        of_mixer
        | aux.get("diagnostics", {})
        | _activations(block.observed(x_BTD, block.config), context.stats_mask)
    )
    return x_BTD, aux, cache


def _activations(x_BTD: jax.Array, counted_BT: jax.Array | None) -> dict[str, jax.Array]:
    """Returns activation_max and activation_median as `measured` describes them.
    `counted_BT`: the mask of the tokens that count; None: all count.
    """
    size_BTD = jnp.abs(x_BTD.astype(jnp.float32))
    largest = jnp.max(jnp.max(size_BTD, axis=-1), where=counted_BT, initial=0.0)
    # The median is taken over each token's own features, because a median over all tokens would
    # have to sort across devices.
    return {
        "activation_max": largest,
        "activation_median": token_mean(jnp.median(size_BTD, axis=-1), counted_BT),
    }
