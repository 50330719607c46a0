"""Sizes of decoding caches: which lengths are compiled, and what a cache costs in bytes.

A recurrent layer's cache (convolution window and state) has one size for every context; an
attention layer's grows with the number of slots.
"""

import jax

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.block import mixer_class

SMALLEST = 64  # slots of the smallest cache


def round_up_length(tokens: int) -> int:
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
    for name in config.mixers:
        shapes = jax.eval_shape(
            lambda mixer=mixer_class(name): mixer.init_cache(config, batch, length)
        )
        total[mixer_class(name).cache_kind] += sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)
        )
    return total


def cache_after_token(config: ModelConfig, cache: list, index_B: jax.Array) -> list:
    """Of what `Qwen3Next.decode(…, each=True)` gave, the cache of each row after its token
    number `index` [B].

    Slots need no such care: one past a row's end is rewritten before any query can see it.
    """

    def pick(leaf):  # [repeats, B, T, …]
        index = index_B.reshape(1, -1, *(1,) * (leaf.ndim - 2))
        return jax.numpy.take_along_axis(leaf, index, axis=2)[:, :, 0]

    mixers = [mixer_class(config.mixers[layers[0]]) for layers in config.stacks]
    return [
        layer if mixer.cache_kind == "slots" else jax.tree.map(pick, layer)
        for mixer, layer in zip(mixers, cache, strict=True)
    ]
