"""Multi-head latent attention (DeepSeek-V2, 2405.04434): keys and values are made of a latent
that all heads share and the cache keeps.

Letters: B batch, T time, S slots, D model, N heads, L latent width, R shared width, P = head_dim
− R: of keys beside it, and of values.
"""

import dataclasses

import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.model.hf_entries import one, vector
from qwen3next_jax.model.layers import rms_norm, rotate
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.mixers.gated_attention import (
    attend,
    attend_cached,
    attention_diagnostics,
    gated_projection,
)
from qwen3next_jax.sharding.rules import constrain


class MLA(Mixer):
    """q = [q_p | RoPE(q_r)], k = [W c | RoPE(k_r)], v = W' c, c = norm(W x) of width
    `mixer.latent_rank`; one k_r for all heads. `partial_rotary_factor` of `head_dim` is rotated,
    0: no positions; k_r is as wide, or `mixer.shared_key_width` (Kimi Linear shares without
    rotating). With `mixer.query_rank` the queries have a latent, too.

    Decoding puts W on the query and W' on the output, and attends in the latent: one key head
    for all.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # numbers a token keeps of its keys and values
        latent_rank: int = 512
        # of the queries' latent; 0: queries straight from the input
        query_rank: int = 0
        # numbers of each key that all heads share; 0: those that are rotated
        shared_key_width: int = 0
        # of the latents' norms; 0: rms_norm_eps
        latent_norm_eps: float = 0.0

        def __post_init__(self):
            check_bounds(
                self,
                "model.mixer",
                {
                    "at least 1": "latent_rank",
                    "0 or more": "query_rank shared_key_width latent_norm_eps",
                },
            )

    switches = ("attention_output_gate", "yarn_factor", "block.rope_scaling")
    cache_kind = "slots"
    in_place = True

    def __init__(self, config, make, layers):
        self.config = c = config
        d, n, k, shared, latent, rank = (
            c.hidden_size,
            c.num_attention_heads,
            c.head_dim,
            _shared(c),
            self.settings(c).latent_rank,
            self.settings(c).query_rank,
        )
        if rank:
            self.q_down, self.q_norm = make.matrix((d, rank), "embed -> ."), make.norm(rank)
        self.q_proj = make.matrix(
            (rank or d, n, k),
            ". -> query_heads head_width" if rank else "embed -> query_heads head_width",
        )
        self.kv_down, self.kv_norm = (
            make.matrix((d, latent + shared), "embed -> ."),
            make.norm(latent),
        )
        self.kv_up = make.matrix(
            (latent, n, 2 * (k - shared)),
            ". -> query_heads head_width",
            parts=(("key", k - shared), ("value", k - shared)),
        )
        if c.attention_output_gate:
            self.gate_proj = make.matrix((d, n, k - shared), "embed -> query_heads head_width")
        self.o_proj = make.matrix((n, k - shared, d), "query_heads head_width -> embed")

    def __call__(self, x_BTD, context, cache=None):
        c, dtype, weight = (
            self.config,
            x_BTD.dtype,
            lambda name: getattr(self, name)[...].astype(x_BTD.dtype),
        )
        shared, plain, rope = (
            _shared(c),
            c.head_dim - _shared(c),
            lambda x: rotate(x, context.positions, c),
        )
        of_norm = dataclasses.replace(
            c, rms_norm_eps=self.settings(c).latent_norm_eps or c.rms_norm_eps
        )
        y = (
            rms_norm(x_BTD @ weight("q_down"), self.q_norm[...], of_norm)
            if self.settings(c).query_rank
            else x_BTD
        )
        q_BTNK = constrain(
            jnp.einsum("btd,dnk->btnk", y, weight("q_proj")),
            context.mesh,
            "batch",
            context.time,
            "heads",
            None,
        )
        q_BTNP, q_BTNR = q_BTNK[..., :plain], rope(q_BTNK[..., plain:])
        latent_BTL, k_BTR = jnp.split(
            x_BTD @ weight("kv_down"), (self.settings(c).latent_rank,), axis=-1
        )
        latent_BTL, k_BT1R = (
            rms_norm(latent_BTL, self.kv_norm[...], of_norm),
            rope(k_BTR[:, :, None]),
        )
        gate = (
            jnp.einsum("btd,dnp->btnp", x_BTD, weight("gate_proj"))
            if c.attention_output_gate
            else None
        )
        diagnostics = {}
        if cache is None:
            k_BTNP, v_BTNP = jnp.split(
                jnp.einsum("btl,lnp->btnp", latent_BTL, weight("kv_up")), 2, axis=-1
            )
            k_BTNK = jnp.concatenate(
                [k_BTNP, jnp.broadcast_to(k_BT1R, (*k_BTNP.shape[:3], shared))], axis=-1
            )
            # the operator takes keys and values of one width
            v_BTNK = jnp.pad(v_BTNP, [(0, 0)] * 3 + [(0, shared)])
            q_BTNK = jnp.concatenate([q_BTNP, q_BTNR], axis=-1)
            o_BTNP = attend(q_BTNK, k_BTNK, v_BTNK, context)[..., :plain]
            if context.diagnose:
                diagnostics = attention_diagnostics(
                    lambda q, k, v: attend(q, k, v, context), q_BTNK, k_BTNK, gate, context
                )
        else:
            k_up_LNP, v_up_LNP = jnp.split(weight("kv_up"), 2, axis=-1)
            q_BTNL = jnp.einsum("btnp,lnp->btnl", q_BTNP, k_up_LNP)
            width = self.settings(c).latent_rank + shared
            # its scale is that of whole heads
            q = jnp.concatenate([q_BTNL, q_BTNR], axis=-1) * (width / c.head_dim) ** 0.5
            new = {"latent": jnp.concatenate([latent_BTL[:, :, None], k_BT1R], axis=-1)}
            o_BTNL, cache = attend_cached(q.astype(dtype), new, cache, context)
            o_BTNP = jnp.einsum(
                "btnl,lnp->btnp", o_BTNL[..., : self.settings(c).latent_rank], v_up_LNP
            )
        return gated_projection(o_BTNP, gate, self.o_proj[...], context), diagnostics, cache

    @classmethod
    def init_cache(cls, config, batch, length):
        return {
            "latent": jnp.zeros(
                (batch, length, 1, cls.settings(config).latent_rank + _shared(config)), config.dtype
            )
        }

    @classmethod
    def forward_flops(cls, config, length):
        """Scores over head_dim and their sum over the values' width, (T + 1)/2 keys a query."""
        return config.num_attention_heads * (2 * config.head_dim - _shared(config)) * (length + 1)

    @classmethod
    def splits(cls, config):
        return {"num_attention_heads": config.num_attention_heads}

    @classmethod
    def check(cls, config):
        require(
            config.rotary_dim < config.head_dim,
            f"model.partial_rotary_factor = {config.partial_rotary_factor} with the mixer 'mla': "
            "expected less than 1, as what is not rotated comes from the latent",
        )
        require(
            config.rotary_dim <= _shared(config) < config.head_dim,
            f"model.mixer.shared_key_width = {_shared(config)}: expected less "
            f"than model.head_dim = {config.head_dim}, and at least the {config.rotary_dim} "
            "numbers of it that are rotated",
        )

    @staticmethod
    def hf_entries(config):
        c, d, n, shared, latent, rank = (
            config,
            config.hidden_size,
            config.num_attention_heads,
            _shared(config),
            MLA.settings(config).latent_rank,
            MLA.settings(config).query_rank,
        )
        if rank:
            yield one("q_down", "self_attn.q_a_proj.weight", (1, 0), (rank, d))
            yield vector("q_norm", "self_attn.q_a_layernorm.weight", rank)
        yield one(
            "q_proj",
            f"self_attn.q_{'b_' * bool(rank)}proj.weight",
            (1, 2, 0),
            (n * c.head_dim, rank or d),
        )
        yield one("kv_down", "self_attn.kv_a_proj_with_mqa.weight", (1, 0), (latent + shared, d))
        yield vector("kv_norm", "self_attn.kv_a_layernorm.weight", latent)
        yield one(
            "kv_up",
            "self_attn.kv_b_proj.weight",
            (1, 2, 0),
            (n * 2 * (c.head_dim - shared), latent),
        )
        yield one("o_proj", "self_attn.o_proj.weight", (2, 0, 1), (d, n * (c.head_dim - shared)))


def _shared(config) -> int:
    """Numbers of each key that all heads share."""
    return MLA.settings(config).shared_key_width or config.rotary_dim
