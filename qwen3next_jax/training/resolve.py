"""A configuration worked out for a mesh, once: stages, the model's structure, the train state as
shapes with their shardings. Whoever trains, plans, restores or replays reads it here.
"""

import dataclasses
import functools

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from qwen3next_jax.config import Config, ModelConfig
from qwen3next_jax.model.block import split_sizes
from qwen3next_jax.sharding.mesh import check_divides, compute_mesh
from qwen3next_jax.sharding.rules import batch_sharding
from qwen3next_jax.training import state
from qwen3next_jax.training.stages import ResolvedStage, resolve_stages
from qwen3next_jax.training.state import State, abstract_model, abstract_train_state


@dataclasses.dataclass(frozen=True, eq=False)
class ResolvedRun:
    """What is known of a run before it makes an array.

    Attributes:
      config: as the user gave it.
      mesh: the devices of the run.
      stages: in their order.
      graphdef: the model without its parameters.
      abstract_state: the train state as `jax.ShapeDtypeStruct`s with their shardings.
    """

    config: Config
    mesh: Mesh
    stages: tuple[ResolvedStage, ...]
    graphdef: nnx.GraphDef
    abstract_state: State

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.stages[-1].last_step

    @property
    def compute_mesh(self) -> Mesh | None:
        """What the model's functions take as `mesh`: None for one device."""
        return compute_mesh(self.mesh)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Where tokens and segment ids [B, T] lie."""
        return batch_sharding(self.mesh)

    @functools.cached_property
    def state_shardings(self) -> State:
        """Where every array of the train state lies."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

    def init_state(self, params: dict | None = None) -> State:
        """The state before the first step, with random parameters from `train.seed`, or with
        `params`.
        """
        c = self.config
        return state.init_state(
            c.model, c.optimizer, c.guards, self.state_shardings, c.train.seed, params
        )


def resolve_run(config: Config, mesh: Mesh) -> ResolvedRun:
    """Works out `config` for `mesh`; no array is made.

    Raises:
      UserError: a stage cannot be trained, or the mesh does not divide what it splits.
    """
    stages = resolve_stages(config)
    for stage in stages:
        check_divides(
            config.model,
            stage.batch_size // stage.micro_batches,
            stage.sequence_length,
            mesh,
            *split_sizes(config.model),
        )
    graphdef, _ = abstract_model(config.model)
    abstract_state = abstract_train_state(config.model, config.optimizer, config.guards, mesh)
    return ResolvedRun(config, mesh, stages, graphdef, abstract_state)
