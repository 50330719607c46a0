"""Multi-head latent attention (DeepSeek-V2, 2405.04434): the keys and values of all heads are
computed from one latent vector per token, and the cache holds the latent vectors.

A key has two parts: one part that each head computes from the latent vector, and one part that all
heads share.

Letters: B batch, T time, S slots, D model, N heads, K head width, L latent width, R width of the
shared part of a key, P = K - R width of a head's own part of a key, and also of a value.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import require
from qwen3next_jax.model.gated_attention import (
    attend,
    attend_cached,
    attention_diagnostics,
    gated_projection,
)
from qwen3next_jax.model.layers import rms_norm, rotate
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.sharding.rules import constrain
from qwen3next_jax.zoo.attention_references import positions_and_causal_mask, rotate_by_distance
from qwen3next_jax.zoo.attention_references import rms_norm as plain_rms_norm

EXAMPLES = {
    "mla": {
        "full_mixer": "mla",
        "mixer": {"latent_rank": 8, "query_rank": 6, "shared_key_width": 4},
    }
}


class MLA(Mixer):
    """The mixer of multi-head latent attention. A head has the query q = [q_p | RoPE(q_r)], the key
    k = [W c | RoPE(k_r)] and the value v = W' c, with a latent vector c. The latent vector c =
    norm(W'' x) has the width `latent_rank`. All heads share the vector k_r, a projection of the
    token's input x; its width is `shared_key_width`, or by default the number of rotated
    dimensions. RoPE rotates the first `partial_rotary_factor` · `head_dim` numbers of q_r and k_r,
    and leaves the remaining numbers unchanged. (Kimi Linear does not rotate q_r and k_r.) If
    `query_rank` is not 0, the queries are computed from a latent vector, too.

    With a cache, the queries are multiplied by Wᵀ and the outputs by W', the matrices that compute
    keys and values from latent vectors. So attention reads the cached latent vectors themselves, as
    a single key head that all query heads share.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        # width of the latent vector from which a token's keys and values are computed, and which
        # the cache holds
        latent_rank: Annotated[int, "at least 1"] = 512
        # width of the latent vector from which queries are computed; 0: queries are computed from
        # the layer's input
        query_rank: Annotated[int, "0 or more"] = 0
        # width of the part of each key that all heads share; 0: the number of rotated dimensions
        shared_key_width: Annotated[int, "0 or more"] = 0
        # epsilon of the norms of latent vectors; 0: rms_norm_eps
        latent_norm_eps: Annotated[float, "0 or more"] = 0.0

    switches_read = ("attention_output_gate", "yarn_factor", "block.rope_scaling")
    cache_kind = "slots"
    writes_cache_in_place = True

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        s, d, n, k, shared = (
            self.settings(c),
            c.hidden_size,
            c.num_attention_heads,
            c.head_dim,
            _shared_key_width(c),
        )
        if s.query_rank:
            self.q_down = make.matrix((d, s.query_rank), "embed -> .")
            self.q_norm = make.norm(s.query_rank)
        self.q_proj = make.matrix(
            (s.query_rank or d, n, k),
            f"{'.' if s.query_rank else 'embed'} -> query_heads head_width",
        )
        self.kv_down = make.matrix((d, s.latent_rank + shared), "embed -> .")
        self.kv_norm = make.norm(s.latent_rank)
        self.kv_up = make.matrix(
            (s.latent_rank, n, 2 * (k - shared)),
            ". -> query_heads head_width",
            parts=(("key", k - shared), ("value", k - shared)),
        )
        if c.attention_output_gate:
            self.gate_proj = make.matrix((d, n, k - shared), "embed -> query_heads head_width")
        self.o_proj = make.matrix((n, k - shared, d), "query_heads head_width -> embed")

    def __call__(self, x_BTD, context, cache=None):
        c, shared = self.config, _shared_key_width(self.config)
        q_BTNP, q_BTNR = self.own_and_shared_query_parts(x_BTD, context)
        latent_BTL, k_BT1R = self.latents_and_shared_keys(x_BTD, context)
        gate_BTNP = None
        if c.attention_output_gate:
            gate_BTNP = jnp.einsum("btd,dnp->btnp", x_BTD, self.parameter_like("gate_proj", x_BTD))
        diagnostics = {}
        if cache is None:
            k_BTNP, v_BTNP = jnp.split(
                jnp.einsum("btl,lnp->btnp", latent_BTL, self.parameter_like("kv_up", x_BTD)),
                2,
                axis=-1,
            )
            k_BTNR = jnp.broadcast_to(k_BT1R, (*k_BTNP.shape[:3], shared))
            k_BTNK = jnp.concatenate([k_BTNP, k_BTNR], axis=-1)
            # The attention operator requires keys and values of the same width.
            v_BTNK = jnp.pad(v_BTNP, [(0, 0)] * 3 + [(0, shared)])
            q_BTNK = jnp.concatenate([q_BTNP, q_BTNR], axis=-1)
            o_BTNP = attend(q_BTNK, k_BTNK, v_BTNK, context)[..., : c.head_dim - shared]
            if context.options.collect_stats:
                diagnostics = attention_diagnostics(
                    lambda q, k, v: attend(q, k, v, context), q_BTNK, k_BTNK, gate_BTNP, context
                )
        else:
            o_BTNP, cache = self.attend_latents(q_BTNP, q_BTNR, latent_BTL, k_BT1R, context, cache)
        return gated_projection(o_BTNP, gate_BTNP, self.o_proj[...], context), diagnostics, cache

    def parameter_like(self, name: str, x: jax.Array) -> jax.Array:
        """Returns the parameter called `name` in the dtype of x."""
        return getattr(self, name)[...].astype(x.dtype)

    def norm_latent(self, x, weight):
        """Applies RMSNorm to latent vectors x. The epsilon of this RMSNorm is `latent_norm_eps`, or
        `rms_norm_eps` if `latent_norm_eps` is 0.
        """
        eps = self.settings(self.config).latent_norm_eps or self.config.rms_norm_eps
        return rms_norm(x, weight[...], dataclasses.replace(self.config, rms_norm_eps=eps))

    def own_and_shared_query_parts(self, x_BTD, context):
        """Returns two parts of the queries: q_p [B, T, N, P], which is multiplied with the part of
        a key that belongs to the head, and q_r [B, T, N, R], rotated, which is multiplied with the
        part that all heads share.
        """
        c, plain = self.config, self.config.head_dim - _shared_key_width(self.config)
        y = x_BTD
        if self.settings(c).query_rank:
            y = self.norm_latent(x_BTD @ self.parameter_like("q_down", x_BTD), self.q_norm)
        q_BTNK = jnp.einsum("btd,dnk->btnk", y, self.parameter_like("q_proj", x_BTD))
        q_BTNK = constrain(q_BTNK, context.mesh, "batch", context.logical_time_axis, "heads", None)
        return q_BTNK[..., :plain], rotate(q_BTNK[..., plain:], context.positions, c)

    def latents_and_shared_keys(self, x_BTD, context):
        """Returns the latent vector [B, T, L] and the rotated shared part of the key [B, T, 1, R]
        of each token.
        """
        rank = self.settings(self.config).latent_rank
        latent_BTL, k_BTR = jnp.split(
            x_BTD @ self.parameter_like("kv_down", x_BTD), (rank,), axis=-1
        )
        k_BT1R = rotate(k_BTR[:, :, None], context.positions, self.config)
        return self.norm_latent(latent_BTL, self.kv_norm), k_BT1R

    def attend_latents(self, q_BTNP, q_BTNR, latent_BTL, k_BT1R, context, cache):
        """Computes attention on the latent vectors in a cache.

        Args:
          q_BTNP, q_BTNR: the result of `own_and_shared_query_parts`.
          latent_BTL, k_BT1R: the result of `latents_and_shared_keys`, which this method writes into
            the cache.

        Returns:
          The outputs of the heads [B, T, N, P]; the cache with the new tokens.
        """
        c, rank = self.config, self.settings(self.config).latent_rank
        k_up_LNP, v_up_LNP = jnp.split(self.parameter_like("kv_up", latent_BTL), 2, axis=-1)
        q_BTNL = jnp.einsum("btnp,lnp->btnl", q_BTNP, k_up_LNP)
        # The operator divides scores by the root of the width of the cached vectors; the layer must
        # divide them by √K.
        scale = ((rank + _shared_key_width(c)) / c.head_dim) ** 0.5
        q = jnp.concatenate([q_BTNL, q_BTNR], axis=-1) * scale
        new = {"latent": jnp.concatenate([latent_BTL[:, :, None], k_BT1R], axis=-1)}
        o_BTNL, cache = attend_cached(q.astype(latent_BTL.dtype), new, cache, context)
        return jnp.einsum("btnl,lnp->btnp", o_BTNL[..., :rank], v_up_LNP), cache

    @classmethod
    def init_cache(cls, config, batch, length):
        width = cls.settings(config).latent_rank + _shared_key_width(config)
        return {"latent": jnp.zeros((batch, length, 1, width), config.dtype)}

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of the scores (K products per key) and of the weighted sum of
        values (P products per key). A query reads (length + 1) / 2 keys on average.
        """
        return (
            config.num_attention_heads
            * (2 * config.head_dim - _shared_key_width(config))
            * (length + 1)
        )

    @classmethod
    def sizes_split_by_tensor(cls, config):
        return {"num_attention_heads": config.num_attention_heads}

    @classmethod
    def check(cls, config):
        require(
            config.rotary_dim < config.head_dim,
            f"model.partial_rotary_factor = {config.partial_rotary_factor} with the mixer 'mla': "
            "expected less than 1, as what is not rotated comes from the latent",
        )
        require(
            config.rotary_dim <= _shared_key_width(config) < config.head_dim,
            f"model.mixer.shared_key_width = {_shared_key_width(config)}: expected less "
            f"than model.head_dim = {config.head_dim}, and at least the {config.rotary_dim} "
            "dimensions that RoPE rotates",
        )


def _shared_key_width(config) -> int:
    """Returns R, the width of the part of each key that all heads share."""
    return MLA.settings(config).shared_key_width or config.rotary_dim


def mla_reference(config, params, x):
    s, plain = config.settings_of_mixer("mla"), config.head_dim - _shared_key_width(config)
    i, j, causal = positions_and_causal_mask(x)
    heads = lambda y, name: jnp.einsum("tl,lnk->tnk", y, params[name])
    y = x
    if s.query_rank:
        y = plain_rms_norm(config, x @ params["q_down"]) * (1 + params["q_norm"])
    q = heads(y, "q_proj")
    latent = plain_rms_norm(config, (x @ params["kv_down"])[:, : s.latent_rank])
    k, v = jnp.split(heads(latent * (1 + params["kv_norm"]), "kv_up"), 2, axis=-1)
    k_shared = (x @ params["kv_down"])[:, s.latent_rank :]
    # The reference rotates the query by its distance from each key, and does not rotate the key.
    q_shared = rotate_by_distance(config, q[:, None, :, plain:], (i - j)[..., None])
    scores = jnp.einsum("ink,jnk->nij", q[..., :plain], k)
    scores = scores + jnp.einsum("ijnr,jr->nij", q_shared, k_shared)
    scores = jnp.where(causal, scores * config.head_dim**-0.5, -jnp.inf)
    o = jnp.einsum("nij,jnp->inp", jax.nn.softmax(scores, axis=-1), v)
    return jnp.einsum("tnp,npd->td", o * jax.nn.sigmoid(heads(x, "gate_proj")), params["o_proj"])


REFERENCES = {"mla": mla_reference}
