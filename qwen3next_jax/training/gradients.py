"""Computes the gradients of a batch, all at once or as a sum over micro-batches."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.common.errors import require
from qwen3next_jax.model.visible_targets import mask_seen_targets
from qwen3next_jax.sharding.rules import SLICE, constrain, num_shards
from qwen3next_jax.sharding.slices import add_up_gradients, on_each_slice, sum_over_slices
from qwen3next_jax.training import lazy_rows
from qwen3next_jax.training.loss import Counts, count_targets, expert_load, total_loss
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage

Batch = dict[str, jax.Array]
# A function (params, batch) → (gradients, parts of the loss, counts, gradients of the tables that
# lazy AdamW updates, by the number of the embedding). All four describe the whole batch.
Gradients = Callable[
    [dict, Batch], tuple[dict, dict[str, jax.Array], Counts, dict[int, lazy_rows.RowGradient]]
]


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

    Raises:
      UserError: lazy AdamW on several slices.
    """
    config, train = run.model, stage.train
    tables = lazy_rows.lazy_tables(config, stage.optimizer)
    has_slices = num_shards(run.mesh, SLICE) > 1
    require(
        not (tables and has_slices),
        "optimizer.ngram_table = 'lazy_adamw' on several slices: each slice would update other "
        "rows of the table: expected 'adamw', or parallel.mesh.slice = 1",
    )

    def micro_batch_gradients(params, batch, counts, mesh, load=None):
        """Returns ((gradients, parts of the loss), gradients of the tables that lazy AdamW updates)
        of one micro-batch.
        """
        others, own = lazy_rows.split_tables(params, tables)
        ids, rows = lazy_rows.look_up(config, tables, params, batch, mesh)

        def loss_share(others, rows):
            model = nnx.merge(run.graphdef, lazy_rows.join_tables(others, own, tables))
            used = batch | {"layer_rows": rows} if tables else batch
            return loss(model, used, train, counts=counts, load=load, mesh=mesh)

        run_loss = jax.value_and_grad(loss_share, argnums=(0, 1), has_aux=True)
        (_, parts), (grads, d_rows) = run_loss(others, rows)
        of_rows = {
            number: lazy_rows.RowGradient(ids[number], d.astype(jnp.float32))
            for number, d in d_rows.items()
        }
        return (grads, parts), of_rows

    def micro_batch_load(params, batch, counts, mesh):
        features = nnx.merge(run.graphdef, params).features(
            batch["tokens"],
            batch["segment_ids"],
            mesh=mesh,
            indexer=train.indexer_training,
            expert_ids=batch.get("expert_ids"),
        )
        return expert_load(features, config, counts)

    def accumulated_gradients(params, batch, counts, mesh):
        """Returns ((gradients, parts of the loss), gradients of the tables) of a whole batch."""
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
            load, _ = _sum_over(
                micro_batches, lambda b: (micro_batch_load(params, b, counts, mesh), None)
            )
            load = sum_over_slices(load, mesh)
        total, of_rows = _sum_over(
            micro_batches, lambda b: micro_batch_gradients(params, b, counts, mesh, load)
        )
        # every use of a row in any micro-batch, as uses by more rows of tokens
        of_rows = jax.tree.map(
            lambda x: constrain(
                jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), mesh, "batch", "time", None
            ),
            of_rows,
        )
        return total, of_rows

    def gradients_of_slices(params, batch, counts):
        of_slice = on_each_slice(lambda *args: accumulated_gradients(*args)[0], run.mesh)
        grads, parts = of_slice(params, batch, counts)
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
        if has_slices:
            grads, parts = gradients_of_slices(params, batch, counts)
            return grads, parts, counts, {}
        mesh = run.compute_mesh
        (grads, parts), of_rows = accumulated_gradients(params, batch, counts, mesh)
        if mesh is not None:
            shardings, _ = lazy_rows.split_tables(run.update_shardings, tables)
            grads = jax.lax.with_sharding_constraint(grads, shardings)
        return grads, parts, counts, of_rows

    return gradients


def _sum_over(micro_batches: Batch, f: Callable):
    """Calls `f(micro_batch)`, which returns a pair of trees, for one micro-batch after another.
    Returns the sum of the first trees, and the second trees stacked. The arrays of `micro_batches`
    have the micro-batches as their first dimension.
    """
    shapes, _ = jax.eval_shape(f, jax.tree.map(lambda x: x[0], micro_batches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(total, micro_batch):
        result, stacked = f(micro_batch)
        return jax.tree.map(jnp.add, total, result), stacked

    return jax.lax.scan(add, zeros, micro_batches)
