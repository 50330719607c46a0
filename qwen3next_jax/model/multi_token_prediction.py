"""Multi-token prediction (MTP): one extra decoder layer that predicts tokens after the next one. It
is applied several times; the applications are called depths d = 0, 1, …

At depth d, position t combines the state of depth d-1 with the embedding of token t+1+d, and
predicts token t+2+d. The state before depth 0 is the state of the model's last layer after the
final norm. All depths use the same parameters, as in the released model's multi-step training.

In training, each depth attends only to its own keys and values, so the layer is an ordinary causal
layer that any attention kernel can run. In speculative decoding, all depths share one cache of keys
and values. It holds the keys and values that depth 0 computed for the accepted tokens, followed by
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
    mixer is `config.full_mixer`. A mixer whose formulas depend on the layer's number gets the
    number of the model's last layer.

    If the residual stream is wider than the model, the module's stream starts as the trunk's does
    (`model.block.Block.enter`). A subclass may combine the whole streams of the trunk instead: it
    overrides `make_input`, `input` and `state`.
    """

    def __init__(self, config: ModelConfig, make: Make):
        self.config = config
        self.make_input(make)
        placement = config.block.import_part("placement")
        self.block = placement(
            config, *config.mixers_and_sparsity[-1], make, (config.num_hidden_layers - 1,)
        )
        self.norm = placement.make_last(config, make)

    def __call__(
        self,
        state_BTD: jax.Array,
        embedded_BTD: jax.Array,
        context: Context,
        cache: dict | None = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], dict | None]:
        """Applies the module at one depth.

        Args:
          state_BTD: the states of the depth before.
          embedded_BTD: for each position the embedding of the token that its state is combined
            with.
          context: the inputs that all layers of the forward pass share.
          cache: the cache of the module's layer; None in training.

        Returns:
          The states [B, T, D] after the norm, which the output head reads; the states for the next
          depth; the block's auxiliary outputs; the cache after these tokens.
        """
        x_BTD, aux, cache = self.before_norm(state_BTD, embedded_BTD, context, cache)
        hidden_BTD = self.leave(x_BTD)
        return hidden_BTD, self.state(x_BTD, hidden_BTD), aux, cache

    def before_norm(
        self,
        state_BTD: jax.Array,
        embedded_BTD: jax.Array,
        context: Context,
        cache: dict | None = None,
    ):
        """Returns (the residual stream after the module's layer, the layer's auxiliary outputs, the
        cache). It takes the arguments of `__call__`.
        """
        return apply_block(self.block, self.input(state_BTD, embedded_BTD, context), context, cache)

    def leave(self, x_BTD: jax.Array) -> jax.Array:
        """Returns what the output head reads, from the residual stream after the module's layer:
        its norm, [B, T, D].
        """
        return self.config.block.import_part("placement").leave(x_BTD, self.norm, self.config)

    @staticmethod
    def state(x_BTD: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
        """Returns the state that the next depth reads. Depth 0 reads the state of the model's last
        layer.

        Args:
          x_BTD: the residual stream after the layer of the previous depth, or after the last layer.
          hidden_BTD: what the output head reads there. This class returns it.
        """
        return hidden_BTD

    def make_input(self, make: Make) -> None:
        """Makes the parameters of `input`."""
        d = self.config.hidden_size
        self.embedding_norm = make.norm(d)
        self.hidden_norm = make.norm(d)
        self.fc = make.matrix((2 * d, d), "embed -> embed_out")  # the embedding's half first

    def input(self, hidden_BTD: jax.Array, embedded_BTD: jax.Array, context: Context) -> jax.Array:
        """Combines states and embeddings [B, T, D] to the residual stream before the module's
        layer.
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
                context.time,
                None,
            )
        )
        return self.config.block.import_part("placement").enter(x_BTD, self.config)
