"""Runs a decoder layer (`model.block.Block`) in the way that a forward pass asks for. The forward
pass may add three things to the layer: an n-gram embedding of the layer's own, diagnostics, or a
split of the batch's rows into groups, so that one group is computed while another group travels
between devices.

Letters: B batch, T time, D model.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.model.layers import Context, token_mean
from qwen3next_jax.model.moe import SparseMoE
from qwen3next_jax.model.row_groups import merge_rows, row_group_count, split_rows

Cache = dict[str, Any] | None
BlockResults = tuple[jax.Array, dict[str, Any], Cache]  # (x, auxiliary outputs, cache)


def apply_block(
    block: nnx.Module, x_BTD: jax.Array, context: Context, cache: Cache = None
) -> BlockResults:
    """Applies a layer as `block(x, context, cache)` does, and adds what the layer and the forward
    pass need: an n-gram embedding, diagnostics, groups of rows.

    Args:
      block: a `model.block.Block`.
      x_BTD: the residual stream.
      context: the inputs that all layers of the forward pass share.
      cache: the cache of the layer; its entry "embedding" is the cache of the n-gram embedding.

    Returns:
      The residual stream after the layer; the auxiliary outputs, with "diagnostics" if
      `ForwardOptions.collect_stats` asks for them; the cache after these tokens.
    """
    if context.options.collect_stats:
        # Diagnostics are means over all tokens, so all rows form one group.
        run = run_with_diagnostics
    elif cache is None and isinstance(block.mlp, SparseMoE):
        run = run_in_row_groups
    else:
        run = type(block).__call__
    if block.embedding is None:
        return run(block, x_BTD, context, cache)
    return add_ngram_embedding_then_run(run, block, x_BTD, context, cache)


def add_ngram_embedding_then_run(
    run: Callable, block: nnx.Module, x_BTD: jax.Array, context: Context, cache: Cache
) -> BlockResults:
    """Adds the layer's n-gram embedding of the tokens to x, then runs the layer with `run`."""
    embedding_cache = None
    if cache is not None:
        embedding_cache = cache["embedding"]
        cache = {name: leaf for name, leaf in cache.items() if name != "embedding"}
    added_BTD, embedding_cache = block.embedding(x_BTD, context, embedding_cache)
    x_BTD, aux, cache = run(block, x_BTD + added_BTD, context, cache)
    if cache is not None:
        cache = cache | {"embedding": embedding_cache}
    return x_BTD, aux, cache


def run_in_row_groups(
    block: nnx.Module, x_BTD: jax.Array, context: Context, cache: None = None
) -> BlockResults:
    """Runs the layer on groups of rows (`model.row_groups`). The mixer, the norms and the shared
    expert process one group at a time; the routed experts process all groups together. The mixer's
    auxiliary outputs are sums over tokens, so this function adds up the sums of all groups.
    """
    groups = row_group_count(x_BTD, block.config, context.mesh)
    if groups == 1:
        return block(x_BTD, context)
    xs_BTD, contexts, mixer_aux = [], [], {}
    for rows_BTD, group_context in split_rows(x_BTD, context, groups):
        mixed_BTD, aux, _ = block.mixer_sublayer(rows_BTD, group_context)
        xs_BTD.append(mixed_BTD)
        contexts.append(group_context)
        mixer_aux = {name: mixer_aux.get(name, 0) + value for name, value in aux.items()}
    inputs_BTD, adds = zip(
        *(
            block.constrained_input_and_add_output(x, "mlp", group_context)
            for x, group_context in zip(xs_BTD, contexts)
        )
    )
    ys_BTD, mlp_aux = block.mlp.apply_to_row_groups(inputs_BTD, contexts)
    x_BTD = merge_rows([add(y_BTD) for add, y_BTD in zip(adds, ys_BTD)], context)
    return x_BTD, mixer_aux | mlp_aux, None


def run_with_diagnostics(
    block: nnx.Module, x_BTD: jax.Array, context: Context, cache: Cache = None
) -> BlockResults:
    """Runs the layer and adds "diagnostics" to the auxiliary outputs: the diagnostics of the mixer
    and of the MLP, activation_max [], the largest |x|, and activation_median [], the mean over
    tokens of the median |x| of a token. Only the tokens that `Context.stats_mask` marks count.
    """
    x_BTD, mixer_aux, cache = block.mixer_sublayer(x_BTD, context, cache)
    x_BTD, aux = block.mlp_sublayer(x_BTD, context)
    if "mixer_loss" in mixer_aux:
        aux["mixer_loss"] = mixer_aux.pop("mixer_loss")
    aux["diagnostics"] = (
        mixer_aux
        | aux.get("diagnostics", {})
        | _activation_max_and_median(
            block.residual_for_diagnostics(x_BTD, block.config), context.stats_mask
        )
    )
    return x_BTD, aux, cache


def _activation_max_and_median(
    x_BTD: jax.Array, counted_BT: jax.Array | None
) -> dict[str, jax.Array]:
    """Returns activation_max, the largest |x|, and activation_median, the mean over tokens of the
    median |x| of a token. `counted_BT`: the mask of the tokens that count; None: all count.
    """
    size_BTD = jnp.abs(x_BTD.astype(jnp.float32))
    largest = jnp.max(jnp.max(size_BTD, axis=-1), where=counted_BT, initial=0.0)
    # The median is taken over each token's own features, because a median over all tokens would
    # have to sort across devices.
    return {
        "activation_max": largest,
        "activation_median": token_mean(jnp.median(size_BTD, axis=-1), counted_BT),
    }
