"""Positions that are added to the embeddings. The released model has none: its attention rotates
queries and keys instead.

Letters: B batch, T time, D model.
"""

from typing import ClassVar

import jax
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.parameters import Make


class NoPositions(nnx.Module):
    """Adds nothing. Other positions are subclasses. For `meaning` see `model.mixer.Mixer`."""

    meaning: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, make: Make):
        self.config = config

    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """x [B, T, D] plus what says where its tokens stand. `positions_BT`: each token's position
        in its document.
        """
        return x_BTD
