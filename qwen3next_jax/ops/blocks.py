"""Splits an axis into chunks, so that intermediate arrays live for one chunk at a time, and names
the arrays that are saved for the backward pass.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

SAVED = "kept"  # as `train.remat` calls the policy that saves them


def wide(x):
    """The dtype in which sums over x are accumulated: float32, or its own if that is wider."""
    return jnp.promote_types(jnp.float32, x.dtype)


def save_for_backward(tree, name: str = SAVED):
    """Gives arrays that are expensive to compute a name, by which a policy of `jax.checkpoint` can
    save them for the backward pass, which then recomputes only what is cheap.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)


def to_chunks(tree, axis: int, size: int, mode: str = "constant"):
    """Splits `axis` of every array into chunks of `size`: [..., T, ...] → [chunks, ..., size, ...].
    The last chunk is filled up with zeros, or with the last entry (mode "edge").
    """

    def one(x):
        count = -(-x.shape[axis] // size)
        x = jnp.pad(
            x, [(0, count * size - n if i == axis else 0) for i, n in enumerate(x.shape)], mode=mode
        )
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)

    return jax.tree.map(one, tree)


def from_chunks(tree, axis: int, length: int):
    """The inverse of `to_chunks` for an axis that had `length` entries."""

    def one(x):
        x = jnp.moveaxis(x, 0, axis)
        return jax.lax.slice_in_dim(
            x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]), 0, length, axis=axis
        )

    return jax.tree.map(one, tree)


def scan(step, carry, blocks):
    """`jax.lax.scan` over chunks; without a loop where there is one chunk."""
    if jax.tree.leaves(blocks)[0].shape[0] > 1:
        return jax.lax.scan(step, carry, blocks)
    carry, result = step(carry, jax.tree.map(lambda x: x[0], blocks))
    return carry, jax.tree.map(lambda x: x[None], result)
