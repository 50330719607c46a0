"""Computes the gradients of a batch, in one backward pass or as a sum over micro-batches.

Each of k micro-batches holds 1/k of the rows, and the sum of the micro-batches' gradients equals
the gradient of the whole batch. The balance loss of the experts is not a sum over rows: it
multiplies each token's router probabilities by the expert load of the whole batch. With several
micro-batches, an extra forward pass without gradients therefore computes the expert load first. The
extra forward pass adds up to a third to the time of a step. Without a balance loss
(`balance_loss_weight` = 0) there is no extra forward pass.

On several TPU slices each micro-batch has rows of every slice. First, each slice sums the gradients
of its own rows over all micro-batches; then one reduction sums over the slices (`sharding.slices`).

The loss is differentiated with respect to the main group of the parameters (`parameter_groups`),
and to the vectors that the batch looks up in the tables of lazy AdamW. Frozen parameters get no
gradient. In this file, "row" means a row of the batch.
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
from qwen3next_jax.training.diagnostics import l2_norms_by_layer
from qwen3next_jax.training.loss import (
    Counts,
    balance_loss,
    count_tokens_and_targets,
    expert_load,
    total_loss,
)
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage

Batch = dict[str, jax.Array]
TableGradients = dict[int, Any]  # values: `lazy_adamw.TableGradient`


class Gradients(NamedTuple):
    """The gradients of a batch, or of some of its rows.

    Attributes:
      main_group: the gradients of the main group of the parameters.
      lazy_adamw_tables: number of an n-gram embedding → the gradient of its table, which lazy AdamW
        updates.
    """

    main_group: dict
    lazy_adamw_tables: TableGradients


def make_gradients(
    run: ResolvedRun, stage: ResolvedStage, loss: Callable = total_loss
) -> Callable[[dict, Batch], tuple[Gradients, dict[str, jax.Array], Counts]]:
    """Makes the function `gradients(params, batch)` for the batches of `stage`; it is not jitted.

    Args:
      run: the resolved run; this function reads its model, parameter groups and mesh.
      stage: the weights of the loss, and the number of micro-batches.
      loss: a function with the arguments and results of `loss.total_loss`.

    Returns:
      The function `gradients`. `params` holds all parameters; `batch` is {name: [B, T, …]} (see
      `loop.make_train_step`). The function returns (gradients, parts of the loss, counts) of the
      whole batch.
    """
    part = _GradientComputation(run, stage, loss)
    has_slices = num_shards(run.mesh, SLICE) > 1

    def gradients(params: dict, batch: Batch):
        batch = mask_seen_targets(run.model, batch)
        counts: Counts = count_tokens_and_targets(batch, run.model.mtp_depth, run.model)
        if has_slices:
            grads, parts = _sum_gradients_over_slices(part, params, batch, counts)
        else:
            (main, parts), tables = part.gradients(params, batch, counts, run.compute_mesh)
            if run.compute_mesh is not None:
                main = jax.lax.with_sharding_constraint(main, run.update_shardings)
            grads = Gradients(main, tables)
        if "router_probability" in parts:
            # A product of two sums over the batch, which micro-batches cannot add up one by one.
            probability = parts.pop("router_probability")
            parts["balance_loss"] = balance_loss(parts["expert_load"], probability)
        main = run.groups.zero_frozen_parts(grads.main_group)
        return grads._replace(main_group=main), parts, counts

    return gradients


def gradient_norms(run: ResolvedRun, params: dict, grads: Gradients) -> dict[str, Any]:
    """Returns the metrics grad_norm, the L2 norm [] of all gradients (each lookup in a table counts
    separately), and grad_norms, the norms by layer (`diagnostics.l2_norms_by_layer`) of the main
    group. `params`: all parameters.
    """
    lookups = {
        number: gradient.row_gradients for number, gradient in grads.lazy_adamw_tables.items()
    }
    return {
        "grad_norm": optax.tree.norm((grads.main_group, lookups)),
        "grad_norms": l2_norms_by_layer(
            run.model, run.groups.fill_frozen_with_zeros(params, grads.main_group)
        ),
    }


def _sum_gradients_over_slices(
    computation: "_GradientComputation", params: dict, batch: Batch, counts: Counts
):
    """Computes gradients on each TPU slice from the slice's rows, and sums them over the slices.
    Returns (gradients, parts of the loss).
    """
    run = computation.run

    def of_slice(*arguments):
        main_and_parts, _ = computation.gradients(*arguments)  # with slices there are no tables
        return main_and_parts

    main, parts = on_each_slice(of_slice, run.mesh)(params, batch, counts)
    main = sum_gradients_over_slices(
        main, run.main_group_shardings, run.update_shardings, run.config.parallel.slice_gradients
    )
    return Gradients(main, {}), parts


@dataclasses.dataclass(frozen=True, eq=False)
class _GradientComputation:
    """Computes the gradients of some or all rows of a batch. The methods of this class take:
    `params`, all parameters; `counts`, the counts of the whole batch, by which sums over rows are
    divided, so that the losses of the parts of a batch add up to the loss of the batch; and `mesh`,
    the devices that the traced code runs on: the devices of one slice if there are several TPU
    slices.
    """

    run: ResolvedRun
    stage: ResolvedStage
    loss_function: Callable

    def gradients(self, params: dict, batch: Batch, counts: Counts, mesh):
        """Returns ((gradients of the main group, parts of the loss), gradients of the tables). The
        gradients of the main group and the parts of the loss are sums over the micro-batches. The
        gradients of the tables hold one gradient for each table lookup of the batch.
        """
        k = self.stage.micro_batches
        if k == 1:
            return self._micro_batch_gradients(params, batch, counts, mesh)
        micro_batches = jax.tree.map(
            lambda x: constrain(
                x.reshape(k, x.shape[0] // k, *x.shape[1:]), mesh, None, "batch", "time"
            ),
            batch,
        )
        load = self._whole_batch_expert_load(params, micro_batches, counts, mesh)
        main_and_parts, tables = _scan_and_sum(
            micro_batches, lambda b: self._micro_batch_gradients(params, b, counts, mesh, load)
        )
        # [k, B / k, T, …] → [B, T, …]: the gradients of all lookups, as of one batch
        tables = jax.tree.map(
            lambda x: constrain(
                jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), mesh, "batch", "time", None
            ),
            tables,
        )
        return main_and_parts, tables

    def _micro_batch_gradients(self, params: dict, batch: Batch, counts: Counts, mesh, load=None):
        """Differentiates what one micro-batch contributes to the loss. Returns the same tuple as
        the method `gradients`, for one micro-batch. `load`: the expert load of the whole batch;
        None: `total_loss` computes the expert load from the micro-batch.
        """
        groups = self.run.groups
        ids, looked_up = self._look_up_table_rows(params, batch, mesh)

        def loss_share(main: dict, looked_up: dict[int, jax.Array]):
            model = nnx.merge(self.run.graphdef, groups.replace_main_and_tables(params, main))
            loss_batch = batch | {"layer_rows": looked_up} if looked_up else batch
            return self.loss_function(
                model, loss_batch, self.stage.train, counts=counts, load=load, mesh=mesh
            )

        differentiate = jax.value_and_grad(loss_share, argnums=(0, 1), has_aux=True)
        (_, parts), (main, d_looked_up) = differentiate(groups.select_main_group(params), looked_up)
        return (main, parts), self._table_gradients(ids, d_looked_up)

    def _look_up_table_rows(self, params: dict, batch: Batch, mesh) -> tuple[dict, dict]:
        """Returns the ids and values of the rows of lazy AdamW's tables that the batch uses
        (`lazy_adamw.look_up_batch_rows`).
        """
        if not self.run.groups.lazy_adamw_tables:
            return {}, {}
        from qwen3next_jax.training import lazy_adamw

        return lazy_adamw.look_up_batch_rows(
            self.run.model, self.run.groups.lazy_adamw_tables, params, batch, mesh
        )

    def _table_gradients(self, ids: dict, d_looked_up: dict) -> TableGradients:
        if not self.run.groups.lazy_adamw_tables:
            return {}
        from qwen3next_jax.training.lazy_adamw import TableGradient

        return {
            number: TableGradient(ids[number], d.astype(jnp.float32))
            for number, d in d_looked_up.items()
        }

    def _whole_batch_expert_load(
        self, params: dict, micro_batches: Batch, counts: Counts, mesh
    ) -> Any:
        """Computes the expert load of the whole batch, by a forward pass of every micro-batch.
        Returns None if the model has no experts or `balance_loss_weight` is 0.
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

        load, _ = _scan_and_sum(micro_batches, of_micro_batch)
        return sum_over_slices(load, mesh)


def _scan_and_sum(micro_batches: Batch, f: Callable):
    """Calls `f(micro_batch)`, which returns a pair of trees, for one micro-batch after another
    (`jax.lax.scan`). Returns the sum of the first trees, and the second trees stacked. The first
    dimension of the arrays in `micro_batches` is the number of micro-batches.
    """
    shapes, _ = jax.eval_shape(f, jax.tree.map(lambda x: x[0], micro_batches))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(total, micro_batch):
        result, stacked = f(micro_batch)
        return jax.tree.map(jnp.add, total, result), stacked

    return jax.lax.scan(add, zeros, micro_batches)
