"""Runs the decoder layers one after another. Layers that repeat with a period are traced once.

`ModelConfig.layer_stacks` lists groups of layers. A group of layers is one block
(`model.block.Block`), which is traced once. Each layer before the periodic part is a group of its
own. The groups of several layers form one period of the pattern (3 recurrent layers and 1 attention
layer in the released model). Each group of the period holds the layers at one place of the period,
with their parameters stacked. The period is the body of one `lax.scan`.

There are two ways to pass caches to mixers. A mixer with `Mixer.writes_cache_in_place` gets the
caches of all layers of its group and writes to the cache of its own layer; these caches are part of
the scan's carry (`carried`). A mixer without `writes_cache_in_place` gets the cache of its own
layer only; these caches are inputs and outputs of the scan (`scanned`).

Letters: B batch, T time, D model.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.apply_block import apply_block
from qwen3next_jax.model.layer_properties import mixer_class
from qwen3next_jax.model.layers import Context
from qwen3next_jax.model.remat import rematerialized
from qwen3next_jax.ops.preferences import prefers_unrolled_layers
from qwen3next_jax.sharding.rules import constrain, gather_params

Cache = Any  # the cache of one block: a dict of arrays, stacked over the block's layers


def run_layers(
    blocks: Sequence[nnx.Module],
    config: ModelConfig,
    x_BTD: jax.Array,
    context: Context,
    cache: Sequence[Cache] | None = None,
    *,
    remat: str = "none",
) -> tuple[jax.Array, list[dict[str, Any]], list[Cache]]:
    """Applies all layers of the trunk.

    Args:
      blocks: one block for each of `config.layer_stacks`, with its layers' parameters stacked.
      config: the model's settings.
      x_BTD: the residual stream before the first layer.
      context: the inputs that all layers of the forward pass share. In this function,
        `context.replayed_expert_ids` has an axis for the layers, [B, T, layers, A].
      cache: one cache for each block; None in training.
      remat: the policy for the backward pass (`model.remat`).

    Returns:
      x [B, T, D] after the last layer; the auxiliary outputs of every layer in order, with the
      layer's output "x" and "router_logits" if `ForwardOptions.capture_layer_outputs` asks for
      them; the caches after these tokens.
    """
    graphdefs, params = zip(*(nnx.split(block) for block in blocks))
    caches = list(cache) if cache else [None] * len(blocks)
    in_place = [
        mixer_class(config.mixers[layers[0]]).writes_cache_in_place
        for layers in config.layer_stacks
    ]
    run = functools.partial(_run_layer_of_each_block, config=config, context=context, remat=remat)

    # The layers before the periodic part: each is a group of one layer, and so comes before all
    # groups of several layers.
    single = sum(len(layers) == 1 for layers in config.layer_stacks)
    first_of = functools.partial(jax.tree.map, lambda leaf: leaf[0])
    single_caches = [
        _map_arrays_sliced_by_layer(first_of, c, is_in_place)
        for c, is_in_place in zip(caches, in_place[:single])
    ]
    # for each block the choices of its layers [layers, B, T, A]
    replayed = [None] * len(blocks)
    if context.replayed_expert_ids is not None:
        replayed = [
            jnp.moveaxis(context.replayed_expert_ids[:, :, jnp.array(layers)], 2, 0)
            for layers in config.layer_stacks
        ]
    x_BTD, per_layer, single_caches = run(
        graphdefs[:single],
        first_of(list(params[:single])),
        x_BTD,
        single_caches,
        first_of(replayed[:single]),
        0,
    )
    stacked_again = functools.partial(jax.tree.map, lambda leaf: leaf[None])
    caches[:single] = [
        _map_arrays_sliced_by_layer(stacked_again, c, is_in_place)
        for c, is_in_place in zip(single_caches, in_place)
    ]
    if single == len(blocks):
        return x_BTD, per_layer, caches

    # the period, repeated
    repeats = len(config.layer_stacks[-1])
    # without a loop, the results saved for the backward pass need not be copied to stacked arrays
    # and back
    unrolled = cache is None and prefers_unrolled_layers(repeats)
    decodes_on_one_device = cache is not None and context.mesh is None
    periodic_params, scanned_params = list(params[single:]), list(params[single:])
    numbers = jnp.arange(repeats)
    if decodes_on_one_device:
        # In place of the experts, the scan passes the indices of the layers; the reason stands
        # above `_replace_expert_parameters`.
        scanned_params = _replace_expert_parameters(scanned_params, lambda p: p.replace(numbers))
    in_place = in_place[single:]
    carried = [c if is_in_place else None for c, is_in_place in zip(caches[single:], in_place)]
    scanned = [None if is_in_place else c for c, is_in_place in zip(caches[single:], in_place)]

    def period(carry, inputs):
        x_BTD, carried = carry
        own_params, scanned, replayed, number = inputs
        if decodes_on_one_device:
            own_params = _take_expert_parameters(periodic_params, own_params)
        caches = [c if is_in_place else s for c, s, is_in_place in zip(carried, scanned, in_place)]
        x_BTD, auxes, caches = run(
            graphdefs[single:], own_params, x_BTD, caches, replayed, number, looped=not unrolled
        )
        carried = [c if is_in_place else None for c, is_in_place in zip(caches, in_place)]
        scanned = [None if is_in_place else c for c, is_in_place in zip(caches, in_place)]
        return (x_BTD, carried), (auxes, scanned)

    (x_BTD, carried), (auxes, scanned) = jax.lax.scan(
        period,
        (x_BTD, carried),
        (scanned_params, scanned, replayed[single:], numbers),
        unroll=repeats if unrolled else 1,
    )
    caches[single:] = [
        c if is_in_place else s for c, s, is_in_place in zip(carried, scanned, in_place)
    ]
    for repeat in range(repeats):
        for aux in auxes:
            per_layer.append(jax.tree.map(lambda leaf, i=repeat: leaf[i], aux))
    return x_BTD, per_layer, caches


def _map_arrays_sliced_by_layer(f, cache: Cache | None, in_place: bool) -> Cache | None:
    """Returns a block's cache with `f` applied to the arrays that `run_layers` slices by layer. If
    the mixer writes its cache in place, only the cache of the n-gram embedding is sliced by layer;
    otherwise all arrays of the cache are sliced.
    """
    if cache is None or not in_place:
        return f(cache)
    return {name: f(part) if name == "embedding" else part for name, part in cache.items()}


def _run_layer_of_each_block(
    graphdefs: Sequence[nnx.GraphDef],
    params: Sequence[nnx.State],
    x_BTD: jax.Array,
    caches: Sequence[Cache],
    replayed: Sequence[jax.Array | None],
    layer_in_group: jax.Array | int,
    *,
    config: ModelConfig,
    context: Context,
    remat: str,
    looped: bool = False,
) -> tuple[jax.Array, list[dict[str, Any]], list[Cache]]:
    """Applies one layer of each block: the layer with the index `layer_in_group` in its group. The
    arguments and results are those of `run_layers`, restricted to the layers with this index.
    `replayed` holds the `Context.replayed_expert_ids` of each layer. `looped`: see
    `remat.rematerialized`.
    """

    def apply(block_params, x_BTD, block_cache, expert_ids, graphdef):
        if config.lora.rank:
            from qwen3next_jax.model.adapters import merge_adapters

            block_params = merge_adapters(block_params, config.lora)
        block = nnx.merge(graphdef, gather_params(block_params, context.mesh, config.dtype))
        layer_context = context._replace(
            layer_in_stack=layer_in_group, replayed_expert_ids=expert_ids
        )
        x_BTD, aux, block_cache = apply_block(block, x_BTD, layer_context, block_cache)
        return (
            constrain(x_BTD, context.mesh, "batch", context.logical_time_axis, None),
            aux,
            block_cache,
        )

    auxes = []
    after = []
    for graphdef, block_params, block_cache, expert_ids in zip(graphdefs, params, caches, replayed):
        block = functools.partial(
            apply, block_cache=block_cache, expert_ids=expert_ids, graphdef=graphdef
        )
        x_BTD, aux, block_cache = rematerialized(block, remat, looped)(block_params, x_BTD)
        if context.options.capture_layer_outputs:
            aux["x"] = x_BTD
        else:
            aux.pop("router_logits", None)
        auxes.append(aux)
        after.append(block_cache)
    return x_BTD, auxes, after


# Decoding on one device uses few of a layer's experts. A scan over the stacked experts would copy
# all experts of a layer out of the stack. Therefore the scan's body reads the stacked experts of
# all layers, and the scan passes the index of the layer in place of the layer's experts.


def _is_parameter(leaf: Any) -> bool:
    return hasattr(leaf, "declared")


def _replace_expert_parameters(params: list[nnx.State], replace) -> list[nnx.State]:
    """Returns `params`, in which each parameter p that holds several experts is replaced by
    `replace(p)`.
    """
    return jax.tree.map(
        lambda p: replace(p) if p.declared.num_experts > 1 else p, params, is_leaf=_is_parameter
    )


def _take_expert_parameters(
    with_experts: list[nnx.State], params: list[nnx.State]
) -> list[nnx.State]:
    """Returns `params`, in which the parameters that hold several experts are replaced by those of
    `with_experts`, a list of the same structure.
    """
    return jax.tree.map(
        lambda p, replaced: p if p.declared.num_experts > 1 else replaced,
        with_experts,
        params,
        is_leaf=_is_parameter,
    )
