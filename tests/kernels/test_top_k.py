"""The kernel for the largest numbers of each row, against `jax.lax.top_k`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen3next_jax.kernels.tpu import top_k as kernel
from qwen3next_jax.ops.top_k import top_k


def rows_with_ties(numbers: int) -> jax.Array:
    """Random rows, and rows of equal numbers, of both zeros, and of numbers that are not finite."""
    x = np.random.default_rng(0).standard_normal((256, numbers)).astype(np.float32)
    x[0] = 0
    x[1] = -np.inf
    x[2] = np.round(x[2])
    x[3, ::3] = -0.0
    x[3, 1::3] = 0.0
    x[4, :3] = np.inf, np.nan, -np.inf
    return jnp.asarray(x)


@pytest.mark.parametrize("numbers, count", [(512, 10), (16, 2), (24, 24)])
def test_the_kernel_finds_what_jax_finds(numbers, count):
    x = rows_with_ties(numbers)
    assert not kernel.unsupported_reason(x, count)
    values, indices = jax.jit(lambda x: kernel.top_k(x, count, interpret=True))(x)
    expected, places = jax.lax.top_k(x, count)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(indices, places)


def test_gradients_are_those_of_jax():
    x, count = rows_with_ties(16), 3
    weights = jax.random.normal(jax.random.key(0), (len(x), count))
    found, expected = (
        jax.jit(jax.grad(lambda x: jnp.sum(find(x)[0] * weights)))(x)
        for find in (lambda x: top_k(x, count, "top"), lambda x: jax.lax.top_k(x, count))
    )
    np.testing.assert_array_equal(found, expected)
