"""Attention to a window (2004.05150), with the first tokens of a document and a sink logit where
asked for (2309.17453, gpt-oss).

Letters: B batch, T time, W = window − 1 keys before the first token, N query heads, M key/value
heads, K head width, F first tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp

from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.model.mixers.gated_attention import GatedAttention
from qwen3next_jax.ops.window_attention import window_attention
from qwen3next_jax.ops.window_attention.window import First
from qwen3next_jax.sharding.rules import TENSOR, activation_spec, local, shards


class SlidingWindow(GatedAttention):
    """`GatedAttention` of which a query sees `mixer.window` keys. Its cache is the window, as
    large after any number of tokens.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(GatedAttention.Settings):
        # keys that a query sees, its own among them
        window: int = 1024
        # keys at the start of a document that stay visible beyond the window
        first_tokens: int = 0
        # a learned score per head that takes weight and gives nothing
        sink_logit: bool = False

        def __post_init__(self):
            check_bounds(self, "model.mixer", {"at least 1": "window", "0 or more": "first_tokens"})

    read_time = ("window", "first_tokens")
    cache_kind = "state"
    in_place = False
    hf_entries = None

    def __init__(self, config, make, layers):
        super().__init__(config, make, layers)
        if self.settings(config).sink_logit:
            self.sink = make.parameter(
                jnp.zeros, (config.num_attention_heads,), "query_heads", kind="rate"
            )

    def attend(self, q_BTNK, k_BTMK, v_BTMK, context, cache=None):
        c, mesh, positions = self.settings(self.config), context.mesh, context.positions
        ids, k, v, first, kv_ids = context.segment_ids, k_BTMK, v_BTMK, None, None
        if cache is not None:
            ids = jnp.ones_like(positions) if ids is None else (ids > 0).astype(jnp.int32)
            # nothing stands before a row's first token
            cached = jnp.arange(1 - c.window, 0) + positions[:, :1] >= 0
            k, v = (jnp.concatenate([cache[name], x], axis=1) for name, x in (("k", k), ("v", v)))
            kv_ids = jnp.concatenate([jnp.where(cached, 1, -1), ids], axis=1)
            cache = self._after(cache, k, v, k_BTMK, v_BTMK, ids, positions)
        if c.first_tokens:
            first = (
                (k, v, jnp.arange(positions.shape[1]) - positions)
                if cache is None
                else (cache["first_k"], cache["first_v"], jnp.zeros_like(positions))
            )
        if k.shape[2] % shards(mesh, TENSOR):
            k, v, *first_kv = (
                jnp.repeat(x, q_BTNK.shape[2] // x.shape[2], axis=2)
                for x in (k, v, *(first or ())[:2])
            )
            first = first and (*first_kv, first[2])

        def run(q, k, v, ids, kv_ids, first, positions, sink):
            first = first and First(*first, positions, c.first_tokens)
            return window_attention(
                q,
                k,
                v,
                segment_ids=ids,
                kv_segment_ids=kv_ids,
                sink=sink,
                first=first,
                window=c.window,
                axis_name=context.time_axis,
            )

        heads, tokens = (
            activation_spec("batch", context.time, "heads"),
            activation_spec("batch", context.time),
        )
        in_specs = (
            heads,
            heads,
            heads,
            tokens,
            tokens,
            first and (heads, heads, tokens),
            tokens,
            activation_spec("heads"),
        )
        sink = self.sink[...] if c.sink_logit else None
        return local(run, mesh, in_specs, heads)(
            q_BTNK, k, v, ids, kv_ids, first, positions, sink
        ), cache

    def _after(self, cache, k, v, k_BTMK, v_BTMK, ids, positions):
        """The cache after these tokens, padding at the end left out."""
        last = jax.vmap(
            lambda x, start: jax.lax.dynamic_slice_in_dim(
                x, start, self.settings(self.config).window - 1
            )
        )
        length_B, row_B1 = jnp.sum(ids > 0, axis=1), jnp.arange(ids.shape[0])[:, None]
        slot_BT = jnp.where(ids > 0, positions, self.settings(self.config).first_tokens)
        first = {
            name: cache[name].at[row_B1, slot_BT].set(x, mode="drop")
            for name, x in (("first_k", k_BTMK), ("first_v", v_BTMK))
        }
        return {"k": last(k, length_B), "v": last(v, length_B)} | first

    @classmethod
    def init_cache(cls, config, batch, length):
        shape = (config.num_key_value_heads, config.head_dim)
        empty = lambda rows: jnp.zeros((batch, rows, *shape), config.dtype)
        window, first = cls.settings(config).window - 1, cls.settings(config).first_tokens
        return {
            "k": empty(window),
            "v": empty(window),
            "first_k": empty(first),
            "first_v": empty(first),
        }

    @classmethod
    def forward_flops(cls, config, length):
        """Scores and their sum: of each query the keys that it sees."""
        window, first = min(cls.settings(config).window, length), cls.settings(config).first_tokens
        keys = (
            sum(min(t + 1, window) + min(first, max(0, t + 1 - window)) for t in range(length))
            / length
        )
        return 4 * config.num_attention_heads * config.head_dim * keys
