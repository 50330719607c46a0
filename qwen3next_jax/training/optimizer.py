"""Parts that all optimizers share: gradient clipping, weight decay, the learning-rate schedule."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import OptimizerConfig
from qwen3next_jax.config.registry import OPTIMIZERS, resolve
from qwen3next_jax.model.parameters import ParameterDeclaration

# A number, or an array that can be broadcast to a parameter.
Scale = float | np.ndarray


def learning_rate_schedule(config: OptimizerConfig, steps: int, begins: int = 0) -> optax.Schedule:
    """Makes a learning-rate schedule of `steps` steps. The rate rises linearly to the peak during
    the first `warmup_steps` steps (all steps, if there are fewer). Then the rate follows
    `config.schedule`:

      cosine               The rate falls along a cosine until the last step.
      linear               The rate falls linearly until the last step.
      warmup_stable_decay  The rate stays at the peak, and falls linearly over the last
                           `decay_fraction` of all steps.
      inverse_sqrt         The rate is peak × √(warmup / step) (1706.03762, section 5.3).
      constant             The rate stays at the peak.

    The first step of a warm-up of n steps has the rate peak / n. The last step of the schedule has
    the rate final_fraction × peak, even if it is the only step; the schedules "constant" and
    "inverse_sqrt" do not read `final_fraction`.

    Args:
      config: the settings of the optimizer.
      steps: the length of the schedule.
      begins: the number of updates before the schedule begins.

    Returns:
      A function: number of updates so far → learning rate.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, steps)
    warm_up = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    schedules, boundaries = [warm_up, optax.constant_schedule(peak)], [warmup]
    # These two do not depend on `steps` after the warm-up, so that a longer run has the same
    # program.
    if config.schedule == "inverse_sqrt":
        # This schedule counts the updates after those of the warm-up.
        schedules[1] = lambda count: peak * jnp.sqrt(warmup / (warmup + 1 + count))
    elif config.schedule != "constant":
        decay_steps = steps
        if config.schedule == "warmup_stable_decay":
            decay_steps = max(round(config.decay_fraction * steps), 1)
        stable_until = max(steps - decay_steps, warmup)
        transitions = max(steps - 1 - stable_until, 1)  # the last step has the final value
        if config.schedule == "cosine":
            decay = optax.cosine_decay_schedule(peak, transitions, config.final_fraction)
        else:
            decay = optax.linear_schedule(peak, peak * config.final_fraction, transitions)
        schedules, boundaries = [*schedules, decay], [warmup, stable_until]
        # If the warm-up takes all steps, or the decay has a single step, the last step has the
        # final value at once.
        if stable_until >= steps - 1:
            schedules[2] = optax.constant_schedule(peak * config.final_fraction)
            boundaries = [min(warmup, steps - 1), steps - 1]
    schedule = optax.join_schedules(schedules, boundaries)
    # The argument counts updates, and skipped steps make no update. Therefore the count may still
    # be below `begins` when the stage begins; the schedule then gives its first value. The outer
    # maximum is needed because a decay to 0 may end slightly below 0 by rounding.
    return lambda step: jnp.maximum(schedule(jnp.maximum(step - begins, 0)), 0.0)


def make_optimizer(
    config: OptimizerConfig,
    parameters: Mapping[str, ParameterDeclaration],
    schedule: optax.Schedule,
    mesh: Mesh | None = None,
    learning_rate_factors: Mapping[str, Scale] = {},
    weight_decays: Mapping[str, Scale] = {},
) -> optax.GradientTransformation:
    """Chains four optax transformations: gradient clipping, the update direction of the optimizer
    that `config.name` names, decoupled weight decay, and the learning rate.

    Each optimizer of the registry is a function of (config, declarations of parameters, mesh). It
    returns the optax transformation from clipped gradients to the update direction, to which weight
    decay is added afterwards. The state of the returned transformation may hold two sorts of
    arrays: scalars, such as a count of updates, which every device has; and arrays that belong to
    one parameter each. An array that belongs to a parameter must have the parameter's shape, and
    its path in the state must end in the parameter's path. `sharding.rules.tree_shardings` then
    shards the array like the parameter.

    Args:
      config: the settings of the optimizer.
      parameters: path of a parameter → its declaration.
      schedule: number of updates so far → learning rate (see `learning_rate_schedule`).
      mesh: the devices that share the optimizer's work; None: one device.
      learning_rate_factors: path of a parameter → a factor of its learning rate, a number or an
        array that can be broadcast to the parameter; 1 for all others.
      weight_decays: path of a parameter → its weight decay, a number or an array as for
        `learning_rate_factors`; `config.weight_decay` for all others. Parameters that never decay
        ignore it.

    Raises:
      UserError: there is no such optimizer, or it cannot be imported.
    """

    def decay_mask(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: parameters[path_string(path)].decays(config.decay_norm_weights), params
        )

    clip = (
        _clip_by_global_norm(config.clip_norm, parameters) if config.clip_norm else optax.identity()
    )
    direction = resolve(OPTIMIZERS, config.name, "optimizer.name")(config, parameters, mesh)
    # The nesting of these chains is part of the optimizer's state, which checkpoints hold, so it
    # must not change. The inner chain is nested like optax.adamw.
    return optax.chain(
        clip,
        optax.chain(
            direction,
            optax.masked(_decoupled_weight_decay(config.weight_decay, weight_decays), decay_mask),
            _scale_updates(optax.scale_by_learning_rate(schedule), learning_rate_factors),
        ),
    )


def _decoupled_weight_decay(
    weight_decay: float, weight_decays: Mapping[str, Scale]
) -> optax.GradientTransformation:
    """Returns decoupled weight decay, with the state of `optax.add_decayed_weights`."""
    same_for_all = optax.add_decayed_weights(weight_decay)
    if not weight_decays:
        return same_for_all

    def update(updates, state, params=None):
        def decayed(path, update, param):
            return update + weight_decays.get(path_string(path), weight_decay) * param

        return jax.tree_util.tree_map_with_path(decayed, updates, params), state

    return optax.GradientTransformation(same_for_all.init, update)


def _scale_updates(
    transformation: optax.GradientTransformation, factors: Mapping[str, Scale]
) -> optax.GradientTransformation:
    """Returns a transformation that multiplies the updates of `transformation` by the factors of
    the parameters. The returned transformation has the same state as `transformation`.
    """
    if not factors:
        return transformation

    def update(updates, state, params=None):
        updates, state = transformation.update(updates, state, params)

        def scaled(path, update):
            factor = factors.get(path_string(path))
            return update if factor is None else factor * update

        return jax.tree_util.tree_map_with_path(scaled, updates), state

    return optax.GradientTransformation(transformation.init, update)


def _clip_by_global_norm(
    norm: float, parameters: Mapping[str, ParameterDeclaration]
) -> optax.GradientTransformation:
    """Returns the transformation that clips gradients by their global norm. The indexers of sparse
    attention and all other parameters are clipped separately, each group by its own norm. With one
    common norm, large gradients of the indexers' loss would scale down the gradients of all other
    parameters.
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
