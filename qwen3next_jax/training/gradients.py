"""The gradients of a batch, whole or as the sum over micro-batches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.model import declared
from qwen3next_jax.model.visible_targets import mask_seen_targets
from qwen3next_jax.sharding.rules import constrain, shardings
from qwen3next_jax.training.loss import Counts, count_targets, expert_load, total_loss
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage

Batch = dict[str, jax.Array]
# (params, batch) → (gradients, parts of the loss, counts) of the whole batch
Gradients = Callable[[dict, Batch], tuple[dict, dict[str, jax.Array], Counts]]


def make_gradients(
    run: ResolvedRun, stage: ResolvedStage, loss: Callable = total_loss
) -> Gradients:
    """→ `gradients(params, batch)`, not jitted, for the batches of `stage`.

    With k micro-batches the rows of a batch are taken k at a time, and the sum over them equals
    the gradient of the one batch. Only the balance loss is not a sum over rows: it multiplies the
    whole batch's expert load into each token's probability. So the load is counted first, in a
    forward pass without gradients (skipped where `balance_loss_weight` is 0), which costs up to a
    third of a step.

    Args:
      loss: as `loss.total_loss`.
    """
    model, train, mesh = run.model, stage.train, run.compute_mesh

    def of_micro_batch(params, batch, counts, load=None):
        def share_of_loss(params):
            return loss(
                nnx.merge(run.graphdef, params), batch, train, counts=counts, load=load, mesh=mesh
            )

        (_, parts), grads = jax.value_and_grad(share_of_loss, has_aux=True)(params)
        return grads, parts

    def load_of_micro_batch(params, batch, counts):
        features = nnx.merge(run.graphdef, params).features(
            batch["tokens"], batch["segment_ids"], mesh=mesh, indexer=train.indexer_training
        )
        return expert_load(features, model, counts)

    def accumulated(params, batch, counts):
        k = stage.micro_batches
        micro_batches = jax.tree.map(
            lambda x: constrain(
                x.reshape(k, x.shape[0] // k, *x.shape[1:]), mesh, None, "batch", "time"
            ),
            batch,
        )
        load = None
        if train.balance_loss_weight and model.has_experts:
            load = _sum_over(micro_batches, lambda b: load_of_micro_batch(params, b, counts))
        return _sum_over(micro_batches, lambda b: of_micro_batch(params, b, counts, load))

    def gradients(params: dict, batch: Batch):
        batch = mask_seen_targets(model, batch)
        counts: Counts = count_targets(batch, model.mtp_depth, model)
        if stage.micro_batches == 1:
            grads, parts = of_micro_batch(params, batch, counts)
        else:
            grads, parts = accumulated(params, batch, counts)
        if mesh is not None:
            grads = jax.lax.with_sharding_constraint(
                grads, shardings(run.abstract_state["params"], declared(model), mesh)
            )
        return grads, parts, counts

    return gradients


def _sum_over(micro_batches: Batch, f: Callable):
    """The sum of `f(micro_batch)`, one micro-batch after another."""
    shapes = jax.eval_shape(f, jax.tree.map(lambda x: x[0], micro_batches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(
        lambda total, b: (jax.tree.map(jnp.add, total, f(b)), None), zeros, micro_batches
    )[0]
