"""The training loss, as sums over tokens that can be added over micro-batches and devices.

    total = CE + w_mtp · mean_d MTP_d + w_balance · mean_l balance_l + w_z · mean_l z_l
            + w_indexer · mean_a indexer_a

CE is the cross-entropy of the next token, and MTP_d the cross-entropy of multi-token prediction
(MTP) at depth d; both are means over the targets of the whole batch. balance_l and z_l are the
balance loss and the z-loss of a router, means over the batch's tokens; l runs over the layers with
experts, including the layer of the MTP module. indexer_a is the loss with which a layer of sparse
attention trains its indexer (`config.TrainConfig.indexer_training`), a mean over the tokens that
`Mixer.loss_token_mask` marks; a runs over the layers of sparse attention.

If the data give loss weights (`data.messages_field`), CE and MTP_d are weighted means: the sum of
weight × cross-entropy over the targets, divided by the sum of their weights. The losses of routers
and indexers ignore the loss weights.

Each sum over a micro-batch is divided by a count over the whole batch (`Counts`). Therefore the
losses of the micro-batches sum to the loss of the batch. The counts are known before the forward
pass, from the segment ids, the target mask and the loss weights.

Letters: B batch, T time, D model, E experts, L layers with experts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qwen3next_jax.config import ModelConfig, TrainConfig
from qwen3next_jax.model import Features, Qwen3Next
from qwen3next_jax.model.layer_properties import has_indexer, mixer_class
from qwen3next_jax.model.layers import ForwardOptions, document_positions
from qwen3next_jax.model.targets import (
    has_target_in_document,
    target_tokens,
    target_weights,
)
from qwen3next_jax.sharding.slices import sum_over_slices


class Counts(NamedTuple):
    """Counts of the whole batch, by which the sums of the loss are divided. All fields but
    `has_targets` are float32. A count of 0 becomes 1, so that a batch of padding alone has a loss
    of 0. A sum of loss weights that is not finite becomes NaN; then the loss is NaN too, and the
    guards skip the update.

    Attributes:
      target_weight_sum: the sum of the loss weights of the targets of the next-token loss; without
        loss weights, the number of these targets.
      mtp_target_weight_sums: the sum of the loss weights of the targets of each MTP depth; ()
        without an MTP module.
      tokens: the number of tokens without padding.
      mtp_router_tokens: the number of tokens that the router statistics of the MTP module count,
        summed over the depths; 0 without an MTP module.
      has_targets: bool, whether the next-token loss has any target.
      indexer_tokens: the number of tokens over which one layer's indexer loss is a mean; None if
        the model has no indexer.
      mtp_indexer_tokens: the number of tokens over which the indexer loss of the MTP module is a
        mean, summed over the depths; 0 without an MTP module.
    """

    target_weight_sum: jax.Array
    mtp_target_weight_sums: tuple[jax.Array, ...]
    tokens: jax.Array
    mtp_router_tokens: jax.Array
    has_targets: jax.Array
    indexer_tokens: jax.Array | None = None
    mtp_indexer_tokens: jax.Array | None = None


def count_tokens_and_targets(
    batch: dict[str, jax.Array], mtp_depth: int, model: ModelConfig | None = None
) -> Counts:
    """Computes the counts of a batch.

    Args:
      batch: segment_ids [B, T] int32, and, if the batch has them, target_mask [B, T] bool and
        loss_weights [B, T] float32.
      mtp_depth: the number of MTP depths.
      model: the model whose indexer loss is counted as well; None: the tokens of the indexer loss
        are not counted.
    """

    def total(mask):
        return jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)

    def total_weight(offset):
        found = jnp.sum(target_weights(batch, offset))
        return jnp.where(found == 0, 1.0, jnp.where(jnp.isfinite(found), found, jnp.nan))

    depths = range(mtp_depth)
    targets = jnp.sum(target_weights(batch, 1))
    counts = Counts(
        total_weight(1),
        tuple(total_weight(2 + d) for d in depths),
        total(batch["segment_ids"] > 0),
        sum(
            (total(has_target_in_document(batch["segment_ids"], 2 + d)) for d in depths),
            jnp.zeros(()),
        ),
        targets != 0,
    )
    if model is None or not has_indexer(model):
        return counts
    mixers = [mixer_class(name) for name, _ in model.mixers_and_sparsity]
    mixer = next(mixer for mixer in mixers if mixer.has_indexer_loss)
    positions = document_positions(batch["segment_ids"])
    learning = functools.partial(mixer.loss_token_mask, model, positions)
    behind = [learning(has_target_in_document(batch["segment_ids"], 2 + d)) for d in depths]
    return counts._replace(
        indexer_tokens=total(learning(batch["segment_ids"] > 0)),
        mtp_indexer_tokens=sum(map(total, behind), jnp.zeros(())),
    )


def token_count_metrics(batch: dict[str, jax.Array], counts: Counts) -> dict[str, jax.Array]:
    """Returns the metrics "tokens", the number of tokens of a batch without padding; and, if the
    batch has loss_weights, "target_share", the number of targets with a weight above 0 divided by
    "tokens".
    """
    metrics = {"tokens": counts.tokens}
    if "loss_weights" in batch:
        metrics["target_share"] = (target_weights(batch, 1) > 0).sum() / counts.tokens
    return metrics


def expert_load(features: Features, config: ModelConfig, counts: Counts) -> jax.Array:
    """Returns the load of each expert, [L, E]: E times the expert's share of all (token, expert)
    assignments of its layer in the whole batch. All loads are 1 if the experts are perfectly
    balanced. The loads that this function returns for the micro-batches of a batch sum to the loads
    of the batch. No gradient flows through the loads.
    """
    stacked = _router_mean_by_layer(features, counts, "load")
    return jax.lax.stop_gradient(stacked * (config.num_experts / config.num_experts_per_tok))


def balance_loss(load: jax.Array, probability: jax.Array) -> jax.Array:
    """Returns the balance loss [] of a batch, the mean over the layers. The balance loss is 1 if
    the experts are perfectly balanced (docs/design.md).

    Args:
      load: [L, E] `expert_load` of the whole batch.
      probability: [L, E] the router's probability of each expert, averaged over the tokens of the
        batch.
    """
    return jnp.mean(jnp.sum(load * probability, axis=-1))


def total_loss(
    model: Qwen3Next,
    batch: dict[str, jax.Array],
    train: TrainConfig,
    counts: Counts,
    load: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the loss of a batch, or what one micro-batch contributes to the loss of its batch.

    Args:
      model: the model.
      batch: tokens and segment_ids, [B, T] int32. The target of a token is the token that follows
        it in the same document. If the batch has target_mask, [B, T] bool, only the tokens that
        target_mask marks are targets. If the batch has loss_weights, [B, T] float32, these are the
        weights of the targets. If the batch has expert_ids, [B, T, layers, A] int16, the tokens use
        these A experts in each layer (`Qwen3Next.features`). If the batch has layer_rows, these are
        the rows of n-gram embedding tables that were looked up before (`Context.embedding_rows`).
      train: the weights of the terms of the loss, and `remat`.
      counts: the counts of the whole batch.
      load: [L, E] `expert_load` of the whole batch; None: the load is computed from `batch`. With
        None, `batch` must be the whole batch (with several TPU slices: all rows of this slice), or
        `train.balance_loss_weight` must be 0.
      mesh: the devices that share the batch; None: one device.

    Returns:
      (total, parts). `total` [] is the loss. `parts` has these entries, which sum over
      micro-batches:
        loss: the next-token cross-entropy, in nats.
        top1: the (weighted) share of targets to which the model gives the highest probability.
        mtp_loss/d, mtp_top1/d: the cross-entropy and the top-1 share of each MTP depth d.
        output_z: the (weighted) mean of the squared logsumexp of the next token's logits, only if
          `train.output_z_loss_weight` is above 0.
        router_z, expert_load [L, E] and router_probability [L, E]: only if a layer has experts.
          `balance_loss` computes the balance loss from the sums of expert_load and
          router_probability over the batch.
        required_bias [L, E, BINS]: the counts of `router.required_bias_histogram`, only if
          `train.router_bias_update` is "quantile".
        indexer_loss: only if an indexer is trained.
        total_loss: `total`.
    """
    features = model.features(
        batch["tokens"],
        batch["segment_ids"],
        remat=train.remat,
        mesh=mesh,
        options=ForwardOptions(
            indexer_training=train.indexer_training,
            count_required_bias=train.router_bias_update == "quantile",
        ),
        embedding_rows=batch.get("layer_rows"),
        replayed_expert_ids=batch.get("expert_ids"),
    )

    def cross_entropy(hidden_BTD, offset, targets, z_weight=0.0):
        """Returns what `batch` contributes to three means over the whole batch: (cross-entropy +
        z_weight · z, top-1 accuracy, z). z is the squared logsumexp of the logits. The target of a
        token is the token `offset` positions later in the same document. `targets`: the sum of the
        weights of the targets in the whole batch.
        """
        weight_BT = target_weights(batch, offset) / targets
        found = model.cross_entropy(
            hidden_BTD, target_tokens(batch, offset), weight_BT, mesh, z_weight
        )
        top1, z = (jnp.sum(x * weight_BT) for x in (found.is_best, jnp.square(found.logsumexp)))
        return found.weighted_loss_sum, top1, z

    total, top1, output_z = cross_entropy(
        features.hidden, 1, counts.target_weight_sum, train.output_z_loss_weight
    )
    parts = {"loss": total, "top1": top1}
    if train.output_z_loss_weight:
        parts |= {"loss": total - train.output_z_loss_weight * output_z, "output_z": output_z}
    mtp_losses = []
    for d, hidden_BTD in enumerate(features.mtp_hidden):
        mtp_loss, mtp_top1, _ = cross_entropy(hidden_BTD, 2 + d, counts.mtp_target_weight_sums[d])
        mtp_losses.append(mtp_loss)
        parts |= {f"mtp_loss/{d}": mtp_loss, f"mtp_top1/{d}": mtp_top1}
    total = total + train.mtp_loss_weight * sum(mtp_losses) / max(len(mtp_losses), 1)
    if features.router_statistics or features.mtp_router_statistics:
        own_load = expert_load(features, model.config, counts)
        load = sum_over_slices(own_load, mesh) if load is None else load
        probability = _router_mean_by_layer(features, counts, "probability")
        balance = balance_loss(load, probability)
        router_z = jnp.mean(_router_mean_by_layer(features, counts, "z"))
        total = total + train.balance_loss_weight * balance + train.router_z_loss_weight * router_z
        parts |= {"router_z": router_z, "expert_load": own_load, "router_probability": probability}
        if train.router_bias_update == "quantile":
            parts["required_bias"] = jnp.concatenate(
                _router_sums_by_layer(features, "required_bias")
            )
    indexer_losses = [loss / counts.indexer_tokens for loss in features.mixer_losses]
    if features.mtp_mixer_loss is not None:
        indexer_losses.append(features.mtp_mixer_loss / counts.mtp_indexer_tokens)
    if indexer_losses:
        parts["indexer_loss"] = sum(indexer_losses) / len(indexer_losses)
        total = total + train.indexer_loss_weight * parts["indexer_loss"]
    return total, parts | {"total_loss": total}


def _router_mean_by_layer(features: Features, counts: Counts, name: str) -> jax.Array:
    """Returns a router statistic of every layer with experts, [L, …]: the sum over the tokens of
    `features`, divided by the number of tokens of the whole batch. The layer of the MTP module is
    last. `name`: a key of `Features.router_statistics`.
    """
    tokens = [counts.tokens] if features.router_statistics else []
    if features.mtp_router_statistics:
        tokens.append(counts.mtp_router_tokens)
    return jnp.concatenate(
        [x / n for x, n in zip(_router_sums_by_layer(features, name), tokens, strict=True)]
    )


def _router_sums_by_layer(features: Features, name: str) -> list[jax.Array]:
    """Returns a list of one router statistic, summed over tokens: first that of the decoder layers
    with experts, [L, …], then that of the layer of the MTP module, [1, …]. A model without decoder
    layers with experts, or without an MTP module, lacks the corresponding entry.
    """
    layers = [features.router_statistics[name]] if features.router_statistics else []
    return layers + (
        [features.mtp_router_statistics[name][None]] if features.mtp_router_statistics else []
    )
