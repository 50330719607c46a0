"""The train state: a plain dict of the arrays that a run needs to continue. On CPUs, a run that
resumes from its train state computes bit-identically what an uninterrupted run computes. On GPUs
the results may differ by rounding, because cuDNN's attention sums gradients in no fixed order.

params      the parameters: a nested dict of float32 arrays, as `nnx.to_pure_dict` names them
opt_state   the state of the optimizers (see `join_opt_state`)
step        int32, the number of steps taken so far
guards      the state of the numerical guards (see `guards.init_guards`). Its "data_offset" counts
            the batches that rewinds have skipped, so step + data_offset is the place in the data.

An update rule may add entries to the train state (see the file `update_rules`), such as "ema", the
moving average of the parameters (see the file `average`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from qwen3next_jax.config import GuardConfig, ModelConfig, OptimizerConfig, SliceState
from qwen3next_jax.model import Qwen3Next, parameter_declarations
from qwen3next_jax.model.adapter_names import base_params, join_base_and_adapters
from qwen3next_jax.sharding.rules import tree_shardings
from qwen3next_jax.training.guards import init_guards
from qwen3next_jax.training.optimizer import make_optimizer
from qwen3next_jax.training.parameter_groups import ParameterGroups
from qwen3next_jax.training.update_rules import UpdateRule, initial_rule_entries

State = dict


def abstract_model(config: ModelConfig) -> tuple[nnx.GraphDef, dict]:
    """Returns the structure of the model: (graph definition, parameters as
    `jax.ShapeDtypeStruct`s).
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0))))
    return graphdef, nnx.to_pure_dict(params)


def abstract_train_state(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    groups: ParameterGroups,
    rules: Sequence[UpdateRule],
    guards: GuardConfig,
    mesh: Mesh,
    slice_state: SliceState = "replicated",
) -> State:
    """Returns the train state as `jax.ShapeDtypeStruct`s, each with its sharding on `mesh`.

    Args:
      model: the settings of the model.
      optimizer: the settings of the optimizer.
      groups: the groups of the parameters.
      rules: the update rules, which may add entries.
      guards: the settings of the guards.
      mesh: the devices.
      slice_state: whether each TPU slice holds the whole optimizer state or a part of it
        (`ParallelConfig.slice_state`).
    """
    _, params = abstract_model(model)
    state = jax.eval_shape(
        lambda params: {
            "params": params,
            "opt_state": _init_opt_state(optimizer, groups, params),
            **_init_step_and_guards(guards),
            **initial_rule_entries(rules, params),
        },
        params,
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        tree_shardings(state, parameter_declarations(model), mesh, slice_state),
    )


def init_state(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    groups: ParameterGroups,
    rules: Sequence[UpdateRule],
    guards: GuardConfig,
    state_shardings: State,
    seed: int,
    params: dict | None = None,
) -> State:
    """Returns the train state before the first step. Each device computes its own shards of the
    state.

    Args:
      model: the settings of the model.
      optimizer: the settings of the optimizer.
      groups: the groups of the parameters.
      rules: the update rules, which may add entries.
      guards: the settings of the guards.
      state_shardings: the sharding of every array of the state.
      seed: the seed of the random parameters, which are the same on every mesh.
      params: parameters to use instead of random ones; None: all parameters are random. If `params`
        lacks the adapters of `model.lora`, the adapters are random.
    """

    def random_params() -> dict:
        module = Qwen3Next(model, rngs=nnx.Rngs(seed))
        return groups.scale_initial_params(nnx.to_pure_dict(nnx.state(module, nnx.Param)))

    shardings = state_shardings["params"]
    if params is None:
        params = jax.jit(random_params, out_shardings=shardings)()
    elif jax.tree.structure(params) == jax.tree.structure(shardings):
        params = jax.device_put(params, shardings)
    else:
        add_random_adapters = jax.jit(
            lambda base: join_base_and_adapters(base, random_params()),
            out_shardings=shardings,
            donate_argnums=0,
        )
        params = add_random_adapters(jax.device_put(params, base_params(shardings)))
    init = jax.jit(
        lambda params: _init_opt_state(optimizer, groups, params),
        out_shardings=state_shardings["opt_state"],
    )
    step_and_guards = _init_step_and_guards(guards)
    state = {"params": params, "opt_state": init(params)} | jax.device_put(
        step_and_guards, {name: state_shardings[name] for name in step_and_guards}
    )
    return state | init_sharded_rule_entries(rules, params, state_shardings)


def init_sharded_rule_entries(
    rules: Sequence[UpdateRule], params: dict, state_shardings: State
) -> State:
    """Returns the entries that `rules` add to the train state, sharded, before the first step to
    which the rules are applied.

    Args:
      rules: some or all update rules of a run.
      params: all parameters.
      state_shardings: the shardings of a train state that has the entries of `rules`.
    """
    names = jax.eval_shape(lambda params: initial_rule_entries(rules, params), params)
    start = jax.jit(
        lambda params: initial_rule_entries(rules, params),
        out_shardings={name: state_shardings[name] for name in names},
    )
    return start(params) if names else {}


def _init_opt_state(config: OptimizerConfig, groups: ParameterGroups, params: dict) -> Any:
    """Returns the entry "opt_state" of the train state before the first step."""
    # The initial state does not depend on the learning rate.
    optimizer = make_optimizer(config, groups.main_parameters, optax.constant_schedule(0.0))
    tables_state = {}
    if groups.lazy_adamw_tables:
        from qwen3next_jax.training import lazy_adamw

        tables_state = lazy_adamw.init(groups.lazy_adamw_tables, params)
    return join_opt_state(optimizer.init(groups.select_main_group(params)), tables_state, groups)


def join_opt_state(main_state: Any, tables_state: dict, groups: ParameterGroups) -> Any:
    """Returns the entry "opt_state" of the train state. If lazy AdamW updates tables, the entry is
    a dict of "tables", the state of lazy AdamW, and "others", the state of the main optimizer. If
    lazy AdamW updates no tables, "opt_state" is the state of the main optimizer.
    """
    return (
        {"others": main_state, "tables": tables_state} if groups.lazy_adamw_tables else main_state
    )


def split_opt_state(opt_state: Any, groups: ParameterGroups) -> tuple[Any, dict]:
    """Splits the result of `join_opt_state` into (state of the main optimizer, state of lazy
    AdamW). The state of lazy AdamW is {} if it updates no tables.
    """
    if not groups.lazy_adamw_tables:
        return opt_state, {}
    return opt_state["others"], opt_state["tables"]


def _init_step_and_guards(guards: GuardConfig) -> dict:
    return {"step": jnp.zeros((), jnp.int32), "guards": init_guards(guards)}
