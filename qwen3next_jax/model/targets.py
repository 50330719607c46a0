"""The target that each position of a batch predicts, and the target's weight in the loss. A
position has no target if its target token would be padding, masked, or a token of another document.

A position t predicts token t + `offset`: the offset is 1 for the next token, and 2 + d for depth d
of multi-token prediction.

Letters: B batch, T time.
"""

import jax
import jax.numpy as jnp


def has_target_in_document(segment_ids_BT: jax.Array, offset: int) -> jax.Array:
    """Returns [B, T] bool: whether the row has a token t + `offset` that belongs to the same
    document as token t. Padding belongs to no document.
    """
    later_BT = jnp.pad(
        segment_ids_BT[:, offset:], ((0, 0), (0, min(offset, segment_ids_BT.shape[1])))
    )
    return (segment_ids_BT > 0) & (later_BT == segment_ids_BT)


def has_target(batch: dict[str, jax.Array], offset: int) -> jax.Array:
    """Returns [B, T] bool: whether token t + `offset` is a target, which position t predicts. A
    target belongs to the same document as token t. In a batch with a `target_mask` [B, T], as in
    synthetic tasks, the mask must also mark the target.
    """
    inside_BT = has_target_in_document(batch["segment_ids"], offset)
    return (
        inside_BT & jnp.roll(batch["target_mask"], -offset, axis=1)
        if "target_mask" in batch
        else inside_BT
    )


def mask_ignored_targets(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Replaces the `loss_weights` of a batch by a `target_mask` that excludes the tokens of weight
    0. A batch without `loss_weights` is returned unchanged.
    """
    if "loss_weights" not in batch:
        return batch
    counts_BT = batch["loss_weights"] > 0
    rest = {name: values for name, values in batch.items() if name != "loss_weights"}
    return rest | {"target_mask": rest.get("target_mask", True) & counts_BT}


def target_tokens(batch: dict[str, jax.Array], offset: int) -> jax.Array:
    """Returns [B, T] int32: the token t + `offset`, which position t predicts. In a batch with
    `labels` [B, T], as in state-tracking tasks, the target is the label of token t + `offset`.
    """
    return jnp.roll(batch.get("labels", batch["tokens"]), -offset, axis=1)


def target_weights(batch: dict[str, jax.Array], offset: int) -> jax.Array:
    """Returns [B, T] float32: for position t, the weight of the target t + `offset` in the loss.
    The weight is 0 if token t + `offset` is no target (`has_target`). The weight of a target is 1,
    or the token's entry of `loss_weights`, if the batch has such weights.
    """
    weight_BT = has_target(batch, offset).astype(jnp.float32)
    if "loss_weights" in batch:
        weight_BT *= jnp.roll(batch["loss_weights"], -offset, axis=1)
    return weight_BT
