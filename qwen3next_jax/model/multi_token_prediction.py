"""Multi-token prediction: one extra decoder layer, applied once per depth, that predicts tokens
beyond the next one.

At depth d = 0, 1, … position t combines the state of depth d-1 (the trunk's final-normed state
at d = 0) with the embedding of token t+1+d, and predicts token t+2+d. Depths share the module,
as in the released model's multi-step training. In training each depth attends to the keys of its
own depth, so that it is a plain causal layer that any attention kernel can run. In drafting all
depths share one list of keys and values: those of depth 0 for the tokens so far, then those of the
current round's drafts (docs/design.md).

Letters: B batch, T time, D model.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layers import Context, rms_norm
from qwen3next_jax.model.parameters import Make
from qwen3next_jax.ops.blocks import save_for_backward
from qwen3next_jax.sharding.rules import constrain


class MultiTokenPrediction(nnx.Module):
    """norm → fc([embedding ; state]) → a layer of `full_mixer` → norm. A mixer that depends on
    its layer's number gets the number of the model's last layer, as its formulas end there.

    Where the residual stream is wider than the model, a subclass overrides `make_input`, `input`
    and `state`.
    """

    def __init__(self, config: ModelConfig, make: Make):
        self.config = config
        self.make_input(make)
        placement = config.block.resolve("placement")
        self.block = placement(
            config, *config.layer_kinds[-1], make, (config.num_hidden_layers - 1,)
        )
        self.norm = placement.make_last(config, make)

    def __call__(
        self,
        state_BTD: jax.Array,
        embedded_BTD: jax.Array,
        context: Context,
        cache: dict | None = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], dict | None]:
        """One depth.

        Args:
          state_BTD: the states of the depth before.
          embedded_BTD: for each position the embedding of the token that it is combined with.

        Returns:
          The normed states [B, T, D] for the head, the states for the next depth, the block's
          auxiliary outputs, the cache.
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
        """The layer's residual stream, aux, cache."""
        return self.block(self.input(state_BTD, embedded_BTD, context), context, cache)

    def leave(self, x_BTD: jax.Array) -> jax.Array:
        """What the head reads, of the layer's residual stream."""
        return self.config.block.resolve("placement").leave(x_BTD, self.norm, self.config)

    @staticmethod
    def state(x_BTD: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
        """What the next depth reads of a depth, or depth 0 of the trunk: its residual stream, or
        what its head reads.
        """
        return hidden_BTD

    def make_input(self, make: Make) -> None:
        """The parameters of `input`."""
        d = self.config.hidden_size
        self.embedding_norm = make.norm(d)
        self.hidden_norm = make.norm(d)
        self.fc = make.matrix((2 * d, d), "embed -> embed_out")  # the embedding's half first

    def input(self, hidden_BTD: jax.Array, embedded_BTD: jax.Array, context: Context) -> jax.Array:
        """The residual stream before the module's layer."""
        pair = jnp.concatenate(
            (
                rms_norm(embedded_BTD, self.embedding_norm[...], self.config),
                rms_norm(hidden_BTD, self.hidden_norm[...], self.config),
            ),
            axis=-1,
        )
        return save_for_backward(
            constrain(
                pair @ self.fc[...].astype(hidden_BTD.dtype),
                context.mesh,
                "batch",
                context.time,
                None,
            )
        )


def targets_in_document(segment_ids_BT: jax.Array, offset: int) -> jax.Array:
    """[B, T] bool: whether token t + `offset` exists in the row, is not padding, and belongs to the
    same document as token t.
    """
    later_BT = jnp.pad(
        segment_ids_BT[:, offset:], ((0, 0), (0, min(offset, segment_ids_BT.shape[1])))
    )
    return (segment_ids_BT > 0) & (later_BT == segment_ids_BT)


def target_positions(batch: dict[str, jax.Array], offset: int) -> jax.Array:
    """[B, T] bool: whether the loss of position t counts. Token t + `offset` must lie in the
    document of token t and, where the batch has a `target_mask` [B, T] (synthetic tasks), be
    marked there.
    """
    inside_BT = targets_in_document(batch["segment_ids"], offset)
    return (
        inside_BT & jnp.roll(batch["target_mask"], -offset, axis=1)
        if "target_mask" in batch
        else inside_BT
    )
