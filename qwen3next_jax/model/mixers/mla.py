"""Multi-head latent attention (DeepSeek-V2, 2405.04434): keys and values are made of a latent that all heads share and the cache keeps.

Letters: B batch, T time, S slots, D model, N heads, L latent width, R rotated width, P = head_dim − R: of keys beside it, and of values.
"""

import jax.numpy as jnp

from qwen3next_jax.errors import require
from qwen3next_jax.model.layers import rms_norm, rotate
from qwen3next_jax.model.mixers.base import Mixer
from qwen3next_jax.model.mixers.gated_attention import attend, attend_cached, attention_diagnostics, gated_projection
from qwen3next_jax.parallel.rules import constrain


class MLA(Mixer):
    """q = [q_p | RoPE(q_r)], k = [W c | RoPE(k_r)], v = W' c, c = norm(W x) of width `mixer.latent_rank`; one k_r for all heads.
    `partial_rotary_factor` of `head_dim` is rotated, 0: no positions (Kimi Linear). With `mixer.query_rank` the queries have a latent, too.

    Decoding puts W on the query and W' on the output, and attends in the latent: one key head for all."""

    settings = ("attention_output_gate", "mixer.latent_rank", "mixer.query_rank")
    cache_kind = "slots"

    def __init__(self, config, make, layers):
        self.config = c = config
        d, n, k, rotated, latent, rank = (c.hidden_size, c.num_attention_heads, c.head_dim, c.rotary_dim, c.mixer.latent_rank,
                                          c.mixer.query_rank)
        if rank:
            self.q_down, self.q_norm = make.matrix((d, rank), "embed -> ."), make.norm(rank)
        self.q_proj = make.matrix((rank or d, n, k), ". -> query_heads head_width" if rank else "embed -> query_heads head_width")
        self.kv_down, self.kv_norm = make.matrix((d, latent + rotated), "embed -> ."), make.norm(latent)
        self.k_up = make.matrix((latent, n, k - rotated), ". -> query_heads head_width")
        self.v_up = make.matrix((latent, n, k - rotated), ". -> query_heads head_width")
        if c.attention_output_gate:
            self.gate_proj = make.matrix((d, n, k - rotated), "embed -> query_heads head_width")
        self.o_proj = make.matrix((n, k - rotated, d), "query_heads head_width -> embed")

    def __call__(self, x_BTD, context, cache=None):
        c, dtype, weight = self.config, x_BTD.dtype, lambda name: getattr(self, name)[...].astype(x_BTD.dtype)
        plain, rope = c.head_dim - c.rotary_dim, lambda x: rotate(x, context.positions, c)
        y = rms_norm(x_BTD @ weight("q_down"), self.q_norm[...], c) if c.mixer.query_rank else x_BTD
        q_BTNK = constrain(jnp.einsum("btd,dnk->btnk", y, weight("q_proj")), context.mesh, "batch", context.time, "heads", None)
        q_BTNP, q_BTNR = q_BTNK[..., :plain], rope(q_BTNK[..., plain:])
        latent_BTL, k_BTR = jnp.split(x_BTD @ weight("kv_down"), (c.mixer.latent_rank,), axis=-1)
        latent_BTL, k_BT1R = rms_norm(latent_BTL, self.kv_norm[...], c), rope(k_BTR[:, :, None])
        gate = jnp.einsum("btd,dnp->btnp", x_BTD, weight("gate_proj")) if c.attention_output_gate else None
        diagnostics = {}
        if cache is None:
            k_BTNP, v_BTNP = (jnp.einsum("btl,lnp->btnp", latent_BTL, weight(name)) for name in ("k_up", "v_up"))
            k_BTNK = jnp.concatenate([k_BTNP, jnp.broadcast_to(k_BT1R, (*k_BTNP.shape[:3], c.rotary_dim))], axis=-1)
            v_BTNK = jnp.pad(v_BTNP, [(0, 0)] * 3 + [(0, c.rotary_dim)])  # the operator takes keys and values of one width
            q_BTNK = jnp.concatenate([q_BTNP, q_BTNR], axis=-1)
            o_BTNP = attend(q_BTNK, k_BTNK, v_BTNK, context)[..., :plain]
            if context.diagnose:
                diagnostics = attention_diagnostics(lambda q, k, v: attend(q, k, v, context), q_BTNK, k_BTNK, gate, context)
        else:
            q_BTNL = jnp.einsum("btnp,lnp->btnl", q_BTNP, weight("k_up"))
            width = c.mixer.latent_rank + c.rotary_dim
            q = jnp.concatenate([q_BTNL, q_BTNR], axis=-1) * (width / c.head_dim) ** 0.5  # its scale is that of whole heads
            new = {"latent": jnp.concatenate([latent_BTL[:, :, None], k_BT1R], axis=-1)}
            o_BTNL, cache = attend_cached(q.astype(dtype), new, cache, context)
            o_BTNP = jnp.einsum("btnl,lnp->btnp", o_BTNL[..., :c.mixer.latent_rank], weight("v_up"))
        return gated_projection(o_BTNP, gate, self.o_proj[...], context), diagnostics, cache

    @staticmethod
    def init_cache(config, batch, length):
        return {"latent": jnp.zeros((batch, length, 1, config.mixer.latent_rank + config.rotary_dim), config.dtype)}

    @staticmethod
    def forward_flops(config, length):
        """Scores over head_dim and their sum over the values' width, (T + 1)/2 keys a query."""
        return config.num_attention_heads * (2 * config.head_dim - config.rotary_dim) * (length + 1)

    @staticmethod
    def splits(config):
        return {"num_attention_heads": config.num_attention_heads}

    @staticmethod
    def check(config):
        require(config.rotary_dim < config.head_dim, f"model.partial_rotary_factor = {config.partial_rotary_factor} with the mixer 'mla': "
                "expected less than 1, as what is not rotated comes from the latent")
