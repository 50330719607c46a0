"""Additive attention (Bahdanau, 1409.0473, A.1.2): a small network scores every pair of tokens.
No positions: layers before it have them.

Letters: B batch, T queries, S keys, D model, N query heads, M key/value heads, R = N/M, K head
width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.layers import token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.model.mixers.gated_attention import gated_projection, write
from qwen3next_jax.ops import blocks
from qwen3next_jax.sharding.rules import TENSOR, activation_spec, constrain, local, shards

QUERIES = 16  # worked at once: each has a vector of head_dim for every key


class Bahdanau(Mixer):
    """o_i = Σ_j softmax_j(uᵀ tanh(q_i + k_j)) v_j per head over the tokens up to i.

    Diagnostics [N]: first_token_share, as `GatedAttention`.
    """

    cache_kind = "slots"

    def __init__(self, config, make, layers):
        self.config = c = config
        d, n, m, k = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = make.matrix((d, n, k), "embed -> query_heads head_width")
        self.k_proj = make.matrix((d, m, k), "embed -> key_value_heads head_width")
        self.v_proj = make.matrix((d, m, k), "embed -> key_value_heads head_width")
        self.o_proj = make.matrix((n, k, d), "query_heads head_width -> embed")
        self.make_score(make, n, k)

    def make_score(self, make, n, k):
        start = lambda shape: jax.random.normal(make.rngs.params(), shape) * k**-0.5
        self.score = make.parameter(start, (n, k), "query_heads .", kind="vector")

    def __call__(self, x_BTD, context, cache=None):
        q_BTNK, k_BTMK, v_BTMK = (
            constrain(
                jnp.einsum("btd,dnk->btnk", x_BTD, weight[...].astype(x_BTD.dtype)),
                context.mesh,
                "batch",
                context.time,
                None if weight.shape[-2] % shards(context.mesh, TENSOR) else "heads",
                None,
            )
            for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        diagnostics, k, v = {}, k_BTMK, v_BTMK
        if cache is not None:
            cache = {
                name: write(cache[name], x, context.positions) for name, x in (("k", k), ("v", v))
            }
            k, v = cache["k"], cache["v"]
        o_BTNK = self.attend(q_BTNK, k, v, context, cache is not None)
        if context.diagnose and cache is None:
            first_BT = context.positions == 0
            indicator = jnp.broadcast_to(first_BT[:, :, None, None], v.shape).astype(v.dtype)
            counted = ~first_BT if context.counted is None else context.counted & ~first_BT
            diagnostics = {
                "first_token_share": token_mean(
                    self.attend(q_BTNK, k, indicator, context, False)[..., 0], counted
                )
            }
        return gated_projection(o_BTNK, None, self.o_proj[...], context), diagnostics, cache

    def attend(self, q_BTNK, k_BSMK, v_BSMK, context, cached: bool):
        """o [B, T, N, K]. `cached`: keys and values are the slots of a cache."""
        if k_BSMK.shape[2] % shards(context.mesh, TENSOR):
            k_BSMK, v_BSMK = (
                jnp.repeat(x, q_BTNK.shape[2] // x.shape[2], axis=2) for x in (k_BSMK, v_BSMK)
            )

        def run(q, k, v, score, positions, ids):
            axis, at = context.time_axis, jnp.broadcast_to(jnp.arange(q.shape[1]), positions.shape)
            ids = jnp.ones_like(positions) if ids is None or cached else ids
            key_ids, at = (
                jnp.ones(k.shape[:2], ids.dtype) if cached else ids,
                positions if cached else at,
            )
            if axis is not None:
                at = at + jax.lax.axis_index(axis) * at.shape[1]
                k, v, key_ids = (
                    jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (k, v, key_ids)
                )
            return additive_attention(q, k, v, score, at, ids, key_ids)

        heads, tokens = (
            activation_spec("batch", context.time, "heads"),
            activation_spec("batch", context.time),
        )
        return local(
            run,
            context.mesh,
            (heads, heads, heads, activation_spec("heads"), tokens, tokens),
            heads,
        )(
            q_BTNK,
            k_BSMK,
            v_BSMK,
            self.score[...].astype(q_BTNK.dtype),
            context.positions,
            context.segment_ids,
        )

    @staticmethod
    def init_cache(config, batch, length):
        empty = jnp.zeros(
            (batch, length, config.num_key_value_heads, config.head_dim), config.dtype
        )
        return {"k": empty, "v": empty}

    @classmethod
    def forward_flops(cls, config, length):
        """Scores and values: a causal query reads (length + 1) / 2 keys on average."""
        return 2 * (length + 1) * config.num_attention_heads * config.head_dim

    @staticmethod
    def splits(config):
        return {"num_attention_heads": config.num_attention_heads}


def additive_attention(q_BTNK, k_BSMK, v_BSMK, score_NK, at_BT, ids_BT, key_ids_BS):
    """o [B, T, N, K] of queries at rows `at`, which see the keys of their document up to there;
    a block of queries after the other.
    """
    batch, time, n, width = q_BTNK.shape
    groups, wide = k_BSMK.shape[2], jnp.promote_types(jnp.float32, q_BTNK.dtype)

    @jax.checkpoint
    def attend(_, block):
        q, at, ids = block
        hidden = jnp.tanh(
            q.reshape(*q.shape[:2], groups, -1, width)[:, :, None] + k_BSMK[:, None, :, :, None]
        )
        s_BCSMR = jnp.einsum(
            "bcsmrk,mrk->bcsmr",
            hidden,
            score_NK.reshape(groups, -1, width),
            preferred_element_type=wide,
        )
        seen = (jnp.arange(k_BSMK.shape[1]) <= at[..., None]) & (
            ids[..., None] == key_ids_BS[:, None]
        )
        p = jax.nn.softmax(jnp.where(seen[..., None, None], s_BCSMR, -1e30), axis=2)
        return None, jnp.einsum("bcsmr,bsmk->bcmrk", p.astype(q.dtype), v_BSMK).reshape(q.shape)

    _, o = blocks.scan(attend, None, blocks.cut((q_BTNK, at_BT, ids_BT), 1, min(QUERIES, time)))
    return blocks.joined(o, 1, time)
