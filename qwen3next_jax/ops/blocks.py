"""An axis cut into blocks, so that what is made of it lives for one block at a time; and what
lives until the backward pass.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

KEPT = "kept"


def wide(x):
    """The dtype in which sums over x are kept: float32, or its own if that is wider."""
    return jnp.promote_types(jnp.float32, x.dtype)


def kept(tree, name: str = KEPT):
    """Arrays that took an operator to make: named, so that the backward pass may keep them and
    compute cheaper things again.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)


def cut(tree, axis: int, size: int, mode: str = "constant"):
    """`axis` of every array padded to whole blocks of `size` (with zeros, or with the last
    entry: "edge"), the blocks in front.
    """

    def one(x):
        count = -(-x.shape[axis] // size)
        x = jnp.pad(
            x, [(0, count * size - n if i == axis else 0) for i, n in enumerate(x.shape)], mode=mode
        )
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)

    return jax.tree.map(one, tree)


def joined(tree, axis: int, length: int):
    """The inverse of `cut`, of an axis of `length`."""

    def one(x):
        x = jnp.moveaxis(x, 0, axis)
        return jax.lax.slice_in_dim(
            x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]), 0, length, axis=axis
        )

    return jax.tree.map(one, tree)


def scan(step, carry, blocks):
    """`jax.lax.scan` over blocks, which is no loop where there is one."""
    if jax.tree.leaves(blocks)[0].shape[0] > 1:
        return jax.lax.scan(step, carry, blocks)
    carry, result = step(carry, jax.tree.map(lambda x: x[0], blocks))
    return carry, jax.tree.map(lambda x: x[None], result)
