"""What all optimizers share: clipping, weight decay, the schedule of the learning rate."""

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
    """Step (from 0) → learning rate of the `steps` steps after the first `begins`: linear
    warm-up to the peak, then cosine, or constant and a linear fall over the last of them (of
    "constant" none, of "linear" all).

    The last step runs at final_fraction of the peak, unless it is constant, and the first one
    already learns (peak / warm-up), unless it is the last.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, steps)
    rising = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    falling = {
        "constant": 0,
        "warmup_stable_decay": max(round(config.decay_fraction * steps), 1),
    }.get(config.schedule, steps)
    stable_until = max(steps - falling, warmup)
    left = max(steps - 1 - stable_until, 1)
    fall = (
        optax.cosine_decay_schedule(peak, left, config.final_fraction)
        if config.schedule == "cosine"
        else optax.linear_schedule(peak, peak * config.final_fraction, left)
    )
    schedules, boundaries = [rising, optax.constant_schedule(peak), fall], [warmup, stable_until]
    # The warm-up takes all steps, or the fall is a single one: that one is already the last.
    if config.schedule != "constant" and stable_until >= steps - 1:
        schedules[2] = optax.constant_schedule(peak * config.final_fraction)
        boundaries = [min(warmup, steps - 1), steps - 1]
    schedule = optax.join_schedules(schedules, boundaries)
    # Skipped updates do not count, so that a later schedule may be asked for steps before its
    # first. A fall to 0 ends a rounding below it.
    return lambda step: jnp.maximum(schedule(jnp.maximum(step - begins, 0)), 0.0)


def make_optimizer(
    config: OptimizerConfig,
    parameters: Mapping[str, Declared],
    schedule: optax.Schedule,
    mesh: Mesh | None = None,
) -> optax.GradientTransformation:
    """Clipping → the direction of `optimizer.name` → decoupled weight decay → learning rate.

    An optimizer is `direction(config, parameters, mesh)` → the transformation between clipping
    and weight decay. Its state holds arrays with the path and shape of their parameter, so that
    they lie on the mesh as the parameter does.

    Args:
      parameters: the declaration of every parameter, by its path.
      schedule: updates so far → learning rate (see `learning_rate_schedule`).
      mesh: devices over which the optimizer may divide its work; None for one device.

    Raises:
      UserError: no such optimizer, or its line of `config.optimizers` cannot be imported.
    """

    def decays(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: parameters[path_string(path)].decays(config.decay_norm_weights), params
        )

    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    direction = resolve(OPTIMIZERS, config.name, "optimizer.name")(config, parameters, mesh)
    # The inner chain is that of optax.adamw, whose state the checkpoints hold.
    return optax.chain(
        clip,
        optax.chain(
            direction,
            optax.add_decayed_weights(config.weight_decay, decays),
            optax.scale_by_learning_rate(schedule),
        ),
    )
