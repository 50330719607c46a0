"""Attention residuals (arXiv 2603.15031): every mixer and every MLP reads a weighted mean of sums
of earlier outputs, in place of the sum of all earlier outputs. This file implements section 3.2 of
the paper, which divides the layers into blocks.

The layers form blocks of `model.streams.block_layers` layers; the last block may have fewer layers.
Let b_0 be the embedding, and b_n the sum of the outputs of all mixers and MLPs in block n. A mixer
or an MLP f in block n, with a vector w and norms N and N_key of its own, reads

    s_j = w · N_key(V_j)     h = Σ_j softmax_j(s) V_j     f reads N(h)

The output of the mixer or MLP f is added to b_n. The sources V_j are the embedding b_0, the sums
b_1 … b_(n-1) of the earlier blocks of layers, and the part of b_n that is already computed. The
first mixer of block n does not read b_n, which is still 0. The language-model head reads the norm
N(h) of a weighted mean h of the embedding and the sums of all blocks. N_key is an RMSNorm with
weights. Every vector w is 0 at the start of training, so that h is at first the plain mean of the
sources.

The layer of the multi-token prediction module is a block of its own: b_0 is the module's input.

The J sources of a token (the embedding and the sum of each block of layers) lie side by side, [B,
T, J·D]. The sum b_n of the outputs of block n is 0 until block n begins.

Letters: B batch, T time, N blocks, J = N + 1 sources, D model, E = J·D.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.block import Block
from qwen3next_jax.model.layers import call_saving_only_inputs, rms_norm
from qwen3next_jax.model.multi_token_prediction import MultiTokenPrediction
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops.blocks import accumulation_dtype

# A configuration for the tests: two blocks, the second of a single layer, in models of 3 layers.
EXAMPLES = {
    "attention_residual": {
        "block": {"placement": "attention_residual"},
        "streams": {"block_layers": 2},
    }
}


class DepthAttention(nnx.Module):
    """Computes the input of one mixer, one MLP or the head: the norm of a weighted mean of the
    sources.
    """

    def __init__(self, config: ModelConfig, make: Make):
        self.config = config
        d = config.hidden_size
        self.query = make.parameter(jnp.zeros, (d,), ".", kind="vector", uses_model_dtype=False)
        self.key_norm = make.norm(d, plain=True)
        self.norm = make.norm(d)

    def __call__(self, v_BTE: jax.Array, visible: jax.Array | int) -> jax.Array:
        """Returns N(h), [B, T, D].

        Args:
          v_BTE: all sources.
          visible: number of sources in the mean, counted from the first source; at least 1.
        """
        weight_D = self.query[...] * self.key_norm[...]

        def mean(v_BTE, weight_D):
            exact = accumulation_dtype(v_BTE)
            sources = jnp.split(v_BTE.astype(exact), v_BTE.shape[-1] // len(weight_D), axis=-1)
            scores_JBT = jnp.stack(
                [
                    jax.lax.rsqrt(jnp.mean(jnp.square(v_BTD), -1) + self.config.rms_norm_eps)
                    * jnp.sum(v_BTD * weight_D, axis=-1)
                    for v_BTD in sources
                ]
            )
            number_J11 = jnp.arange(len(sources))[:, None, None]
            share_JBT = jax.nn.softmax(
                jnp.where(number_J11 < visible, scores_JBT, -jnp.inf), axis=0
            )
            return sum(a_BT[..., None] * v_BTD for a_BT, v_BTD in zip(share_JBT, sources)).astype(
                v_BTE.dtype
            )

        return rms_norm(call_saving_only_inputs(mean, v_BTE, weight_D), self.norm[...], self.config)


class DepthMultiTokenPrediction(MultiTokenPrediction):
    """Multi-token prediction whose layer has two sources: the module's input, and the sum of the
    outputs of the layer's mixer and MLP.
    """

    def __init__(self, config: ModelConfig, make: Make):
        super().__init__(config, make)
        self.block.layer_indices = (0,)

    def join_state_and_embedding(self, hidden_BTD, embedded_BTD, context):
        return super().join_state_and_embedding(hidden_BTD, embedded_BTD, context)[
            ..., : 2 * self.config.hidden_size
        ]


class AttentionResidual(Block):
    """A layer whose mixer and MLP read a weighted mean over earlier blocks of layers."""

    multi_token_prediction = DepthMultiTokenPrediction

    def __init__(self, config, mixer, sparse, make, layer_indices):
        size = config.streams.block_layers
        require(
            size <= config.num_hidden_layers,
            f"model.streams.block_layers = {size} with model.num_hidden_layers = "
            f"{config.num_hidden_layers}: expected at most as many layers in a block as the model "
            "has",
        )
        require(
            not config.ple.layer_ids,
            f"model.ple.layer_ids = {config.ple.layer_ids} with model.block.placement = "
            f"{config.block.placement!r}: a layer has no single residual stream to which it could "
            "add an embedding: expected (), or another placement",
        )
        super().__init__(config, mixer, sparse, make, layer_indices)
        self.layer_indices = layer_indices

    def make_norm(self, make):
        return DepthAttention(self.config, make)

    def input_and_add_output(self, v_BTE, part, context):
        size, d = self.config.streams.block_layers, self.config.hidden_size
        layer = jnp.array(self.layer_indices)[context.layer_in_stack]
        own_block = layer // size + 1  # the number of the layer's block
        visible = own_block + 1
        if part == "mixer":
            visible = jnp.where(layer % size == 0, own_block, own_block + 1)

        def add(y_BTD):
            sum_BTD = jax.lax.dynamic_slice_in_dim(v_BTE, own_block * d, d, axis=-1) + y_BTD
            return jax.lax.dynamic_update_slice_in_dim(v_BTE, sum_BTD, own_block * d, axis=-1)

        return getattr(self, f"{part}_norm")(v_BTE, visible), add

    @staticmethod
    def residual_from_embeddings(x_BTD, config):
        blocks = -(-config.num_hidden_layers // config.streams.block_layers)
        return jnp.pad(x_BTD, ((0, 0), (0, 0), (0, blocks * config.hidden_size)))

    @staticmethod
    def make_final_norm(config, make):
        return DepthAttention(config, make)

    @staticmethod
    def head_input(v_BTE, last, config):
        return last(v_BTE, v_BTE.shape[-1] // config.hidden_size)

    @staticmethod
    def residual_for_diagnostics(v_BTE, config):
        """Returns the sum of all sources. In a model with the placement "pre", the sum of all
        sources is the residual stream.
        """
        return sum(jnp.split(v_BTE, v_BTE.shape[-1] // config.hidden_size, axis=-1))

    @staticmethod
    def residual_flops(config, num_layers):
        """Counts the FLOPs of the scores and of the weighted means: 4 D FLOPs, with the model width
        D, for each source that a mixer, an MLP or the head reads.
        """
        size = config.streams.block_layers
        read = 1 + -(-num_layers // size)  # by the head
        for layer in range(num_layers):
            own_block = layer // size + 1
            read += own_block + (layer % size > 0) + own_block + 1
        return 4.0 * config.hidden_size * read


# ---- reference
# --------------------------------------------------------------------------------------------------


def attention_residual_reference(config, params, last, embedding_D, blocks):
    """Returns the input N(h) [D] of the language-model head for one token, in the dtype of the
    inputs.

    Args:
      params: list of the parameters of every mixer's and every MLP's `DepthAttention`, in order.
      last: the parameters of the head's `DepthAttention`.
      embedding_D: the token's embedding.
      blocks: functions from the input N(h) [D] of each mixer and MLP to its output [D].
    """

    def rms(x_D):
        return x_D / jnp.sqrt(jnp.mean(x_D**2) + config.rms_norm_eps)

    def read(p, sources):
        scores = [p["query"] @ (rms(v_D) * p["key_norm"]) for v_D in sources]
        weights = [jnp.exp(score) for score in scores]
        h_D = sum(weight * v_D for weight, v_D in zip(weights, sources)) / sum(weights)
        return rms(h_D) * (1 + p["norm"])

    finished, outputs = [embedding_D], []
    for number, (p, f) in enumerate(zip(params, blocks)):
        if number and number % (2 * config.streams.block_layers) == 0:  # two outputs a layer
            finished.append(sum(outputs))
            outputs = []
        outputs.append(f(read(p, [*finished, sum(outputs)] if outputs else finished)))
    return read(last, [*finished, sum(outputs)])
