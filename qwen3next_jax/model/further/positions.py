"""Positions that are added to the embeddings. Letters: B batch, T time, D model."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.parameters import Make


class NoPositions(nnx.Module):
    """`meaning`: as that of `model.mixer.Mixer`."""

    meaning = ()

    def __init__(self, config: ModelConfig, make: Make):
        self.config = config

    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        return x_BTD


class Sinusoidal(NoPositions):
    """sin and cos of t / 10000^(2i/D), of one i side by side (1706.03762 section 3.5)."""

    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        half = self.config.hidden_size // 2
        angle = positions_BT[..., None] * jnp.exp(jnp.arange(half) * (-math.log(10_000) / half))
        added_BTD = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(x_BTD.shape)
        return x_BTD + added_BTD.astype(x_BTD.dtype)


class Learned(NoPositions):
    """A row of a table for each place of the context."""

    meaning = ("max_position_embeddings", "yarn_factor")

    def __init__(self, config: ModelConfig, make: Make):
        super().__init__(config, make)
        self.table = make.matrix(
            (config.context_length, config.hidden_size), ". .", kind="embedding"
        )

    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        length, rows = x_BTD.shape[1], self.config.context_length
        require(
            length <= rows,
            f"rows of {length} tokens with model.block.positions = 'learned': expected at most "
            f"{rows}, model.max_position_embeddings × model.yarn_factor, as many as its table has",
        )
        return x_BTD + self.table[...][positions_BT].astype(x_BTD.dtype)
