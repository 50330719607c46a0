"""Computes the gradients of a batch, all at once or as a sum over micro-batches.

Each of k micro-batches holds 1/k of the rows, and the sum of the micro-batches' gradients equals
the gradient of the whole batch. The balance loss needs an extra pass for this, because it is not a
sum over rows: it multiplies each token's router probabilities by the expert load of the whole
batch. With several micro-batches, a forward pass without gradients therefore computes the load
first. This pass adds up to a third to the time of a step. It is left out if `balance_loss_weight`
is 0.

On several slices each micro-batch has rows of every slice. A slice adds up the gradients of its
rows of all micro-batches before the slices add up theirs (`sharding.slices`).

The loss is differentiated by the arrays of the main optimizer (`assignment.Assignment.main`) and by
the rows that the batch uses of the tables of lazy AdamW; what is frozen takes no gradient.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qwen3next_jax.model.layers import ForwardOptions
from qwen3next_jax.model.visible_targets import mask_seen_targets
from qwen3next_jax.sharding.rules import SLICE, constrain, num_shards
from qwen3next_jax.sharding.slices import add_up_gradients, on_each_slice, sum_over_slices
from qwen3next_jax.training.loss import (
    Counts,
    balance_loss,
    count_targets,
    expert_load,
    total_loss,
)
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage

Batch = dict[str, jax.Array]
RowGradients = dict[int, Any]  # values: `lazy_rows.RowGradient`
# A function (params, batch) → (gradients of the arrays of the main optimizer, parts of the loss,
# counts, gradients of the tables that lazy AdamW updates, by the number of the embedding). All four
# describe the whole batch.
Gradients = Callable[[dict, Batch], tuple[dict, dict[str, jax.Array], Counts, RowGradients]]


def make_gradients(
    run: ResolvedRun, stage: ResolvedStage, loss: Callable = total_loss
) -> Gradients:
    """Makes the function `gradients(params, batch)` for the batches of `stage`; it is not jitted.

    Args:
      run: the model, its structure, by what its parameters are trained, and the mesh.
      stage: the weights of the loss, and the number of micro-batches.
      loss: a function with the arguments and results of `loss.total_loss`.

    Returns:
      The function. `params` are all parameters; `batch` is {name: [B, T, …]}; see
      `loop.make_train_step`.
    """
    has_slices = num_shards(run.mesh, SLICE) > 1
    compute = _Gradients(run, stage, loss)
    of_rows = compute.of_rows_on_slices if has_slices else compute.of_rows

    def gradients(params: dict, batch: Batch):
        batch = mask_seen_targets(run.model, batch)
        counts: Counts = count_targets(batch, run.model.mtp_depth, run.model)
        grads, parts, row_grads = of_rows(params, batch, counts)
        if "router_probability" in parts:
            # A product of two sums over the batch, which micro-batches cannot add up one by one.
            probability = parts.pop("router_probability")
            parts["balance_loss"] = balance_loss(parts["expert_load"], probability)
        return run.assignment.without_frozen_parts(grads), parts, counts, row_grads

    return gradients


@dataclasses.dataclass(frozen=True, eq=False)
class _Gradients:
    """Computes the gradients of some or all rows of a batch. `params` are all parameters. `counts`
    are those of the whole batch: the sums over the rows are divided by them, so that the losses of
    all parts of the batch add up to its loss. `mesh` is that of the part of the program that is
    traced: the devices of one slice if there are several slices. The results are, of the rows: the
    gradients of the arrays of the main optimizer, the parts of the loss, and the gradients of the
    tables that lazy AdamW updates.
    """

    run: ResolvedRun
    stage: ResolvedStage
    loss: Callable

    def of_rows(self, params: dict, batch: Batch, counts: Counts):
        """Computes the gradients of a whole batch on a single slice."""
        mesh = self.run.compute_mesh
        (grads, parts), row_grads = self._of_micro_batches(params, batch, counts, mesh)
        if mesh is not None:
            grads = jax.lax.with_sharding_constraint(grads, self.run.update_shardings)
        return grads, parts, row_grads

    def of_rows_on_slices(self, params: dict, batch: Batch, counts: Counts):
        """Computes the gradients of a whole batch on several slices, without tables."""

        def of_own_rows(*arguments):
            return self._of_micro_batches(*arguments)[0]

        grads, parts = on_each_slice(of_own_rows, self.run.mesh)(params, batch, counts)
        grads = add_up_gradients(
            grads,
            self.run.main_shardings,
            self.run.update_shardings,
            self.run.config.parallel.slice_gradients,
        )
        return grads, parts, {}

    def _of_micro_batches(self, params: dict, batch: Batch, counts: Counts, mesh):
        """Adds up the gradients of the micro-batches. Returns ((gradients, parts of the loss),
        gradients of the tables).
        """
        k = self.stage.micro_batches
        if k == 1:
            return self._of_micro_batch(params, batch, counts, mesh)
        micro_batches = jax.tree.map(
            lambda x: constrain(
                x.reshape(k, x.shape[0] // k, *x.shape[1:]), mesh, None, "batch", "time"
            ),
            batch,
        )
        load = self._load(params, micro_batches, counts, mesh)
        total, row_grads = _sum_over(
            micro_batches, lambda b: self._of_micro_batch(params, b, counts, mesh, load)
        )
        # [k, B / k, T, …] → [B, T, …]: the gradients of all uses of table rows, as of one batch
        row_grads = jax.tree.map(
            lambda x: constrain(
                jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), mesh, "batch", "time", None
            ),
            row_grads,
        )
        return total, row_grads

    def _of_micro_batch(self, params: dict, batch: Batch, counts: Counts, mesh, load=None):
        """Differentiates what one micro-batch contributes to the loss. Returns what
        `_of_micro_batches` returns, for this micro-batch. `load`: the experts' load in the
        whole batch; None: `total_loss` computes it from these rows.
        """
        run, assignment = self.run, self.run.assignment
        ids, rows, row_grads = {}, {}, {}
        if assignment.tables:
            from qwen3next_jax.training import lazy_rows

            ids, rows = lazy_rows.look_up(run.model, assignment.tables, params, batch, mesh)

        def loss_share(main: dict, rows: dict[int, jax.Array]):
            model = nnx.merge(run.graphdef, assignment.replace(params, main))
            used = batch | {"layer_rows": rows} if rows else batch
            return self.loss(model, used, self.stage.train, counts=counts, load=load, mesh=mesh)

        differentiate = jax.value_and_grad(loss_share, argnums=(0, 1), has_aux=True)
        (_, parts), (grads, d_rows) = differentiate(assignment.main(params), rows)
        for number, d in d_rows.items():
            row_grads[number] = lazy_rows.RowGradient(ids[number], d.astype(jnp.float32))
        return (grads, parts), row_grads

    def _load(self, params: dict, micro_batches: Batch, counts: Counts, mesh) -> Any:
        """Computes the experts' load in the whole batch, by a forward pass of every micro-batch.
        Returns None if no loss needs it.
        """
        config, train = self.run.model, self.stage.train
        if not (train.balance_loss_weight and config.has_experts):
            return None

        def of_micro_batch(batch):
            features = nnx.merge(self.run.graphdef, params).features(
                batch["tokens"],
                batch["segment_ids"],
                mesh=mesh,
                options=ForwardOptions(indexer=train.indexer_training),
                expert_ids=batch.get("expert_ids"),
            )
            return expert_load(features, config, counts), None

        load, _ = _sum_over(micro_batches, of_micro_batch)
        return sum_over_slices(load, mesh)


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
