"""Computes the gradients of a batch, all at once or as a sum over micro-batches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.model import declared
from qwen3next_jax.model.visible_targets import mask_seen_targets
from qwen3next_jax.sharding.rules import constrain, tree_shardings
from qwen3next_jax.training.loss import Counts, count_targets, expert_load, total_loss
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage

Batch = dict[str, jax.Array]
# A function (params, batch) → (gradients, parts of the loss, counts). All three describe the whole
# batch.
Gradients = Callable[[dict, Batch], tuple[dict, dict[str, jax.Array], Counts]]


def make_gradients(
    run: ResolvedRun, stage: ResolvedStage, loss: Callable = total_loss
) -> Gradients:
    """Makes the function `gradients(params, batch)` for the batches of `stage`; it is not jitted.

    Each of k micro-batches holds 1/k of the rows, and the sum of the micro-batches' gradients
    equals the gradient of the whole batch. The balance loss needs an extra pass for this, because
    it is not a sum over rows: it multiplies each token's router probabilities by the expert load of
    the whole batch. With several micro-batches, a forward pass without gradients therefore computes
    the load first. This pass adds up to a third to the time of a step. It is left out if
    `balance_loss_weight` is 0.

    Args:
      run: the model, its structure, and the mesh.
      stage: the weights of the loss, and the number of micro-batches.
      loss: a function with the arguments and results of `loss.total_loss`.

      Returns:
        The function. `batch` is {name: [B, T]}; see `loop.make_train_step`.
    """
    config, train, mesh = run.model, stage.train, run.compute_mesh

    def micro_batch_gradients(params, batch, counts, load=None):
        def loss_share(params):
            return loss(
                nnx.merge(run.graphdef, params), batch, train, counts=counts, load=load, mesh=mesh
            )

        (_, parts), grads = jax.value_and_grad(loss_share, has_aux=True)(params)
        return grads, parts

    def micro_batch_load(params, batch, counts):
        features = nnx.merge(run.graphdef, params).features(
            batch["tokens"],
            batch["segment_ids"],
            mesh=mesh,
            indexer=train.indexer_training,
            expert_ids=batch.get("expert_ids"),
        )
        return expert_load(features, config, counts)

    def accumulated_gradients(params, batch, counts):
        k = stage.micro_batches
        micro_batches = jax.tree.map(
            lambda x: constrain(
                x.reshape(k, x.shape[0] // k, *x.shape[1:]), mesh, None, "batch", "time"
            ),
            batch,
        )
        load = None
        if train.balance_loss_weight and config.has_experts:
            load = _sum_over(micro_batches, lambda b: micro_batch_load(params, b, counts))
        return _sum_over(micro_batches, lambda b: micro_batch_gradients(params, b, counts, load))

    def gradients(params: dict, batch: Batch):
        batch = mask_seen_targets(config, batch)
        counts: Counts = count_targets(batch, config.mtp_depth, config)
        if stage.micro_batches == 1:
            grads, parts = micro_batch_gradients(params, batch, counts)
        else:
            grads, parts = accumulated_gradients(params, batch, counts)
        if mesh is not None:
            grads = jax.lax.with_sharding_constraint(
                grads, tree_shardings(run.abstract_state["params"], declared(config), mesh)
            )
        return grads, parts, counts

    return gradients


def _sum_over(micro_batches: Batch, f: Callable):
    """Returns the sum of the trees `f(micro_batch)`, computed one after another. The arrays of
    `micro_batches` have the micro-batches as their first dimension.
    """
    shapes = jax.eval_shape(f, jax.tree.map(lambda x: x[0], micro_batches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = jax.lax.scan(
        lambda total, b: (jax.tree.map(jnp.add, total, f(b)), None), zeros, micro_batches
    )
    return total
