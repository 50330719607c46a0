"""Resolves a configuration for a mesh: computes the run's stages, the model's structure, and the
shapes and shardings of the train state. Training, planning, restoring and replaying a run all use
the result, a `ResolvedRun`.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from qwen3next_jax.common.errors import UserError, error_message, require
from qwen3next_jax.config import Config, ModelConfig, registry
from qwen3next_jax.model.layer_properties import mesh_requirements
from qwen3next_jax.sharding.mesh import check_mesh_divides, mesh_unless_single_device
from qwen3next_jax.sharding.rules import SLICE, batch_sharding, num_shards, tree_shardings
from qwen3next_jax.training import average, indexer, parameter_groups, router_bias, state
from qwen3next_jax.training.parameter_groups import ParameterGroups, make_parameter_groups
from qwen3next_jax.training.stages import ResolvedStage, resolve_stages
from qwen3next_jax.training.state import State, abstract_model, abstract_train_state
from qwen3next_jax.training.update_rules import UpdateRule


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedRun:
    """A configuration resolved for a mesh.

    Attributes:
      config: the configuration as the user gave it.
      mesh: the devices of the run.
      stages: the stages of the run in order.
      graphdef: the model without its parameters.
      groups: the groups of the parameters: the main group, the tables of lazy AdamW, frozen
        parameters.
      rules: the update rules, in the order in which they act.
      abstract_state: the train state as `jax.ShapeDtypeStruct`s with shardings.
    """

    config: Config
    mesh: Mesh
    stages: tuple[ResolvedStage, ...]
    graphdef: nnx.GraphDef
    groups: ParameterGroups
    rules: tuple[UpdateRule, ...]
    abstract_state: State

    @property
    def model(self) -> ModelConfig:
        """The settings of the model."""
        return self.config.model

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        return self.stages[-1].last_step

    @property
    def compute_mesh(self) -> Mesh | None:
        """The argument `mesh` of the model's functions: the mesh, or None if there is only one
        device.
        """
        return mesh_unless_single_device(self.mesh)

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of tokens and segment ids [B, T]."""
        return batch_sharding(self.mesh)

    @functools.cached_property
    def state_shardings(self) -> State:
        """The sharding of every array of the train state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    @functools.cached_property
    def main_group_shardings(self) -> dict:
        """The shardings of the main group of parameters (`ParameterGroups.select_main_group`)."""
        return tree_shardings(self.abstract_main_group, self.groups.main_parameters, self.mesh)

    @functools.cached_property
    def update_shardings(self) -> dict:
        """The shardings of the gradients and updates of the main group while the optimizer computes
        with them: those of the optimizer's moments.
        """
        moments = {"opt_state": self.abstract_main_group}
        slice_state = self.config.parallel.slice_state
        parameters = self.groups.main_parameters
        return tree_shardings(moments, parameters, self.mesh, slice_state)["opt_state"]

    @functools.cached_property
    def abstract_main_group(self) -> dict:
        """The parameters of the main group as `jax.ShapeDtypeStruct`s without shardings."""
        return jax.eval_shape(self.groups.select_main_group, self.abstract_state["params"])

    def init_state(self, params: dict | None = None) -> State:
        """Returns the train state before the first step. The parameters in the state are `params`,
        or random parameters from the seed `train.seed` if `params` is None. If `params` lacks the
        adapters of `model.lora`, the adapters are random.
        """
        config = self.config
        return state.init_state(
            config.model,
            config.optimizer,
            self.groups,
            self.rules,
            config.guards,
            self.state_shardings,
            config.train.seed,
            params,
        )


def resolve_run(config: Config, mesh: Mesh) -> ResolvedRun:
    """Resolves `config` for `mesh`, without allocating any array.

    Raises:
      UserError: the settings of a stage are not valid, or a size is not divisible by the axes of
        the mesh that split it, or `train.freeze`, `optimizer.groups` or `train.update_rules` is not
        valid, or lazy AdamW would update tables on several slices.
    """
    stages = resolve_stages(config)
    for stage in stages:
        check_mesh_divides(
            config.model,
            stage.batch_size // stage.micro_batches,
            stage.sequence_length,
            mesh,
            *mesh_requirements(config.model),
        )
    graphdef, _ = abstract_model(config.model)
    groups = make_parameter_groups(config.model, config.train.freeze, config.optimizer)
    require(
        not (groups.lazy_adamw_tables and num_shards(mesh, SLICE) > 1),
        "optimizer.ngram_table = 'lazy_adamw' on several slices: each slice would update other "
        "rows of the table: expected 'adamw', or parallel.mesh.slice = 1",
    )
    rules = make_update_rules(config, groups)
    abstract_state = abstract_train_state(
        config.model,
        config.optimizer,
        groups,
        rules,
        config.guards,
        mesh,
        config.parallel.slice_state,
    )
    return ResolvedRun(config, mesh, stages, graphdef, groups, rules, abstract_state)


def make_update_rules(config: Config, groups: ParameterGroups) -> tuple[UpdateRule, ...]:
    """Makes the update rules of a run, in the order in which they act. The user's own rules come
    before the rule that restores frozen parameters and the rule of the moving average, so these two
    rules see the changes of the user's rules.

    Raises:
      UserError: `train.update_rules` is not valid.
    """
    rules = [
        router_bias.make_rule(config, groups),
        indexer.make_rule(config, groups),
        *_user_update_rules(config, groups),
        parameter_groups.make_rule(config, groups),
        average.make_rule(config, groups),
    ]
    return tuple(rule for rule in rules if rule is not None)


def _user_update_rules(config: Config, groups: ParameterGroups) -> Iterator[UpdateRule]:
    """Makes the user's update rules, which the setting `train.update_rules` names.

    Raises:
      UserError: a rule cannot be imported or made, or is not an `UpdateRule`.
    """
    for name in config.train.update_rules:
        make = registry.resolve({}, name, "train.update_rules")
        try:
            rule = make(config, groups)
        except UserError:
            raise
        except Exception as error:  # a user's code can raise anything
            raise UserError(
                f"train.update_rules = {name!r}: calling it with (config, groups) failed "
                f"({type(error).__name__}: {error_message(error)}): correct it"
            ) from error
        require(
            isinstance(rule, UpdateRule),
            f"train.update_rules = {name!r} returned {type(rule).__name__}: expected a "
            "training.update_rules.UpdateRule",
        )
        yield rule
