"""An all-gather for `shard_map`, whose gradient is a reduce-scatter. The reduce-scatter is arranged
so that the TPU compiler does not replace it by an all-reduce.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.compile_target import compile_target

LANES = 128  # values in a row of a TPU tile
# A product of primes below 37. In experiments, the compiler split dimensions whose number of tiles
# divides this product, and did not split dimensions whose number of tiles is a multiple of 37 or
# 1187.
_SMOOTH = 2**30 * 3**5 * 5**3 * 7 * 11 * 13 * 17 * 19


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Concatenates the parts `x` of all devices along the mesh axis `axis`. It is called inside
    `shard_map`.

    Args:
      x: this device's part of the array, with at least two dimensions.
      axis: name of the mesh axis.
      dim: the dimension along which the parts are concatenated.

    Returns:
      The whole array, on every device.
    """
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def _reduce_scatter_gradient(axis, dim, _, dy):
    """Returns the gradient of `x`: a reduce-scatter of the result's gradient `dy`.

    To run a reduce-scatter along `dim`, the TPU compiler also splits a second dimension of `dy`. If
    the number of tiles along this second dimension has a prime factor of 37 or more, as for a
    vocabulary of 151,936 = 128 · 1187, the compiler sums the whole array on every device instead,
    which sends twice the bytes. Therefore the second dimension is padded with zeros to a number of
    tiles that the compiler can split.
    """
    last = dy.ndim - 1
    other = last - 1 if dim == last else last
    size = padded = dy.shape[other]
    tpu = compile_target().platform == "tpu"
    while tpu and padded % LANES == 0 and _SMOOTH % (padded // LANES):
        padded += LANES
    padding = [(0, 0)] * dy.ndim
    padding[other] = (0, padded - size)
    part = jax.lax.psum_scatter(jnp.pad(dy, padding), axis, scatter_dimension=dim, tiled=True)
    if padded == size:
        return (part,)
    # Without the barrier, the compiler cuts the padding off in its own slice of the sum, and can
    # then end with an internal error (64 devices with 45 rows each of [2880, 201088]).
    return (jax.lax.slice_in_dim(jax.lax.optimization_barrier(part), 0, size, axis=other),)


all_gather.defvjp(lambda x, *static: (all_gather(x, *static), None), _reduce_scatter_gradient)
