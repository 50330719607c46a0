"""Attention whose scores take a bias by the distance of query and key instead of rotations.

Letters: see pairwise.py.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from qwen3next_jax.common.errors import require
from qwen3next_jax.config.bounds import check_bounds
from qwen3next_jax.model.mixers.nope_attention import NoPEAttention
from qwen3next_jax.model.mixers.pairwise import Masked
from qwen3next_jax.ops.pair_attention import dot


class ALiBi(Masked):
    """−slope · |distance| (2108.12409), slopes 2^(−8 (n + 1) / N) of N = 2^i heads; of other
    numbers those of the power below, and of the power above every other one.
    """

    switches = NoPEAttention.switches
    weights_of = None

    def __init__(self, config, make, layers):
        super().__init__(config, make, layers)
        slopes_N = jnp.asarray(alibi_slopes(config.num_attention_heads))
        self.slopes = make.parameter(
            lambda shape: jnp.broadcast_to(slopes_N, shape),
            slopes_N.shape,
            "query_heads",
            kind="rate",
        )

    def queries(self, q_BTNK, t_BT):
        return q_BTNK

    def keys(self, k_BSMK, s_BS):
        return k_BSMK

    def per_head(self):
        return (jax.lax.stop_gradient(self.slopes[...]),)

    def score(self, q, k, t_BC1, s_B1S, slopes_N):
        return dot(q, k) - slopes_N[:, None, None] * jnp.abs(t_BC1 - s_B1S)[:, None]


def alibi_slopes(heads: int) -> list[float]:
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    return slopes + [2 ** (-8 * (n + 1) / (2 * power)) for n in range(0, 2 * (heads - power), 2)]


class T5Bias(ALiBi):
    """A learned number per head and bucket of distances (1910.10683 section 2.1): half of
    `mixer.buckets` exact, the others growing with the logarithm up to `mixer.max_distance`;
    where tokens see both ways, half of the buckets for each. Each layer has its own; scores keep
    their scale.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings(ALiBi.Settings):
        # of distances
        buckets: int = 32
        # from which on all distances fall into the last bucket
        max_distance: int = 128

        def __post_init__(self):
            super().__post_init__()
            check_bounds(self, "model.mixer", {"at least 4": "buckets"})
            require(
                self.max_distance > self.buckets // 2,
                f"model.mixer.max_distance = {self.max_distance}: expected more than half of "
                f"model.mixer.buckets = {self.buckets}, which are exact",
            )

    # the mask says which distances the buckets stand for
    read_time = ("prefix_tokens",)

    def __init__(self, config, make, layers):
        Masked.__init__(self, config, make, layers)
        start = lambda shape: (
            config.initializer_range * jax.random.normal(make.rngs.params(), shape)
        )
        self.bias = make.parameter(
            start,
            (config.num_attention_heads, self.settings(config).buckets),
            "query_heads .",
            kind="rate",
        )

    def per_head(self):
        return (self.bias[...],)

    def score(self, q, k, t_BC1, s_B1S, bias_NR):
        c = self.settings(self.config)
        bucket_BCS = t5_bucket(
            t_BC1 - s_B1S, c.buckets, c.max_distance, both_ways=c.mask != "causal"
        )
        return dot(q, k) + jnp.moveaxis(bias_NR[:, bucket_BCS], 0, 1)


def t5_bucket(distance: jax.Array, buckets: int, largest: int, both_ways: bool) -> jax.Array:
    """Of distances [...], query − key. Those of keys behind the query have the second half of
    the buckets, or bucket 0.
    """
    if both_ways:
        buckets //= 2
    exact, far = buckets // 2, np.arange(largest + 1)
    steps = np.log(np.maximum(far, 1) / exact) / math.log(largest / exact) * (buckets - exact)
    table = jnp.asarray(
        np.where(far < exact, far, np.minimum(exact + np.floor(steps), buckets - 1)), jnp.int32
    )
    if not both_ways:
        return table[jnp.clip(distance, 0, largest)]
    return table[jnp.minimum(jnp.abs(distance), largest)] + jnp.where(distance < 0, buckets, 0)
