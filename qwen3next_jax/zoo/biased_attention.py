"""Full attention whose projections have biases (GLM-4.5, Qwen 2, gpt-oss), and full attention with
a sink logit for each head (gpt-oss, 2508.10925).

Letters: T queries, S keys, N query heads.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from qwen3next_jax.zoo.attention_references import gated_attention, positions_and_causal_mask
from qwen3next_jax.zoo.biased_projections import BiasedProjections
from qwen3next_jax.zoo.pair_mixer import PairAttention

EXAMPLES = {
    "biased_attention": {"full_mixer": "biased_attention"},
    "sink_attention": {"full_mixer": "sink_attention", "mixer": {"attention_bias": "qkvo"}},
}


class BiasedAttention(BiasedProjections):
    """`GatedAttention` whose projections have biases. The kernels are those of `GatedAttention`."""

    @dataclasses.dataclass(frozen=True)
    class Settings(BiasedProjections.Settings):
        # which projections have a bias: the projections of queries, keys and values ("qkv"), or
        # these and the output projection ("qkvo")
        attention_bias: Literal["qkv", "qkvo"] = "qkv"


class SinkAttention(BiasedProjections, PairAttention):
    """Attention in which each head has a learned logit s, which adds a term to the denominator of
    the softmax: p_ij = e^{s_ij} / (e^s + Σ_{j'} e^{s_ij'}), where s_ij is the score of query i and
    key j. With the sink logit, the attention weights of a head sum to less than 1, so that a head
    can attend to nothing. The kernels of `ops.attention` do not support a sink logit, so XLA
    computes all T × T scores.
    """

    loads_weights_of = None

    def __init__(self, config, make, layer_indices):
        super().__init__(config, make, layer_indices)
        self.sink = make.parameter(
            jnp.zeros, (config.num_attention_heads,), "query_heads", kind="rate"
        )

    def sink_logit(self):
        return self.sink[...]


# ---- references
# --------------------------------------------------------------------------------------------------


def biased_attention_reference(config, params, x):
    i, j, causal = positions_and_causal_mask(x)
    return gated_attention(config, params, x, seen=causal, distance=i - j)


def sink_attention_reference(config, params, x):
    i, j, causal = positions_and_causal_mask(x)
    return gated_attention(config, params, x, seen=causal, distance=i - j, sink=params["sink"])


REFERENCES = {
    "biased_attention": biased_attention_reference,
    "sink_attention": sink_attention_reference,
}
