"""Position embeddings that are added to the token embeddings. The released model has no position
embeddings: its attention layers rotate queries and keys instead (RoPE).

Letters: B batch, T time, D model.
"""

from typing import ClassVar

import jax
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.parameters import Make


class NoPositions(nnx.Module):
    """Adds no position embeddings; subclasses add position embeddings. `model.mixer.Mixer` explains
    the attribute `settings_fixed_by_weights`.
    """

    settings_fixed_by_weights: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, make: Make):
        self.config = config

    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Returns x [B, T, D] plus the position embeddings of its tokens. `positions_BT`: each
        token's position in its document.
        """
        return x_BTD
