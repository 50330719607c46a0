"""Computes the gradients of a batch, all at once or as a sum over micro-batches.

Each of k micro-batches holds 1/k of the rows, and the sum of the micro-batches' gradients equals
the gradient of the whole batch. The balance loss needs an extra pass for this, because it is not a
sum over rows: it multiplies each token's router probabilities by the expert load of the whole
batch. With several micro-batches, a forward pass without gradients therefore computes the load
first. This pass adds up to a third to the time of a step. It is left out if `balance_loss_weight`
is 0.

On several slices each micro-batch has rows of every slice. A slice adds up the gradients of its
rows of all micro-batches before the slices add up theirs (`sharding.slices`).

The loss is differentiated by the main group of the parameters (`parameter_groups`), and by the
vectors that the batch looks up in the tables of lazy AdamW; what is frozen takes no gradient. A row
is always a row of the batch here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from qwen3next_jax.model.layers import ForwardOptions
from qwen3next_jax.model.visible_targets import mask_seen_targets
from qwen3next_jax.sharding.rules import SLICE, constrain, num_shards
from qwen3next_jax.sharding.slices import on_each_slice, sum_gradients_over_slices, sum_over_slices
from qwen3next_jax.training.diagnostics import norms_by_layer
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
TableGradients = dict[int, Any]  # values: `lazy_adamw.TableGradient`


class Gradients(NamedTuple):
    """The gradients of a batch, or of a part of it.

    Attributes:
      main: those of the main group of the parameters.
      tables: number of an embedding → that of its table, which lazy AdamW updates.
    """

    main: dict
    tables: TableGradients


def make_gradients(
    run: ResolvedRun, stage: ResolvedStage, loss: Callable = total_loss
) -> Callable[[dict, Batch], tuple[Gradients, dict[str, jax.Array], Counts]]:
    """Makes the function `gradients(params, batch)` for the batches of `stage`; it is not jitted.

    Args:
      run: the model, its structure, the groups of its parameters, and the mesh.
      stage: the weights of the loss, and the number of micro-batches.
      loss: a function with the arguments and results of `loss.total_loss`.

    Returns:
      The function. `params` are all parameters; `batch` is {name: [B, T, …]}; see
      `loop.make_train_step`. The result is (gradients, parts of the loss, counts) of the whole
      batch.
    """
    part = _PartOfBatch(run, stage, loss)
    has_slices = num_shards(run.mesh, SLICE) > 1

    def gradients(params: dict, batch: Batch):
        batch = mask_seen_targets(run.model, batch)
        counts: Counts = count_targets(batch, run.model.mtp_depth, run.model)
        if has_slices:
            grads, parts = _add_up_slices(part, params, batch, counts)
        else:
            (main, parts), tables = part.gradients(params, batch, counts, run.compute_mesh)
            if run.compute_mesh is not None:
                main = jax.lax.with_sharding_constraint(main, run.update_shardings)
            grads = Gradients(main, tables)
        if "router_probability" in parts:
            # A product of two sums over the batch, which micro-batches cannot add up one by one.
            probability = parts.pop("router_probability")
            parts["balance_loss"] = balance_loss(parts["expert_load"], probability)
        main = run.groups.without_frozen_parts(grads.main)
        return grads._replace(main=main), parts, counts

    return gradients


def gradient_norms(run: ResolvedRun, params: dict, grads: Gradients) -> dict[str, Any]:
    """Returns the metrics grad_norm, the L2 norm [] of all gradients (each lookup in a table counts
    separately), and grad_norms, the norms by layer (`diagnostics.norms_by_layer`) of the main
    group. `params`: all parameters.
    """
    lookups = {number: gradient.values for number, gradient in grads.tables.items()}
    return {
        "grad_norm": optax.tree.norm((grads.main, lookups)),
        "grad_norms": norms_by_layer(run.model, run.groups.with_zeros(params, grads.main)),
    }


def _add_up_slices(part: "_PartOfBatch", params: dict, batch: Batch, counts: Counts):
    """Adds up the gradients of the rows of each slice. Returns (gradients, parts of the loss)."""
    run = part.run

    def of_slice(*arguments):
        main_and_parts, _ = part.gradients(*arguments)  # with slices there are no tables
        return main_and_parts

    main, parts = on_each_slice(of_slice, run.mesh)(params, batch, counts)
    main = sum_gradients_over_slices(
        main, run.main_shardings, run.update_shardings, run.config.parallel.slice_gradients
    )
    return Gradients(main, {}), parts


@dataclasses.dataclass(frozen=True, eq=False)
class _PartOfBatch:
    """Computes the gradients of some or all rows of a batch. In its methods, `params` are all
    parameters. `counts` are those of the whole batch: the sums over the rows are divided by them,
    so that the losses of all parts of the batch add up to its loss. `mesh` is that of the part of
    the program that is traced: the devices of one slice if there are several slices.
    """

    run: ResolvedRun
    stage: ResolvedStage
    loss: Callable

    def gradients(self, params: dict, batch: Batch, counts: Counts, mesh):
        """Returns ((gradients of the main group, parts of the loss), gradients of the tables): the
        sums over the micro-batches of the first two, and the third for the lookups of all rows.
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
        main_and_parts, tables = _sum_over(
            micro_batches, lambda b: self._of_micro_batch(params, b, counts, mesh, load)
        )
        # [k, B / k, T, …] → [B, T, …]: the gradients of all lookups, as of one batch
        tables = jax.tree.map(
            lambda x: constrain(
                jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), mesh, "batch", "time", None
            ),
            tables,
        )
        return main_and_parts, tables

    def _of_micro_batch(self, params: dict, batch: Batch, counts: Counts, mesh, load=None):
        """Differentiates what one micro-batch contributes to the loss. Returns what `gradients`
        returns, for this micro-batch. `load`: the experts' load in the whole batch; None:
        `total_loss` computes it from this batch.
        """
        groups = self.run.groups
        ids, looked_up = self._look_up(params, batch, mesh)

        def loss_share(main: dict, looked_up: dict[int, jax.Array]):
            model = nnx.merge(self.run.graphdef, groups.replace(params, main))
            used = batch | {"layer_rows": looked_up} if looked_up else batch
            return self.loss(model, used, self.stage.train, counts=counts, load=load, mesh=mesh)

        differentiate = jax.value_and_grad(loss_share, argnums=(0, 1), has_aux=True)
        (_, parts), (main, d_looked_up) = differentiate(groups.main(params), looked_up)
        return (main, parts), self._of_tables(ids, d_looked_up)

    def _look_up(self, params: dict, batch: Batch, mesh) -> tuple[dict, dict]:
        """Looks up what the batch uses of the tables of lazy AdamW (`lazy_adamw.look_up`)."""
        if not self.run.groups.tables:
            return {}, {}
        from qwen3next_jax.training import lazy_adamw

        return lazy_adamw.look_up(self.run.model, self.run.groups.tables, params, batch, mesh)

    def _of_tables(self, ids: dict, d_looked_up: dict) -> TableGradients:
        if not self.run.groups.tables:
            return {}
        from qwen3next_jax.training.lazy_adamw import TableGradient

        return {
            number: TableGradient(ids[number], d.astype(jnp.float32))
            for number, d in d_looked_up.items()
        }

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
                options=ForwardOptions(indexer_training=train.indexer_training),
                replayed_expert_ids=batch.get("expert_ids"),
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
