"""Attention of the first neural translation models. The score of a query and a key is computed by a
small network (Bahdanau, 1409.0473, A.1.2), or is a bilinear form qᵀ W k (Luong, 1508.04025, the
score "general"). Neither Bahdanau's nor Luong's score depends on the positions of the tokens; only
the causal mask does. So a model with Bahdanau's or Luong's attention needs a source of positions:
recurrent layers, or the setting `model.block.positions`.

Letters: B batch, T queries, S keys, C queries of a chunk, D model, N query heads, M key/value
heads, R = N/M, K head width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.gated_attention import attend, gated_projection, write_tokens_to_cache
from qwen3next_jax.model.layers import token_mean
from qwen3next_jax.model.mixer import Mixer
from qwen3next_jax.ops import blocks
from qwen3next_jax.sharding.rules import TENSOR, activation_spec, constrain, num_shards, per_shard
from qwen3next_jax.zoo.attention_references import positions_and_causal_mask

EXAMPLES = {"bahdanau": {"full_mixer": "bahdanau"}, "luong": {"full_mixer": "luong"}}
# Queries computed at once. Each pair of a query and a key needs a vector of head_dim numbers.
QUERIES_PER_CHUNK = 16


class Bahdanau(Mixer):
    """Bahdanau's attention: o_i = Σ_j softmax_j(uᵀ tanh(q_i + k_j)) v_j for each head, over the
    tokens j ≤ i, with a learned vector u for each head.

    Diagnostics: first_token_share [N], for each head the mean weight that tokens give to the first
    token of their document. The mean of first_token_share leaves out the first token of each
    document, and tokens outside of `Context.stats_mask`.
    """

    cache_kind = "slots"

    def __init__(self, config, make, layer_indices):
        self.config = c = config
        d, n, m, k = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = make.matrix((d, n, k), "embed -> query_heads head_width")
        self.k_proj = make.matrix((d, m, k), "embed -> key_value_heads head_width")
        self.v_proj = make.matrix((d, m, k), "embed -> key_value_heads head_width")
        self.o_proj = make.matrix((n, k, d), "query_heads head_width -> embed")
        self.make_score_parameter(make, n, k)

    def make_score_parameter(self, make, n, k):
        """Makes the parameter of the score function: in this class the vectors u [N, K]."""
        start = lambda shape: jax.random.normal(make.rngs.params(), shape) * k**-0.5
        self.score = make.parameter(start, (n, k), "query_heads .", kind="vector")

    def __call__(self, x_BTD, context, cache=None):
        q_BTNK = self.project_to_heads(x_BTD, self.q_proj, context)
        k_BSMK = self.project_to_heads(x_BTD, self.k_proj, context)
        v_BSMK = self.project_to_heads(x_BTD, self.v_proj, context)
        if cache is not None:
            k_BSMK = write_tokens_to_cache(cache["k"], k_BSMK, context.positions)
            v_BSMK = write_tokens_to_cache(cache["v"], v_BSMK, context.positions)
            cache = {"k": k_BSMK, "v": v_BSMK}
        o_BTNK = self.attend(q_BTNK, k_BSMK, v_BSMK, context, cache is not None)
        diagnostics = {}
        if context.options.collect_stats and cache is None:
            first_BT = context.positions == 0
            indicator = jnp.broadcast_to(first_BT[:, :, None, None], v_BSMK.shape)
            counted = ~first_BT if context.stats_mask is None else context.stats_mask & ~first_BT
            share_BTNK = self.attend(q_BTNK, k_BSMK, indicator.astype(v_BSMK.dtype), context, False)
            diagnostics = {"first_token_share": token_mean(share_BTNK[..., 0], counted)}
        return gated_projection(o_BTNK, None, self.o_proj[...], context), diagnostics, cache

    def project_to_heads(self, x_BTD, weight, context):
        """Returns x times the matrix `weight` [D, heads, K], as [B, T, heads, K]. The heads are
        split over the mesh axis `tensor` if the size of the axis divides the number of heads.
        """
        split = None if weight.shape[-2] % num_shards(context.mesh, TENSOR) else "heads"
        y_BTNK = jnp.einsum("btd,dnk->btnk", x_BTD, weight[...].astype(x_BTD.dtype))
        return constrain(y_BTNK, context.mesh, "batch", context.logical_time_axis, split, None)

    def attend(self, q_BTNK, k_BSMK, v_BSMK, context, cached: bool):
        """Returns the output of the heads, o [B, T, N, K]. If `cached` is true, keys and values are
        the slots of a cache, and a query sees the slots up to the query's position.
        """
        if k_BSMK.shape[2] % num_shards(context.mesh, TENSOR):
            k_BSMK, v_BSMK = (
                jnp.repeat(x, q_BTNK.shape[2] // x.shape[2], axis=2) for x in (k_BSMK, v_BSMK)
            )

        def run(q, k, v, score, positions, ids):
            axis = context.mesh_time_axis
            ids = jnp.ones_like(positions) if ids is None or cached else ids
            key_ids = jnp.ones(k.shape[:2], ids.dtype) if cached else ids
            at = positions
            if not cached:
                at = jnp.broadcast_to(jnp.arange(q.shape[1]), positions.shape)
            if axis is not None:
                at = at + jax.lax.axis_index(axis) * at.shape[1]
                k, v, key_ids = (
                    jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (k, v, key_ids)
                )
            return additive_attention(q, k, v, score, at, ids, key_ids)

        heads = activation_spec("batch", context.logical_time_axis, "heads")
        tokens = activation_spec("batch", context.logical_time_axis)
        in_specs = (heads, heads, heads, activation_spec("heads"), tokens, tokens)
        return per_shard(run, context.mesh, in_specs, heads)(
            q_BTNK,
            k_BSMK,
            v_BSMK,
            self.score[...].astype(q_BTNK.dtype),
            context.positions,
            context.segment_ids,
        )

    @classmethod
    def init_cache(cls, config, batch, length):
        shape = (batch, length, config.num_key_value_heads, config.head_dim)
        empty = jnp.zeros(shape, config.dtype)
        return {"k": empty, "v": empty}

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of the scores and of the weighted sum of values. A causal
        query reads (length + 1) / 2 keys on average.
        """
        return 2 * (length + 1) * config.num_attention_heads * config.head_dim

    @classmethod
    def sizes_split_by_tensor(cls, config):
        return {"num_attention_heads": config.num_attention_heads}


class Luong(Bahdanau):
    """Luong's attention: o_i = Σ_j softmax_j(q_iᵀ W k_j) v_j for each head, over the tokens j ≤ i,
    with a learned matrix W [K, K] for each head. The scores are not divided by √K; instead the
    initial values of W are small.
    """

    def make_score_parameter(self, make, n, k):
        start = lambda shape: jax.random.normal(make.rngs.params(), shape) / k
        self.score = make.parameter(start, (n, k, k), "query_heads . .", kind="vector")

    def attend(self, q_BTNK, k_BSMK, v_BSMK, context, cached):
        scale = q_BTNK.shape[-1] ** 0.5  # the operator divides by √K
        q_BTNK = jnp.einsum("btnj,njk->btnk", q_BTNK, self.score[...].astype(q_BTNK.dtype) * scale)
        return attend(q_BTNK, k_BSMK, v_BSMK, context, context.positions if cached else None)

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of the products with W, of the scores, and of the weighted sum
        of values.
        """
        matrices = 2 * config.num_attention_heads * config.head_dim**2
        return super().activation_flops(config, length) + matrices


def additive_attention(q_BTNK, k_BSMK, v_BSMK, score_NK, at_BT, ids_BT, key_ids_BS):
    """Computes Bahdanau's attention, one chunk of queries after the other. A query sees the keys of
    its document up to its own key.

    Args:
      q_BTNK: queries.
      k_BSMK, v_BSMK: keys and values; N is a multiple of M.
      score_NK: the vector u of each head.
      at_BT: for each query, the index along S of its own key.
      ids_BT: the document of each query.
      key_ids_BS: the document of each key.

    Returns:
      o [B, T, N, K] in the dtype of q.
    """
    time, width = q_BTNK.shape[1], q_BTNK.shape[-1]
    groups, wide = k_BSMK.shape[2], jnp.promote_types(jnp.float32, q_BTNK.dtype)

    @jax.checkpoint
    def attend(_, chunk):
        q, at, ids = chunk
        q_BCMRK = q.reshape(*q.shape[:2], groups, -1, width)
        hidden = jnp.tanh(q_BCMRK[:, :, None] + k_BSMK[:, None, :, :, None])
        score_MRK = score_NK.reshape(groups, -1, width)
        s_BCSMR = jnp.einsum("bcsmrk,mrk->bcsmr", hidden, score_MRK, preferred_element_type=wide)
        is_before = jnp.arange(k_BSMK.shape[1]) <= at[..., None]
        seen = is_before & (ids[..., None] == key_ids_BS[:, None])
        p = jax.nn.softmax(jnp.where(seen[..., None, None], s_BCSMR, -1e30), axis=2)
        return None, jnp.einsum("bcsmr,bsmk->bcmrk", p.astype(q.dtype), v_BSMK).reshape(q.shape)

    chunks = blocks.to_chunks((q_BTNK, at_BT, ids_BT), 1, min(QUERIES_PER_CHUNK, time))
    _, o = blocks.scan_or_call_once(attend, None, chunks)
    return blocks.from_chunks(o, 1, time)


# ---- references
# --------------------------------------------------------------------------------------------------


def _attention_with_scores(config, params, x, scores):
    """Returns the output [T, D] of causal attention. The function `scores` maps q and k [T, N, K]
    to the scores [N, T, T].
    """
    heads = config.num_attention_heads
    qkv = []
    for name in ("q_proj", "k_proj", "v_proj"):
        y = jnp.einsum("td,dnk->tnk", x, params[name])
        qkv.append(jnp.repeat(y, heads // y.shape[1], axis=1))
    q, k, v = qkv
    _, _, causal = positions_and_causal_mask(x)
    weights = jax.nn.softmax(jnp.where(causal, scores(q, k), -jnp.inf), axis=-1)
    return jnp.einsum("tnk,nkd->td", jnp.einsum("nij,jnk->ink", weights, v), params["o_proj"])


def bahdanau_reference(config, params, x):
    def scores(q, k):
        return jnp.einsum("ijnk,nk->nij", jnp.tanh(q[:, None] + k[None]), params["score"])

    return _attention_with_scores(config, params, x, scores)


def luong_reference(config, params, x):
    def scores(q, k):
        return jnp.einsum("ina,nab,jnb->nij", q, params["score"], k)

    return _attention_with_scores(config, params, x, scores)


REFERENCES = {"bahdanau": bahdanau_reference, "luong": luong_reference}
