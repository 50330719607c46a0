"""Gated DeltaNet-2 (2605.22791): Kimi Delta Attention whose erasing and writing have gates of
their own, a number per channel.

Letters: B batch, T time, D model, G key heads, H value heads, R = H/G, K/V their widths.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.mixers.kda import KDA
from qwen3next_jax.model.mixers.recurrent import unit
from qwen3next_jax.ops import channel_delta_rule


class GDN2(KDA):
    """S ← Diag(e^g) S, S ← S + k (w ⊙ v − Sᵀ(b ⊙ k))ᵀ with b = σ(W x) per key channel, w = σ(W'
    x) per value channel; the output gate is a SiLU. All else, the gates being each value head's,
    as `KDA`, whose recurrence it is where b = w = β. Its diagnostic beta is the mean of b and w.
    """

    activation = staticmethod(jax.nn.silu)

    def __init__(self, config, make, layers):
        super().__init__(config, make, layers)
        h, parts = (
            config.linear_num_value_heads,
            (("erase", config.linear_key_head_dim), ("write", config.linear_value_head_dim)),
        )
        shape = (config.hidden_size, h, sum(width for _, width in parts))
        # in the place of KDA's
        self.beta_proj = make.matrix(shape, "embed -> value_heads .", parts=parts)

    def recurrence(self, heads, state):
        dtype, scale, repeats = (
            heads.v.dtype,
            heads.q.shape[-1] ** -0.5,
            heads.v.shape[2] // heads.k.shape[2],
        )
        erase_BTHK, write_BTHV = jnp.split(heads.beta, (heads.k.shape[-1],), axis=-1)
        k_BTGK = unit(heads.k)
        o, final = channel_delta_rule(
            (unit(heads.q) * scale).astype(dtype),
            k_BTGK.astype(dtype),
            (write_BTHV * heads.v).astype(dtype),
            g=heads.g,
            erase_key=erase_BTHK * jnp.repeat(k_BTGK, repeats, axis=2),
            initial_state=state and state["state"],
            segment_ids=heads.segment_ids,
            axis_name=heads.axis_name,
        )
        return o, {"state": final}
