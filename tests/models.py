"""Models and layers for tests which do not ask how start values are drawn.

XLA takes 6 seconds to compile `jax.random.normal` for all parameters of a small model.
"""

import contextlib
from collections.abc import Callable, Iterator
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
        return rng.normal(size=shape).astype(dtype)

    with mock.patch.object(jax.random, "normal", normal):
        yield


def drawn(make: Callable[[], nnx.Module], seed: int = 0) -> nnx.Module:
    """The module that `make` makes, with normal start values that NumPy draws. One program makes
    all parameters: outside of one, each operation on each shape would be a program.
    """
    graphdef, _ = nnx.split(nnx.eval_shape(make))
    with numpy_draws(seed):
        return nnx.merge(graphdef, jax.jit(lambda: nnx.state(make()))())


def drawn_model(config: ModelConfig) -> Qwen3Next:
    """A model whose normal start values NumPy draws."""
    return drawn(lambda: Qwen3Next(config, rngs=nnx.Rngs(0)))
