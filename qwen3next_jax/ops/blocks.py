"""Helpers for operators that process a long axis in chunks, so that intermediate arrays exist for
one chunk at a time. `save_for_backward` marks arrays that a remat policy can save for the backward
pass.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

SAVED = "kept"  # the remat policy of this name (model/remat.py) saves arrays of this name


def accumulation_dtype(x):
    """Returns the dtype in which sums over x are accumulated: float32, or x's dtype if that is
    wider.
    """
    return jnp.promote_types(jnp.float32, x.dtype)


def save_for_backward(tree, name: str = SAVED):
    """Returns the arrays of `tree` with a name (`checkpoint_name`). A policy of `jax.checkpoint`
    can save arrays with this name for the backward pass. Name the arrays that are expensive to
    compute. If a policy saves only named arrays, the backward pass recomputes all arrays without a
    name.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)


def to_chunks(tree, axis: int, size: int, mode: str = "constant"):
    """Splits `axis` of every array into chunks of `size` entries: [..., T, ...] →
    [chunks, ..., size, ...]. The last chunk is padded with zeros, or, if `mode` is "edge", with
    copies of the last entry.
    """

    def split(x):
        count = -(-x.shape[axis] // size)
        x = jnp.pad(
            x, [(0, count * size - n if i == axis else 0) for i, n in enumerate(x.shape)], mode=mode
        )
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)

    return jax.tree.map(split, tree)


def from_chunks(tree, axis: int, length: int):
    """The inverse of `to_chunks` for an axis that had `length` entries. The padding is dropped."""

    def merge(x):
        x = jnp.moveaxis(x, 0, axis)
        return jax.lax.slice_in_dim(
            x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]), 0, length, axis=axis
        )

    return jax.tree.map(merge, tree)


def scan_or_call_once(step, carry, blocks):
    """Returns jax.lax.scan(step, carry, blocks), where the arrays of `blocks` have a leading axis
    of chunks. For a single chunk, `step` is called once, without a loop.
    """
    if jax.tree.leaves(blocks)[0].shape[0] > 1:
        return jax.lax.scan(step, carry, blocks)
    carry, result = step(carry, jax.tree.map(lambda x: x[0], blocks))
    return carry, jax.tree.map(lambda x: x[None], result)
