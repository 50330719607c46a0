"""The training objective, as sums that add up exactly over micro-batches and devices.

    total = CE + w_mtp · mean_d MTP_d + w_balance · mean_l balance_l + w_z · mean_l z_l

CE is the cross-entropy of the next token, and MTP_d that of the multi-token prediction at depth d;
both are means over the targets of the whole batch. balance_l and z_l are the balance loss and the
router z-loss of layer l, as means over the tokens of the whole batch; l runs over the layers with
experts, including the layer of the MTP module. Each micro-batch divides its sums by counts of the
whole batch, which need no forward pass. The results of all micro-batches therefore sum to the value
of the whole batch.

Letters: B batch, T time, D model, E experts, L layers with experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qwen3next_jax.config import ModelConfig, TrainConfig
from qwen3next_jax.model import Features, Qwen3Next
from qwen3next_jax.model.multi_token_prediction import target_positions, targets_in_document


class Counts(NamedTuple):
    """Counts over the whole batch. Sums are divided by all of them but `has_targets`, which are
    float32 scalars.

    Attributes:
      targets: number of targets of the next-token loss, at least 1.
      mtp_targets: number of targets of each MTP depth, each at least 1.
      tokens: number of tokens that are not padding, at least 1.
      mtp_tokens: sum over all MTP depths of the number of tokens whose target lies in the same
        document, each number at least 1.
      has_targets: bool scalar, whether the next-token loss has any target.
    """

    targets: jax.Array
    mtp_targets: tuple[jax.Array, ...]
    tokens: jax.Array
    mtp_tokens: jax.Array
    has_targets: jax.Array


def count_targets(batch: dict[str, jax.Array], mtp_depth: int) -> Counts:
    """Returns the counts of `batch`. A count by which sums are divided is at least 1, so the loss
    of a batch of padding alone is 0.
    """

    def total(mask):
        return jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)

    depths = range(mtp_depth)
    targets = jnp.sum(target_positions(batch, 1), dtype=jnp.float32)
    return Counts(
        jnp.maximum(targets, 1.0),
        tuple(total(target_positions(batch, 2 + d)) for d in depths),
        total(batch["segment_ids"] > 0),
        sum(
            (total(targets_in_document(batch["segment_ids"], 2 + d)) for d in depths), jnp.zeros(())
        ),
        targets > 0,
    )


def expert_load(features: Features, config: ModelConfig, counts: Counts) -> jax.Array:
    """Returns each expert's share of all choices of experts in the whole batch, times E: [L, E]. If
    the load is perfectly balanced, all entries are 1. The results for the micro-batches of a batch
    sum to the result for the whole batch.
    """
    stacked = _per_layer(features, counts, "load")
    return jax.lax.stop_gradient(stacked * (config.num_experts / config.num_experts_per_tok))


def total_loss(
    model: Qwen3Next,
    batch: dict[str, jax.Array],
    train: TrainConfig,
    counts: Counts,
    load: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes what this batch or micro-batch contributes to the loss and to its parts.

    Args:
      model: the model.
      batch: tokens and segment_ids, [B, T] int32. Targets are the tokens that follow in the same
        document; if the batch has target_mask, [B, T] bool, only the targets that it marks count.
      train: the weights of the parts of the loss, and `remat`.
      counts: the counts of the whole batch.
      load: [L, E] `expert_load` of the whole batch; None if this batch is the whole batch.
      mesh: the devices that share the batch; None: one device.

    Returns:
      (total, parts). Over the micro-batches of a batch, the results sum to those of the batch.
      parts has the entries `loss` (CE), `top1` (share of the targets that the most probable token
      hits), `mtp_loss/d` and `mtp_top1/d` (the same for MTP depth d), `balance_loss`, `router_z`,
      `expert_load` [L, E], and `total_loss`.
    """
    features = model.features(batch["tokens"], batch["segment_ids"], remat=train.remat, mesh=mesh)

    def cross_entropy(hidden_BTD, offset, targets):
        """Returns what this batch contributes to (mean cross-entropy, top-1 accuracy). The target
        of a token is the token `offset` positions later in the same document.
        """
        weight_BT = target_positions(batch, offset).astype(jnp.float32) / targets
        total, correct_BT, *_ = model.cross_entropy(
            hidden_BTD, jnp.roll(batch["tokens"], -offset, axis=1), weight_BT, mesh
        )
        return total, jnp.sum(correct_BT * weight_BT)

    loss, top1 = cross_entropy(features.hidden, 1, counts.targets)
    parts = {"loss": loss, "top1": top1}
    mtp_losses = []
    for d, hidden_BTD in enumerate(features.mtp_hidden):
        mtp_loss, mtp_top1 = cross_entropy(hidden_BTD, 2 + d, counts.mtp_targets[d])
        mtp_losses.append(mtp_loss)
        parts |= {f"mtp_loss/{d}": mtp_loss, f"mtp_top1/{d}": mtp_top1}
    total = loss + train.mtp_loss_weight * sum(mtp_losses) / max(len(mtp_losses), 1)
    if features.router or features.mtp_router:
        own_load = expert_load(features, model.config, counts)
        load = own_load if load is None else load
        balance = jnp.mean(jnp.sum(load * _per_layer(features, counts, "probability"), axis=-1))
        router_z = jnp.mean(_per_layer(features, counts, "z"))
        total = total + train.balance_loss_weight * balance + train.router_z_loss_weight * router_z
        parts |= {"balance_loss": balance, "router_z": router_z, "expert_load": own_load}
    return total, parts | {"total_loss": total}


def _per_layer(features: Features, counts: Counts, name: str) -> jax.Array:
    """Returns a router statistic of every layer with experts, divided by the number of tokens of
    the whole batch: [L, …]. The layer of the MTP module is last.
    """
    layers = []
    if features.router:
        layers.append(features.router[name] / counts.tokens)
    if features.mtp_router:
        layers.append(features.mtp_router[name][None] / counts.mtp_tokens)
    return jnp.concatenate(layers)
