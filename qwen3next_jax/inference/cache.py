"""Lengths and sizes in bytes of the caches for decoding.

The cache of a recurrent layer (the inputs of its convolution, and its state) has the same size for
every context length. The cache of sliding-window attention has the same size for every context
length, too. The cache of any other attention layer has a slot for every token.
"""

import jax

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layer_properties import empty_layer_cache, mixer_class

MIN_SLOTS = 64  # slots of the smallest cache


def round_up_cache_length(tokens: int) -> int:
    """Returns the number of slots of a cache for `tokens` tokens.

    The number of slots is MIN_SLOTS, or 5, 6, 7 or 8 eighths of a power of two. Requests of similar
    length therefore use the same compiled programs, and less than a fifth of the slots is unused
    (except in a cache of MIN_SLOTS).
    """
    if tokens <= MIN_SLOTS:
        return MIN_SLOTS
    step = 1 << ((tokens - 1).bit_length() - 3)
    return -(-tokens // step) * step


def cache_bytes_by_kind(config: ModelConfig, batch: int, length: int) -> dict[str, int]:
    """Returns `cache_kind` → bytes of the caches of all decoder layers of this kind, for `batch`
    rows with `length` slots. The cache of the MTP module is not included.

    Caches of kind "state" have the same number of bytes at any length; caches of kind "slots" grow
    with the length.
    """
    total = {"state": 0, "slots": 0}
    for layer, name in enumerate(config.mixers):
        shapes = jax.eval_shape(lambda layer=layer: empty_layer_cache(config, layer, batch, length))
        for part, leaves in shapes.items():
            kind = "state" if part == "embedding" else mixer_class(name).cache_kind
            total[kind] += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves))
    return total


def roll_back_cache(config: ModelConfig, cache: list, index_B: jax.Array) -> list:
    """Rolls the cache back to an earlier token: after a call of `Qwen3Next.decode` on T tokens, row
    b gets the cache as it was after token number `index_B[b]`. The first of the T tokens has the
    number 0.

    Caches of kind "slots" are returned unchanged: a slot after token `index_B[b]` is overwritten
    before any query reads it.

    Args:
      config: the model's settings.
      cache: the cache that `Qwen3Next.decode` returned with `return_all_states=True`. The arrays of
        kind "state" in this cache hold the state after every token, [layers, B, T, …].
      index_B: [B] int32, numbers from 0 to T - 1.
    """

    def pick(leaf):  # [layers, B, T, …]
        index = index_B.reshape(1, -1, *(1,) * (leaf.ndim - 2))
        return jax.numpy.take_along_axis(leaf, index, axis=2)[:, :, 0]

    def picked(mixer, layer):
        has_slots = mixer.cache_kind == "slots"
        return {
            name: part if has_slots and name != "embedding" else jax.tree.map(pick, part)
            for name, part in layer.items()
        }

    mixers = [mixer_class(config.mixers[layers[0]]) for layers in config.layer_stacks]
    return [picked(mixer, layer) for mixer, layer in zip(mixers, cache, strict=True)]
