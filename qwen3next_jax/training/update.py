"""The update of the parameters. Each of the three groups of parameters (`parameter_groups`) has its
own optimizer:

main     `optimizer.make_optimizer`: clipping, direction, weight decay, learning rate
tables   lazy AdamW (`lazy_adamw`), which changes only the rows that the batch uses
frozen   none

`optax.partition` cannot express these groups. `optax.partition` divides a tree by whole leaves, but
the main group may hold only some of the layers that are stacked in an array. Also, an optax update
has the shape of its parameter, but lazy AdamW must not create an array of the shape of a table.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from qwen3next_jax.training import guards
from qwen3next_jax.training.gradients import Gradients
from qwen3next_jax.training.optimizer import make_optimizer
from qwen3next_jax.training.resolve import ResolvedRun
from qwen3next_jax.training.stages import ResolvedStage
from qwen3next_jax.training.state import join_opt_state, split_opt_state

# A function (gradients, params, opt_state, learning rate, skip) → (params, opt_state) after the
# update; they are unchanged if the bool `skip` is true. `params` are all parameters.
Update = Callable[[Gradients, dict, Any, jax.Array, jax.Array], tuple[dict, Any]]


def make_update(run: ResolvedRun, stage: ResolvedStage, schedule: optax.Schedule) -> Update:
    """Makes the function that updates the parameters in the steps of `stage`; it is not jitted.

    Args:
      run: the resolved run; this function reads its parameter groups and mesh.
      stage: the settings of the optimizers.
      schedule: number of updates so far → learning rate. The main optimizer evaluates `schedule`;
        lazy AdamW gets the learning rate as an argument of the update.
    """
    groups = run.groups
    update_main = _make_main_update(run, stage, schedule)
    update_tables = _make_tables_update(run, stage)

    def update(grads: Gradients, params: dict, opt_state: Any, learning_rate, skip):
        main_state, tables_state = split_opt_state(opt_state, groups)
        main, main_state = update_main(grads, groups.select_main_group(params), main_state, skip)
        tables, tables_state = update_tables(
            grads, groups.select_lazy_adamw_tables(params), tables_state, learning_rate, skip
        )
        opt_state = join_opt_state(main_state, tables_state, groups)
        return groups.replace_main_and_tables(params, main, tables), opt_state

    return update


def _make_main_update(run: ResolvedRun, stage: ResolvedStage, schedule: optax.Schedule) -> Callable:
    """Makes the function that updates the main group: (gradients, main group, optimizer state,
    skip) → (main group, optimizer state).
    """
    optimizer = make_optimizer(
        stage.optimizer,
        run.groups.main_parameters,
        schedule,
        run.compute_mesh,
        run.groups.learning_rate_factors,
        run.groups.weight_decays,
    )
    shares_updates = run.update_shardings != run.main_group_shardings

    def update_main(grads: Gradients, before: dict, state: Any, skip: jax.Array):
        updates, new_state = optimizer.update(grads.main_group, state, before)
        if shares_updates:  # each slice computes a part of the updates; then all get all parts
            updates = jax.lax.with_sharding_constraint(updates, run.update_shardings)
            updates = jax.lax.with_sharding_constraint(updates, run.main_group_shardings)
        after = optax.apply_updates(before, updates)
        return guards.keep_old_if(skip, (before, state), (after, new_state))

    return update_main


def _make_tables_update(run: ResolvedRun, stage: ResolvedStage) -> Callable:
    """Makes the function that updates the tables of lazy AdamW: (gradients, tables, state of lazy
    AdamW, learning rate, skip) → (tables, state of lazy AdamW).
    """
    if not run.groups.lazy_adamw_tables:
        return lambda grads, tables, state, learning_rate, skip: (tables, state)
    from qwen3next_jax.training import lazy_adamw

    def update_tables(grads: Gradients, tables: dict, state: dict, learning_rate, skip):
        return lazy_adamw.update(
            run.model,
            stage.optimizer,
            run.groups.lazy_adamw_tables,
            tables,
            state,
            grads.lazy_adamw_tables,
            learning_rate,
            skip,
            run.compute_mesh,
        )

    return update_tables
