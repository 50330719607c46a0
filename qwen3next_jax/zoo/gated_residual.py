"""Several residual streams with gates in place of norms: the residual form of Qwen3.8-Flash-Next
(transformers' `qwen4_exp`). The streams are the hyper-connections of arXiv 2409.19606 with a
low-rank input gate.

Every one of the S streams starts as the embedding. Around every block f (a mixer or an MLP), with n
the RMSNorm of each stream alone and V, U, A weights,

    w = sigmoid(U silu(V n / S))     x = mean over streams of w ∘ n       f reads x
    a = 2 sigmoid(A n / S)           h_s ← h_s + a_s · f(x)               for every stream s

The input of the language-model head is computed from the streams after the last layer, like the
input x of a block, with weights of the head's own. There is no other norm.

The streams of a token lie side by side, [B, T, S·D]. Letters: B batch, T time, S streams, D model,
R rank of the input gate.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax.common.errors import require
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.block import Block
from qwen3next_jax.model.layers import Context, norm_scale, rms_norm
from qwen3next_jax.model.multi_token_prediction import MultiTokenPrediction
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.sharding.rules import constrain
from qwen3next_jax.zoo.ops import residual_streams

# A configuration for the tests, with numbers of streams and of ranks that are not the defaults.
EXAMPLES = {
    "gated_residual": {
        "block": {"placement": "gated_residual"},
        "streams": {"hc_count": 3, "hc_lowrank": 5},
    }
}


class StreamMix(nnx.Module):
    """Computes the input of one block from the streams, and the factors with which the block's
    output is added to the streams.

    Args:
      injects: whether the module computes the factors of a block's output; False for the module
        that computes the head's input.
    """

    def __init__(self, config: ModelConfig, make: Make, injects: bool = True):
        self.config, self.injects = config, injects
        require(
            config.block.norm == "rms",
            f"model.block.norm = {config.block.norm!r} with model.block.placement = "
            f"{config.block.placement!r}: expected 'rms', the norm of each stream",
        )
        s, r, d = config.streams.hc_count, config.streams.hc_lowrank, config.hidden_size
        self.norm = make.norm(s * d)
        self.down = make.matrix((s, d, r), ". embed -> .")
        self.up = make.matrix((r, s, d), ". -> . embed")
        if injects:
            self.inject = make.matrix((s, d, s), ". embed -> .")

    def block_input_and_factors(
        self, h_BTE: jax.Array, context: Context | None = None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Computes the input of a block, and the factors of its output.

        Args:
          h_BTE: the streams.
          context: the inputs that all layers share; None: XLA computes the results, without
            kernels.

        Returns:
          x [B, T, D], the block's input; the factors a [B, T, S] float32 of the block's output, or
          None if no block follows; the streams [B, T, S·D], to which the caller adds the output.
        """
        dtype, rank = h_BTE.dtype, self.up.shape[0]
        down_SDX = self.down[...].astype(jnp.float32)
        if self.injects:
            down_SDX = jnp.concatenate((down_SDX, self.inject[...]), axis=-1)
        scale_SD = norm_scale(self.norm[...].reshape(down_SDX.shape[:2]), self.config)
        if context is None:
            where = {"implementation": "xla"}
        else:
            where = {"mesh": context.mesh, "time": context.logical_time_axis}
        x_BTD, inner_BTX, h_BTE = residual_streams.mix_streams(
            h_BTE,
            scale_SD,
            (scale_SD[..., None] * down_SDX).astype(dtype),
            self.up[...].astype(dtype),
            self.config.rms_norm_eps,
            **where,
        )
        if not self.injects:
            return x_BTD, None, h_BTE
        streams = self.config.streams.hc_count
        return x_BTD, 2 * jax.nn.sigmoid(inner_BTX[..., rank:] / streams), h_BTE


class GatedMultiTokenPrediction(MultiTokenPrediction):
    """Multi-token prediction from all streams.

    Stream s of the module starts as x_s = fc_e norm(embedding) + fc_h n_s, where n is one RMSNorm
    over all S·D numbers of the model's streams after the model's last layer. After the input
    streams, the module has one layer and one `StreamMix` of its own. vLLM runs this multi-token
    prediction module; transformers does not have it.
    """

    def make_input_projection(self, make: Make) -> None:
        d, s = self.config.hidden_size, self.config.streams.hc_count
        self.embedding_norm = make.norm(d)
        self.hidden_norm = make.norm(s * d)
        self.fc_embedding = make.matrix((d, d), "embed -> embed_out")
        self.fc_hidden = make.matrix((d, d), "embed -> embed_out")

    def join_state_and_embedding(
        self, state_BTE: jax.Array, embedded_BTD: jax.Array, context: Context
    ) -> jax.Array:
        dtype = state_BTE.dtype
        n_BTE = rms_norm(state_BTE, self.hidden_norm[...], self.config)
        n_BTSD = n_BTE.reshape(*n_BTE.shape[:-1], -1, self.config.hidden_size)
        e_BTD = rms_norm(embedded_BTD, self.embedding_norm[...], self.config)
        x_BTSD = (e_BTD @ self.fc_embedding[...].astype(dtype))[:, :, None] + (
            n_BTSD @ self.fc_hidden[...].astype(dtype)
        )
        return save_for_backward(
            constrain(
                x_BTSD.reshape(n_BTE.shape), context.mesh, "batch", context.logical_time_axis, None
            )
        )

    @staticmethod
    def next_depth_state(x_BTE: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
        return x_BTE


class GatedResidual(Block):
    """A layer whose mixer and MLP read and write several residual streams."""

    multi_token_prediction = GatedMultiTokenPrediction

    def make_norm(self, make):
        return StreamMix(self.config, make)

    def input_and_add_output(self, h_BTE, part, context):
        norm = getattr(self, f"{part}_norm")
        x_BTD, a_BTS, h_BTE = norm.block_input_and_factors(h_BTE, context)
        return x_BTD, lambda y_BTD: residual_streams.add_to_streams(
            h_BTE, y_BTD, a_BTS, context.mesh, context.logical_time_axis
        )

    @staticmethod
    def residual_from_embeddings(x_BTD, config):
        return jnp.tile(x_BTD, config.streams.hc_count)

    @staticmethod
    def make_final_norm(config, make):
        return StreamMix(config, make, injects=False)

    @staticmethod
    def head_input(h_BTE, last, config):
        return last.block_input_and_factors(h_BTE)[0]


# ---- reference
# --------------------------------------------------------------------------------------------------


def _block_input_and_factors_reference(config, p, h_SD):
    """Returns the block's input x [D] and the factors a [S] of the block's output, for the streams
    of one token. a is None after the last layer.
    """
    size = np.sqrt(np.mean(h_SD * h_SD, axis=-1, keepdims=True) + config.rms_norm_eps)
    n_SD = h_SD / size * (1 + p["norm"].reshape(h_SD.shape))
    streams = len(h_SD)
    inner_R = np.einsum("sd,sdr->r", n_SD, p["down"]) / streams
    inner_R = inner_R / (1 + np.exp(-inner_R))
    w_SD = 1 / (1 + np.exp(-np.einsum("r,rsd->sd", inner_R, p["up"])))
    x_D = np.mean(w_SD * n_SD, axis=0)
    if "inject" not in p:
        return x_D, None
    a_S = 2 / (1 + np.exp(-np.einsum("sd,sdz->z", n_SD, p["inject"]) / streams))
    return x_D, a_S


def head_input_reference(config, params, h_SD, blocks):
    """Returns the head's input [D] for one token, computed by NumPy in the dtype of the inputs.

    Args:
      params: list of the parameters of each block's `StreamMix`, and last the parameters of the
        head's `StreamMix`.
      h_SD: the token's streams before the first block.
      blocks: functions x [D] → output [D].
    """
    for p, block in zip(params[:-1], blocks):
        x_D, a_S = _block_input_and_factors_reference(config, p, h_SD)
        h_SD = h_SD + a_S[:, None] * block(x_D)[None]
    return _block_input_and_factors_reference(config, params[-1], h_SD)[0]
