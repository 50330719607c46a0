"""The parts that all optimizers share: clipping, weight decay, the learning-rate schedule."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import OptimizerConfig
from qwen3next_jax.config.registry import OPTIMIZERS, resolve
from qwen3next_jax.model.parameters import Declared


def learning_rate_schedule(config: OptimizerConfig, steps: int, begins: int = 0) -> optax.Schedule:
    """Makes the learning-rate schedule of `steps` steps: a linear warm-up to the peak, and then one
    of these:

      cosine               The rate falls along a cosine over all steps after the warm-up.
      linear               The rate falls linearly over all steps after the warm-up.
      warmup_stable_decay  The rate stays at the peak, and falls linearly over the last
                           `decay_fraction` of the steps.
      constant             The rate stays at the peak.

    The first step of a warm-up has the rate peak / warm-up steps. The last step has the rate
    final_fraction × peak, even if it is the only step; with "constant" it has the peak.

    Args:
      config: the settings of the optimizer.
      steps: the length of the schedule.
      begins: the number of updates before the schedule begins.

    Returns:
      A function: number of updates so far → learning rate.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, steps)
    warm_up = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    decay_steps = {
        "constant": 0,
        "warmup_stable_decay": max(round(config.decay_fraction * steps), 1),
    }.get(config.schedule, steps)
    stable_until = max(steps - decay_steps, warmup)
    transitions = max(steps - 1 - stable_until, 1)  # the last step has the final value
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, transitions, config.final_fraction)
    else:
        decay = optax.linear_schedule(peak, peak * config.final_fraction, transitions)
    schedules = [warm_up, optax.constant_schedule(peak), decay]
    boundaries = [warmup, stable_until]
    # If the warm-up takes all steps, or the decay has a single step, the last step has the final
    # value at once.
    if config.schedule != "constant" and stable_until >= steps - 1:
        schedules[2] = optax.constant_schedule(peak * config.final_fraction)
        boundaries = [min(warmup, steps - 1), steps - 1]
    schedule = optax.join_schedules(schedules, boundaries)
    # Skipped updates do not count, so a stage may evaluate its schedule at a number of updates
    # before `begins`; the schedule then gives its first value. The outer maximum is needed because
    # rounding may let a decay to 0 end slightly below 0.
    return lambda step: jnp.maximum(schedule(jnp.maximum(step - begins, 0)), 0.0)


def make_optimizer(
    config: OptimizerConfig,
    parameters: Mapping[str, Declared],
    schedule: optax.Schedule,
    mesh: Mesh | None = None,
) -> optax.GradientTransformation:
    """Chains clipping, the direction of the optimizer that `config.name` names, decoupled weight
    decay, and the learning rate.

    An optimizer is a function `direction(config, parameters, mesh)`. It returns the gradient
    transformation between clipping and weight decay. The state of this transformation
    holds scalars, such as a count of updates, which every device has, and arrays that each belong
    to a parameter. The path of such an array ends in the path of its parameter, and it has the
    parameter's shape, so it is sharded as the parameter is (`sharding.rules.tree_shardings`).

    Args:
      config: the settings of the optimizer.
      parameters: path of a parameter → its declaration.
      schedule: number of updates so far → learning rate (see `learning_rate_schedule`).
      mesh: the devices that share the optimizer's work; None: one device.

    Raises:
      UserError: there is no such optimizer, or it cannot be imported.
    """

    def decay_mask(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: parameters[path_string(path)].decays(config.decay_norm_weights), params
        )

    clip = _clip(config.clip_norm, parameters) if config.clip_norm else optax.identity()
    direction = resolve(OPTIMIZERS, config.name, "optimizer.name")(config, parameters, mesh)
    # Checkpoints hold the state of the chain, so the inner chain keeps the structure of
    # optax.adamw.
    return optax.chain(
        clip,
        optax.chain(
            direction,
            optax.add_decayed_weights(config.weight_decay, decay_mask),
            optax.scale_by_learning_rate(schedule),
        ),
    )


def _clip(norm: float, parameters: Mapping[str, Declared]) -> optax.GradientTransformation:
    """Clipping by the global norm. Indexers of sparse attention are clipped by themselves: their
    loss would otherwise slow all other parameters down.
    """
    clip = optax.clip_by_global_norm(norm)
    indexers = {path for path, parameter in parameters.items() if parameter.kind == "indexer"}
    if not indexers:
        return clip

    def update(updates, state, params=None):
        leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
        groups = {False: [], True: []}
        for path, leaf in leaves:
            groups[path_string(path) in indexers].append(leaf)
        clipped = {key: iter(clip.update(group, state)[0]) for key, group in groups.items()}
        in_order = [next(clipped[path_string(path) in indexers]) for path, _ in leaves]
        return jax.tree.unflatten(structure, in_order), state

    return optax.GradientTransformation(clip.init, update)
