"""The base class of gated attention with scores or masks that the fast kernels do not support. The
base class computes all T × T scores of a row of T tokens.

Letters: B batch, T queries, S keys (slots of the cache), C queries of a chunk, N query heads, M
key/value heads, K head width.
"""

import jax
import jax.numpy as jnp

from qwen3next_jax.model.gated_attention import GatedAttention, write_tokens_to_cache
from qwen3next_jax.model.layers import rotate, token_mean
from qwen3next_jax.sharding.rules import TENSOR, activation_spec, num_shards, per_shard
from qwen3next_jax.zoo.ops.pair_attention import QUERIES_PER_CHUNK, pair_attention, scaled_dot


class PairAttention(GatedAttention):
    """Gated attention with overridable scores and masks. A subclass may override
    `queries_for_score` and `keys_for_score`, which return the arrays, or trees of arrays, from
    which scores are computed; `score`, which computes the scores; `attention_mask`, which computes
    the mask; and `visible_pair_count`, which counts the pairs of a query and a key that the mask
    allows. The cache holds keys that are not rotated.
    """

    loads_weights_of = GatedAttention
    writes_cache_in_place = False
    chunk = QUERIES_PER_CHUNK  # number of queries computed at once

    def with_positions(self, x_BTNK, positions_BT):
        return x_BTNK  # unchanged, because `queries_for_score` and `keys_for_score` rotate

    def queries_for_score(self, q_BTNK, t_BT):
        """Returns the argument `q` of `score` for the queries q at the positions t. This class
        returns q, rotated.
        """
        return rotate(q_BTNK, t_BT, self.config)

    def keys_for_score(self, k_BSMK, s_BS):
        """Returns the argument `k` of `score` for the keys k at the positions s. This class returns
        k, rotated.
        """
        return rotate(k_BSMK, s_BS, self.config)

    def score_arrays_per_head(self) -> tuple[jax.Array, ...]:
        """Returns arrays [N, …] with an entry for each head, such as parameters, that `score` gets
        as its last arguments.
        """
        return ()

    def score(self, q, k, t_BC1, s_B1S, *per_head):
        """Computes the scores of a chunk of queries and all keys.

        Args:
          q: the chunk's part of the result of `queries_for_score`, [B, C, N, K] for an array.
          k: the result of `keys_for_score`, [B, S, M, K] for an array.
          t_BC1, s_B1S: the positions of the queries and keys in their documents.
          per_head: this device's part of the result of `score_arrays_per_head`.

        Returns:
          The scores [B, N, C, S], float32.
        """
        return scaled_dot(q, k)

    def attention_mask(self, t_BC1, s_B1S):
        """Returns the mask of a chunk of queries, bool [B, C, S]: whether each query sees each key
        of its document. `pair_attention` hides the keys of other documents whatever the mask is. If
        `self.num_selected_keys` is not 0, returns two masks: the keys that the query always sees,
        and the keys from which the query selects.
        """
        return s_B1S <= t_BC1

    @property
    def num_selected_keys(self) -> int:
        """The number of keys with the highest scores that each head of a query selects and sees in
        addition; 0 for none.
        """
        return 0

    def sink_logit(self) -> jax.Array | None:
        """Returns a logit s of each head, [N], that adds e^s to the softmax's denominator; or
        None.
        """
        return None

    @classmethod
    def visible_pair_count(cls, config, length: int) -> float:
        """Returns the number of pairs of a query and a key that the query sees, in a row of
        `length` tokens that is one document.
        """
        return length * (length + 1) / 2

    def attend(self, q_BTNK, k_BTMK, v_BTMK, context, cache=None):
        mesh, t_BT = context.mesh, context.positions
        k, v, s_BS, ids = k_BTMK, v_BTMK, t_BT, context.segment_ids
        if cache is not None:
            cache = {
                "k": write_tokens_to_cache(cache["k"], k_BTMK, t_BT),
                "v": write_tokens_to_cache(cache["v"], v_BTMK, t_BT),
            }
            k, v, ids = cache["k"], cache["v"], None
            s_BS = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[:2])
        if k.shape[2] % num_shards(mesh, TENSOR):
            k, v = (jnp.repeat(x, q_BTNK.shape[2] // x.shape[2], axis=2) for x in (k, v))

        def run(q, k, v, t, s, ids, per_head, sink):
            return pair_attention(
                q,
                k,
                v,
                score=lambda *pair: self.score(*pair, *per_head),
                seen=self.attention_mask,
                positions=t,
                kv_positions=s,
                segment_ids=ids,
                kv_segment_ids=ids,
                num_selected_keys=self.num_selected_keys,
                sink=sink,
                axis_name=context.mesh_time_axis,
                chunk=self.chunk,
            )

        heads = activation_spec("batch", context.logical_time_axis, "heads")
        tokens = activation_spec("batch", context.logical_time_axis)
        by_head = activation_spec("heads")
        in_specs = (heads, heads, heads, tokens, tokens, tokens, by_head, by_head)
        o_BTNK = per_shard(run, mesh, in_specs, heads)(
            self.queries_for_score(q_BTNK, t_BT),
            self.keys_for_score(k, s_BS),
            v,
            t_BT,
            s_BS,
            ids,
            self.score_arrays_per_head(),
            self.sink_logit(),
        )
        return o_BTNK, cache

    def diagnostics(self, q_BTNK, k_BTMK, gate_BTNK, context):
        """Computes the diagnostics of `GatedAttention` except `logit_max`."""
        first_BT = context.positions == 0
        indicator_BTMK = jnp.broadcast_to(first_BT[:, :, None, None], k_BTMK.shape).astype(
            k_BTMK.dtype
        )
        counted_BT = ~first_BT if context.stats_mask is None else context.stats_mask & ~first_BT
        share_BTN = self.attend(q_BTNK, k_BTMK, indicator_BTMK, context)[0][..., 0]
        found = {"first_token_share": token_mean(share_BTN, counted_BT)}
        if gate_BTNK is None:
            return found
        open_BTNK = jax.nn.sigmoid(gate_BTNK.astype(jnp.float32))
        return found | {
            "gate_mean": jnp.mean(token_mean(open_BTNK, context.stats_mask)),
            "gate_closed": jnp.mean(token_mean(open_BTNK < 0.1, context.stats_mask)),
        }

    @classmethod
    def activation_flops(cls, config, length):
        """Counts the FLOPs per token of two products of K numbers for each key that a query sees:
        one for the score, one for the weighted sum of values.
        """
        return (
            4
            * config.num_attention_heads
            * config.head_dim
            * cls.visible_pair_count(config, length)
            / length
        )
