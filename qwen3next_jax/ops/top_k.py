"""The largest numbers of each row.

R rows, E numbers of a row, A largest numbers to find in a row.
"""

import functools

import jax
import jax.numpy as jnp

from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.ops.implementations import (
    ChosenImplementation,
    XlaImplementation,
    choose_implementation,
)


def top_k(x_RE: jax.Array, count: int, name: str) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` largest numbers of each row, largest first, and their indices in the row,
    both [R, A]. Equal numbers keep their order, as in `jax.lax.top_k`.

    There is a kernel for TPUs, where `jax.lax.top_k` sorts whole rows.

    Args:
      x_RE: float32.
      count: A.
      name: the name of both results for a policy of `jax.checkpoint`. The policy can save the
        indices, which the gradient reads, only if this function names its results itself: a policy
        saves only the very array that has the name.
    """
    return _differentiable_top_k(
        choose_implementation("top_k", None, XLA_IMPLEMENTATIONS, x_RE=x_RE, count=count),
        count,
        name,
        x_RE,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable_top_k(chosen: ChosenImplementation, count: int, name: str, x_RE):
    return _top_k_forward(chosen, count, name, x_RE)[0]


def _top_k_forward(chosen: ChosenImplementation, count: int, name: str, x_RE):
    results = save_for_backward(chosen.function_named("top_k")(x_RE, count), name)
    return results, (results[1], x_RE.shape[1])


def _top_k_backward(chosen: ChosenImplementation, count: int, name: str, saved, gradients):
    index_RA, numbers = saved
    gradient_RA, _ = gradients
    number_E = jnp.arange(numbers)
    # A scatter would write one number after another.
    gradient_RE = jnp.zeros((len(index_RA), numbers), gradient_RA.dtype)
    for rank in range(count):
        chosen_RE = index_RA[:, rank, None] == number_E
        gradient_RE = jnp.where(chosen_RE, gradient_RA[:, rank, None], gradient_RE)
    return (gradient_RE,)


_differentiable_top_k.defvjp(_top_k_forward, _top_k_backward)


XLA_IMPLEMENTATIONS = (XlaImplementation("xla", ("cpu", "gpu", "tpu"), dict(top_k=jax.lax.top_k)),)
