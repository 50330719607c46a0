"""The train state: a plain dict of arrays that holds all that a run needs to continue. On CPUs, a
run that resumes from it computes bit-identically what a run without an interruption computes; on
GPUs the gradients of cuDNN's attention have no fixed order of sums.

params      the parameters: a nested dict of float32 arrays, as `nnx.to_pure_dict` names them
opt_state   the state of the optimizers (see `join_opt_state`)
step        int32, the number of steps taken so far
guards      the state of the numerical guards (see `guards.init_guards`)

An update rule may add entries (see the file `update_rules`); "ema", the moving average of the
parameters (see the file `average`), is one.
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
from qwen3next_jax.training.update_rules import UpdateRule, initial_entries

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
      slice_state: whether the slices share the optimizer's state (`ParallelConfig.slice_state`).
    """
    _, params = abstract_model(model)
    state = jax.eval_shape(
        lambda params: {
            "params": params,
            "opt_state": _init_optimizers(optimizer, groups, params),
            **_step_and_guards(guards),
            **initial_entries(rules, params),
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
    """Returns the train state before the first step. Each device computes its own shards.

    Args:
      model: the settings of the model.
      optimizer: the settings of the optimizer.
      groups: the groups of the parameters.
      rules: the update rules, which may add entries.
      guards: the settings of the guards.
      state_shardings: the sharding of every array of the state.
      seed: the seed of the random parameters, which are the same on every mesh.
      params: parameters to use instead of random ones; they may be without the adapters of
        `model.lora`, which are then random. None: all are random.
    """

    def random_params() -> dict:
        module = Qwen3Next(model, rngs=nnx.Rngs(seed))
        return groups.scale_start(nnx.to_pure_dict(nnx.state(module, nnx.Param)))

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
        lambda params: _init_optimizers(optimizer, groups, params),
        out_shardings=state_shardings["opt_state"],
    )
    step_and_guards = _step_and_guards(guards)
    state = {"params": params, "opt_state": init(params)} | jax.device_put(
        step_and_guards, {name: state_shardings[name] for name in step_and_guards}
    )
    return state | start_rules(rules, params, state_shardings)


def start_rules(rules: Sequence[UpdateRule], params: dict, state_shardings: State) -> State:
    """Returns the entries that `rules` add to the train state, before the first step that they see.

    Args:
      rules: some or all update rules of a run.
      params: all parameters.
      state_shardings: the shardings of a train state with these entries.
    """
    names = jax.eval_shape(lambda params: initial_entries(rules, params), params)
    start = jax.jit(
        lambda params: initial_entries(rules, params),
        out_shardings={name: state_shardings[name] for name in names},
    )
    return start(params) if names else {}


def _init_optimizers(config: OptimizerConfig, groups: ParameterGroups, params: dict) -> Any:
    """Returns the entry "opt_state" of the train state before the first step."""
    # The initial state does not depend on the learning rate.
    optimizer = make_optimizer(config, groups.parameters, optax.constant_schedule(0.0))
    tables_state = {}
    if groups.tables:
        from qwen3next_jax.training import lazy_adamw

        tables_state = lazy_adamw.init(groups.tables, params)
    return join_opt_state(optimizer.init(groups.main(params)), tables_state, groups)


def join_opt_state(main: Any, tables: dict, groups: ParameterGroups) -> Any:
    """Returns the entry "opt_state" of the train state, from the state of the main optimizer and
    that of lazy AdamW. If lazy AdamW updates tables, it is a dict with the entries "tables", the
    state of lazy AdamW, and "others", that of the main optimizer; otherwise it is the latter.
    """
    return {"others": main, "tables": tables} if groups.tables else main


def split_opt_state(opt_state: Any, groups: ParameterGroups) -> tuple[Any, dict]:
    """Returns (the state of the main optimizer, that of lazy AdamW), which `join_opt_state`
    joined; the second is {} if lazy AdamW updates no tables.
    """
    if not groups.tables:
        return opt_state, {}
    return opt_state["others"], opt_state["tables"]


def _step_and_guards(guards: GuardConfig) -> dict:
    return {"step": jnp.zeros((), jnp.int32), "guards": init_guards(guards)}
