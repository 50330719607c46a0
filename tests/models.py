"""Models and layers for tests which do not ask how start values are drawn.

XLA takes 6 seconds to compile `jax.random.normal` for all parameters of a small model.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax import ModelConfig, Qwen3Next


@contextlib.contextmanager
def numpy_draws(seed: int = 0) -> Iterator[None]:
    """Inside, NumPy draws what is asked of `jax.random.normal`, whose key is ignored."""
    rng = np.random.default_rng(seed)

    def normal(key, shape=(), dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    with mock.patch.object(jax.random, "normal", normal):
        yield


def drawn_model(config: ModelConfig) -> Qwen3Next:
    """A model whose normal start values NumPy draws."""
    with numpy_draws():
        return Qwen3Next(config, rngs=nnx.Rngs(0))
