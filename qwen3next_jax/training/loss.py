"""The training objective, as sums that add up exactly over micro-batches and devices.

    total = CE + w_mtp · mean_d MTP_d + w_balance · mean_l balance_l + w_z · mean_l z_l
            + w_indexer · mean_a indexer_a

CE and MTP_d are means over the targets of the whole batch, balance_l and z_l over its tokens (l
runs over the sparse layers, the MTP module's included). indexer_a is the loss with which a layer
of sparse attention trains its indexer, a mean over the tokens of the batch that have something to
select (`Mixer.loss_tokens`; only where `TrainConfig.indexer_training` asks for it). Every piece is
divided by the batch's own counts, which follow from the segment ids alone, so a micro-batch
contributes a share and the shares sum to the batch's value.

Letters: B batch, T time, D model, E experts, L layers with experts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qwen3next_jax.config import ModelConfig, TrainConfig
from qwen3next_jax.model import Features, Qwen3Next
from qwen3next_jax.model.block import has_indexer, mixer_class
from qwen3next_jax.model.layers import document_positions
from qwen3next_jax.model.multi_token_prediction import target_positions, targets_in_document


class Counts(NamedTuple):
    """Counts over the whole batch. Sums are divided by all of them but `has_targets`, which are
    float32 scalars.

    has_targets: bool, whether the next-token loss has any target.
    mixer_tokens, mtp_mixer_tokens: those of the indexers' loss, of a layer of the trunk and over
    all MTP depths; None where there is no such loss.
    """

    targets: jax.Array
    mtp_targets: tuple[jax.Array, ...]
    tokens: jax.Array
    mtp_tokens: jax.Array
    has_targets: jax.Array
    mixer_tokens: jax.Array | None = None
    mtp_mixer_tokens: jax.Array | None = None


def count_targets(
    batch: dict[str, jax.Array], mtp_depth: int, model: ModelConfig | None = None
) -> Counts:
    """What the sums over this batch are divided by (at least 1, so that padding alone gives 0),
    and whether it has anything to predict. `model`: whose indexers' loss is counted, too.
    """

    def total(mask):
        return jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)

    depths = range(mtp_depth)
    targets = jnp.sum(target_positions(batch, 1), dtype=jnp.float32)
    counts = Counts(
        jnp.maximum(targets, 1.0),
        tuple(total(target_positions(batch, 2 + d)) for d in depths),
        total(batch["segment_ids"] > 0),
        sum(
            (total(targets_in_document(batch["segment_ids"], 2 + d)) for d in depths), jnp.zeros(())
        ),
        targets > 0,
    )
    if model is None or not has_indexer(model):
        return counts
    mixers = [mixer_class(name) for name, _ in model.layer_kinds]
    mixer = next(mixer for mixer in mixers if mixer.has_loss)
    positions = document_positions(batch["segment_ids"])
    learning = functools.partial(mixer.loss_tokens, model, positions)
    behind = [learning(targets_in_document(batch["segment_ids"], 2 + d)) for d in depths]
    return counts._replace(
        mixer_tokens=total(learning(batch["segment_ids"] > 0)),
        mtp_mixer_tokens=sum(map(total, behind), jnp.zeros(())),
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
        layer_rows, if the batch has them: see `Context`.
      train: the weights of the parts of the loss, and `remat`.
      counts: the counts of the whole batch.
      load: [L, E] `expert_load` of the whole batch; None if this batch is the whole batch.
      mesh: the devices that share the batch; None: one device.

    Returns:
      (total, parts): parts are sums over the batch's shares: `loss`, `mtp_loss/d`, `mtp_top1/d`
      (share of targets hit by the depth's best guess), `top1`, `balance_loss`, `router_z`,
      `indexer_loss` (where an indexer is trained), and `expert_load` [L, E].
    """
    features = model.features(
        batch["tokens"],
        batch["segment_ids"],
        remat=train.remat,
        mesh=mesh,
        indexer=train.indexer_training,
        layer_rows=batch.get("layer_rows"),
    )

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
    indexer_losses = [loss / counts.mixer_tokens for loss in features.mixer_losses]
    if features.mtp_mixer_loss is not None:
        indexer_losses.append(features.mtp_mixer_loss / counts.mtp_mixer_tokens)
    if indexer_losses:
        parts["indexer_loss"] = sum(indexer_losses) / len(indexer_losses)
        total = total + train.indexer_loss_weight * parts["indexer_loss"]
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
