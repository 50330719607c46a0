"""What each position of a batch is to predict, and with which weight. This is where padding, tokens
of other documents and tokens that do not count are kept out of the loss, at every depth.

A position t predicts token t + `offset`: the offset is 1 for the next token, and 2 + d for depth d
of multi-token prediction.

Letters: B batch, T time.
"""

import jax
import jax.numpy as jnp


def targets_in_document(segment_ids_BT: jax.Array, offset: int) -> jax.Array:
    """Returns [B, T] bool: whether the row has a token t + `offset` that belongs to the same
    document as token t. Padding belongs to no document.
    """
    later_BT = jnp.pad(
        segment_ids_BT[:, offset:], ((0, 0), (0, min(offset, segment_ids_BT.shape[1])))
    )
    return (segment_ids_BT > 0) & (later_BT == segment_ids_BT)


def target_positions(batch: dict[str, jax.Array], offset: int) -> jax.Array:
    """Returns [B, T] bool: whether token t + `offset` is a target that position t is to predict. It
    is one if it belongs to the same document as token t and, in a batch with a `target_mask` [B, T]
    (synthetic tasks have one), the mask marks it.
    """
    inside_BT = targets_in_document(batch["segment_ids"], offset)
    return (
        inside_BT & jnp.roll(batch["target_mask"], -offset, axis=1)
        if "target_mask" in batch
        else inside_BT
    )


def mask_ignored_targets(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns `batch` with a `target_mask` that excludes tokens with the loss weight 0, and without
    its `loss_weights`; `batch` itself if it has none.
    """
    if "loss_weights" not in batch:
        return batch
    counts_BT = batch["loss_weights"] > 0
    rest = {name: values for name, values in batch.items() if name != "loss_weights"}
    return rest | {"target_mask": rest.get("target_mask", True) & counts_BT}


def later_tokens(batch: dict[str, jax.Array], offset: int) -> jax.Array:
    """Returns [B, T] int32: the token t + `offset` that position t is to predict. In a batch with
    `labels` [B, T] (tasks of a state have them), it is the label there.
    """
    return jnp.roll(batch.get("labels", batch["tokens"]), -offset, axis=1)


def target_weights(batch: dict[str, jax.Array], offset: int) -> jax.Array:
    """Returns [B, T] float32: the weight of the loss with which position t predicts token
    t + `offset`; 0 where that is no target (`target_positions`). In a batch with `loss_weights`
    [B, T] it is the weight of token t + `offset`, in all others 1.
    """
    weight_BT = target_positions(batch, offset).astype(jnp.float32)
    if "loss_weights" in batch:
        weight_BT *= jnp.roll(batch["loss_weights"], -offset, axis=1)
    return weight_BT
