"""Gated retention (2405.05254, equation 6): RetNet whose decay is a gate of the token."""

import jax

from qwen3next_jax.model.mixers.recurrent import through
from qwen3next_jax.model.mixers.retnet import RetNet

TEMPERATURE = 16.0  # the paper's τ


class GatedRetention(RetNet):
    """γ = σ(w x)^(1/τ) per head, τ = 16; all else as `RetNet`."""

    def __init__(self, config, make, layers):
        super().__init__(config, make, layers)
        self.decay_proj = make.matrix(
            (config.hidden_size, config.linear_num_value_heads), "embed -> value_heads"
        )

    def log_decay(self, x_BTD):
        return jax.nn.log_sigmoid(through(x_BTD, self.decay_proj)) / TEMPERATURE
