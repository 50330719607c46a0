"""Sizes of decoding caches: which lengths are compiled, and what a cache costs in bytes.

A recurrent layer's cache (convolution window and state) has one size for every context; an
attention layer's grows with the number of slots.
"""

import jax

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.block import layer_cache, mixer_class

SMALLEST = 64  # slots of the smallest cache


def rounded_length(tokens: int) -> int:
    """Slots of the cache that holds `tokens`: the next of four sizes per octave, so that calls
    of similar length share their compiled programs and at most a quarter of the slots is unused.
    """
    if tokens <= SMALLEST:
        return SMALLEST
    step = 1 << ((tokens - 1).bit_length() - 3)
    return -(-tokens // step) * step


def cache_bytes(config: ModelConfig, batch: int, length: int) -> dict[str, int]:
    """Bytes of the trunk's cache of `length` slots, by the layers' `cache_kind`: "state" is as
    large at any length.
    """
    total = {"state": 0, "slots": 0}
    for layer, name in enumerate(config.mixers):
        shapes = jax.eval_shape(lambda layer=layer: layer_cache(config, layer, batch, length))
        for part, leaves in shapes.items():
            kind = "state" if part == "embedding" else mixer_class(name).cache_kind
            total[kind] += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves))
    return total


def after_token(config: ModelConfig, cache: list, index_B: jax.Array) -> list:
    """Of what `Qwen3Next.decode(…, each=True)` gave, the cache of each row after its token
    number `index` [B].

    Slots need no such care: one past a row's end is rewritten before any query can see it.
    """

    def pick(leaf):  # [repeats, B, T, …]
        index = index_B.reshape(1, -1, *(1,) * (leaf.ndim - 2))
        return jax.numpy.take_along_axis(leaf, index, axis=2)[:, :, 0]

    def picked(mixer, layer):
        has_slots = mixer.cache_kind == "slots"
        return {
            name: part if has_slots and name != "embedding" else jax.tree.map(pick, part)
            for name, part in layer.items()
        }

    mixers = [mixer_class(config.mixers[layers[0]]) for layers in config.stacks]
    return [picked(mixer, layer) for mixer, layer in zip(mixers, cache, strict=True)]
