"""Models for tests which do not ask how a model's start values are drawn."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax import ModelConfig, Qwen3Next


def new_model(config: ModelConfig) -> Qwen3Next:
    """A model whose normal start values NumPy draws.

    XLA takes 6 seconds to compile `jax.random.normal` for all parameters of a small model.
    """
    rng = np.random.default_rng(0)

    def normal(key, shape=(), dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    with mock.patch.object(jax.random, "normal", normal):
        return Qwen3Next(config, rngs=nnx.Rngs(0))
