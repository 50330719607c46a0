"""Computes the gradients of a batch, all at once or as a sum over micro-batches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.model.visible_targets import mask_seen_targets
from qwen3next_jax.sharding.rules import SLICE, constrain, num_shards
from qwen3next_jax.sharding.slices import add_up_gradients, on_each_slice, sum_over_slices
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

    On several slices each micro-batch has rows of every slice. A slice adds up the gradients of its
    rows of all micro-batches before the slices add up theirs (`sharding.slices`).

    Args:
      run: the model, its structure, and the mesh.
      stage: the weights of the loss, and the number of micro-batches.
      loss: a function with the arguments and results of `loss.total_loss`.

      Returns:
        The function. `batch` is {name: [B, T]}; see `loop.make_train_step`.
    """
    config, train = run.model, stage.train

    def micro_batch_gradients(params, batch, counts, mesh, load=None):
        def loss_share(params):
            return loss(
                nnx.merge(run.graphdef, params), batch, train, counts=counts, load=load, mesh=mesh
            )

        (_, parts), grads = jax.value_and_grad(loss_share, has_aux=True)(params)
        return grads, parts

    def micro_batch_load(params, batch, counts, mesh):
        features = nnx.merge(run.graphdef, params).features(
            batch["tokens"], batch["segment_ids"], mesh=mesh, indexer=train.indexer_training
        )
        return expert_load(features, config, counts)

    def accumulated_gradients(params, batch, counts, mesh):
        k = stage.micro_batches
        if k == 1:
            return micro_batch_gradients(params, batch, counts, mesh)
        micro_batches = jax.tree.map(
            lambda x: constrain(
                x.reshape(k, x.shape[0] // k, *x.shape[1:]), mesh, None, "batch", "time"
            ),
            batch,
        )
        load = None
        if train.balance_loss_weight and config.has_experts:
            load = _sum_over(micro_batches, lambda b: micro_batch_load(params, b, counts, mesh))
            load = sum_over_slices(load, mesh)
        return _sum_over(
            micro_batches, lambda b: micro_batch_gradients(params, b, counts, mesh, load)
        )

    def gradients_of_slices(params, batch, counts):
        grads, parts = on_each_slice(accumulated_gradients, run.mesh)(params, batch, counts)
        grads = add_up_gradients(
            grads,
            run.state_shardings["params"],
            run.update_shardings,
            run.config.parallel.slice_gradients,
        )
        return grads, parts

    def gradients(params: dict, batch: Batch):
        batch = mask_seen_targets(config, batch)
        counts: Counts = count_targets(batch, config.mtp_depth, config)
        if num_shards(run.mesh, SLICE) > 1:
            grads, parts = gradients_of_slices(params, batch, counts)
            return grads, parts, counts
        grads, parts = accumulated_gradients(params, batch, counts, run.compute_mesh)
        if run.compute_mesh is not None:
            grads = jax.lax.with_sharding_constraint(grads, run.update_shardings)
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
