"""Multi-token prediction (MTP): one extra decoder layer that predicts tokens after the next one.
The layer is applied several times; the applications are called depths d = 0, 1, …

At depth d, position t combines the state of depth d-1 with the embedding of token t+1+d, and
predicts token t+2+d. Depth 0 reads the state of the model's last layer after the final norm. All
depths use the same parameters, as in the released model's multi-step training.

In training, each depth attends only to its own keys and values, so the layer is an ordinary causal
layer that any attention kernel can run. In speculative decoding, all depths share one cache of keys
and values. The cache holds the keys and values that depth 0 computed for the accepted tokens, then
the keys and values of the tokens that are being drafted (docs/design.md).

Letters: B batch, T time, D model.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.apply_block import apply_block
from qwen3next_jax.model.layers import Context, rms_norm
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.sharding.rules import constrain


class MultiTokenPrediction(nnx.Module):
    """The MTP module: fc([norm(embedding) ; norm(state)]) → one decoder layer → norm. The layer's
    mixer is `config.full_mixer`. If the mixer depends on the index of its layer, the module's layer
    has the index of the model's last layer.

    If the residual stream is wider than the model, the module makes its stream from fc's output, as
    the trunk makes its stream from the embeddings (`model.block.Block.residual_from_embeddings`). A
    subclass may read the trunk's whole stream instead: it overrides `make_input_projection`,
    `join_state_and_embedding` and `next_depth_state`.
    """

    def __init__(self, config: ModelConfig, make: Make):
        self.config = config
        self.make_input_projection(make)
        placement = config.block.import_part("placement")
        self.block = placement(
            config, *config.mixers_and_sparsity[-1], make, (config.num_hidden_layers - 1,)
        )
        self.norm = placement.make_final_norm(config, make)

    def __call__(
        self,
        state_BTD: jax.Array,
        embedded_BTD: jax.Array,
        context: Context,
        cache: dict | None = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], dict | None]:
        """Applies the module at one depth.

        Args:
          state_BTD: the states of the previous depth.
          embedded_BTD: for each position the embedding of the token to combine with its state.
          context: the inputs that all layers of the forward pass share.
          cache: the cache of the module's layer; None in training.

        Returns:
          The states [B, T, D] after the norm, which the output head reads; the states that the next
          depth reads; the layer's auxiliary outputs; the cache after these tokens.
        """
        x_BTD, aux, cache = self.run_layer(state_BTD, embedded_BTD, context, cache)
        hidden_BTD = self.head_input(x_BTD)
        return hidden_BTD, self.next_depth_state(x_BTD, hidden_BTD), aux, cache

    def run_layer(
        self,
        state_BTD: jax.Array,
        embedded_BTD: jax.Array,
        context: Context,
        cache: dict | None = None,
    ):
        """Does the same as `__call__` without the norm. The results are the residual stream after
        the module's layer, the layer's auxiliary outputs, and the cache after these tokens.
        """
        return apply_block(
            self.block,
            self.join_state_and_embedding(state_BTD, embedded_BTD, context),
            context,
            cache,
        )

    def head_input(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the input of the output head, [B, T, D]: the norm of the residual stream after
        the module's layer.
        """
        return self.config.block.import_part("placement").head_input(x_BTD, self.norm, self.config)

    @staticmethod
    def next_depth_state(x_BTD: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
        """Returns the state that the next depth reads; this class returns `hidden_BTD`. For depth
        0, `x_BTD` and `hidden_BTD` come from the trunk's last layer.

        Args:
          x_BTD: the residual stream after the layer.
          hidden_BTD: the input of the output head, computed from `x_BTD`.
        """
        return hidden_BTD

    def make_input_projection(self, make: Make) -> None:
        """Makes the parameters of `join_state_and_embedding`: two norms and the matrix fc."""
        d = self.config.hidden_size
        self.embedding_norm = make.norm(d)
        self.hidden_norm = make.norm(d)
        self.fc = make.matrix((2 * d, d), "embed -> embed_out")  # the embedding's half first

    def join_state_and_embedding(
        self, hidden_BTD: jax.Array, embedded_BTD: jax.Array, context: Context
    ) -> jax.Array:
        """Returns the residual stream before the module's layer, computed from states and
        embeddings [B, T, D] by norms and the matrix fc.
        """
        pair = jnp.concatenate(
            (
                rms_norm(embedded_BTD, self.embedding_norm[...], self.config),
                rms_norm(hidden_BTD, self.hidden_norm[...], self.config),
            ),
            axis=-1,
        )
        x_BTD = save_for_backward(
            constrain(
                pair @ self.fc[...].astype(hidden_BTD.dtype),
                context.mesh,
                "batch",
                context.logical_time_axis,
                None,
            )
        )
        return self.config.block.import_part("placement").residual_from_embeddings(
            x_BTD, self.config
        )
