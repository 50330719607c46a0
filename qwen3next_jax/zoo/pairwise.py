"""Variants of gated attention: without rotary positions, with masks other than the causal one, and
with a bias that depends on the distance of query and key in place of rotary positions.

Letters: B batch, T queries, S keys (slots of the cache), C queries of a chunk, N query heads, M
key/value heads, K head width.
"""

import dataclasses
import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import UserError, require
from qwen3next_jax.config.registry import MIXERS, resolve
from qwen3next_jax.model.gated_attention import GatedAttention
from qwen3next_jax.zoo.attention_references import gated_attention, positions_and_causal_mask
from qwen3next_jax.zoo.ops.pair_attention import scaled_dot
from qwen3next_jax.zoo.pair_mixer import PairAttention

EXAMPLES = {
    "nope_attention": {"full_mixer": "nope_attention"},
    "masked_attention": {"full_mixer": "masked_attention"},
    "alibi": {"full_mixer": "alibi"},
    "t5_bias": {"full_mixer": "t5_bias", "mixer": {"buckets": 8, "max_distance": 12}},
}


class NoPEAttention(GatedAttention):
    """`GatedAttention` whose queries and keys are not rotated. Some models have layers without
    rotary positions among layers with rotary positions (SmolLM3, Llama 4; 2501.18795).
    """

    switches_read = ("attention_output_gate", "qk_norm")
    loads_weights_of = GatedAttention

    def with_positions(self, x_BTNK, positions_BT):
        return x_BTNK


class MaskedAttention(PairAttention):
    """Attention with the mask that the setting `mask` names.

    causal: every token sees itself and the tokens before it.
    prefix (1905.03197, 1910.10683): the first `prefix_tokens` tokens of a document see each other,
      as in an encoder; every other token sees itself and the tokens before it, as in a decoder.
    bidirectional: every token sees its whole document.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(PairAttention.Settings):
        # which tokens a token sees. "causal": itself and the tokens before it. "prefix": the same,
        # and the first prefix_tokens tokens of a document also see each other. "bidirectional":
        # all tokens of its document
        mask: Literal["causal", "prefix", "bidirectional"] = "causal"
        # for the mask "prefix": number of tokens at a document's start that see each other
        prefix_tokens: Annotated[int, "0 or more"] = 0

        def __post_init__(self):
            require(
                (self.mask == "prefix") == (self.prefix_tokens > 0),
                f"model.mixer.mask = {self.mask!r} with model.mixer.prefix_tokens = "
                f"{self.prefix_tokens}: expected mask = 'prefix' and 1 or more, or another mask "
                "and 0",
            )

    settings_free_after_training = ("mask", "prefix_tokens")

    def attention_mask(self, t_BC1, s_B1S):
        s = self.settings(self.config)
        is_before = s_B1S <= t_BC1
        if s.mask == "prefix":
            return is_before | ((t_BC1 < s.prefix_tokens) & (s_B1S < s.prefix_tokens))
        return is_before if s.mask == "causal" else jnp.ones_like(is_before)

    def attend(self, q_BTNK, k_BTMK, v_BTMK, context, cache=None):
        if cache is not None and self.settings(self.config).mask == "bidirectional":
            raise UserError(
                "model.mixer.mask = 'bidirectional': a token's state changes with the tokens "
                "after it, so that no cache can continue a text: expected 'causal' or 'prefix' to "
                "generate"
            )
        return super().attend(q_BTNK, k_BTMK, v_BTMK, context, cache)

    @classmethod
    def noncausal_prefix_tokens(cls, config):
        s = cls.settings(config)
        return math.inf if s.mask == "bidirectional" else s.prefix_tokens

    @classmethod
    def check(cls, config):
        super().check(config)
        mask = cls.settings(config).mask
        predicts = config.mtp_depth and issubclass(
            resolve(MIXERS, config.full_mixer, "model.full_mixer"), MaskedAttention
        )
        require(
            mask == "causal" or not predicts,
            f"model.mixer.mask = {mask!r} with model.full_mixer = {config.full_mixer!r} and "
            f"model.mtp_depth = {config.mtp_depth}: the module would see the token that it "
            "predicts: expected mtp_depth = 0, or "
            "another full_mixer, with this mixer's layers named in model.layer_types",
        )

    @classmethod
    def visible_pair_count(cls, config, length):
        s = cls.settings(config)
        if s.mask == "bidirectional":
            return length**2
        prefix = min(s.prefix_tokens, length)
        return length * (length + 1) / 2 + prefix * (prefix - 1) / 2


class ALiBi(MaskedAttention):
    """ALiBi (2108.12409): each head subtracts slope · |distance| from its scores, with a constant
    slope. `alibi_slopes` returns the slopes.
    """

    switches_read = ("attention_output_gate", "qk_norm")
    loads_weights_of = None

    def __init__(self, config, make, layer_indices):
        super().__init__(config, make, layer_indices)
        slopes_N = jnp.asarray(alibi_slopes(config.num_attention_heads))
        self.slopes = make.parameter(
            lambda shape: jnp.broadcast_to(slopes_N, shape),
            slopes_N.shape,
            "query_heads",
            kind="rate",
        )

    def queries_for_score(self, q_BTNK, t_BT):
        return q_BTNK

    def keys_for_score(self, k_BSMK, s_BS):
        return k_BSMK

    def score_arrays_per_head(self):
        return (jax.lax.stop_gradient(self.slopes[...]),)

    def score(self, q, k, t_BC1, s_B1S, slopes_N):
        return scaled_dot(q, k) - slopes_N[:, None, None] * jnp.abs(t_BC1 - s_B1S)[:, None]


def alibi_slopes(heads: int) -> list[float]:
    """Returns the slope of each of N = `heads` heads. If N is a power of two, the heads n = 0 to
    N - 1 have the slopes 2^(-8 (n + 1) / N). Otherwise let P be the largest power of two below N:
    the first P heads have the slopes for P heads, and the remaining heads have the first, third,
    fifth, … slope for 2 P heads.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    return slopes + [2 ** (-8 * (n + 1) / (2 * power)) for n in range(0, 2 * (heads - power), 2)]


class T5BiasAttention(MaskedAttention):
    """T5's relative position bias (1910.10683, section 2.1). A bucket is a range of distances; each
    head adds a learned number for the bucket of the distance to the score. If the mask is causal,
    all buckets are for earlier keys; otherwise half of them are for earlier keys and half for later
    keys. Of the buckets for one direction (earlier or later keys), each bucket in the first half
    holds one distance, and the ranges of the buckets in the second half grow geometrically up to
    `max_distance`. In contrast to T5, each layer has its own learned numbers, and the scores are
    scaled by K^-1/2.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(MaskedAttention.Settings):
        # number of buckets of distances, each with its own learned number
        buckets: Annotated[int, "at least 4"] = 32
        # distances from this number on fall into the last bucket; must be more than half of the
        # number of buckets
        max_distance: int = 128

        def __post_init__(self):
            super().__post_init__()
            require(
                self.max_distance > self.buckets // 2,
                f"model.mixer.max_distance = {self.max_distance}: expected more than half of "
                f"model.mixer.buckets = {self.buckets}, which are exact",
            )

    switches_read = ("attention_output_gate", "qk_norm")
    loads_weights_of = None
    # `mask` is not listed, because the mask determines the distances that the buckets hold.
    settings_free_after_training = ("prefix_tokens",)

    def __init__(self, config, make, layer_indices):
        super().__init__(config, make, layer_indices)
        self.bias = make.parameter(
            lambda shape: config.initializer_range * jax.random.normal(make.rngs.params(), shape),
            (config.num_attention_heads, self.settings(config).buckets),
            "query_heads .",
            kind="rate",
        )

    def queries_for_score(self, q_BTNK, t_BT):
        return q_BTNK

    def keys_for_score(self, k_BSMK, s_BS):
        return k_BSMK

    def score_arrays_per_head(self):
        return (self.bias[...],)

    def score(self, q, k, t_BC1, s_B1S, bias_NR):
        s = self.settings(self.config)
        bucket_BCS = t5_bucket(
            t_BC1 - s_B1S, s.buckets, s.max_distance, both_ways=s.mask != "causal"
        )
        return scaled_dot(q, k) + jnp.moveaxis(bias_NR[:, bucket_BCS], 0, 1)


def t5_bucket(distance: jax.Array, buckets: int, largest: int, both_ways: bool) -> jax.Array:
    """Returns the bucket of each distance, an array of the same shape.

    Args:
      distance: the position of the query minus the position of the key.
      buckets: number of buckets.
      largest: the setting `max_distance`; this distance and larger ones fall into the last bucket.
      both_ways: whether queries see later keys. If queries see later keys, those keys have the
        second half of the buckets; otherwise the bucket of later keys is 0.
    """
    if both_ways:
        buckets //= 2
    exact, distances = buckets // 2, np.arange(largest + 1)
    steps = np.log(np.maximum(distances, 1) / exact) / math.log(largest / exact) * (buckets - exact)
    table = jnp.asarray(
        np.where(distances < exact, distances, np.minimum(exact + np.floor(steps), buckets - 1)),
        jnp.int32,
    )
    if not both_ways:
        return table[jnp.clip(distance, 0, largest)]
    return table[jnp.minimum(jnp.abs(distance), largest)] + jnp.where(distance < 0, buckets, 0)


# ---- references
# --------------------------------------------------------------------------------------------------


def nope_attention_reference(config, params, x):
    _, _, causal = positions_and_causal_mask(x)
    return gated_attention(config, params, x, seen=causal)


def _mask_reference(config, x):
    """Returns the mask of `MaskedAttention` for a row x of T tokens, bool [T, T]."""
    s = config.settings_of_mixer(config.mixers[0])
    i, j, causal = positions_and_causal_mask(x)
    if s.mask == "prefix":
        return causal | (i < s.prefix_tokens) & (j < s.prefix_tokens)
    return causal if s.mask == "causal" else causal | True


def masked_attention_reference(config, params, x):
    i, j, _ = positions_and_causal_mask(x)
    return gated_attention(config, params, x, seen=_mask_reference(config, x), distance=i - j)


def alibi_reference(config, params, x):
    i, j, _ = positions_and_causal_mask(x)
    heads = config.num_attention_heads
    assert heads & (heads - 1) == 0, "the paper prints slopes for powers of two"
    slopes = 2.0 ** (-8 / heads * np.arange(1, heads + 1))
    bias = -slopes[:, None, None] * np.abs(i - j)
    return gated_attention(config, params, x, seen=_mask_reference(config, x), bias=bias)


def t5_bias_reference(config, params, x):
    s = config.settings_of_mixer("t5_bias")
    i, j, _ = positions_and_causal_mask(x)
    both_ways = s.mask != "causal"
    bucket = np.vectorize(
        lambda d: _t5_bucket_reference(int(d), s.buckets, s.max_distance, both_ways)
    )
    bias = params["bias"][:, bucket(i - j)]
    return gated_attention(config, params, x, seen=_mask_reference(config, x), bias=bias)


def _t5_bucket_reference(distance, buckets, largest, both_ways):
    """Computes `t5_bucket` for one distance, in Python."""
    first = 0
    if both_ways:
        buckets //= 2
        first = buckets if distance < 0 else 0
        distance = abs(distance)
    exact = buckets // 2
    if distance < exact:
        return first + max(distance, 0)
    steps = math.log(distance / exact) / math.log(largest / exact) * (buckets - exact)
    return first + min(exact + int(steps), buckets - 1)


REFERENCES = {
    "nope_attention": nope_attention_reference,
    "masked_attention": masked_attention_reference,
    "alibi": alibi_reference,
    "t5_bias": t5_bias_reference,
}
