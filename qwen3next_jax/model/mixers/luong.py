"""Bilinear attention (Luong, 1508.04025, "general"): a matrix of its own between queries and
keys. No positions, as `Bahdanau`.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.mixers.bahdanau import Bahdanau
from qwen3next_jax.model.mixers.gated_attention import attend


class Luong(Bahdanau):
    """o_i = Σ_j softmax_j(q_iᵀ W k_j) v_j per head over the tokens up to i; nothing divides by
    √K, but W starts that small.
    """

    def make_score(self, make, n, k):
        start = lambda shape: jax.random.normal(make.rngs.params(), shape) / k
        self.score = make.parameter(start, (n, k, k), "query_heads . .", kind="vector")

    def attend(self, q_BTNK, k_BSMK, v_BSMK, context, cached):
        scale = q_BTNK.shape[-1] ** 0.5  # the operator divides by √K
        q_BTNK = jnp.einsum("btnj,njk->btnk", q_BTNK, self.score[...].astype(q_BTNK.dtype) * scale)
        return attend(q_BTNK, k_BSMK, v_BSMK, context, context.positions if cached else None)

    @classmethod
    def forward_flops(cls, config, length):
        """The heads' matrices beside scores and values."""
        return (
            super().forward_flops(config, length)
            + 2 * config.num_attention_heads * config.head_dim**2
        )
