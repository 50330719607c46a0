"""Gated attention whose scores or mask the fast kernels do not have: `ops.pair_attention`, T × T
work.

Letters: B batch, T queries, S keys (slots of the cache), C queries of a block, N query heads, M
key/value heads, K head width.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.config.registry import MIXERS, resolve
from qwen3next_jax.model.layers import rotate, token_mean
from qwen3next_jax.model.mixers.gated_attention import GatedAttention, write
from qwen3next_jax.ops.pair_attention import dot, pair_attention
from qwen3next_jax.sharding.rules import TENSOR, activation_spec, local, shards


class Pairwise(GatedAttention):
    """A subclass says what its scores are made of (`queries`, `keys`: trees of arrays), the
    score of a pair, and which pairs are seen. The cache holds keys as they are, without their
    place.
    """

    weights_of = GatedAttention
    in_place = False
    hf_entries = None
    block = 64  # queries worked at once

    def placed(self, x_BTNK, positions_BT):
        return x_BTNK  # below, by pairs

    def queries(self, q_BTNK, t_BT):
        return rotate(q_BTNK, t_BT, self.config)

    def keys(self, k_BSMK, s_BS):
        return rotate(k_BSMK, s_BS, self.config)

    def per_head(self) -> tuple[jax.Array, ...]:
        """Arrays [N, …] that `score` gets behind its other arguments."""
        return ()

    def score(self, q, k, t_BC1, s_B1S, *per_head):
        """[B, N, C, S] float32."""
        return dot(q, k)

    def seen(self, t_BC1, s_B1S):
        """Bool [B, C, S]; with `self.best` two of them, as in `pair_attention`."""
        return s_B1S <= t_BC1

    @property
    def best(self) -> int:
        return 0

    def attend(self, q_BTNK, k_BTMK, v_BTMK, context, cache=None):
        mesh, t_BT = context.mesh, context.positions
        k, v, s_BS, ids = k_BTMK, v_BTMK, t_BT, context.segment_ids
        if cache is not None:
            cache = {"k": write(cache["k"], k_BTMK, t_BT), "v": write(cache["v"], v_BTMK, t_BT)}
            k, v, ids = cache["k"], cache["v"], None
            s_BS = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[:2])
        if k.shape[2] % shards(mesh, TENSOR):
            k, v = (jnp.repeat(x, q_BTNK.shape[2] // x.shape[2], axis=2) for x in (k, v))

        def run(q, k, v, t, s, ids, per_head):
            return pair_attention(
                q,
                k,
                v,
                score=lambda *pair: self.score(*pair, *per_head),
                seen=self.seen,
                positions=t,
                kv_positions=s,
                segment_ids=ids,
                kv_segment_ids=ids,
                best=self.best,
                axis_name=context.time_axis,
                block=self.block,
            )

        heads, tokens = (
            activation_spec("batch", context.time, "heads"),
            activation_spec("batch", context.time),
        )
        in_specs = (heads, heads, heads, tokens, tokens, tokens, activation_spec("heads"))
        o = local(run, mesh, in_specs, heads)(
            self.queries(q_BTNK, t_BT), self.keys(k, s_BS), v, t_BT, s_BS, ids, self.per_head()
        )
        return o, cache

    def diagnostics(self, q_BTNK, k_BTMK, gate_BTNK, context):
        """`first_token_share` and the gate's, see `GatedAttention`; the largest logit is not
        measured.
        """
        first_BT = context.positions == 0
        indicator_BTMK = jnp.broadcast_to(first_BT[:, :, None, None], k_BTMK.shape).astype(
            k_BTMK.dtype
        )
        counted_BT = ~first_BT if context.counted is None else context.counted & ~first_BT
        found = {
            "first_token_share": token_mean(
                self.attend(q_BTNK, k_BTMK, indicator_BTMK, context)[0][..., 0], counted_BT
            )
        }
        if gate_BTNK is None:
            return found
        open_BTNK = jax.nn.sigmoid(gate_BTNK.astype(jnp.float32))
        return found | {
            "gate_mean": jnp.mean(token_mean(open_BTNK, context.counted)),
            "gate_closed": jnp.mean(token_mean(open_BTNK < 0.1, context.counted)),
        }

    @classmethod
    def forward_flops(cls, config, length):
        """Scores and their sum: of each query the keys that it sees."""
        return 4 * config.num_attention_heads * config.head_dim * cls.pairs(config, length) / length

    @classmethod
    def pairs(cls, config, length: int) -> float:
        """How many pairs are seen in a row of one document."""
        return length * (length + 1) / 2


class Masked(Pairwise):
    """Attention under `mixer.mask`. prefix (1905.03197, 1910.10683): the first
    `mixer.prefix_tokens` of a document, an encoder's, see each other, the others, a decoder's,
    what is before them: encoder and decoder in one row. bidirectional: every token sees its
    document.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(Pairwise.Settings):
        mask: Literal["causal", "prefix", "bidirectional"] = "causal"
        # of the mask "prefix": tokens at a document's start that see each other
        prefix_tokens: int = 0

        def __post_init__(self):
            check_bounds(self, "model.mixer", {"0 or more": "prefix_tokens"})
            require(
                (self.mask == "prefix") == (self.prefix_tokens > 0),
                f"model.mixer.mask = {self.mask!r} with model.mixer.prefix_tokens = "
                f"{self.prefix_tokens}: expected mask = 'prefix' and 1 or more, or another mask "
                "and 0",
            )

    read_time = ("mask", "prefix_tokens")

    def seen(self, t_BC1, s_B1S):
        c = self.settings(self.config)
        before = s_B1S <= t_BC1
        if c.mask == "prefix":
            return before | ((t_BC1 < c.prefix_tokens) & (s_B1S < c.prefix_tokens))
        return before if c.mask == "causal" else jnp.ones_like(before)

    def attend(self, q_BTNK, k_BTMK, v_BTMK, context, cache=None):
        if cache is not None and self.settings(self.config).mask == "bidirectional":
            raise UserError(
                "model.mixer.mask = 'bidirectional': a token's state changes with the tokens "
                "after it, so that no cache can "
                "continue a text: expected 'causal' or 'prefix' to generate"
            )
        return super().attend(q_BTNK, k_BTMK, v_BTMK, context, cache)

    @classmethod
    def check(cls, config):
        super().check(config)
        c = cls.settings(config)
        own = config.mtp_depth and issubclass(
            resolve(MIXERS, config.full_mixer, "model.full_mixer"), Masked
        )
        require(
            c.mask == "causal" or not own,
            f"model.mixer.mask = {c.mask!r} with model.full_mixer = {config.full_mixer!r} and "
            f"model.mtp_depth = {config.mtp_depth}: the module would see the token that it "
            "predicts: expected mtp_depth = 0, or "
            "another full_mixer, these layers named by layer_types",
        )

    @classmethod
    def tokens_seen_ahead(cls, config):
        c = cls.settings(config)
        return math.inf if c.mask == "bidirectional" else c.prefix_tokens

    @classmethod
    def pairs(cls, config, length):
        prefix = min(cls.settings(config).prefix_tokens, length)
        causal = length * (length + 1) / 2
        return (
            length**2
            if cls.settings(config).mask == "bidirectional"
            else causal + prefix * (prefix - 1) / 2
        )
