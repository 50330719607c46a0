"""The models that tests share, and normal start values for them at little cost.

A test takes one of these models and changes what it is about:

    MODEL = dataclasses.replace(HYBRID, mtp_depth=1)
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax import ModelConfig, Qwen3Next

# An attention layer with a dense MLP: for tests of what surrounds a model.
SMALLEST = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    full_attention_interval=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=0,
    intermediate_size=24,
    mtp_depth=0,
    dtype="float32",
    max_position_embeddings=128,
)
# A gated delta layer and an attention layer, both with experts, as the released model has them.
HYBRID = dataclasses.replace(
    SMALLEST,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
    initializer_range=0.2,
)
# Every part of the released model, in sizes that differ, so that an exchanged axis is an error.
# The decay is slow and the weights are large: a wrong state shows in what is said much later.
UNEVEN = dataclasses.replace(
    HYBRID,
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=4,
    head_dim=16,
    linear_value_head_dim=16,
    num_experts=6,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    intermediate_size=48,
    mtp_depth=2,
    decay_init="log_uniform",
    max_position_embeddings=256,
)
# For meshes: eight devices divide its heads, experts, rows and columns.
DIVISIBLE = dataclasses.replace(
    HYBRID,
    hidden_size=32,
    num_attention_heads=8,
    linear_num_key_heads=8,
    linear_num_value_heads=16,
    num_experts=8,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    initializer_range=0.05,
)


@contextlib.contextmanager
def numpy_draws(seed: int = 0) -> Iterator[None]:
    """Inside, NumPy draws what is asked of `jax.random.normal`, whose key is ignored: XLA takes 6
    seconds to compile the draws of all parameters of a small model.
    """
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
