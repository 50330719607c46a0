"""Gathers inside `shard_map` whose gradient a TPU's compiler keeps a reduce-scatter."""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.compile_target import compile_target

LANES = 128  # of a tile
# numbers of tiles that divide this were cut; multiples of 37 and 1187 were not
_SMOOTH = 2**30 * 3**5 * 5**3 * 7 * 11 * 13 * 17 * 19


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """The parts `x` of all devices along the mesh axis `axis`, joined along dimension `dim`; of
    two dimensions or more.
    """
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def _backward(axis, dim, _, dy):
    """A TPU cuts what it reduces along another dimension, too. Where its tiles have a prime
    factor of 37 or more (151,936 = 128 · 1187) the compiler sums the whole on every device
    instead, twice the bytes: zeros fill it up.
    """
    other = dy.ndim - 1 - (dim == dy.ndim - 1)
    wide = full = dy.shape[other]
    tpu = compile_target().platform == "tpu"
    while tpu and full % LANES == 0 and _SMOOTH % (full // LANES):
        full += LANES
    fill = [(0, (full - wide) * (i == other)) for i in range(dy.ndim)]
    part = jax.lax.psum_scatter(jnp.pad(dy, fill), axis, scatter_dimension=dim, tiled=True)
    return (jax.lax.slice_in_dim(part, 0, wide, axis=other),)


all_gather.defvjp(lambda x, *static: (all_gather(x, *static), None), _backward)
