"""Hyper-connections with a doubly stochastic mixture (mHC, arXiv 2512.24880, equations 7 to 9):
several residual streams, which a matrix mixes around every mixer and every MLP.

Every one of the S streams starts as the embedding. X [S, D] holds the streams of a token, and
vec(X) [S·D] is their numbers in one row. Around every block f (a mixer or an MLP with its norm N),

    u = vec(X) φ / rms(vec(X))                     φ is a matrix [S·D, S + S + S²]
    H_pre  = sigmoid(α_pre u_pre + b_pre)          [S]
    H_post = 2 sigmoid(α_post u_post + b_post)     [S]
    H_res  = sinkhorn(α_res u_res + b_res)         [S, S], u_res row by row
    X ← H_res X + H_postᵀ f(N(H_pre X))

sinkhorn(L) takes exp(L), and then, `model.streams.sinkhorn_iterations` times, divides every column
by the column's sum and every row by the row's sum. All numbers of H_res are positive, its rows sum
to 1, and its columns nearly do. Because the rows of H_res sum to 1, mixing does not make the
streams grow, whatever the number of layers.

The head reads the norm of the sum of the streams, as in the hyper-connections of 2409.19606. The
layer of the multi-token prediction module has streams of its own, which all start as the module's
input. The weight of the norm of vec(X) is part of φ, as in the paper.

The factors α_pre, α_post and α_res start at 0.01, as in the paper. The paper does not give the
start values of the biases b_pre, b_post and b_res. In this code, b_pre and b_post start at 0, and
b_res starts at 0 except for its diagonal (`INITIAL_DIAGONAL`). So at the start of training, the
streams are equal and hardly mix, and each stream is nearly the residual stream of the placement
"pre".

Letters: B batch, T time, S streams, D model, E = S·D, X = S + S + S².
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.block import Block
from qwen3next_jax.model.layers import call_saving_only_inputs, rms_norm
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops.blocks import accumulation_dtype, save_for_backward

INITIAL_ALPHA = 0.01  # the start of every α
INITIAL_DIAGONAL = 5.0  # the start of the diagonal of b_res: 4 streams keep 98 % of themselves

# A configuration for the tests, with numbers that are not the defaults.
EXAMPLES = {
    "mhc": {"block": {"placement": "mhc"}, "streams": {"hc_count": 3, "sinkhorn_iterations": 7}}
}


class HyperConnection(nnx.Module):
    """Computes the maps H_pre, H_post and H_res of the streams around one block (a mixer or an
    MLP). The module also holds the norm of the block's input.
    """

    def __init__(self, config: ModelConfig, make: Make):
        self.config = config
        s, d = config.streams.hc_count, config.hidden_size
        widths = s, s, s * s
        self.norm = make.norm(d)
        self.phi = make.matrix(
            (s, d, sum(widths)), ". embed -> .", parts=tuple(zip(("pre", "post", "res"), widths))
        )
        bias_X = jnp.concatenate((jnp.zeros(2 * s), (INITIAL_DIAGONAL * jnp.eye(s)).reshape(-1)))
        self.alpha = make.parameter(
            lambda shape: jnp.full(shape, INITIAL_ALPHA), (3,), ".", kind="rate"
        )
        self.bias = make.parameter(
            lambda shape: jnp.broadcast_to(bias_X, shape), bias_X.shape, ".", kind="rate"
        )

    def pre_post_and_res_maps(self, h_BTE: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes the maps H_pre, H_post and H_res of every token from the token's streams h [B,
        T, E].

        Returns:
          H_pre [S, B, T]; H_post [S, B, T]; H_res [S, S, B, T], with the new streams along the
          first axis and the old streams along the second. All maps are float32 or, if h is wider,
          have the dtype of h. The axes of the streams come first, because an accelerator pads the
          last two axes of an array.
        """
        exact, s = accumulation_dtype(h_BTE), self.config.streams.hc_count
        slices = jnp.split(h_BTE, s, axis=-1)
        u_BTX = sum(
            jnp.matmul(h_BTD, phi_DX.astype(h_BTE.dtype), preferred_element_type=exact)
            for h_BTD, phi_DX in zip(slices, self.phi[...])
        )
        square_BT = jnp.mean(jnp.square(h_BTE.astype(exact)), axis=-1)
        u_XBT = jnp.moveaxis(save_for_backward(u_BTX), -1, 0) * jax.lax.rsqrt(
            square_BT + self.config.rms_norm_eps
        )
        alpha_X = jnp.repeat(
            self.alpha[...], np.array([s, s, s * s]), total_repeat_length=len(u_XBT)
        )
        logits_XBT = alpha_X[:, None, None] * u_XBT + self.bias[...][:, None, None]
        pre_SBT, post_SBT, res_XBT = jnp.split(logits_XBT, (s, 2 * s))
        res_SSBT = jax.checkpoint(sinkhorn, static_argnums=1)(
            res_XBT.reshape(s, s, *square_BT.shape), self.config.streams.sinkhorn_iterations
        )
        return jax.nn.sigmoid(pre_SBT), 2 * jax.nn.sigmoid(post_SBT), res_SSBT


def sinkhorn(logits: jax.Array, iterations: int) -> jax.Array:
    """Returns matrices [S, S, …] of positive numbers whose rows sum to 1 and whose columns nearly
    do. The function divides the columns of exp(logits) by their sums, then the rows, `iterations`
    times. It computes with logarithms, so that no sum overflows or becomes 0.

    Args:
      logits: [S, S, …]; the first axis numbers the rows, the second axis the columns.
      iterations: how often the columns and the rows are divided.
    """

    def divided(logits, axis):
        return logits - jax.nn.logsumexp(logits, axis=axis, keepdims=True)

    # a column is summed over its rows, axis 0; the softmax divides the rows once more
    logits = jax.lax.fori_loop(
        1, iterations, lambda _, logits: divided(divided(logits, 1), 0), divided(logits, 0)
    )
    return jax.nn.softmax(logits, axis=1)


def _block_input(h_BTE: jax.Array, pre_SBT: jax.Array) -> jax.Array:
    """Returns H_pre X, [B, T, D]."""
    slices = jnp.split(h_BTE, len(pre_SBT), axis=-1)
    return _weighted_sum(pre_SBT, slices).astype(h_BTE.dtype)


def _streams_after_block(
    h_BTE: jax.Array, y_BTD: jax.Array, post_SBT: jax.Array, res_SSBT: jax.Array
) -> jax.Array:
    """Returns the new streams H_res X + H_postᵀ y, [B, T, E], for the streams X and the output y of
    the block.
    """
    slices = jnp.split(h_BTE, len(post_SBT), axis=-1)
    y_BTD = y_BTD.astype(post_SBT.dtype)
    new = [
        (_weighted_sum(row_SBT, slices) + own_BT[..., None] * y_BTD).astype(h_BTE.dtype)
        for row_SBT, own_BT in zip(res_SSBT, post_SBT)
    ]
    return jnp.concatenate(new, axis=-1)


def _weighted_sum(weight_SBT: jax.Array, slices: list[jax.Array]) -> jax.Array:
    """Returns the weighted sum of the streams, [B, T, D]."""
    return sum(
        w_BT[..., None] * h_BTD.astype(w_BT.dtype) for w_BT, h_BTD in zip(weight_SBT, slices)
    )


class MHC(Block):
    """A layer whose mixer and MLP read and write several residual streams, which a doubly
    stochastic matrix mixes.
    """

    def make_norm(self, make):
        return HyperConnection(self.config, make)

    def input_and_add_output(self, h_BTE, part, context):
        connection = getattr(self, f"{part}_norm")
        pre_SBT, post_SBT, res_SSBT = connection.pre_post_and_res_maps(h_BTE)
        x_BTD = call_saving_only_inputs(_block_input, h_BTE, pre_SBT)
        return rms_norm(
            x_BTD, connection.norm[...], self.config
        ), lambda y_BTD: call_saving_only_inputs(
            _streams_after_block, h_BTE, y_BTD, post_SBT, res_SSBT
        )

    @staticmethod
    def residual_from_embeddings(x_BTD, config):
        return jnp.tile(x_BTD, config.streams.hc_count)

    @staticmethod
    def head_input(h_BTE, last, config):
        slices = jnp.split(h_BTE, config.streams.hc_count, axis=-1)
        x_BTD = sum(h_BTD.astype(accumulation_dtype(h_BTE)) for h_BTD in slices).astype(h_BTE.dtype)
        return rms_norm(x_BTD, last[...], config)

    @staticmethod
    def residual_flops(config, num_layers):
        """Counts the FLOPs of mixing the streams, H_pre X, H_res X and H_postᵀ y, around the mixer
        and the MLP of every layer.
        """
        s = config.streams.hc_count
        return num_layers * 2 * 2.0 * (s + s * s + s) * config.hidden_size


# ---- reference
# --------------------------------------------------------------------------------------------------


def streams_after_blocks_reference(config, params, h_SD, blocks):
    """Returns the streams of one token after some blocks, [S, D], in the dtype of the inputs.

    Args:
      params: list of the parameters of each block's connection.
      h_SD: the token's streams before the first block.
      blocks: functions from the input N(H_pre X) [D] of a block to its output [D].
    """
    streams = config.streams.hc_count
    for p, block in zip(params, blocks):
        row_E = h_SD.reshape(-1)
        n_E = row_E / jnp.sqrt(jnp.mean(row_E**2) + config.rms_norm_eps)
        u_X = n_E @ p["phi"].reshape(row_E.size, -1)
        pre_S, post_S = u_X[:streams], u_X[streams : 2 * streams]
        res_SS = u_X[2 * streams :].reshape(streams, streams)
        pre_S = 1 / (1 + jnp.exp(-(p["alpha"][0] * pre_S + p["bias"][:streams])))
        post_S = 2 / (1 + jnp.exp(-(p["alpha"][1] * post_S + p["bias"][streams : 2 * streams])))
        res_SS = jnp.exp(
            p["alpha"][2] * res_SS + p["bias"][2 * streams :].reshape(streams, streams)
        )
        for _ in range(config.streams.sinkhorn_iterations):
            res_SS = res_SS / jnp.sum(res_SS, axis=0, keepdims=True)
            res_SS = res_SS / jnp.sum(res_SS, axis=1, keepdims=True)
        x_D = pre_S @ h_SD
        x_D = x_D / jnp.sqrt(jnp.mean(x_D**2) + config.rms_norm_eps) * (1 + p["norm"])
        h_SD = res_SS @ h_SD + jnp.outer(post_S, block(x_D))
    return h_SD
