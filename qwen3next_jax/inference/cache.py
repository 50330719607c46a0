"""Sizes of decoding caches: which lengths are compiled, and what a cache costs in bytes.

A recurrent layer's cache (convolution window and state) has one size for every context; an attention layer's grows with
the number of slots.
"""

import jax

from qwen3next_jax.config import FULL, ModelConfig
from qwen3next_jax.model.block import MIXERS

SMALLEST = 64  # slots of the smallest cache


def rounded_length(tokens: int) -> int:
    """Slots of the cache that holds `tokens`: the next of four sizes per octave, so that calls of similar length share
    their compiled programs and at most a quarter of the slots is unused."""
    if tokens <= SMALLEST:
        return SMALLEST
    step = 1 << ((tokens - 1).bit_length() - 3)
    return -(-tokens // step) * step


def cache_bytes(config: ModelConfig, batch: int, length: int) -> dict[str, int]:
    """Bytes of the trunk's cache of `length` slots: {"recurrent": …, "attention": …}."""
    total = {"recurrent": 0, "attention": 0}
    for kind, _ in config.layer_kinds:
        shapes = jax.eval_shape(lambda kind=kind: MIXERS[kind].init_cache(config, batch, length))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        total["attention" if kind == FULL else "recurrent"] += size
    return total


def select_recurrent(config: ModelConfig, keep_new, new: list, old: list) -> list:
    """The cache `new`, but with the recurrent layers of the rows where `keep_new` [B] is False as they are in `old`.

    Attention slots need no such care: a slot past a row's end is rewritten before any query can see it.
    """
    def pick(new_leaf, old_leaf):  # [repeats, B, …]
        return jax.numpy.where(keep_new.reshape(1, -1, *(1,) * (new_leaf.ndim - 2)), new_leaf, old_leaf)

    kinds = [kind for kind, _ in config.layer_kinds[:config.period]]
    return [layer if kind == FULL else jax.tree.map(pick, layer, before)
            for kind, layer, before in zip(kinds, new, old, strict=True)]
